"""Writes golden.npz: states of transformers' models with the weights of helpers.draw, for the parity tests.

    pip install -r tests/requirements-peers.txt && PYTHONPATH=. python tests/perception/make_golden.py

Run it only to add a case. OpenELM is not in transformers; its states come from openelm_reference.py.
"""

import json
from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoModel,
    BertConfig,
    MistralConfig,
    PhiConfig,
    PretrainedConfig,
    Qwen2Config,
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
CASES = {
    "bert": BertConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES, num_key_value_heads=2, rope_theta=1e3),
    "mistral": MistralConfig(**SIZES, num_key_value_heads=1, head_dim=12, sliding_window=5),
    "phi": PhiConfig(**SIZES, num_key_value_heads=2, partial_rotary_factor=0.5),
}


def states(model: torch.nn.Module, tokens_BL: np.ndarray, lengths_B: np.ndarray) -> np.ndarray:
    """Returns the last states (B, L, D), 0 at padding."""
    inside_BL = np.arange(tokens_BL.shape[1]) < lengths_B[:, None]
    with torch.inference_mode():
        found = model.eval()(
            input_ids=torch.tensor(tokens_BL, dtype=torch.int64),
            attention_mask=torch.tensor(inside_BL, dtype=torch.int64),
        )
    return found.last_hidden_state.numpy() * inside_BL[..., None]


def peer(config: PretrainedConfig) -> torch.nn.Module:
    """Returns transformers' model without an output layer, with the weights of `draw`."""
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
