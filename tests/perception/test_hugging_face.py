"""Hugging Face format: parity with other implementations, export, and invalid directories."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from common.errors import UserError
from common.sharding import abstract, make_mesh
from perception.backbones import BACKBONES, Relative
from perception.families.table import FAMILIES
from perception.hugging_face import Pretrained, check_shape, export, open_model
from perception.relative_attention import bias_groups, embedding_groups
from perception.safetensor_files import TensorFiles
from tests.perception.helpers import golden, golden_json, states, structure_of, write_folder

SHARDED = {"data": 2, "fsdp": 2, "tensor": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Callable[..., Path]:
    """Returns a function (family, prefix) that writes a Hugging Face directory without this project's code."""

    def make(family: str, prefix: str = "") -> Path:
        directory = tmp_path_factory.mktemp(family)
        config, shapes = (golden_json(f"{family}/{name}") for name in ("config", "shapes"))
        return write_folder(directory, config, shapes, prefix)

    return make


@pytest.fixture
def own(folder) -> Path:
    """Returns a new BERT directory for each test, which the test may change."""
    return folder("bert")


def load(model: Pretrained, dtype: type = jnp.float32) -> dict[str, jax.Array]:
    wanted = abstract(structure_of(model.shape).trainable, make_mesh(SHARDED, jax.devices()[:8]))
    return model.load(
        {n: jax.ShapeDtypeStruct(w.shape, dtype, sharding=w.sharding) for n, w in wanted.items()}
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_states_match_other_implementations(family: str, folder) -> None:
    """States of sharded models equal the states of transformers or, for OpenELM, of a slow reference."""
    tokens_BL, lengths_B = golden()["tokens"], golden()["lengths"]
    found = states(open_model(folder(family)), tokens_BL, lengths_B, SHARDED)
    wanted = golden()[f"{family}/states"]
    inside = np.arange(wanted.shape[1]) < lengths_B[:, None]
    assert np.abs(wanted[inside]).max() > 1
    np.testing.assert_allclose(found[inside], wanted[inside], atol=1e-4)


def test_relative_positions_of_long_texts_share_groups() -> None:
    """Small offsets between tokens have their own groups, larger offsets share groups, and the largest are clipped.

    The tested offsets come from all three ranges.
    """
    mpnet, deberta = Relative("bias", 32, 128), Relative("disentangled", 256, 512)
    offset = np.array([0, 1, 7, 8, 11, 12, 127, 128, 500])
    assert bias_groups(offset, mpnet).tolist() == [0, 1, 7, 8, 8, 9, 15, 15, 15]
    assert bias_groups(-offset, mpnet).tolist() == [
        0,
        *(16 + np.array([1, 7, 8, 8, 9, 15, 15, 15])),
    ]
    offset = np.array([0, 1, 127, 128, 129, 511, 600])
    assert embedding_groups(offset, deberta).tolist() == [256, 257, 383, 384, 385, 511, 511]
    assert embedding_groups(-offset, deberta).tolist() == [256, 255, 129, 128, 127, 1, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_export_round_trip_is_bit_exact(family: str, folder, tmp_path) -> None:
    """The weights and the fields of config.json that describe the model match the original.

    The exported names lack the prefix that the family's names may have.
    """
    prefix = FAMILIES[family].names.prefix
    theirs, out = folder(family, prefix), tmp_path / "out"
    model = open_model(theirs)
    export(out, model.shape, load(model), '{"version": "1.0"}')
    before, after = load_file(theirs / "model.safetensors"), load_file(out / "model.safetensors")
    assert {prefix + name for name in after} == set(before)
    for name, value in after.items():
        np.testing.assert_array_equal(value, before[prefix + name])
    assert open_model(out).shape == model.shape
    assert (out / "tokenizer.json").read_text() == '{"version": "1.0"}'
    old, new = (json.loads((place / "config.json").read_text()) for place in (theirs, out))
    said = {key: value for key, value in new.items() if key in old and old[key] is not None}
    free = ("architectures", "torch_dtype", "activation_fn_name", "ffn_multipliers", "pad_token_id")
    assert {k: v for k, v in said.items() if k not in free} == {
        k: old[k] for k in said if k not in free
    }


def test_export_keeps_unused_tensors_fields_and_files(own, tmp_path) -> None:
    """With `like`, exports keep unused tensors of any dtype, unknown fields, tokenizer files and the name prefix."""
    path, extra = own / "model.safetensors", {"cls.bias": np.arange(3.0, dtype=np.float16)}
    extra["bert.embeddings.position_ids"] = np.arange(24)[None]
    given = {f"bert.{name}": value for name, value in load_file(path).items()} | extra
    save_file(given, path)
    said = json.loads((own / "config.json").read_text()) | {"bos_token_id": 7, "cls": "x"}
    (own / "config.json").write_text(json.dumps(said | {"architectures": ["BertForMaskedLM"]}))
    (own / "vocab.txt").write_text("[PAD]\n")
    model, out = open_model(own), tmp_path / "out"
    values = load(model)
    changed = "stack/blocks/0/residuals/1/function/up/kernel"
    export(out, model.shape, values | {changed: 2 * values[changed]}, like=model)
    theirs, found = "bert.encoder.layer.0.intermediate.dense.weight", load_file(out / path.name)
    assert found.keys() == given.keys()
    for name, value in found.items():
        wanted = given[name] * (2 if name == theirs else 1)
        assert value.dtype == given[name].dtype
        np.testing.assert_array_equal(value, wanted)
    config = json.loads((out / "config.json").read_text())
    assert config == said | {"architectures": ["BertForMaskedLM"], "torch_dtype": "float32"}
    assert (out / "vocab.txt").read_text() == "[PAD]\n"


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bit_weights_round_trip(dtype: type, folder, tmp_path) -> None:
    values = load(open_model(folder("openelm")), dtype)
    model = open_model(folder("openelm"))
    export(tmp_path / "narrow", model.shape, values)
    again = load(open_model(tmp_path / "narrow"))
    for name, value in values.items():
        assert value.dtype == dtype
        np.testing.assert_array_equal(np.asarray(again[name]), np.asarray(value, np.float32))
    config = json.loads((tmp_path / "narrow" / "config.json").read_text())
    assert config["torch_dtype"] == jnp.dtype(dtype).name


def test_export_keeps_dtypes_of_the_base(folder, tmp_path) -> None:
    """Unchanged bfloat16 tensors are bit-exact. Changed tensors are rounded to bfloat16."""
    export(
        tmp_path / "narrow",
        open_model(folder("bert")).shape,
        load(open_model(folder("bert")), jnp.bfloat16),
    )
    base = open_model(tmp_path / "narrow")
    values, changed = load(base), "stack/blocks/0/residuals/1/function/up/kernel"
    export(tmp_path / "out", base.shape, values | {changed: values[changed] / 3}, like=base)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("narrow", "out"))
    theirs = "encoder.layer.0.intermediate.dense.weight"
    for name, value in after.items():
        assert value.dtype == jnp.bfloat16
        wanted = (
            before[name] if name != theirs else (np.float32(before[name]) / 3).astype(value.dtype)
        )
        np.testing.assert_array_equal(value, wanted)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_each_device_reads_only_its_shard(folder, monkeypatch) -> None:
    read, sizes = TensorFiles.read, []

    def watched(self: TensorFiles, name: str, index: tuple[slice, ...]) -> np.ndarray:
        part = read(self, name, index)
        if len(index) == 2 and "norm" not in name:
            sizes.append(part.size / np.prod(self.shape(name)))
        return part

    monkeypatch.setattr(TensorFiles, "read", watched)
    load(open_model(folder("qwen2")))
    # A matrix is split over two fsdp and two tensor devices.
    assert len(sizes) > 8 and max(sizes) == 1 / 4


def test_old_bert_norm_names_are_read(own) -> None:
    """Older files name the scales and biases of norms "gamma" and "beta"."""
    wanted, path = load(open_model(own)), own / "model.safetensors"
    renamed = {
        name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): value
        for name, value in load_file(path).items()
    }
    save_file(renamed, path)
    for name, value in load(open_model(own)).items():
        np.testing.assert_array_equal(value, wanted[name])


