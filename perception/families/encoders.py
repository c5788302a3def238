"""Converts config.json of BERT, RoBERTa, XLM-R, DistilBERT, MPNet, DeBERTa-v3 and ModernBERT to backbones and back.

Some fields, such as sizes, are required. Other missing fields get the default values of transformers 4.57.
"""

from dataclasses import replace
from typing import Any

from common.errors import check
from perception.backbones import Backbone, Relative, bert
from perception.families.fields import (
    ACTIVATIONS,
    ATTENTION,
    FORWARD,
    THEIRS,
    Fields,
    Names,
    as_json,
    sizes,
    sizes_json,
)


def _norms(attention: str, feed_forward: str) -> dict[str, str]:
    return {"residuals/0/norm": attention, "residuals/1/norm": feed_forward}


def _projections(query: str, key: str, value: str, out: str) -> dict[str, str]:
    theirs = {"query": query, "key": key, "value": value, "out": out}
    return {f"{ATTENTION}{ours}": path for ours, path in theirs.items()}


_WORDS = {"embed": "embeddings.word_embeddings", "norm": "embeddings.LayerNorm"}
_POSITIONS = {"embed/positions": "embeddings.position_embeddings"}
_TYPES = {"embed/types": "embeddings.token_type_embeddings"}
_BERT_FORWARD = {f"{FORWARD}up": "intermediate.dense", f"{FORWARD}down": "output.dense"}
_BERT_LAYER = {
    **_projections(
        *(f"attention.self.{name}" for name in ("query", "key", "value")), "attention.output.dense"
    ),
    **_BERT_FORWARD,
    **_norms("attention.output.LayerNorm", "output.LayerNorm"),
}
BERT = Names("bert.", "encoder.layer", _WORDS | _POSITIONS | _TYPES, _BERT_LAYER)
ROBERTA = replace(BERT, prefix="roberta.")
DISTILBERT = Names(
    "distilbert.",
    "transformer.layer",
    _WORDS | _POSITIONS,
    {
        **_projections(*(f"attention.{name}_lin" for name in ("q", "k", "v", "out"))),
        f"{FORWARD}up": "ffn.lin1",
        f"{FORWARD}down": "ffn.lin2",
        **_norms("sa_layer_norm", "output_layer_norm"),
    },
)
MPNET = Names(
    "mpnet.",
    "encoder.layer",
    {**_WORDS, **_POSITIONS, "relative": "encoder.relative_attention_bias"},
    {
        **_projections(*(f"attention.attn.{name}" for name in "qkvo")),
        **_BERT_FORWARD,
        **_norms("attention.LayerNorm", "output.LayerNorm"),
    },
)
DEBERTA = Names(
    "deberta.",
    "encoder.layer",
    {**_WORDS, "relative": "encoder.rel_embeddings", "relative/norm": "encoder.LayerNorm"},
    _BERT_LAYER
    | _projections(
        *(f"attention.self.{name}_proj" for name in ("query", "key", "value")),
        "attention.output.dense",
    ),
)
MODERNBERT = Names(
    "model.",
    "layers",
    {"embed": "embeddings.tok_embeddings", "norm": "embeddings.norm", "stack/norm": "final_norm"},
    {
        f"{ATTENTION}qkv": "attn.Wqkv",
        f"{ATTENTION}out": "attn.Wo",
        f"{FORWARD}gate": "mlp.Wi",
        f"{FORWARD}up": "mlp.Wi",
        f"{FORWARD}down": "mlp.Wo",
        **_norms("attn_norm", "mlp_norm"),
    },
)


def _read(fields: Fields, *, epsilon: float = 1e-12, types: int = 2) -> Backbone:
    """Reads the fields that all encoders except ModernBERT have in common.

    Args:
      epsilon: default of the field `layer_norm_eps`.
      types: default of the field `type_vocab_size`; 0 for a family without token types, which ignores the field.
    """
    fields.only(is_decoder=False, add_cross_attention=False, pruned_heads={})
    dropout_rate = fields.number("hidden_dropout_prob", 0.1)
    longest = fields.count("max_position_embeddings", 512)
    return replace(
        bert(*sizes(fields)),
        vocabulary=fields.count("vocab_size"),
        learned=longest,
        longest=longest,
        types=fields.count("type_vocab_size", types) if types else 0,
        epsilon=fields.number("layer_norm_eps", epsilon),
        dropout=(dropout_rate, dropout_rate, fields.number("attention_probs_dropout_prob", 0.1)),
        activation=fields.one_of("hidden_act", ACTIVATIONS, "gelu"),
        tied=fields.flag("tie_word_embeddings", True),
    )


