"""Slow OpenELM reference in float64, independent of this project: one text, one head and one query at a time.

Follows the paper (Mehta et al., 2024) and its published weight layout: [query | key | value] in qkv_proj, the gate
first in ffn.proj_1, groups of neighbouring heads, rotary positions that pair feature k with k + K/2 (K: head size).
"""

import math

import numpy as np

from tests.perception.helpers import draw

CONFIG = {
    "architectures": ["OpenELMForCausalLM"],
    "model_type": "openelm",
    "vocab_size": 50,
    "model_dim": 32,
    "num_transformer_layers": 3,
    "head_dim": 8,
    "num_gqa_groups": 2,
    "qkv_multipliers": [0.5, 1.0],
    "num_query_heads": [2, 4, 4],
    "num_kv_heads": [1, 2, 2],
    "ffn_multipliers": [0.5, 2.0, 3.0],
    "ffn_dim_divisor": 16,
    "ffn_with_glu": True,
    "activation_fn_name": "swish",
    "normalization_layer_name": "rms_norm",
    "normalize_qk_projections": True,
    "share_input_output_layers": True,
    "max_context_length": 24,
    "rope_max_length": 48,
    "rope_freq_constant": 10000,
    "initializer_range": 0.02,
}
WIDTH, SIZE, GROUPS = 32, 8, 2
HEADS, HIDDEN = (2, 4, 4), (16, 64, 96)


def shapes() -> dict[str, list[int]]:
    """Returns {name: shape} of all weights."""
    found = {"token_embeddings.weight": [50, WIDTH], "norm.weight": [WIDTH]}
    for layer, (heads, hidden) in enumerate(zip(HEADS, HIDDEN, strict=True)):
        found |= {
            f"layers.{layer}.{name}.weight": shape
            for name, shape in {
                "attn_norm": [WIDTH],
                "attn.qkv_proj": [(heads + 2 * heads // GROUPS) * SIZE, WIDTH],
                "attn.q_norm": [SIZE],
                "attn.k_norm": [SIZE],
                "attn.out_proj": [WIDTH, heads * SIZE],
                "ffn_norm": [WIDTH],
                "ffn.proj_1": [2 * hidden, WIDTH],
                "ffn.proj_2": [WIDTH, hidden],
            }.items()
        }
    return found


def weight(name: str) -> np.ndarray:
    name = f"{name}.weight"
    return draw(name, tuple(shapes()[name])).astype(np.float64)


def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / math.sqrt(sum(x * x) / len(x) + 1e-6) * scale


def rotate(x: np.ndarray, position: int) -> np.ndarray:
    turned, half = x.copy(), SIZE // 2
    for k in range(half):
        angle = position / 10000 ** (2 * k / SIZE)
        turned[k] = x[k] * math.cos(angle) - x[k + half] * math.sin(angle)
        turned[k + half] = x[k + half] * math.cos(angle) + x[k] * math.sin(angle)
    return turned


def attention(layer: int, rows: list[np.ndarray]) -> list[np.ndarray]:
    heads, kv_heads = HEADS[layer], HEADS[layer] // GROUPS
    qkv, out = weight(f"layers.{layer}.attn.qkv_proj"), weight(f"layers.{layer}.attn.out_proj")
    scales = [weight(f"layers.{layer}.attn.{name}_norm") for name in "qk"]

    def part(row: np.ndarray, number: int) -> np.ndarray:
        return (qkv @ row)[number * SIZE : (number + 1) * SIZE]

    results = []
    for t, row in enumerate(rows):
        found = []
        for head in range(heads):
            query = rotate(norm(part(row, head), scales[0]), t)
            shared = head // GROUPS
            keys = [rotate(norm(part(r, heads + shared), scales[1]), s) for s, r in enumerate(rows)]
            weights = np.array([math.exp(query @ key / SIZE**0.5) for key in keys[: t + 1]])
            values = np.array([part(r, heads + kv_heads + shared) for r in rows[: t + 1]])
            found.append(weights / weights.sum() @ values)
        results.append(out @ np.concatenate(found))
    return results


def feed_forward(layer: int, row: np.ndarray) -> np.ndarray:
    both = weight(f"layers.{layer}.ffn.proj_1") @ row
    gate, up = both[: HIDDEN[layer]], both[HIDDEN[layer] :]
    return weight(f"layers.{layer}.ffn.proj_2") @ (gate / (1 + np.exp(-gate)) * up)


def states(tokens_BL: np.ndarray, lengths_B: np.ndarray) -> np.ndarray:
    """Returns the hidden states (B, L, D) after the last norm, 0 at padding."""
    result = np.zeros((*tokens_BL.shape, WIDTH))
    for number, (tokens, length) in enumerate(zip(tokens_BL, lengths_B, strict=True)):
        rows = [weight("token_embeddings")[token] for token in tokens[:length]]
        for layer in range(len(HEADS)):
            scale = weight(f"layers.{layer}.attn_norm")
            new = attention(layer, [norm(row, scale) for row in rows])
            rows = [row + y for row, y in zip(rows, new, strict=True)]
            scale = weight(f"layers.{layer}.ffn_norm")
            rows = [row + feed_forward(layer, norm(row, scale)) for row in rows]
        result[number, :length] = [norm(row, weight("norm")) for row in rows]
    return result
