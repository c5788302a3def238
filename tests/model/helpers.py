"""A reference transformer in NumPy, and random values for comparisons.

Weights are looked up by the path names of `AbstractModel`. The reference computes one sentence at a time in float64.
Attention omits masked keys, instead of giving them a large negative logit.
"""

import math
from collections.abc import Mapping

import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from common import variables
from common.variables import AbstractModel
from reservoir.model import translator

Weights = Mapping[str, np.ndarray]
SOURCE_VOCABULARY, TARGET_VOCABULARY = 13, 11


def structure_of(model: ConfigDict) -> AbstractModel:
    return variables.abstract(
        lambda rngs: translator(model, SOURCE_VOCABULARY, TARGET_VOCABULARY, rngs=rngs)
    )


def random_values(some: Mapping[str, nnx.Variable], seed: int) -> dict[str, np.ndarray]:
    """Draws values so that every parameter affects the output: biases are not 0, and scales are not 1."""
    generator = np.random.default_rng(seed)
    values = {}
    for name, variable in sorted(some.items()):
        noise = generator.standard_normal(variable.shape)
        if name.endswith("scale"):
            values[name] = 1 + 0.3 * noise
        elif name.endswith("bias"):
            values[name] = 0.3 * noise
        else:
            values[name] = noise / math.sqrt(variable.shape[0 if "kernel" in name else 1])
    return {name: value.astype(np.float32) for name, value in values.items()}


def below(weights: Weights, path: str) -> dict[str, np.ndarray]:
    """Returns the weights below a path, in float64, with names relative to this path."""
    return {
        name.removeprefix(f"{path}/"): np.asarray(value, np.float64)
        for name, value in weights.items()
        if name.startswith(f"{path}/")
    }


def layer_norm(weights: Weights, x: np.ndarray) -> np.ndarray:
    rows = []
    for row in x:
        mean = sum(row) / len(row)
        variance = sum((row - mean) ** 2) / len(row)
        rows.append((row - mean) / math.sqrt(variance + 1e-5))
    return np.stack(rows) * weights["scale"] + weights["bias"]


def linear(weights: Weights, x: np.ndarray) -> np.ndarray:
    return x @ weights["kernel"] + weights["bias"]


def gelu(x: np.ndarray) -> np.ndarray:
    """Returns x times the cumulative normal distribution at x."""
    return x * np.vectorize(lambda one: (1 + math.erf(one / math.sqrt(2))) / 2)(x)


def feed_forward(weights: Weights, x: np.ndarray, activation: str = "relu") -> np.ndarray:
    hidden = linear(below(weights, "up"), x)
    hidden = gelu(hidden) if activation == "gelu" else np.maximum(hidden, 0)
    return linear(below(weights, "down"), hidden)


def attention(
    weights: Weights, x: np.ndarray, encoded: np.ndarray, heads: int, causal: bool
) -> np.ndarray:
    """Returns attention from `x` to `encoded`, which has no padding. `causal` masks keys after the query's position."""
    query = linear(below(weights, "query"), x)
    key, value = (linear(below(weights, name), encoded) for name in ("key", "value"))
    size = x.shape[1] // heads
    result = np.zeros_like(x)
    for t in range(len(x)):
        seen = t + 1 if causal else len(encoded)
        for head in range(heads):
            part = slice(head * size, (head + 1) * size)
            scores = np.array([query[t, part] @ key[s, part] for s in range(seen)])
            weight = np.exp(scores / math.sqrt(size))
            weight /= weight.sum()
            result[t, part] = sum(weight[s] * value[s, part] for s in range(seen))
    return linear(below(weights, "out"), result)


def positions(length: int, width: int) -> np.ndarray:
    """Returns sinusoidal positions in fairseq's layout: sines in the first half of the width, then cosines."""
    table = np.zeros((length, width))
    half = width // 2
    for p in range(length):
        for i in range(half):
            angle = p * 10000 ** (-i / (half - 1))
            table[p, i], table[p, half + i] = math.sin(angle), math.cos(angle)
    return table


def embed(weights: Weights, tokens: np.ndarray) -> np.ndarray:
    table = weights["table"]
    length, width = len(tokens), table.shape[1]
    learned = weights.get("positions/table")
    places = positions(length, width) if learned is None else learned[:length]
    return table[tokens] * math.sqrt(width) + places


def stack(
    weights: Weights, x: np.ndarray, model: ConfigDict, length: int, encoded: np.ndarray | None
) -> np.ndarray:
    """Returns the output of the decoder's stack or, if `encoded` is None, of the encoder's stack.

    Args:
      length: number of tokens of the source without padding; unused in the decoder.
    """
    layers = {int(name.split("/")[1]) for name in weights if name.startswith("blocks/")}
    for layer in sorted(layers):
        block = below(weights, f"blocks/{layer}")
        residuals = {int(name.split("/")[1]) for name in block}
        for number in sorted(residuals):
            part = below(block, f"residuals/{number}")
            norm, function = below(part, "norm"), below(part, "function")
            y = layer_norm(norm, x) if model.norm == "pre" else x
            if "up/kernel" in function:
                y = feed_forward(function, y, model.activation)
            elif encoded is None:
                y = attention(function, y, y[:length], model.heads, causal=False)
            elif number == 0:
                y = attention(function, y, y, model.heads, causal=True)
            else:
                y = attention(function, y, encoded, model.heads, causal=False)
            x = x + y if model.norm == "pre" else layer_norm(norm, x + y)
    return layer_norm(below(weights, "norm"), x) if model.norm == "pre" else x


def encode(weights: Weights, source: np.ndarray, model: ConfigDict) -> np.ndarray:
    """Returns the encoder output (tokens, D) of a source without its padding."""
    length = int((source != 0).sum())
    x = embed(below(weights, "source_embed"), source)
    return stack(below(weights, "encoder"), x, model, length, None)[:length]


def decode(
    weights: Weights, encoded: np.ndarray, target: np.ndarray, model: ConfigDict
) -> np.ndarray:
    """Returns the logits (T, V) of the token after each token of `target`."""
    embedding = below(weights, "target_embed")
    x = stack(below(weights, "decoder"), embed(embedding, target), model, len(target), encoded)
    return x @ embedding["table"].T


def forward(
    weights: Weights, source: np.ndarray, target: np.ndarray, model: ConfigDict
) -> np.ndarray:
    """Returns the logits (B, T, V) of a batch."""
    return np.stack(
        [
            decode(weights, encode(weights, one, model), other, model)
            for one, other in zip(source, target, strict=True)
        ]
    )