def test_fingerprint_depends_on_config_json(own) -> None:
    before, path = open_model(own).fingerprint, own / "config.json"
    assert open_model(own).fingerprint == before
    path.write_text(json.dumps(json.loads(path.read_text()) | {"layer_norm_eps": 1e-5}))
    assert open_model(own).fingerprint != before


WORDS = "embeddings.word_embeddings.weight"
WEIGHTS = {
    "missing": (lambda w: w.pop(WORDS), f"has neither tensor {WORDS} nor bert.{WORDS}"),
    "rows": (
        lambda w: w.update({WORDS: w[WORDS][1:]}),
        rf"tensor {WORDS} has shape \(49, 32\), but config.json needs \(50, 32\)",
    ),
    "type": (
        lambda w: w.update({WORDS: w[WORDS].astype(np.float64)}),
        f"tensor {WORDS} has dtype F64, but only F32, F16, BF16 are supported",
    ),
    "numbers": (
        lambda w: w.update({WORDS: np.where(w[WORDS] == w[WORDS].max(), np.nan, w[WORDS])}),
        f"tensor {WORDS} contains values that are not finite",
    ),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_invalid_tensor_raises_error_with_its_name(case: str, own) -> None:
    alter, message = WEIGHTS[case]
    weights = load_file(own / "model.safetensors")
    alter(weights)
    save_file(weights, own / "model.safetensors")
    with pytest.raises(UserError, match=message):
        load(open_model(own))


def test_missing_or_damaged_config_json_raises_error(own, tmp_path) -> None:
    with pytest.raises(
        UserError, match=f"--config.pretrained={tmp_path}/no is not a readable directory"
    ):
        open_model(tmp_path / "no")
    (own / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config.json is damaged"):
        open_model(own)
    (own / "config.json").unlink()
    with pytest.raises(UserError, match=f"^--pretrained={own} has no config.json"):
        open_model(own, "--pretrained")


def test_check_shape_lists_differences() -> None:
    given, found = BACKBONES["arctic_m"], BACKBONES["arctic_s"]
    message = r"not --config.backbone=x, because it has width 384 \(not 768\), size 32 \(not 64\), hidden\[0\]"
    with pytest.raises(UserError, match=message):
        check_shape("--x=DIR", "x", given, found, "do y")
    with pytest.raises(
        UserError, match=r"^--x=DIR is not .*=x, because it has layers 24 \(not 12\): do y$"
    ):
        check_shape("--x=DIR", "x", given, BACKBONES["arctic_l"], "do y")
    with pytest.raises(
        UserError, match=r"=x, because it has family 'qwen2' \(not 'phi'\), .* and 7 more"
    ):
        check_shape("--x=DIR", "x", BACKBONES["tiny_phi"], BACKBONES["tiny_qwen2"], "do y")
    local = replace(given, window=9, local=(False, True) * 6)  # `given.local` is empty
    with pytest.raises(
        UserError, match=r"=x, because it has window 9 \(not None\), local \(False, True"
    ):
        check_shape("--x=DIR", "x", given, local, "do y")
    # Dropout does not affect the shapes of the weights.
    check_shape("--x=DIR", "x", given, replace(given, dropout=(0.0, 0.0, 0.0)), "do y")


def test_export_does_not_overwrite(own, tmp_path) -> None:
    model = open_model(own)
    values = load(model)
    for place in (own, own / "config.json"):
        with pytest.raises(
            UserError, match=rf"--out={place}(: \S+ is not a folder;| is not empty)"
        ):
            export(place, model.shape, values)
    wrong = r"do not match the backbone; the first missing: \[\('\S+', \([\d, ]+\)\)\], the first unexpected: \[\('"
    with pytest.raises(ValueError, match=wrong):
        export(tmp_path / "out", BACKBONES["tiny_bert"], values)
    assert not (tmp_path / "out").exists()


def test_failed_export_leaves_no_files(own, tmp_path, monkeypatch) -> None:
    model, out = open_model(own), tmp_path / "out" / "deep"
    values = load(model)

    def full(*_) -> None:
        # A killed export leaves no `out`.
        assert not out.exists() and out.parent.exists()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("perception.safetensor_files._write_file", full)
    with pytest.raises(UserError, match=f"^cannot write to --out={out}: No space left on device"):
        export(out, model.shape, values)
    assert not any(out.parent.iterdir())
