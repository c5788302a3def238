"""Adapters in PEFT's format: round trips, scales, folders that other programs wrote, and unsupported adapters."""

import json
from pathlib import Path
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from common.errors import UserError
from common.model.low_rank import Lora
from common.sharding import make_mesh
from perception import adapter_commands, peft_format
from perception.adapter_arithmetic import Adapter, combine

UP = "residuals/1/function/up"
BERT = "encoder.layer.0.intermediate.dense"


def adapter(rank: int, seed: int, layers: tuple[str, ...], base: str = "base") -> Adapter:
    """Returns a random adapter of `layers`, whose kernels have the shape (6, 8)."""
    draw = np.random.default_rng(seed).standard_normal
    pairs = [(draw((6, rank)), draw((rank, 8))) for _ in layers]
    return Adapter(
        base,
        {
            layer: (jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32))
            for layer, (a, b) in zip(layers, pairs, strict=True)
        },
    )


def change(adapter: Adapter) -> dict[str, np.ndarray]:
    return {n: np.float64(a) @ np.float64(b) for n, (a, b) in adapter.layers.items()}


def write_foreign(folder: Path, tensors: dict | None = None, **fields: object) -> Path:
    """Writes an adapter of rank 2 on BERT's first feed-forward layer, without this project's code. Returns the folder.

    `tensors` are stored too, and `fields` override fields of adapter_config.json.
    """
    folder.mkdir(exist_ok=True)
    draw = np.random.default_rng(5).standard_normal
    values = {
        f"base_model.model.{BERT}.lora_A.weight": draw((2, 6), np.float32),
        f"base_model.model.{BERT}.lora_B.weight": draw((8, 2), np.float32),
    }
    save_file(values | (tensors or {}), folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["dense"]}
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))
    return folder


@pytest.mark.parametrize("stabilized", [False, True])
def test_trained_adapter_round_trip(stabilized: bool, tmp_path) -> None:
    """Matrices are stored without the scale. Reading applies the scale alpha / rank or alpha / sqrt(rank)."""
    lora = Lora(4, 6.0, 0.1, stabilized)
    given = adapter(4, 0, (f"stack/blocks/0/{UP}", f"stack/blocks/11/{UP}"))
    peft_format.write(tmp_path, given, "bert", lora, tmp_path)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert stored[f"base_model.model.{BERT}.lora_A.weight"].shape == (4, 6)
    found = peft_format.read(tmp_path, "bert", "base")
    assert found.base == "base" and found.layers.keys() == given.layers.keys()
    for name, value in change(given).items():
        np.testing.assert_allclose(change(found)[name], lora.scale * value, rtol=1e-5)


def test_sum_of_different_ranks_round_trip(tmp_path) -> None:
    first, second = f"stack/blocks/0/{UP}", f"stack/blocks/1/{UP}"
    total = combine([(adapter(2, 0, (first,)), 0.5), (adapter(3, 1, (first, second)), -1.0)])
    peft_format.write(tmp_path, total, "bert", None, None)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    one = "encoder.layer.1.intermediate.dense"
    assert (config["r"], config["lora_alpha"]) == (5, 5)
    assert config["rank_pattern"] == config["alpha_pattern"] == {one: 3}
    found = peft_format.read(tmp_path, "bert")
    for name, value in change(total).items():
        np.testing.assert_allclose(change(found)[name], value, rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        ({}, 3),
        ({"init_lora_weights": None}, 3),
        ({"use_rslora": True}, 6 / 2**0.5),
        ({"alpha_pattern": {"intermediate.dense": 1}}, 0.5),
        ({"alpha_pattern": {"mediate.dense": 1, r"layer\.\d+\.intermediate.dense": 4}}, 2),
    ],
)
def test_scale_of_a_foreign_adapter(fields: dict, scale: float, tmp_path) -> None:
    """A key of alpha_pattern is a regular expression for the path of a module.

    The key must match the whole path, or the whole rest of the path after one of its dots.
    """
    tensors = load_file(write_foreign(tmp_path, **fields) / "adapter_model.safetensors")
    a, b = (tensors[f"base_model.model.{BERT}.lora_{side}.weight"] for side in "AB")
    (found,) = change(peft_format.read(tmp_path, "bert")).values()
    np.testing.assert_allclose(found, scale * (b @ a).T, rtol=1e-5)


def test_prefix_and_head_of_a_classification_model(tmp_path, capsys) -> None:
    """The prefix "bert." of BertForSequenceClassification is accepted. A note names its head, which is ignored."""
    folder = write_foreign(tmp_path, {"base_model.model.classifier.weight": np.ones((2, 3))})
    wanted = change(peft_format.read(folder, "bert"))
    assert "outside the encoder: classifier.weight" in capsys.readouterr().err
    path = folder / "adapter_model.safetensors"
    values = load_file(path)
    save_file({n.replace(".encoder.", ".bert.encoder."): x for n, x in values.items()}, path)
    found = change(peft_format.read(folder, "bert"))
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value)


NORM = "base_model.model.encoder.layer.0.output.LayerNorm.weight"
UNKNOWN = "base_model.model.encoder.layer.0.other.lora_A.weight"
ONES = np.ones((2, 2), np.float32)


