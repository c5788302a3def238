"""Converts config.json of OpenELM to a backbone and back.

Some fields, such as sizes, are required. Other missing fields get the default values of Apple's published code.
"""

import math
from dataclasses import replace
from itertools import product
from typing import Any

from common.errors import check
from perception.backbones import Backbone, between, divisible, openelm
from perception.families.fields import (
    ACTIVATIONS,
    ATTENTION,
    FORWARD,
    THEIRS,
    Fields,
    Names,
    as_json,
    is_number,
)

OPENELM = Names(
    "transformer.",
    "layers",
    {"embed": "token_embeddings", "stack/norm": "norm"},
    {
        f"{ATTENTION}qkv": "attn.qkv_proj",
        f"{ATTENTION}query_norm": "attn.q_norm",
        f"{ATTENTION}key_norm": "attn.k_norm",
        f"{ATTENTION}out": "attn.out_proj",
        "residuals/0/norm": "attn_norm",
        f"{FORWARD}gate": "ffn.proj_1",
        f"{FORWARD}up": "ffn.proj_1",
        f"{FORWARD}down": "ffn.proj_2",
        "residuals/1/norm": "ffn_norm",
    },
)


def _scales(fields: Fields, name: str, default: float, layers: int) -> list[float]:
    """Returns one scale per layer from the field `name`.

    The field is a number, a list with one number per layer, or a list of two numbers (of the first and the last layer),
    which are interpolated linearly.
    """
    value = fields.get(name, default)
    if is_number(value):
        return [value] * layers
    fits = isinstance(value, list) and len(value) in (2, layers) and all(map(is_number, value))
    check(
        fits,
        f"{fields.place}: {name} must be a number or a list of 2 or {layers} numbers, got {as_json(value)}",
    )
    return between(*value, layers) if len(value) == 2 else value


def read_openelm(fields: Fields) -> Backbone:
    fields.only(ffn_with_glu=True, normalization_layer_name="rms_norm", rms_norm_eps=1e-6)
    fields.must(normalize_qk_projections=True)
    layers, width = fields.count("num_transformer_layers"), fields.count("model_dim")
    size = fields.count("head_dim")
    check(
        size % 2 == 0,
        f"{fields.place}: rotary positions need an even head_dim, got {size}; correct the file",
    )
    made = openelm(
        layers,
        width,
        size,
        groups=fields.count("num_gqa_groups", 1),
        attention=_scales(fields, "qkv_multipliers", 1.0, layers),
        feed_forward=_scales(fields, "ffn_multipliers", 4.0, layers),
        divisor=fields.count("ffn_dim_divisor", 256),
    )
    fields.only(num_query_heads=list(made.heads), num_kv_heads=list(made.kv_heads))
    return replace(
        made,
        vocabulary=fields.count("vocab_size"),
        theta=fields.number("rope_freq_constant", 1e4),
        longest=fields.count("max_context_length", 2048),
        activation=fields.one_of("activation_fn_name", ACTIVATIONS, "swish"),
        tied=fields.flag("share_input_output_layers", False),
    )


def write_openelm(shape: Backbone) -> dict[str, Any]:
    groups = shape.heads[0] // shape.kv_heads[0]

    def makes_the_heads(ends: tuple[float, float]) -> bool:
        scales = between(*ends, shape.layers)
        heads = (divisible(shape.width * s, shape.size * groups) // shape.size for s in scales)
        return tuple(heads) == shape.heads

    # Apple's code computes the number of heads of each layer from the scales of the first and the last layer
    # (`qkv_multipliers`). Search for two scales that give the backbone's numbers of heads.
    tried = [n / 20 for n in range(5, 41)]
    ends = next(filter(makes_the_heads, [(0.5, 1.0), *product(tried, tried)]), None)
    check(
        ends is not None,
        f"config.json of the family openelm cannot describe a backbone with {list(shape.heads)} heads in its layers: no"
        " two qkv_multipliers (of the first and the last layer, multiples of 0.05 from 0.25 to 2) give these numbers;"
        " choose a backbone with other numbers of heads",
    )
    return {
        "num_transformer_layers": shape.layers,
        "model_dim": shape.width,
        "head_dim": shape.size,
        "num_gqa_groups": groups,
        "qkv_multipliers": ends,
        "num_query_heads": shape.heads,
        "num_kv_heads": shape.kv_heads,
        "ffn_multipliers": [hidden / shape.width for hidden in shape.hidden],
        "ffn_dim_divisor": math.gcd(*shape.hidden),
        "ffn_with_glu": True,
        "activation_fn_name": THEIRS[shape.activation],
        "normalization_layer_name": "rms_norm",
        "normalize_qk_projections": True,
        "share_input_output_layers": shape.tied,
        "max_context_length": shape.longest,
        "rope_max_length": 2 * shape.longest,
        "rope_freq_constant": shape.theta,
    }
