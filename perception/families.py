"""Reads and writes the config.json fields of the five model families.

Defaults of absent fields are those of transformers 4.57, and for OpenELM those of Apple's published code.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from common.config import check, check_choice
from perception.backbones import Backbone, bert, between, divisible, mistral, openelm, phi, qwen2

_NEEDED = object()


@dataclass(frozen=True)
class Fields:
    """Typed access to the fields of a JSON file. Absent and null fields take the default, if there is one.

    All methods raise a UserError that names the file and the field.
    """

    path: Path
    values: Mapping[str, Any]

    def get(self, name: str, default: Any = _NEEDED) -> Any:
        value = self.values.get(name)
        value = default if value is None else value
        check(value is not _NEEDED, f"{self.path} has no {name}")
        return value

    def _check(self, name: str, value: Any, fits: bool, kind: str) -> Any:
        check(fits, f"{self.path}: {name} must be {kind}, got {value!r}")
        return value

    def count(self, name: str, default: Any = _NEEDED) -> int:
        value = self.get(name, default)
        fits = isinstance(value, int) and not isinstance(value, bool) and value > 0
        return self._check(name, value, fits, "a whole number of at least 1")

    def optional(self, name: str, default: int | None) -> int | None:
        """Returns a count or None; null means None, and an absent field takes the default."""
        return None if self.values.get(name, default) is None else self.count(name, default)

    def number(self, name: str, default: Any = _NEEDED) -> float:
        value = self.get(name, default)
        return self._check(name, value, is_number(value) and value >= 0, "a number of at least 0")

    def flag(self, name: str, default: Any = _NEEDED) -> bool:
        value = self.get(name, default)
        return self._check(name, value, isinstance(value, bool), "true or false")

    def one_of(self, name: str, known: Mapping[str, Any], default: Any = _NEEDED) -> Any:
        """Maps the field's text through `known`."""
        value = self.get(name, default)
        check_choice(f"{self.path}: {name}", str(value), known)
        return known[value]

    def only(self, **expected: Any) -> None:
        """Requires each field to be absent or to have the only supported value."""
        for name, value in expected.items():
            found = self.get(name, value)
            check(
                found == value,
                f"{self.path}: {name}={found!r} is not supported; it must be {value!r} or absent",
            )


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
_THEIRS = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}


def _heads(fields: Fields) -> int:
    width, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    check(
        width % heads == 0 or fields.values.get("head_dim") is not None,
        f"{fields.path}: hidden_size={width} is not divisible by num_attention_heads={heads}",
    )
    return heads


def _sizes(fields: Fields) -> tuple[int, int, int, int]:
    names = ("num_hidden_layers", "hidden_size", "intermediate_size")
    return *map(fields.count, names), _heads(fields)


