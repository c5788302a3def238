"""`PerExample`: rows of batches with several shapes are returned in the order of the examples."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from common import variables
from common.sharding import make_mesh
from common.train.evaluate import PerExample
from common.train.task import ModelState


class Scale(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(jnp.float32(3))


def test_rows_of_two_batch_shapes_are_collected_by_example() -> None:
    """Padding rows have the id -1 and are left out."""
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    abstract_model = variables.split(Scale())
    values = ModelState(abstract_model, {"scale": jnp.float32(3)}, {}, mesh)
    evaluate = PerExample(lambda model, b: {"sum": model.scale[...] * b["x"].sum(1)})
    batches = [
        {"ids": np.int32([2, 0]), "x": np.ones((2, 4), np.float32)},
        {"ids": np.int32([1, -1]), "x": np.ones((2, 8), np.float32)},
    ]
    for _ in range(2):
        np.testing.assert_array_equal(evaluate(values, batches, 3)["sum"], [12, 24, 12])
