"""Folders of Hugging Face's format: states of other implementations, the way back, and folders that are at fault."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from common.errors import UserError
from common.sharding import make_mesh
from common.train.checkpoint import abstract
from perception.backbones import BACKBONES
from perception.hugging_face import Pretrained, check_shape, export, open_model
from perception.safetensor_files import TensorFiles
from tests.perception.helpers import golden, golden_json, states, structure_of, write_folder
from tests.programs import finish_two

FAMILIES = ("bert", "qwen2", "mistral", "phi", "openelm")
SHARDED = {"data": 2, "fsdp": 2, "tensor": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Callable[..., Path]:
    """A function (family, prefix) -> a folder that others wrote. Not to be changed."""

    def make(family: str, prefix: str = "") -> Path:
        directory = tmp_path_factory.mktemp(family)
        config, shapes = (golden_json(f"{family}/{name}") for name in ("config", "shapes"))
        return write_folder(directory, config, shapes, prefix)

    return make


@pytest.fixture
def own(folder) -> Path:
    """A folder of its own."""
    return folder("bert")


def load(model: Pretrained, dtype: type = jnp.float32) -> dict[str, jax.Array]:
    wanted = abstract(structure_of(model.shape).trainable, make_mesh(SHARDED, jax.devices()[:8]))
    return model.load(
        {n: jax.ShapeDtypeStruct(w.shape, dtype, sharding=w.sharding) for n, w in wanted.items()}
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_states_are_those_of_other_implementations(family: str, folder) -> None:
    """transformers' own, and for OpenELM a slow reading; the weights lie on eight devices."""
    tokens_BL, lengths_B = golden()["tokens"], golden()["lengths"]
    found = states(open_model(folder(family)), tokens_BL, lengths_B, SHARDED)
    wanted = golden()[f"{family}/states"]
    inside = np.arange(wanted.shape[1]) < lengths_B[:, None]
    assert np.abs(wanted[inside]).max() > 1
    np.testing.assert_allclose(found[inside], wanted[inside], atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_is_what_was_read(family: str, folder, tmp_path) -> None:
    """To the bit, whether there was a prefix or not; names, shapes and the configuration are those of the family."""
    prefix = {"bert": "bert.", "openelm": "transformer."}.get(family, "model.")
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
    free = ("architectures", "torch_dtype", "activation_fn_name", "ffn_multipliers")
    assert {k: v for k, v in said.items() if k not in free} == {
        k: old[k] for k in said if k not in free
    }


def test_what_is_not_read_goes_along(own, tmp_path) -> None:
    """Output layers of any type, fields that mean nothing here, files beside the weights; and names with a prefix."""
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
def test_narrow_types_are_read_and_written(dtype: type, folder, tmp_path) -> None:
    values = load(open_model(folder("openelm")), dtype)
    model = open_model(folder("openelm"))
    export(tmp_path / "narrow", model.shape, values)
    again = load(open_model(tmp_path / "narrow"))
    for name, value in values.items():
        assert value.dtype == dtype
        np.testing.assert_array_equal(np.asarray(again[name]), np.asarray(value, np.float32))
    config = json.loads((tmp_path / "narrow" / "config.json").read_text())
    assert config["torch_dtype"] == jnp.dtype(dtype).name


def test_a_device_reads_no_more_than_its_part(folder, monkeypatch) -> None:
    read, sizes = TensorFiles.read, []

    def watched(self: TensorFiles, name: str, index: tuple[slice, ...]) -> np.ndarray:
        part = read(self, name, index)
        if len(index) == 2 and "norm" not in name:
            sizes.append(part.size / np.prod(self.shape(name)))
        return part

    monkeypatch.setattr(TensorFiles, "read", watched)
    load(open_model(folder("qwen2")))
    assert len(sizes) > 8 and max(sizes) == 1 / 4  # fsdp x tensor


def test_an_old_file_of_bert_is_read(own) -> None:
    """The first ones call the scales and biases of norms gamma and beta."""
    wanted, path = load(open_model(own)), own / "model.safetensors"
    renamed = {
        name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): value
        for name, value in load_file(path).items()
    }
    save_file(renamed, path)
    for name, value in load(open_model(own)).items():
        np.testing.assert_array_equal(value, wanted[name])


def test_other_settings_make_other_weights_of_the_same_files(own) -> None:
    before, path = open_model(own).fingerprint, own / "config.json"
    assert open_model(own).fingerprint == before
    path.write_text(json.dumps(json.loads(path.read_text()) | {"layer_norm_eps": 1e-5}))
    assert open_model(own).fingerprint != before