def _json(shape: Backbone) -> dict[str, Any]:
    return {
        "max_position_embeddings": shape.learned or shape.longest,
        "layer_norm_eps": shape.epsilon,
        "hidden_dropout_prob": shape.dropout[0],
        "attention_probs_dropout_prob": shape.dropout[2],
        **sizes_json(shape),
    }


def _first_at(fields: Fields, shape: Backbone, family: str, first: int) -> Backbone:
    """Returns a copy of `shape` for `family`. No position uses the first `first` rows of the table of positions."""
    check(
        shape.learned > first,
        f"{fields.place}: max_position_embeddings={shape.learned} must exceed {first}, because no position uses the"
        f" first {first} rows of the table of positions; correct the file",
    )
    return replace(shape, family=family, first_position=first, longest=shape.learned - first)


def read_bert(fields: Fields) -> Backbone:
    fields.only(position_embedding_type="absolute")
    return _read(fields)


def write_bert(shape: Backbone) -> dict[str, Any]:
    own = {"type_vocab_size": shape.types, "position_embedding_type": "absolute", "pad_token_id": 0}
    return own | _json(shape)


def read_roberta(fields: Fields) -> Backbone:
    padding = fields.count("pad_token_id", 1, least=0)
    return _first_at(fields, read_bert(fields), "roberta", padding + 1)


def read_xlm_roberta(fields: Fields) -> Backbone:
    return replace(read_roberta(fields), family="xlm-roberta")


def write_roberta(shape: Backbone) -> dict[str, Any]:
    return write_bert(shape) | {"pad_token_id": shape.first_position - 1}


_DISTILBERT = {
    "num_hidden_layers": "n_layers",
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "num_attention_heads": "n_heads",
    "hidden_act": "activation",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
}
"""Name of a field of BERT -> its name in the files of DistilBERT."""


def read_distilbert(fields: Fields) -> Backbone:
    """Reads DistilBERT. Unlike in transformers, training applies dropout to the outputs of attention layers."""
    made = _read(replace(fields, names=_DISTILBERT), types=0)
    return replace(made, family="distilbert", epsilon=1e-12)  # transformers ignores layer_norm_eps


def write_distilbert(shape: Backbone) -> dict[str, Any]:
    values = {name: value for name, value in _json(shape).items() if name != "layer_norm_eps"}
    values["pad_token_id"] = 0
    return {_DISTILBERT.get(name, name): value for name, value in values.items()}


def read_mpnet(fields: Fields) -> Backbone:
    fields.only(relative_attention_num_buckets=32)  # transformers always uses 32 buckets
    made = _first_at(fields, _read(fields, types=0), "mpnet", 2)
    return replace(made, relative=Relative("bias", 32, 128))


def write_mpnet(shape: Backbone) -> dict[str, Any]:
    own = {"relative_attention_num_buckets": shape.relative.buckets, "pad_token_id": 1}
    return own | _json(shape)


def read_deberta(fields: Fields) -> Backbone:
    """Reads DeBERTa-v3, whose model_type is deberta-v2. Rejects other models of this type, such as DeBERTa-v2."""
    fields.must(relative_attention=True, share_att_key=True, norm_rel_ebd="layer_norm")
    fields.must(position_biased_input=False)
    fields.only(type_vocab_size=0, conv_kernel_size=0)
    kinds = fields.get("pos_att_type")
    kinds = kinds.split("|") if isinstance(kinds, str) else kinds
    check(
        isinstance(kinds, list) and sorted(map(str, kinds)) == ["c2p", "p2c"],
        f"{fields.place}: pos_att_type={as_json(kinds)} is not supported: use a model whose pos_att_type lists just c2p"
        " and p2c",
    )
    made = _read(fields, epsilon=1e-7, types=0)
    fields.only(embedding_size=made.width, attention_head_size=made.size)
    farthest = fields.get("max_relative_positions", -1)
    farthest = made.longest if farthest == -1 else fields.count("max_relative_positions")
    relative = Relative("disentangled", fields.count("position_buckets"), farthest)
    return replace(made, family="deberta-v2", learned=0, relative=relative)


