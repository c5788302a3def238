"""Conversion between config.json of Hugging Face and `Backbone`, and unsupported fields."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from common import variables
from common.errors import UserError
from configs import perception as recipes
from perception.backbones import BACKBONES, Backbone, bert, between, mistral, openelm, phi, qwen2
from perception.config_json import from_json, to_json
from perception.families.table import FAMILIES
from perception.finetuning import make_shape
from tests.perception import published
from tests.perception.helpers import golden_json, structure_of

PATH = Path("DIR/config.json")

OTHERS = {
    # Rounding down would give 29 dimensions, because 30 / 44 * 44 is below 30 in float arithmetic.
    "30 of 44 dimensions turned": replace(phi(2, 88, 96, 2), rotated=30),
    "heads of their own size": replace(mistral(2, 64, 96, 4, 2), window=None, size=24, rotated=24),
    "multipliers": openelm(
        4,
        64,
        8,
        attention=between(0.75, 1.25, 4),
        feed_forward=between(1.0, 2.0, 4),
        divisor=32,
    ),
    "another activation": replace(bert(2, 64, 96, 4), activation="relu", dropout=(0.2, 0.2, 0.0)),
    "untied": replace(qwen2(2, 64, 96, 4, 2), tied=False, dropout=(0.0, 0.0, 0.1)),
}


def sizes(layers: int, width: int, hidden: int, heads: int, vocabulary: int) -> dict[str, int]:
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    return dict(
        zip((*names, "vocab_size"), (layers, width, hidden, heads, vocabulary), strict=True)
    )


QWEN2 = {"model_type": "qwen2", "num_key_value_heads": 2, "rope_theta": 1e6, "rms_norm_eps": 1e-6}
QWEN2 |= {"tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 131_072}
QWEN2 |= {"max_position_embeddings": 131_072, "hidden_act": "silu", "attention_dropout": 0.0}
BERT = {"model_type": "bert", "max_position_embeddings": 512, "type_vocab_size": 2}
BERT |= {"layer_norm_eps": 1e-12, "hidden_act": "gelu", "position_embedding_type": "absolute"}
BERT |= {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
PHI = {"model_type": "phi", "partial_rotary_factor": 0.4, "rope_theta": 1e4, "layer_norm_eps": 1e-5}
PHI |= {"hidden_act": "gelu_new", "resid_pdrop": 0.1, "embd_pdrop": 0.0, "attention_dropout": 0.0}
PHI |= {"max_position_embeddings": 2048, "tie_word_embeddings": False, "qk_layernorm": False}
MISTRAL = {"model_type": "mistral", "num_key_value_heads": 8, "sliding_window": 4096}
MISTRAL |= {"rope_theta": 1e4, "rms_norm_eps": 1e-5, "max_position_embeddings": 32_768}
MISTRAL |= {"hidden_act": "silu", "tie_word_embeddings": False}
OPENELM = {
    "model_type": "openelm",
    "num_gqa_groups": 4,
    "ffn_dim_divisor": 256,
    "vocab_size": 32_000,
}
OPENELM |= {"qkv_multipliers": [0.5, 1.0], "ffn_multipliers": [0.5, 4.0], "ffn_with_glu": True}
OPENELM |= {"rope_freq_constant": 10_000, "max_context_length": 2048, "activation_fn_name": "swish"}
OPENELM |= {"normalize_qk_projections": True, "share_input_output_layers": True}

PUBLISHED = {
    "qwen2_0.5b": QWEN2 | sizes(24, 896, 4864, 14, 151_936),
    "qwen2_1.5b": QWEN2 | sizes(28, 1536, 8960, 12, 151_936),
    "arctic_xs": BERT | sizes(6, 384, 1536, 12, 30_522),
    "arctic_l": BERT | sizes(24, 1024, 4096, 16, 30_522),
    "phi_2": PHI | sizes(32, 2560, 10_240, 32, 51_200),
    "mistral_7b": MISTRAL | sizes(32, 4096, 14_336, 32, 32_000),
    "openelm_270m": OPENELM | {"num_transformer_layers": 16, "model_dim": 1280, "head_dim": 64},
    "openelm_3b": OPENELM | {"num_transformer_layers": 36, "model_dim": 3072, "head_dim": 128},
}
"""Name of a backbone of the paper -> config.json fields of the published model."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_match_backbones(name: str) -> None:
    """All fields match, not only fields that affect parameter counts: positions, windows, activations, dropout."""
    assert from_json(PUBLISHED[name], PATH) == BACKBONES[name]