WORDS = "embeddings.word_embeddings.weight"
WEIGHTS = {
    "missing": (lambda w: w.pop(WORDS), f"has no tensor {WORDS}, nor bert.{WORDS}"),
    "rows": (
        lambda w: w.update({WORDS: w[WORDS][1:]}),
        rf"the tensor {WORDS} of .* has the shape \(49, 32\), the model needs \(50, 32\)",
    ),
    "type": (
        lambda w: w.update({WORDS: w[WORDS].astype(np.float64)}),
        f"the tensor {WORDS} of .* is of the type F64; known are F32, F16, BF16",
    ),
    "numbers": (
        lambda w: w.update({WORDS: np.where(w[WORDS] == w[WORDS].max(), np.nan, w[WORDS])}),
        f"the tensor {WORDS} of .* has numbers that are not finite",
    ),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_a_tensor_that_does_not_fit_is_named(case: str, own) -> None:
    alter, message = WEIGHTS[case]
    weights = load_file(own / "model.safetensors")
    alter(weights)
    save_file(weights, own / "model.safetensors")
    with pytest.raises(UserError, match=message):
        load(open_model(own))


def test_a_folder_without_a_configuration_is_refused(own, tmp_path) -> None:
    with pytest.raises(UserError, match=f"--config.pretrained={tmp_path}/no is no folder"):
        open_model(tmp_path / "no")
    (own / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config.json is damaged"):
        open_model(own)
    (own / "config.json").unlink()
    with pytest.raises(UserError, match=r"has no config.json"):
        open_model(own)


def test_another_model_than_was_asked_for_is_told_apart() -> None:
    given, found = BACKBONES["arctic_m"], BACKBONES["arctic_s"]
    message = (
        r"not --config.backbone=x: width 384 \(not 768\), size 32 \(not 64\), hidden\[0\] 1536"
    )
    with pytest.raises(UserError, match=message):
        check_shape("x", given, found)
    with pytest.raises(UserError, match=r"=x: layers 24 \(not 12\)"):
        check_shape("x", given, BACKBONES["arctic_l"])
    with pytest.raises(UserError, match=r"=x: family 'qwen2' \(not 'phi'\), .* and 7 more"):
        check_shape("x", BACKBONES["tiny_phi"], BACKBONES["tiny_qwen2"])
    check_shape("x", given, replace(given, dropout=(0.0, 0.0, 0.0)))  # not of the weights


def test_export_leaves_what_is_there_alone(own, tmp_path) -> None:
    model = open_model(own)
    values = load(model)
    for place in (own, own / "config.json"):
        with pytest.raises(UserError, match=r"is not empty|is a file"):
            export(place, model.shape, values)
    with pytest.raises(ValueError, match="not the values of this backbone"):
        export(tmp_path / "out", BACKBONES["tiny_bert"], values)
    assert not (tmp_path / "out").exists()


def test_an_export_that_fails_leaves_nothing(own, tmp_path, monkeypatch) -> None:
    model, out = open_model(own), tmp_path / "out" / "deep"
    values = load(model)

    def full(*_) -> None:
        assert (
            not out.exists() and out.parent.exists()
        )  # a kill would leave no folder that looks whole
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("perception.safetensor_files._write_file", full)
    with pytest.raises(UserError, match="No space left on device"):
        export(out, model.shape, values)
    assert not any(out.parent.iterdir())


COPY = """
import sys
from pathlib import Path
import jax
from common.runtime import processes
from common.sharding import make_mesh
from common.train.checkpoint import abstract
from perception.hugging_face import export, open_model
from tests.perception.helpers import structure_of

distributed.initialize()
model = open_model(Path(sys.argv[1]))
mesh = make_mesh({"fsdp": 4, "tensor": 2})
values = model.load(abstract(structure_of(model.shape).trainable, mesh))
export(Path(sys.argv[2]), model.shape, values)
"""


@pytest.mark.slow
def test_two_processes_read_and_write_one_folder(folder, tmp_path) -> None:
    """Each has four of the eight devices, so no process holds the whole of all tensors."""
    theirs, out = folder("openelm"), tmp_path / "out"
    finish_two([sys.executable, "-c", COPY, str(theirs), str(out)])
    before, after = load_file(theirs / "model.safetensors"), load_file(out / "model.safetensors")
    assert set(after) == set(before)
    for name, value in after.items():
        np.testing.assert_array_equal(value, before[name])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