def write_deberta(shape: Backbone) -> dict[str, Any]:
    return {
        "relative_attention": True,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": shape.relative.buckets,
        "max_relative_positions": shape.relative.farthest,
        "position_biased_input": False,
        "type_vocab_size": 0,
        "pad_token_id": 0,
        **_json(shape),
    }


def read_modernbert(fields: Fields) -> Backbone:
    fields.only(mlp_dropout=0.0, rope_scaling=None)
    layers, width, hidden, heads = sizes(fields)
    every = fields.count("global_attn_every_n_layers", 3)
    # transformers 5 writes the kind of attention of each layer, and the rotary fields of each kind.
    known = {"full_attention": False, "sliding_attention": True}
    default = [list(known)[layer % every != 0] for layer in range(layers)]
    kinds = fields.layer_kinds(layers, known, default)
    rope = replace(fields, group="rope_parameters.")
    of_global, of_local = (
        Fields(fields.path, rope.object(kind), f"rope_parameters.{kind}.") for kind in known
    )
    for rotary in (of_global, of_local):
        rotary.only(rope_type="default")
    bias = fields.flag("attention_bias", False)
    rates = fields.number("embedding_dropout", 0.0), fields.number("attention_dropout", 0.0)
    theta = of_global.number("rope_theta", fields.number("global_rope_theta", 160_000.0))
    check(
        width // heads % 2 == 0,
        f"{fields.place}: rotary positions need an even head size, got hidden_size / num_attention_heads ="
        f" {width // heads}; correct one of these fields",
    )
    return Backbone(
        "modernbert",
        fields.count("vocab_size"),
        width,
        (heads,) * layers,
        (heads,) * layers,
        width // heads,
        (hidden,) * layers,
        causal=False,
        norm="layer" if fields.flag("norm_bias", False) else "layer_scale",
        epsilon=fields.number("norm_eps", 1e-5),
        embedding_norm=True,
        first_norm=False,
        theta=theta,
        rotated=width // heads,
        window=fields.count("local_attention", 128) // 2 + 1,
        local=tuple(known[kind] for kind in kinds),
        # transformers 4 gives local layers the theta of global layers if the field is null, but not if it is missing.
        local_theta=of_local.number(
            "rope_theta",
            fields.number(
                "local_rope_theta", theta if "local_rope_theta" in fields.values else 10_000.0
            ),
        ),
        biases=(bias, bias, fields.flag("mlp_bias", False)),
        activation=fields.one_of("hidden_activation", ACTIVATIONS, "gelu"),
        fused=True,
        dropout=(0.0, *rates),
        longest=fields.count("max_position_embeddings", 8192),
        tied=fields.flag("tie_word_embeddings", True),
        targets=("qkv", "out", "down"),
    )


def write_modernbert(shape: Backbone) -> dict[str, Any]:
    sizes_of = {n: x for n, x in sizes_json(shape).items() if n != "hidden_act"}
    every = shape.local.index(False, 1) if False in shape.local[1:] else shape.layers
    return {
        **sizes_of,
        "hidden_activation": THEIRS[shape.activation],
        "norm_eps": shape.epsilon,
        "norm_bias": shape.norm == "layer",
        "global_rope_theta": shape.theta,
        "local_rope_theta": shape.local_theta,
        "local_attention": 2 * (shape.window - 1),
        "global_attn_every_n_layers": every,
        "attention_bias": shape.biases[0],
        "mlp_bias": shape.biases[2],
        "embedding_dropout": shape.dropout[1],
        "attention_dropout": shape.dropout[2],
        "max_position_embeddings": shape.longest,
        "pad_token_id": None,  # transformers' default may exceed the vocabulary
    }