def of_case(name: str) -> Backbone:
    """Returns the backbone of a test case: a backbone with a name, an entry of OTHERS, or a published model."""
    known = {**BACKBONES, **OTHERS}
    return known[name] if name in known else from_json(published.PUBLISHED[name][0], PATH)


@pytest.mark.parametrize("name", [*BACKBONES, *OTHERS, *published.PUBLISHED])
def test_config_json_round_trip(name: str) -> None:
    shape = of_case(name)
    assert from_json(to_json(shape), PATH) == shape


LARGE = ("Llama-2-7b", "xlm-roberta-large", "ModernBERT-large", "ModernBERT-base")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.medium] if name in LARGE else [])
        for name in published.PUBLISHED
    ],
)
def test_published_models_have_their_number_of_parameters(name: str) -> None:
    fields, count = published.PUBLISHED[name]
    assert variables.count(structure_of(from_json(fields, PATH)))["total"] == count


def test_roberta_positions_begin_after_the_padding_row() -> None:
    shape = of_case("roberta-base")
    assert (shape.first_position, shape.learned, shape.longest) == (2, 514, 512)


def test_maximum_length_of_roberta_excludes_the_padding_rows() -> None:
    config = recipes.get_config("tiny")
    config.backbone, config.finetune, config.data.max_length = "auto", "lora", 512
    pretrained = SimpleNamespace(shape=of_case("roberta-base"))
    assert make_shape(config, pretrained, 1000).learned == 514
    config.data.max_length = 513
    with pytest.raises(
        UserError,
        match="max_length=513 exceeds the 512 positions of the model: set at most 512, or use",
    ):
        make_shape(config, pretrained, 1000)
    config.finetune = "full"
    assert make_shape(config, pretrained, 1000).learned == 515


def test_tokenizer_with_more_ids_than_embeddings_raises_error() -> None:
    config = recipes.get_config("tiny")
    config.backbone, config.finetune, config.pretrained = "auto", "lora", "DIR"
    pretrained = SimpleNamespace(shape=of_case("roberta-base"))
    with pytest.raises(
        UserError,
        match=r"^the tokenizer of the run has 60,000 ids, .* the model DIR has only 50,265 rows: set",
    ):
        make_shape(config, pretrained, 60_000)


def test_every_third_layer_of_modernbert_attends_without_a_window() -> None:
    shape = of_case("ModernBERT-base")
    assert [layer for layer in range(22) if shape.window_of(layer) is None] == [*range(0, 22, 3)]
    assert (shape.window_of(1), shape.theta_of(1), shape.theta_of(0)) == (65, 1e4, 1.6e5)


def test_modernbert_without_local_rope_theta_gets_transformers_default() -> None:
    values = dict(published.PUBLISHED["ModernBERT-base"][0])
    assert from_json(values | {"local_rope_theta": None}, PATH).local_theta == 1.6e5
    del values["local_rope_theta"]
    assert from_json(values, PATH).local_theta == 1e4


def test_modernbert_of_transformers_5_equals_modernbert_of_transformers_4() -> None:
    values = dict(published.PUBLISHED["ModernBERT-base"][0]) | {"local_rope_theta": 500.0}
    shape = from_json(values, PATH)
    thetas = values.pop("global_rope_theta"), values.pop("local_rope_theta")
    del values["global_attn_every_n_layers"]
    kinds = ("full_attention", "sliding_attention")
    rope = {
        k: {"rope_type": "default", "rope_theta": x} for k, x in zip(kinds, thetas, strict=True)
    }
    values |= {
        "rope_parameters": rope,
        "layer_types": [kinds[layer % 3 > 0] for layer in range(22)],
    }
    assert from_json(values, PATH) == shape
    values["layer_types"] = [kinds[layer % 2] for layer in range(22)]
    assert from_json(values, PATH).local == (False, True) * 11
    for wrong in (values["layer_types"][:-1], ["linear_attention"] * 22):
        with pytest.raises(
            UserError, match="layer_types must be a list with full_attention or sliding_attention "
        ):
            from_json(values | {"layer_types": wrong}, PATH)
    rope["full_attention"]["rope_type"] = "yarn"
    with pytest.raises(UserError, match='rope_type="yarn" is not supported'):
        from_json(values, PATH)


