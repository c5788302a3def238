"""Initialises trained layers with the distributions of frozen layers (`common.freezing.draw`)."""

import math

import jax
from flax import nnx

from common import freezing
from common.model import initializers

INITIALIZERS = {
    "orthogonal": jax.nn.initializers.orthogonal,
    "xavier": initializers.xavier_uniform,
    "fan_in": lambda gain: (
        lambda key, shape: initializers.normal(gain / math.sqrt(shape[0]))(key, shape)
    ),
    "uniform": initializers.uniform,
    "normal": initializers.normal,
    "ones": lambda: initializers.ones,
    "zeros": lambda: initializers.zeros,
}
"""Name of a distribution in `common.freezing.draw` -> function from parameters, such as a gain, to an initializer."""


def redraw(module: nnx.Module, matrix: tuple, *, rngs: nnx.Rngs) -> None:
    """Re-initialises all trainable parameters of `module` with the distributions that `freezing.freeze` would use.

    Args:
      matrix: name and parameters of the distribution of matrices, such as ("orthogonal", 1.0).

    Raises:
      ValueError: a layer has no initializer for one of its parameters (`common.freezing.draws`).
    """
    for part, name, (draw, *numbers) in freezing.draws(module, matrix):
        parameter = getattr(part, name)
        parameter[...] = INITIALIZERS[draw](*numbers)(rngs.params(), parameter.shape)