def read_bert(fields: Fields) -> Backbone:
    fields.only(position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    fields.only(pruned_heads={})
    dropout_rate = fields.number("hidden_dropout_prob", 0.1)
    made = bert(
        *_sizes(fields),
        vocabulary=fields.count("vocab_size"),
        longest=fields.count("max_position_embeddings", 512),
        types=fields.count("type_vocab_size", 2),
        epsilon=fields.number("layer_norm_eps", 1e-12),
        dropout=(dropout_rate, dropout_rate, fields.number("attention_probs_dropout_prob", 0.1)),
    )
    return replace(
        made,
        activation=fields.one_of("hidden_act", ACTIVATIONS, "gelu"),
        tied=fields.flag("tie_word_embeddings", True),
    )


def write_bert(shape: Backbone) -> dict[str, Any]:
    return {
        "max_position_embeddings": shape.learned,
        "type_vocab_size": shape.types,
        "layer_norm_eps": shape.epsilon,
        "position_embedding_type": "absolute",
        "hidden_dropout_prob": shape.dropout[0],
        "attention_probs_dropout_prob": shape.dropout[2],
        "pad_token_id": 0,
        **_sizes_json(shape),
    }


def _sizes_json(shape: Backbone) -> dict[str, Any]:
    return {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.width,
        "intermediate_size": shape.hidden[0],
        "num_attention_heads": shape.heads[0],
        "hidden_act": _THEIRS[shape.activation],
        "tie_word_embeddings": shape.tied,
    }


def _decoder(
    fields: Fields,
    made: Backbone,
    *,
    partial: float = 1.0,
    activation: str = "silu",
    tied: bool = False,
    dropout_rates: tuple[float, float] = (0.0, 0.0),
) -> Backbone:
    """Sets the fields that qwen2, mistral and phi share. `made` has the sizes; the other arguments are defaults."""
    fields.only(rope_scaling=None, rope_type="default")
    size = fields.count("head_dim", made.size)
    rotated = int(size * partial)
    check(
        rotated % 2 == 0,
        f"{fields.path}: rotary positions need an even number of features, got {rotated} of the head size {size}",
    )
    check(
        made.heads[0] % made.kv_heads[0] == 0,
        f"{fields.path}: num_attention_heads={made.heads[0]} is not divisible by"
        f" num_key_value_heads={made.kv_heads[0]}",
    )
    return replace(
        made,
        vocabulary=fields.count("vocab_size"),
        size=size,
        rotated=rotated,
        theta=fields.number("rope_theta", 1e4),
        activation=fields.one_of("hidden_act", ACTIVATIONS, activation),
        dropout=(*dropout_rates, fields.number("attention_dropout", 0.0)),
        tied=fields.flag("tie_word_embeddings", tied),
    )


def _decoder_json(shape: Backbone) -> dict[str, Any]:
    return {
        "num_key_value_heads": shape.kv_heads[0],
        "head_dim": shape.size,
        "max_position_embeddings": shape.longest,
        "rope_theta": shape.theta,
        "attention_dropout": shape.dropout[2],
        **_sizes_json(shape),
    }


def read_qwen2(fields: Fields) -> Backbone:
    fields.only(use_sliding_window=False, partial_rotary_factor=1.0)
    layers = fields.count("num_hidden_layers")
    fields.only(layer_types=["full_attention"] * layers)
    made = qwen2(
        *_sizes(fields),
        fields.count("num_key_value_heads", 32),
        longest=fields.count("max_position_embeddings", 32_768),
        epsilon=fields.number("rms_norm_eps", 1e-6),
    )
    return _decoder(fields, made)


def read_mistral(fields: Fields) -> Backbone:
    fields.only(layer_types=None, partial_rotary_factor=1.0)
    made = mistral(
        *_sizes(fields),
        fields.count("num_key_value_heads", 8),
        longest=fields.count("max_position_embeddings", 131_072),
        window=fields.optional("sliding_window", 4096),
        epsilon=fields.number("rms_norm_eps", 1e-6),
    )
    return _decoder(fields, made)


def write_gated(shape: Backbone) -> dict[str, Any]:
    window = {"sliding_window": shape.window} if shape.family == "mistral" else {}
    return {"rms_norm_eps": shape.epsilon, **window, **_decoder_json(shape)}


def read_phi(fields: Fields) -> Backbone:
    fields.only(qk_layernorm=False)
    heads = _heads(fields)
    made = phi(
        *_sizes(fields),
        kv_heads=fields.count("num_key_value_heads", heads),
        longest=fields.count("max_position_embeddings", 2048),
        epsilon=fields.number("layer_norm_eps", 1e-5),
    )
    dropout_rates = fields.number("resid_pdrop", 0.0), fields.number("embd_pdrop", 0.0)
    partial = fields.number("partial_rotary_factor", 0.5)
    return _decoder(
        fields, made, partial=partial, activation="gelu_new", dropout_rates=dropout_rates
    )


def write_phi(shape: Backbone) -> dict[str, Any]:
    partial = shape.rotated / shape.size
    if int(shape.size * partial) < shape.rotated:  # transformers truncates the product
        partial = math.nextafter(partial, 1)
    return {
        "layer_norm_eps": shape.epsilon,
        "partial_rotary_factor": partial,
        "resid_pdrop": shape.dropout[0],
        "embd_pdrop": shape.dropout[1],
        **_decoder_json(shape),
    }


def _scales(fields: Fields, name: str, default: float, layers: int) -> list[float]:
    """Reads one number for all layers, two for the first and last layer, or one for each layer."""
    value = fields.get(name, default)
    if is_number(value):
        return [value] * layers
    fits = isinstance(value, list) and len(value) in (2, layers) and all(map(is_number, value))
    check(fits, f"{fields.path}: {name} must be 1, 2 or {layers} numbers, got {value!r}")
    return between(*value, layers) if len(value) == 2 else value


def read_openelm(fields: Fields) -> Backbone:
    fields.only(ffn_with_glu=True, normalization_layer_name="rms_norm", rms_norm_eps=1e-6)
    fields.only(normalize_qk_projections=True)
    layers, width = fields.count("num_transformer_layers"), fields.count("model_dim")
    size, groups = fields.count("head_dim"), fields.count("num_gqa_groups", 1)
    divisor = fields.count("ffn_dim_divisor", 256)
    attention = _scales(fields, "qkv_multipliers", 1.0, layers)
    heads = tuple(divisible(width * scale, size * groups) // size for scale in attention)
    kv_heads = tuple(count // groups for count in heads)
    fields.only(num_query_heads=list(heads), num_kv_heads=list(kv_heads))
    feed_forward = _scales(fields, "ffn_multipliers", 4.0, layers)
    made = openelm(
        layers,
        width,
        size,
        vocabulary=fields.count("vocab_size"),
        theta=fields.number("rope_freq_constant", 1e4),
        longest=fields.count("max_context_length", 2048),
    )
    return replace(
        made,
        heads=heads,
        kv_heads=kv_heads,
        hidden=tuple(divisible(width * scale, divisor) for scale in feed_forward),
        activation=fields.one_of("activation_fn_name", ACTIVATIONS, "swish"),
        tied=fields.flag("share_input_output_layers", False),
    )


def write_openelm(shape: Backbone) -> dict[str, Any]:
    groups = shape.heads[0] // shape.kv_heads[0]

    def makes_the_heads(ends: tuple[float, float]) -> bool:
        scales = between(*ends, shape.layers)
        heads = (divisible(shape.width * s, shape.size * groups) // shape.size for s in scales)
        return tuple(heads) == shape.heads

    # OpenELM's file stores the two ends of the interpolation, not the heads. Any ends that give the same heads will do.
    tried = [n / 20 for n in range(5, 41)]
    lines = filter(makes_the_heads, [(0.5, 1.0), *product(tried, tried)])
    return {
        "num_transformer_layers": shape.layers,
        "model_dim": shape.width,
        "head_dim": shape.size,
        "num_gqa_groups": groups,
        "qkv_multipliers": next(lines, (1.0, 1.0)),
        "num_query_heads": shape.heads,
        "num_kv_heads": shape.kv_heads,
        "ffn_multipliers": [hidden / shape.width for hidden in shape.hidden],
        "ffn_dim_divisor": math.gcd(*shape.hidden),
        "ffn_with_glu": True,
        "activation_fn_name": _THEIRS[shape.activation],
        "normalization_layer_name": "rms_norm",
        "normalize_qk_projections": True,
        "share_input_output_layers": shape.tied,
        "max_context_length": shape.longest,
        "rope_max_length": 2 * shape.longest,
        "rope_freq_constant": shape.theta,
    }