def test_null_number_of_key_value_heads_means_the_number_of_heads() -> None:
    """As in transformers, null means the number of attention heads."""
    null = from_json(golden_json("qwen2/config") | {"num_key_value_heads": None}, PATH)
    assert null.kv_heads == null.heads


def test_early_gemma_files_get_the_activation_used_in_training() -> None:
    fields = published.PUBLISHED["gemma-2b"][0]
    assert from_json(fields, PATH).activation == "gelu_tanh"
    assert from_json(fields | {"hidden_activation": "relu"}, PATH).activation == "relu"


def test_unknown_family_is_refused_with_the_list() -> None:
    with pytest.raises(UserError) as caught:
        from_json({"model_type": "t5"}, PATH)
    for family in FAMILIES:
        assert family in str(caught.value)


def test_to_json_rejects_inexpressible_backbones() -> None:
    with pytest.raises(UserError, match=r"family qwen2 cannot describe .* window 5 \(not None\)"):
        to_json(replace(BACKBONES["tiny_qwen2"], window=5))
    uneven = replace(BACKBONES["tiny_openelm"], heads=(4, 2, 4), kv_heads=(2, 1, 2))
    with pytest.raises(UserError, match=r"cannot describe a backbone with \[4, 2, 4\] heads"):
        to_json(uneven)


def test_transformers_5_rope_parameters_are_read() -> None:
    values = golden_json("phi/config") | {"rope_theta": 500.0, "partial_rotary_factor": 0.25}
    shape = from_json(values, PATH)
    assert (shape.theta, shape.rotated) == (500, 2)
    rope = {"rope_type": "default"}
    rope |= {name: values.pop(name) for name in ("rope_theta", "partial_rotary_factor")}
    assert from_json({**values, "rope_parameters": rope}, PATH) == shape


def test_family_is_inferred_from_architectures() -> None:
    values = golden_json("bert/config")
    shape = from_json(values, PATH)
    del values["model_type"]
    for architectures in (["BertForMaskedLM"], "BertModel"):
        assert from_json(values | {"architectures": architectures}, PATH) == shape


