"""Configurations of Hugging Face's models as backbones and back, and those that are none."""

from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import UserError
from perception.backbones import BACKBONES, bert, mistral, openelm, phi, qwen2
from perception.config_json import from_json, to_json
from tests.perception.helpers import golden_json

PATH = Path("DIR/config.json")

OTHERS = {
    "30 of 44 dimensions turned": replace(phi(2, 88, 96, 2), rotated=30),  # 30 / 44 * 44 < 30
    "heads of their own size": replace(mistral(2, 64, 96, 4, 2, window=None), size=24, rotated=24),
    "other lines": openelm(4, 64, 8, attention=(0.75, 1.25), feed_forward=(1.0, 2.0), divisor=32),
    "another activation": replace(bert(2, 64, 96, 4), activation="relu", dropout=(0.2, 0.2, 0.0)),
    "untied": replace(qwen2(2, 64, 96, 4, 2), tied=False, dropout=(0.0, 0.0, 0.1)),
}


@pytest.mark.parametrize("name", [*BACKBONES, *OTHERS])
def test_every_backbone_can_be_told_to_transformers_and_back(name: str) -> None:
    shape = {**BACKBONES, **OTHERS}[name]
    assert from_json(to_json(shape), PATH) == shape


def test_a_backbone_that_the_family_does_not_have_is_not_written() -> None:
    with pytest.raises(UserError, match=r"family qwen2 cannot say window 5 \(not None\)"):
        to_json(replace(BACKBONES["tiny_qwen2"], window=5))
    uneven = replace(BACKBONES["tiny_openelm"], heads=(4, 2, 4), kv_heads=(2, 1, 2))
    with pytest.raises(UserError, match=r"num_query_heads=\[4, 2, 4\]"):
        to_json(uneven)


def test_a_configuration_of_transformers_5_is_read() -> None:
    values = golden_json("phi/config") | {"rope_theta": 500.0, "partial_rotary_factor": 0.25}
    shape = from_json(values, PATH)
    assert (shape.theta, shape.rotated) == (500, 2)
    rope = {"rope_type": "default"}
    rope |= {name: values.pop(name) for name in ("rope_theta", "partial_rotary_factor")}
    assert from_json({**values, "rope_parameters": rope}, PATH) == shape


def test_a_family_is_known_by_its_architecture_too() -> None:
    values = golden_json("bert/config")
    shape = from_json(values, PATH)
    del values["model_type"]
    assert from_json(values | {"architectures": ["BertForMaskedLM"]}, PATH) == shape


FIELDS = {
    "unknown family": ("bert", {"model_type": "gpt2"}, "model_type='gpt2': choose one of bert, "),
    "no family": ("bert", {"model_type": None}, "has no model_type: "),
    "Phi-3 is another family": (
        "phi",
        {"model_type": None, "architectures": ["Phi3Model"]},
        "choose one",
    ),
    "activation": ("bert", {"hidden_act": "gelu_python"}, "hidden_act='gelu_python': choose one"),
    "positions": (
        "bert",
        {"position_embedding_type": "relative_key"},
        "position_embedding_type='relative_key' is not supported; it must be 'absolute'",
    ),
    "decoder": ("bert", {"is_decoder": True}, "is_decoder=True is not supported"),
    "scaled positions": (
        "qwen2",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "rope_scaling={'rope_type': 'yarn', 'factor': 4.0} is not supported",
    ),
    "scaled positions of transformers 5": (
        "phi",
        {"rope_parameters": {"rope_type": "linear"}},
        "rope_type='linear' is not supported",
    ),
    "window": ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True is not supported"),
    "normed heads": ("phi", {"qk_layernorm": True}, "qk_layernorm=True is not supported"),
    "no gate": ("openelm", {"ffn_with_glu": False}, "ffn_with_glu=False is not supported"),
    "other heads": ("openelm", {"num_query_heads": [2, 2, 4]}, r"num_query_heads=\[2, 2, 4\]"),
    "numbers": ("openelm", {"ffn_multipliers": [1, 2, 3, 4]}, "must be 1, 2 or 3 numbers"),
    "quantized": ("mistral", {"quantization_config": {"bits": 4}}, "quantization_config="),
    "missing": ("bert", {"hidden_size": None}, "has no hidden_size"),
    "no number": ("bert", {"hidden_size": "32"}, "hidden_size must be a whole number"),
    "heads": (
        "bert",
        {"num_attention_heads": 5},
        "hidden_size=32 is not divisible by num_attention_heads=5",
    ),
    "groups": (
        "mistral",
        {"num_key_value_heads": 3},
        "num_attention_heads=4 is not divisible by num_key_value_heads=3",
    ),
    "odd rotation": ("phi", {"partial_rotary_factor": 0.4}, "not 3 of the 8"),
}


@pytest.mark.parametrize("case", FIELDS)
def test_a_field_that_no_backbone_has_is_refused_by_name(case: str) -> None:
    family, changed, message = FIELDS[case]
    values = golden_json(f"{family}/config") | changed
    with pytest.raises(UserError, match=f"DIR/config.json.* {message}"):
        from_json(values, PATH)
