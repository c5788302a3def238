"""A warm start for the output layer of any model of the core: the explicit solution over the features below it.

B examples of a batch (of any leading shape), D features, N outputs, K priming number.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from common import sharding
from common.errors import UserError
from common.model.linear import Linear
from common.train.prefetch import put
from common.train.task import Batch, ModelState, Task
from common.variables import Params
from explicit_opt.solution import FLOOR, from_cooccurrences

Examples = Callable[[Batch], tuple[jax.Array, jax.Array]]
"""Targets and weights of a batch, in the leading shape of the features."""


def targets_and_weights(batch: Batch) -> tuple[jax.Array, jax.Array]:
    """The examples of this paper's tasks."""
    return batch["targets"], batch["weights"]


@dataclass
class Sums:
    """What one pass over features of any sign has to add up, in float64.

    The solution is for features that are not negative. A feature that is negative somewhere is moved up by its
    lowest value, and a bias takes the move back: h U + b = (h - low) U with b = -low U.

    Attributes:
      found_DN: co-occurrences of the features as they are.
      counts_N: weight of each target.
      low_D: the lowest value of each feature, at most 0.
      norm: sum of all features.
    """

    found_DN: np.ndarray
    counts_N: np.ndarray
    low_D: np.ndarray
    norm: float = 0.0

    @classmethod
    def empty(cls, features: int, outputs: int) -> "Sums":
        return cls(np.zeros((features, outputs)), np.zeros(outputs), np.zeros(features))

    def add(self, found_DN, counts_N, low_D, norm) -> None:
        self.found_DN += np.asarray(found_DN)
        self.counts_N += np.asarray(counts_N)
        self.low_D = np.minimum(self.low_D, np.asarray(low_D))
        self.norm += float(norm)

    def solution(
        self,
        priming: float | None = None,
        *,
        exponent: float | None = None,
        sign: int = -1,
        floor: float = FLOOR,
    ) -> tuple[jax.Array, jax.Array]:
        """Kernel (D, N) and bias (N,); the arguments are those of `explicit_solution`.

        Raises:
          UserError: there was no example, or a feature was not finite.
        """
        total = self.counts_N.sum()
        if not total:
            raise UserError("no example: the output layer has nothing to start from")
        if not np.isfinite(self.norm):
            raise UserError("a feature below the output layer is not finite")
        moved_DN = self.found_DN - self.low_D[:, None] * self.counts_N
        if priming is None:
            # At least 1, below which there is no solution; a softmax's norm may come out as 1 - 1e-8.
            priming = max(1.0, self.norm / total - self.low_D.sum())
        kernel_DN = from_cooccurrences(
            np.maximum(moved_DN, 0), priming, exponent=exponent, sign=sign, floor=floor
        )
        return kernel_DN, -jnp.asarray(self.low_D, jnp.float32) @ kernel_DN


class _Recorder(nnx.Module):
    """Stands in for a layer, and keeps what it reads."""

    def __init__(self, layer: Linear):
        self.layer = layer
        self.read = nnx.data(None)

    def __call__(self, x, *arguments, **options):
        self.read = x
        return self.layer(x, *arguments, **options)


def warm_start(
    task: Task,
    values: ModelState,
    layer: str,
    batches: Iterable[Batch],
    *,
    examples: Examples = targets_and_weights,
    **options: float,
) -> Params:
    """The trainable values with an explicit solution in one layer, by one pass over `batches`.

    Args:
      layer: path of a `Linear` whose outputs are the logits, such as "layers/1".
      batches: of the training data; a finite number, this process's rows.
      examples: reads targets and weights from a batch.
      options: of `Sums.solution`.

    Raises:
      UserError: there is no such layer, it is frozen, or it has no bias and features below it are negative.
    """
    kernel, bias = (values.trainable.get(f"{layer}/{name}") for name in ("kernel", "bias"))
    if kernel is None:
        linear = [n.removesuffix("/kernel") for n in values.trainable if n.endswith("/kernel")]
        raise UserError(
            f"no trainable layer {layer!r} with a kernel; there are: {', '.join(linear) or 'none'}"
        )

    def add_up(trainable, frozen, batch):
        model = values.abstract_model.build(trainable, frozen)
        recorder = _put_recorder(model, layer)
        task.loss(model, batch, None)
        width, outputs = kernel.shape
        h_BD = recorder.read.reshape(-1, width).astype(jnp.float32)
        targets, weights = examples(batch)
        weights_B = weights.reshape(-1).astype(jnp.float32)
        h_BD = jnp.where(weights_B[:, None] > 0, h_BD, 0.0)
        hits_NB = (targets.reshape(-1) == jnp.arange(outputs)[:, None]) * weights_B
        return hits_NB @ h_BD, hits_NB.sum(1), h_BD.min(0), (h_BD.sum(1) * weights_B).sum()

    add_up = jax.jit(add_up, out_shardings=sharding.replicated(values.mesh))
    sums = Sums.empty(*kernel.shape)
    for batch in batches:
        found_ND, *rest = add_up(values.trainable, values.frozen, put(batch, values.mesh))
        sums.add(found_ND.T, *rest)
    new_kernel, new_bias = sums.solution(**options)
    started = {f"{layer}/kernel": jax.device_put(new_kernel, kernel.sharding)}
    if bias is not None:
        started[f"{layer}/bias"] = jax.device_put(new_bias, bias.sharding)
    elif sums.low_D.any():
        raise UserError(
            f"features below {layer} are negative, which needs a bias to move them up, and it has none"
        )
    return {**values.trainable, **started}


def _put_recorder(model: nnx.Module, layer: str) -> _Recorder:
    *above, last = (int(part) if part.isdigit() else part for part in layer.split("/"))
    parent = model
    for part in above:
        parent = parent[part] if isinstance(part, int) else getattr(parent, part)
    found = parent[last] if isinstance(last, int) else getattr(parent, last)
    recorder = _Recorder(found)
    if isinstance(last, int):
        parent[last] = recorder
    else:
        setattr(parent, last, recorder)
    return recorder