FIELDS = {
    "unknown family": ("bert", {"model_type": "gpt2"}, "model_type='gpt2': choose one of bert, "),
    "no family": ("bert", {"model_type": None}, "has neither model_type nor architectures, so "),
    "Phi-3 is another family": (
        "phi",
        {"model_type": None, "architectures": ["Phi3Model"]},
        r'architectures=\["Phi3Model"\] is not supported: use a model of one of the families bert, ',
    ),
    "architectures of no list": (
        "bert",
        {"model_type": None, "architectures": {"encoder": "BertModel"}},
        r'architectures=\{"encoder": "BertModel"\} is not supported: use a model of one of ',
    ),
    "activation of no text": ("bert", {"hidden_act": 0}, "hidden_act=0: choose one of gelu, "),
    "activation": ("bert", {"hidden_act": "gelu_python"}, "hidden_act='gelu_python': choose one"),
    "positions": (
        "bert",
        {"position_embedding_type": "relative_key"},
        'is not supported: use a model or an adapter whose position_embedding_type is "absolute"',
    ),
    "decoder": ("bert", {"is_decoder": True}, "is_decoder=true is not supported"),
    "scaled positions": (
        "qwen2",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        'rope_scaling={"rope_type": "yarn", "factor": 4.0} is not supported',
    ),
    "scaled positions of transformers 5": (
        "phi",
        {"rope_parameters": {"rope_type": "linear"}},
        'rope_type="linear" is not supported',
    ),
    "window": ("qwen2", {"use_sliding_window": True}, "use_sliding_window=true is not supported"),
    "normed heads": ("phi", {"qk_layernorm": True}, "qk_layernorm=true is not supported"),
    "no gate": ("openelm", {"ffn_with_glu": False}, "ffn_with_glu=false is not supported"),
    "other heads": ("openelm", {"num_query_heads": [2, 2, 4]}, r"num_query_heads=\[2, 2, 4\]"),
    "numbers": ("openelm", {"ffn_multipliers": [1, 2, 3, 4]}, "a list of 2 or 3 numbers"),
    "quantized": (
        "mistral",
        {"quantization_config": {"bits": 4}},
        "quant_method=null in quantization_config",
    ),
    "missing": ("bert", {"hidden_size": None}, "has no value for the required field hidden_size"),
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
    "scaled positions of llama": (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        'rope_scaling={"type": "linear", "factor": 2.0} is not supported',
    ),
    "scaling without a kind": (
        "llama",
        {"rope_scaling": 2.0},
        r"rope_scaling must be a JSON object, got 2\.0",
    ),
    "scaling without its numbers": (
        "llama",
        {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
        "has no value for the required field rope_scaling.low_freq_factor",
    ),
    "infinite factor": (
        "llama",
        {"rope_scaling": {"rope_type": "llama3", "factor": float("inf")}},
        "rope_scaling.factor must be a finite number of at least 0, got Infinity",
    ),
    "no window": (
        "mistral",
        {"sliding_window": 0},
        "sliding_window must be null or a whole number of at least 1, got 0",
    ),
    "rotary fields in a list": (
        "llama",
        {"rope_parameters": [1]},
        r"rope_parameters must be a JSON object, got \[1\]",
    ),
    "no position": (
        "roberta",
        {"max_position_embeddings": 2},
        "must exceed 2, because no position uses the first 2 rows",
    ),
    "other buckets": (
        "mpnet",
        {"relative_attention_num_buckets": 64},
        "relative_attention_num_buckets is 32 or absent",
    ),
    "version 2 of DeBERTa": ("deberta-v2", {"conv_kernel_size": 3}, "conv_kernel_size=3 is not"),
    "own position matrices": ("deberta-v2", {"share_att_key": False}, "share_att_key=false is not"),
    "half of the positions": (
        "deberta-v2",
        {"pos_att_type": ["c2p"]},
        r'pos_att_type=\["c2p"\] is',
    ),
    "heads of distilbert": ("distilbert", {"n_heads": 5}, "dim=32 is not divisible by n_heads=5"),
    "dropped features": ("modernbert", {"mlp_dropout": 0.1}, "mlp_dropout=0.1 is not supported"),
    "bidirectional": (
        "gemma",
        {"use_bidirectional_attention": True},
        "use_bidirectional_attention=true is not supported",
    ),
    "odd rotation": (
        "phi",
        {"partial_rotary_factor": 0.4},
        r"got 3 \(the head size 8, which is head_dim or else .*, times partial_rotary_factor 0.4",
    ),
    "rotation of more features than a head has": (
        "phi",
        {"partial_rotary_factor": 1.5},
        "partial_rotary_factor, the fraction .*, must be at most 1, got 1.5",
    ),
    "odd head": (
        "openelm",
        {"head_dim": 7, "num_query_heads": None, "num_kv_heads": None},
        "rotary positions need an even head_dim, got 7",
    ),
    "kinds of other layers": (
        "qwen2",
        {"num_hidden_layers": 1},
        "layer_types must be a list with full_attention for each of the 1 layers, got ",
    ),
    "rotary fields of a kind": (
        "modernbert",
        {"rope_parameters": {"full_attention": 3}},
        r"rope_parameters\.full_attention must be a JSON object, got 3",
    ),
}


@pytest.mark.parametrize(
    ("family", "field"),
    [
        ("deberta-v2", "relative_attention"),
        ("deberta-v2", "share_att_key"),
        ("deberta-v2", "norm_rel_ebd"),
        ("deberta-v2", "position_biased_input"),
        ("openelm", "normalize_qk_projections"),
    ],
)
def test_field_whose_default_is_not_supported_is_required(family: str, field: str) -> None:
    values = golden_json(f"{family}/config")
    del values[field]
    with pytest.raises(
        UserError,
        match=f"^DIR/config.json has no value for the required field {field}, which must be ",
    ):
        from_json(values, PATH)


@pytest.mark.parametrize("case", FIELDS)
def test_unsupported_field_raises_error_with_its_name(case: str) -> None:
    family, changed, message = FIELDS[case]
    values = golden_json(f"{family}/config") | changed
    with pytest.raises(UserError, match=f"DIR/config.json.* {message}"):
        from_json(values, PATH)