@pytest.mark.parametrize(
    ("tensors", "fields", "told"),
    [
        (
            {},
            {"peft_type": "IA3"},
            'peft_type="IA3" is not supported: use a model or an adapter whose peft_type is "LORA"',
        ),
        ({}, {"bias": "all"}, 'bias="all" is not supported'),
        ({}, {"use_dora": True}, "use_dora=true is not supported"),
        ({}, {"init_lora_weights": "pissa"}, '"pissa" may change the base weights'),
        ({}, {"lora_alpha": "x"}, "lora_alpha must be a finite number"),
        (
            {},
            {"alpha_pattern": {"a": 1, "b(": 1}},
            r"the key b\( of alpha_pattern is not a regular expression \(.*subpattern\);",
        ),
        ({}, {"alpha_pattern": [1]}, r"alpha_pattern must be a JSON object, got \[1\]"),
        ({NORM: ONES}, {}, "LayerNorm.weight is not supported"),
        (
            {UNKNOWN: ONES},
            {},
            "LoRA matrices for .*0.other, which is unknown in the family bert, .* without matrices for .*0.other",
        ),
        (
            {f"base_model.model.{BERT}.lora_B.weight": ONES[:, :1]},
            {},
            "lora_A and lora_B of .*dense have different ranks",
        ),
        (
            {f"base_model.model.{BERT}.lora_B.weight": ONES[0]},
            {},
            "lora_A or lora_B of .*dense is missing or no matrix",
        ),
    ],
)
def test_unsupported_adapter_raises_error(tensors, fields, told, tmp_path) -> None:
    with pytest.raises(UserError, match=told) as caught:
        peft_format.read(write_foreign(tmp_path, tensors, **fields), "bert")
    assert "\n" not in str(caught.value)


def test_missing_and_damaged_files_raise_errors(tmp_path, monkeypatch) -> None:
    with pytest.raises(UserError, match=r"has no adapter_config\.json"):
        peft_format.read(tmp_path, "bert")
    folder = write_foreign(tmp_path / "a")
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(UserError, match=r"adapter_config\.json is damaged"):
        peft_format.read(folder, "bert")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", Mock(side_effect=PermissionError(13, "Permission denied")))
        with pytest.raises(
            UserError, match=r"^cannot read .*config\.json: Permission denied; correct"
        ):
            peft_format.read(folder, "bert")
    path = write_foreign(folder) / "adapter_model.safetensors"
    path.rename(folder / "adapter_model.bin")
    with pytest.raises(UserError, match=r"adapter_model\.bin is a pickle"):
        peft_format.read(folder, "bert")


def test_fused_layer_of_openelm_raises_error(tmp_path) -> None:
    """OpenELM stores the kernels `gate` and `up` as one matrix, so an adapter of one of them cannot be stored."""
    with pytest.raises(UserError, match=r"layers\.0\.ffn\.proj_1 of the family openelm holds"):
        peft_format.write(tmp_path, adapter(2, 0, (f"stack/blocks/0/{UP}",)), "openelm", None, None)
    assert not any(tmp_path.iterdir())


def test_foreign_adapter_needs_its_base_weights(tmp_path, pretrained) -> None:
    """The base weights come from --pretrained, or from the model that adapter_config.json names, here a directory."""
    mesh = make_mesh({"fsdp": -1}, jax.devices()[:1])
    named = write_foreign(tmp_path / "named", base_model_name_or_path="bert-base")
    with pytest.raises(UserError, match='path="bert-base" is neither a directory nor'):
        adapter_commands.open_adapter(named, mesh)
    opened = adapter_commands.open_adapter(named, mesh, weights=pretrained)
    assert (opened.family, opened.source, opened.adapter.base) == ("bert", None, "")
    number = write_foreign(tmp_path / "number", base_model_name_or_path=3)
    with pytest.raises(
        UserError, match=r"json: base_model_name_or_path must be a string .* got 3; correct"
    ):
        adapter_commands.open_adapter(number, mesh)
    empty = write_foreign(tmp_path / "empty", base_model_name_or_path=str(tmp_path))
    with pytest.raises(UserError, match=r"^.*empty/adapter_config.json: base_model_name_or_path="):
        adapter_commands.open_adapter(empty, mesh)
    local = write_foreign(tmp_path / "local", base_model_name_or_path=str(pretrained))
    assert adapter_commands.open_adapter(local, mesh).source == pretrained


def test_unknown_base_weights_fit_any_adapter() -> None:
    layer = f"stack/blocks/0/{UP}"
    known, unknown = adapter(2, 0, (layer,)), adapter(2, 1, (layer,), "")
    assert combine([(unknown, 1.0), (known, 1.0)]).base == "base"
    with pytest.raises(
        UserError,
        match="adapters: adapter 2 and adapter 3 were trained on different base weights",
    ):
        combine([(unknown, 1.0), (known, 1.0), (adapter(2, 0, (layer,), "other"), 1.0)])
    wide = Adapter("", {layer: (jnp.ones((6, 2)), jnp.ones((2, 9)))})
    with pytest.raises(
        UserError,
        match=r"cannot be added, because .* kernels of different shapes, \(6, 8\) and \(6, 9\)",
    ):
        combine([(known, 1.0), (wide, 1.0)])
