"""Converts config.json of decoders (Qwen2, Mistral, Llama, Gemma, phi) to backbones and back.

Some fields, such as sizes, are required. Other missing fields get the default values of transformers 4.57.
"""

import math
from dataclasses import replace
from typing import Any

from common.errors import check
from perception.backbones import Backbone, Stretch, mistral, phi, qwen2
from perception.families.fields import (
    ACTIVATIONS,
    ATTENTION,
    FORWARD,
    Fields,
    Names,
    as_json,
    heads_of,
    sizes,
    sizes_json,
)

_QKV = {"query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj"}
LLAMA = Names(
    "model.",
    "layers",
    {"embed": "embed_tokens", "stack/norm": "norm"},
    {
        **{f"{ATTENTION}{ours}": theirs for ours, theirs in _QKV.items()},
        f"{ATTENTION}out": "self_attn.o_proj",
        "residuals/0/norm": "input_layernorm",
        f"{FORWARD}gate": "mlp.gate_proj",
        f"{FORWARD}up": "mlp.up_proj",
        f"{FORWARD}down": "mlp.down_proj",
        "residuals/1/norm": "post_attention_layernorm",
    },
)
PHI = Names(
    "model.",
    "layers",
    {"embed": "embed_tokens", "stack/norm": "final_layernorm"},
    {
        **{f"{ATTENTION}functions/0/{ours}": theirs for ours, theirs in _QKV.items()},
        f"{ATTENTION}functions/0/out": "self_attn.dense",
        f"{ATTENTION}functions/1/up": "mlp.fc1",
        f"{ATTENTION}functions/1/down": "mlp.fc2",
        "residuals/0/norm": "input_layernorm",
    },
)


def _stretch(fields: Fields) -> Stretch | None:
    """Reads the rotary scaling from the field `rope_scaling`, or else from `fields`; None for no scaling.

    `config_json.from_json` has merged the fields of `rope_parameters` (transformers 5) into `fields`.
    """
    scaling = fields.object("rope_scaling")
    own = Fields(fields.path, scaling, "rope_scaling.") if scaling else fields
    kind = own.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return None
    found = f"rope_type={as_json(kind)}" if own is fields else f"rope_scaling={as_json(scaling)}"
    check(
        kind == "llama3",
        f"{fields.place}: {found} is not supported: use a model whose rope_type is default or llama3",
    )
    return Stretch(
        own.number("factor"),
        own.number("low_freq_factor"),
        own.number("high_freq_factor"),
        own.count("original_max_position_embeddings"),
    )


def _stretch_json(stretch: Stretch | None) -> dict[str, Any]:
    if stretch is None:
        return {}
    scaling = {
        "rope_type": "llama3",
        "factor": stretch.factor,
        "low_freq_factor": stretch.low,
        "high_freq_factor": stretch.high,
        "original_max_position_embeddings": stretch.trained,
    }
    return {"rope_scaling": scaling}


def _kv_heads(fields: Fields, default: int) -> int:
    """Returns the field `num_key_value_heads`: `default` if it is missing, the number of query heads if it is null."""
    null = "num_key_value_heads" in fields.values
    return fields.count("num_key_value_heads", heads_of(fields) if null else default)


def _decoder(
    fields: Fields,
    made: Backbone,
    longest: int,
    *,
    epsilon: tuple[str, float] = ("rms_norm_eps", 1e-6),
    partial: float = 1.0,
    activation: str = "silu",
    tied: bool = False,
    dropout_rates: tuple[float, float] = (0.0, 0.0),
) -> Backbone:
    """Returns a copy of `made` with the values of the fields that all decoders in this module have in common.

    Args:
      made: backbone with the sizes from config.json.
      longest: default of the field `max_position_embeddings`.
      epsilon: name and default of the field with the epsilon of norms.
      partial: fraction of a head's features to which rotary positions are applied.
      activation, tied: defaults of the fields `hidden_act` and `tie_word_embeddings`.
      dropout_rates: dropout rates of the sublayer outputs and the embeddings.
    """
    size = fields.count("head_dim", made.size)
    rotated = int(size * partial)
    check(
        partial <= 1,
        f"{fields.place}: partial_rotary_factor, the fraction of rotated features of a head, must be at most 1, got"
        f" {partial:g}; correct the file",
    )
    check(
        rotated % 2 == 0,
        f"{fields.place}: the number of rotated features of a head must be even, got {rotated} (the head size {size},"
        " which is head_dim or else hidden_size / num_attention_heads, times partial_rotary_factor"
        f" {partial:g}, rounded down); correct one of these fields",
    )
    absent = "num_key_value_heads" not in fields.values
    default = " (the default, because the file lacks this field)" if absent else ""
    check(
        made.heads[0] % made.kv_heads[0] == 0,
        f"{fields.place}: num_attention_heads={made.heads[0]} is not divisible by"
        f" num_key_value_heads={made.kv_heads[0]}{default}; correct one of these fields",
    )
    return replace(
        made,
        vocabulary=fields.count("vocab_size"),
        longest=fields.count("max_position_embeddings", longest),
        epsilon=fields.number(*epsilon),
        size=size,
        rotated=rotated,
        theta=fields.number("rope_theta", 1e4),
        stretch=_stretch(fields),
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
        **_stretch_json(shape.stretch),
        **sizes_json(shape),
    }


