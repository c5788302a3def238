"""A toy task that belongs to no paper: fits a linear function with a trained layer on top of a frozen layer."""

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common.freezing import freeze
from common.model.linear import Linear
from common.sharding import make_mesh
from common.train.loop import fit
from common.train.task import Batch, ModelState, Task
from configs import translation


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.frozen = Linear(2, 4, ("embed", "mlp"), rngs=rngs)
        freeze(self.frozen)
        self.trained = Linear(4, 1, ("mlp", "embed"), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.trained(self.frozen(x))


class Toy(Task):
    """The toy task.

    Args:
      poison: index of the batch whose targets are NaN. Batch 0 belongs to step 1.
      scores: validation values to report, one after the other, instead of the true values. The last value repeats.
    """

    objective, mode = "error", "min"

    def __init__(self, poison: int = -1, scores: list[float] | None = None):
        self.poison, self.scores = poison, scores
        self.starts: list[dict | None] = []
        self.evaluated: list[str] = []

    def build(self, rngs: nnx.Rngs) -> nnx.Module:
        return Model(rngs)

    def loss(self, model, batch, key) -> tuple[jax.Array, jax.Array]:
        error = jnp.square(model(batch["x"]) - batch["y"]).sum()
        return error, jnp.float32(batch["x"].shape[0])

    def batches(self, start: dict | None) -> Iterator[tuple[Batch, dict]]:
        self.starts.append(start)
        number = start["next"] if start else 0
        while True:
            generator = np.random.default_rng(number)
            x = generator.standard_normal((8, 2)).astype(np.float32)
            y = x.sum(1, keepdims=True) + (np.nan if number == self.poison else 0)
            number += 1
            yield {"x": x, "y": y.astype(np.float32)}, {"next": number}

    def evaluate(self, values: ModelState, split: str) -> dict[str, float]:
        self.evaluated.append(split)
        if self.scores is not None and split == "valid":
            return {"error": self.scores[min(self.evaluated.count("valid"), len(self.scores)) - 1]}
        model = values.abstract_model.build(values.trainable, values.frozen)
        x = jnp.asarray([[1.0, 2.0]])
        return {"error": float(jnp.abs(model(x) - 3.0)[0, 0])}

    def save(self, workdir: Path) -> None:
        (workdir / "toy").write_text("kept")


def config(**fields: object) -> ConfigDict:
    """Returns the configuration of a short run. Overrides are named like `train__steps` for train.steps."""
    result = translation.base()
    result.wandb.mode = "disabled"
    result.optimizer.learning_rate, result.optimizer.warmup_steps = 0.05, 0
    result.optimizer.schedule = "constant"
    result.train.steps, result.train.log_steps = 20, 1
    result.eval.steps, result.eval.patience = 5, 0
    result.checkpoint.steps = 5
    result.update_from_flattened_dict(
        {key.replace("__", "."): value for key, value in fields.items()}
    )
    return result


def mesh() -> Mesh:
    return make_mesh({"data": 1}, jax.devices()[:1])


def run(workdir: Path, task: Toy | None = None, **fields: object) -> dict:
    return fit(config(**fields), task or Toy(), workdir, mesh())
