"""Writes golden.npz for the parity tests: hidden states that Hugging Face transformers computes with random weights.

    pip install -r tests/requirements-peers.txt && PYTHONPATH=. python tests/perception/make_golden.py

The weights are those of `helpers.draw`. OpenELM is not in transformers, so its states come from openelm_reference.py.
Run this program only to add a case.
"""

import json
from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoModel,
    BertConfig,
    DebertaV2Config,
    DistilBertConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    ModernBertConfig,
    MPNetConfig,
    PhiConfig,
    PretrainedConfig,
    Qwen2Config,
    RobertaConfig,
    XLMRobertaConfig,
)

from tests.perception import openelm_reference
from tests.perception.helpers import draw, texts

VOCABULARY, LENGTHS = 50, (24, 11, 1)
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": max(LENGTHS),
}
# RoBERTa's positions begin after row 1, the row of the padding.
LATER = SIZES | {"max_position_embeddings": max(LENGTHS) + 2, "pad_token_id": 1}
LLAMA_3 = {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA_3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES = {
    "bert": BertConfig(**SIZES),
    "roberta": RobertaConfig(**LATER, type_vocab_size=1, layer_norm_eps=1e-5),
    "xlm-roberta": XLMRobertaConfig(**LATER, type_vocab_size=1, layer_norm_eps=1e-5),
    "distilbert": DistilBertConfig(
        vocab_size=VOCABULARY,
        dim=32,
        n_layers=2,
        n_heads=4,
        hidden_dim=48,
        max_position_embeddings=max(LENGTHS),
    ),
    "mpnet": MPNetConfig(**LATER),
    # In the position table, each offset from -5 to 5 between two tokens has its own row. Larger offsets share rows.
    "deberta-v2": DebertaV2Config(
        **SIZES,
        relative_attention=True,
        position_buckets=8,
        max_relative_positions=14,
        pos_att_type=["p2c", "c2p"],
        share_att_key=True,
        norm_rel_ebd="layer_norm",
        position_biased_input=False,
    ),
    # The second layer attends to three tokens on each side.
    "modernbert": ModernBertConfig(
        **SIZES,
        pad_token_id=0,
        local_attention=6,
        global_attn_every_n_layers=2,
        global_rope_theta=1e3,
        local_rope_theta=1e2,
        reference_compile=False,
    ),
    "qwen2": Qwen2Config(**SIZES, num_key_value_heads=2, rope_theta=1e3),
    "mistral": MistralConfig(**SIZES, num_key_value_heads=1, head_dim=12, sliding_window=5),
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2, rope_theta=1e3, rope_scaling=LLAMA_3),
    "gemma": GemmaConfig(**SIZES, num_key_value_heads=1, head_dim=12),
    "phi": PhiConfig(**SIZES, num_key_value_heads=2, partial_rotary_factor=0.5),
}


def states(model: torch.nn.Module, tokens_BL: np.ndarray, lengths_B: np.ndarray) -> np.ndarray:
    """Returns the hidden states (B, L, D) after the last layer, 0 at padding."""
    inside_BL = np.arange(tokens_BL.shape[1]) < lengths_B[:, None]
    with torch.inference_mode():
        found = model.eval()(
            input_ids=torch.tensor(tokens_BL, dtype=torch.int64),
            attention_mask=torch.tensor(inside_BL, dtype=torch.int64),
        )
    return found.last_hidden_state.numpy() * inside_BL[..., None]


def peer(config: PretrainedConfig) -> torch.nn.Module:
    """Returns the model of Hugging Face transformers, without an output layer, with the weights of `draw`."""
    model = AutoModel.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(draw(name, tuple(parameter.shape))))
    return model


def main() -> None:
    tokens_BL, lengths_B = texts(VOCABULARY, LENGTHS)
    arrays = {"tokens": tokens_BL.astype(np.uint8), "lengths": lengths_B.astype(np.uint8)}
    for family, config in CASES.items():
        model = peer(config)
        shapes = {n: list(p.shape) for n, p in model.named_parameters() if "pooler" not in n}
        arrays[f"{family}/config"] = np.array(config.to_json_string())
        arrays[f"{family}/shapes"] = np.array(json.dumps(shapes))
        arrays[f"{family}/states"] = states(model, tokens_BL, lengths_B)
    arrays["openelm/config"] = np.array(json.dumps(openelm_reference.CONFIG))
    arrays["openelm/shapes"] = np.array(json.dumps(openelm_reference.shapes()))
    arrays["openelm/states"] = openelm_reference.states(tokens_BL, lengths_B).astype(np.float32)
    np.savez_compressed(Path(__file__).with_name("golden.npz"), **arrays)


if __name__ == "__main__":
    main()