def read_qwen2(fields: Fields) -> Backbone:
    fields.only(use_sliding_window=False, partial_rotary_factor=1.0)
    layers = fields.count("num_hidden_layers")
    fields.layer_kinds(layers, ["full_attention"], ["full_attention"] * layers)
    return _decoder(fields, qwen2(*sizes(fields), _kv_heads(fields, 32)), 32_768)


def read_mistral(fields: Fields) -> Backbone:
    fields.only(layer_types=None, partial_rotary_factor=1.0)
    made = mistral(*sizes(fields), _kv_heads(fields, 8))
    made = replace(made, window=fields.optional("sliding_window", 4096))
    return _decoder(fields, made, 131_072)


def read_llama(fields: Fields) -> Backbone:
    fields.only(partial_rotary_factor=1.0)
    heads = heads_of(fields)
    made = qwen2(*sizes(fields), fields.count("num_key_value_heads", heads))
    bias = fields.flag("attention_bias", False)
    biases = (bias, bias, fields.flag("mlp_bias", False))
    return _decoder(fields, replace(made, family="llama", biases=biases), 2048)


def write_llama(shape: Backbone) -> dict[str, Any]:
    own = {"attention_bias": shape.biases[0], "mlp_bias": shape.biases[2]}
    return own | write_gated(shape)


def read_gemma(fields: Fields) -> Backbone:
    """Reads Gemma. Reads the activation "gelu" as the tanh approximation of GELU, with which Gemma was trained."""
    fields.only(attention_bias=False, partial_rotary_factor=1.0, use_bidirectional_attention=None)
    given = fields.get("hidden_activation", fields.get("hidden_act", "gelu_pytorch_tanh"))
    exact = {"hidden_act": "gelu_pytorch_tanh" if given == "gelu" else given}
    fields = Fields(fields.path, {**fields.values, **exact})
    made = replace(
        qwen2(*sizes(fields), _kv_heads(fields, 16)),
        family="gemma",
        biases=(False, False, False),
        norm="rms_offset",
        scaled_embeddings=True,
        size=256,  # default of head_dim
    )
    return _decoder(fields, made, 8192, tied=True)


def write_gemma(shape: Backbone) -> dict[str, Any]:
    values = write_gated(shape)
    if shape.activation == "gelu_tanh":
        values["hidden_act"] = "gelu_pytorch_tanh"
    return values | {"hidden_activation": values["hidden_act"], "attention_bias": False}


def write_gated(shape: Backbone) -> dict[str, Any]:
    window = {"sliding_window": shape.window} if shape.family == "mistral" else {}
    return {"rms_norm_eps": shape.epsilon, **window, **_decoder_json(shape)}


def read_phi(fields: Fields) -> Backbone:
    fields.only(qk_layernorm=False)
    made = phi(*sizes(fields))
    kv_heads = fields.count("num_key_value_heads", made.heads[0])
    return _decoder(
        fields,
        replace(made, kv_heads=(kv_heads,) * made.layers),
        2048,
        epsilon=("layer_norm_eps", 1e-5),
        partial=fields.number("partial_rotary_factor", 0.5),
        activation="gelu_new",
        dropout_rates=(fields.number("resid_pdrop", 0.0), fields.number("embd_pdrop", 0.0)),
    )


def write_phi(shape: Backbone) -> dict[str, Any]:
    partial = shape.rotated / shape.size
    if int(shape.size * partial) < shape.rotated:  # transformers truncates size * partial
        partial = math.nextafter(partial, 1)
    return {
        "layer_norm_eps": shape.epsilon,
        "partial_rotary_factor": partial,
        "resid_pdrop": shape.dropout[0],
        "embd_pdrop": shape.dropout[1],
        **_decoder_json(shape),
    }
