"""Pseudo-random weights, small models and texts for comparisons with other implementations."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from common import variables
from common.data.manual import python
from common.sharding import abstract, make_mesh
from common.variables import AbstractModel, Params
from perception.backbones import Backbone, bert
from perception.hugging_face import Pretrained, export
from perception.model import backbone
from perception.subword import build_subword

SHAPE = replace(bert(1, 16, 24, 2), vocabulary=300, learned=16, longest=16)

GOLDEN = Path(__file__).with_name("golden.npz")


@cache
def golden() -> dict[str, np.ndarray]:
    """Returns the arrays that make_golden.py wrote."""
    with np.load(GOLDEN) as file:
        return dict(file)


def golden_json(name: str) -> dict:
    """Returns an entry of golden.npz.

    "FAMILY/config" has the fields of config.json. "FAMILY/shapes" is {name: shape} of all weights except poolers.
    """
    return json.loads(str(golden()[name]))


def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Draws a weight that depends only on its name and shape.

    Biases are not 0 and scales are not 1, so every weight affects the hidden states.
    """
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
    noise = np.random.Generator(np.random.Philox(key=key)).standard_normal(shape)
    if len(shape) == 2:
        return (noise / math.sqrt(1 if "embed" in name else shape[1])).astype(np.float32)
    return (0.3 * noise + (not name.endswith("bias"))).astype(np.float32)


def write_folder(
    directory: Path, config: Mapping, shapes: Mapping[str, list[int]], prefix: str = ""
) -> Path:
    """Writes a directory in Hugging Face format, with weights of `draw`. Does not use the code under test.

    `prefix` comes before the name of each weight. Returns the directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    weights = {prefix + name: draw(name, tuple(shape)) for name, shape in shapes.items()}
    save_file(weights, directory / "model.safetensors")
    return directory


def small_bert(shape: Backbone = SHAPE) -> dict[str, jax.Array]:
    """Returns random weights of a BERT.

    The weights are five times the initial values, so that every layer affects the output.
    """
    trainable = variables.split(backbone(shape, rngs=nnx.Rngs(7))).trainable
    return {name: 5 * value.get_value() for name, value in trainable.items()}


def write_small_bert(folder: Path, weights: Params | None = None, shape: Backbone = SHAPE) -> Path:
    """Writes a BERT and its tokenizer in Hugging Face format. Returns the folder.

    `weights`: None takes the weights of `small_bert`.
    """
    lines = [text for (text,), _ in python("train")]
    tokenizer = build_subword(shape.vocabulary, lines, folder.parent)
    export(folder, shape, weights or small_bert(shape), tokenizer.to_json())
    return folder


def structure_of(shape: Backbone) -> AbstractModel:
    return variables.abstract(lambda rngs: backbone(shape, rngs=rngs))


def states(
    model: Pretrained, tokens_BL: np.ndarray, lengths_B: np.ndarray, sizes: Mapping | None = None
) -> np.ndarray:
    """Loads the weights of `model`, and returns the hidden states (B, L, D) after the last layer.

    `sizes` maps mesh axes to their sizes; None means one device.
    """
    devices = jax.devices()[: math.prod((sizes or {}).values())]
    mesh, abstract_model = make_mesh(sizes or {}, devices), structure_of(model.shape)
    values = model.load(abstract(abstract_model.trainable, mesh))

    def forward(values, tokens_BL, lengths_B):
        return abstract_model.build(values, {})(tokens_BL, lengths_B)

    with jax.set_mesh(mesh):
        return np.asarray(jax.jit(forward)(values, jnp.asarray(tokens_BL), jnp.asarray(lengths_B)))


def texts(vocabulary: int, lengths: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Returns random tokens (B, L), right-padded with 0, and their lengths (B,).

    The tokens are at least 2, so none equals the padding here (0) or RoBERTa's padding (1).
    """
    lengths_B = np.asarray(lengths, np.int32)
    generator = np.random.Generator(np.random.Philox(key=1))
    tokens_BL = generator.integers(2, vocabulary, (len(lengths), max(lengths)))
    inside_BL = np.arange(max(lengths)) < lengths_B[:, None]
    return (tokens_BL * inside_BL).astype(np.int32), lengths_B
