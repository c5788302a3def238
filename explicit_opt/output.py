"""Initialises the output layer of any model with the explicit solution, computed from the layer's inputs.

Shape letters of this module: B examples of a batch, with all leading axes flattened; M input features; N outputs.
"""

from collections.abc import Iterable
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
from explicit_opt.solution import from_cooccurrences


@dataclass
class Sums:
    """Float64 sums over training data. `solution` computes the kernel and the bias from these sums.

    The explicit solution needs non-negative features. A feature with negative values is shifted so that its lowest
    value is 0, and the bias compensates: h U + b = (h - low) U with b = -low U.

    Attributes:
      found_MN: co-occurrences of features and targets before the shift.
      counts_N: sum of the example weights of each target.
      low_M: lowest value of each feature, or 0 if the lowest value is positive.
      norm: sum of all features of all examples, weighted by the example weights.
    """

    found_MN: np.ndarray
    counts_N: np.ndarray
    low_M: np.ndarray
    norm: float = 0.0

    @classmethod
    def empty(cls, features: int, outputs: int) -> "Sums":
        return cls(np.zeros((features, outputs)), np.zeros(outputs), np.zeros(features))

    def add(self, found_MN, counts_N, low_M, norm) -> None:
        self.found_MN += np.asarray(found_MN)
        self.counts_N += np.asarray(counts_N)
        self.low_M = np.minimum(self.low_M, np.asarray(low_M))
        self.norm += float(norm)

    def solution(
        self,
        priming: float | None = None,
        *,
        exponent: float | None = None,
        sign: int = -1,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns kernel (M, N) and bias (N,). `explicit_solution` documents the arguments.

        Raises:
          UserError: no example with a positive weight was added, a feature is not finite, or `priming` is below 1.
        """
        total = self.counts_N.sum()
        if not total:
            raise UserError(
                "the explicit solution needs at least one training example with a positive weight, got none: check"
                " the training data and the weights"
            )
        if not np.isfinite(self.norm):
            raise UserError(
                "an input feature of the output layer is NaN or infinite: check the training data and the layers"
                " below"
            )
        moved_MN = self.found_MN - self.low_M[:, None] * self.counts_N
        if priming is None:
            # K must be at least 1. Rounding may make the norm of a softmax slightly less than 1.
            priming = max(1.0, self.norm / total - self.low_M.sum())
        kernel_MN = from_cooccurrences(
            np.maximum(moved_MN, 0), priming, exponent=exponent, sign=sign
        )
        return kernel_MN, -jnp.asarray(self.low_M, jnp.float32) @ kernel_MN


class _Recorder(nnx.Module):
    """Wraps a layer and records the input of the last call."""

    def __init__(self, layer: Linear):
        self.layer = layer
        self.input = nnx.data(None)

    def __call__(self, x, *arguments, **options):
        self.input = x
        return self.layer(x, *arguments, **options)


def warm_start(
    task: Task,
    values: ModelState,
    layer: str,
    batches: Iterable[Batch],
    **options: float,
) -> Params:
    """Returns the trainable parameters with the explicit solution in one layer. Reads `batches` once.

    Args:
      layer: path of the `Linear` that computes the logits, such as "layers/1".
      batches: a finite number of training batches, with the rows of this process. Their arrays `targets` and `weights`
        have the leading axes of the layer's inputs.
      options: keyword arguments of `Sums.solution`.

    Raises:
      UserError: the layer does not exist or is frozen, the layer has negative input features but no bias, or
        `Sums.solution` fails.
    """
    kernel, bias = (values.trainable.get(f"{layer}/{name}") for name in ("kernel", "bias"))
    if kernel is None:
        linear = [n.removesuffix("/kernel") for n in values.trainable if n.endswith("/kernel")]
        raise UserError(
            f"no trainable layer {layer!r} with a kernel; trainable layers: {', '.join(linear) or 'none'}"
        )

    def add_up(trainable, frozen, batch):
        model = values.abstract_model.build(trainable, frozen)
        recorder = _put_recorder(model, layer)
        task.loss(model, batch, None)
        width, outputs = kernel.shape
        h_BM = recorder.input.reshape(-1, width).astype(jnp.float32)
        weights_B = batch["weights"].reshape(-1).astype(jnp.float32)
        h_BM = jnp.where(weights_B[:, None] > 0, h_BM, 0.0)
        hits_NB = (batch["targets"].reshape(-1) == jnp.arange(outputs)[:, None]) * weights_B
        return hits_NB @ h_BM, hits_NB.sum(1), h_BM.min(0), (h_BM.sum(1) * weights_B).sum()

    add_up = jax.jit(add_up, out_shardings=sharding.replicated(values.mesh))
    sums = Sums.empty(*kernel.shape)
    for batch in batches:
        found_NM, *rest = add_up(values.trainable, values.frozen, put(batch, values.mesh))
        sums.add(found_NM.T, *rest)
    new_kernel, new_bias = sums.solution(**options)
    started = {f"{layer}/kernel": jax.device_put(new_kernel, kernel.sharding)}
    if bias is not None:
        started[f"{layer}/bias"] = jax.device_put(new_bias, bias.sharding)
    elif sums.low_M.any():
        raise UserError(
            f"layer {layer} has negative input features, so the explicit solution needs a bias: add a bias to the layer"
        )
    return {**values.trainable, **started}


def _put_recorder(model: nnx.Module, layer: str) -> _Recorder:
    *above, last = (int(part) if part.isdigit() else part for part in layer.split("/"))
    parent = model
    for part in above:
        parent = parent[part] if isinstance(part, int) else getattr(parent, part)
    linear_layer = parent[last] if isinstance(last, int) else getattr(parent, last)
    recorder = _Recorder(linear_layer)
    if isinstance(last, int):
        parent[last] = recorder
    else:
        setattr(parent, last, recorder)
    return recorder
