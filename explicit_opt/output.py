"""Initialises the output layer of any model with the explicit solution, computed from the layer's inputs.

Shape letters of this module: B examples of a batch, with all leading axes flattened; M input features; N outputs.
"""

from collections.abc import Iterable
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from common import sharding
from common.errors import UserError, check
from common.model.linear import Linear
from common.train.prefetch import put
from common.train.task import Batch, ModelState, Task
from common.variables import Params
from explicit_opt.heads import HeadStart


class _Recorder(nnx.Module):
    """Wraps a layer and records the input of the most recent call."""

    def __init__(self, layer: Linear):
        self.layer = layer
        self.input = nnx.data(None)

    def __call__(self, x, *arguments, **options):
        self.input = x
        return self.layer(x, *arguments, **options)


def warm_start(task: Task, values: ModelState, layer: str, batches: Iterable[Batch]) -> Params:
    """Returns the trainable parameters with the explicit solution in one layer. Reads `batches` once.

    Args:
      layer: path of the `Linear` that computes the logits, such as "layers/1".
      batches: a finite number of training batches, with the rows of this process. Their arrays `targets` and `weights`
        have the leading axes of the layer's inputs.

    Raises:
      UserError: the layer does not exist, is frozen or is never called, the layer has negative input features but no
        bias, an input feature is not finite, a target is out of range, or no example has a positive weight.
    """
    kernel, bias = (values.trainable.get(f"{layer}/{name}") for name in ("kernel", "bias"))
    if kernel is None:
        linear = [n.removesuffix("/kernel") for n in values.trainable if n.endswith("/kernel")]
        advice = f"choose one of {', '.join(linear)}" if linear else "use a model that has one"
        raise UserError(f"no trainable layer {layer!r} with a kernel: {advice}")

    def record(trainable: Params, frozen: Params, batch: Batch) -> tuple[jax.Array, ...]:
        model = values.abstract_model.build(trainable, frozen)
        recorder = _put_recorder(model, layer)
        task.loss(model, batch, None)
        check(
            recorder.input is not None,
            f"the task's loss never calls the layer {layer!r}: choose the layer that computes the logits",
        )
        h_BM = recorder.input.reshape(-1, kernel.shape[0]).astype(jnp.float32)
        return h_BM, batch["targets"].reshape(-1), batch["weights"].reshape(-1)

    record = jax.jit(record, out_shardings=sharding.replicated(values.mesh))
    head = HeadStart("explicit", outputs=kernel.shape[1], scale=1.0, smoothing=0.0)
    for batch in batches:
        recorded = record(values.trainable, values.frozen, put(batch, values.mesh))
        h_BM, targets_B, weights_B = map(np.asarray, recorded)
        # Leave out padding, because its inputs and targets may be invalid.
        seen_B = weights_B > 0
        head.add(h_BM[seen_B], targets_B[seen_B], weights_B[seen_B])
    new_kernel, new_bias = head.finish()
    started = {f"{layer}/kernel": jax.device_put(new_kernel, kernel.sharding)}
    if bias is not None:
        started[f"{layer}/bias"] = jax.device_put(new_bias, bias.sharding)
    elif new_bias.any():
        raise UserError(
            f"layer {layer} has negative input features, so the explicit solution needs a bias: add a bias to the layer"
        )
    return {**values.trainable, **started}


def _child(module: Any, name: str) -> Any:
    return module[int(name)] if name.isdigit() else getattr(module, name)


def _put_recorder(model: nnx.Module, layer: str) -> _Recorder:
    """Replaces a layer of the model, in place, by a recorder of the layer. Returns the recorder."""
    *above, last = layer.split("/")
    parent = reduce(_child, above, model)
    recorder = _Recorder(_child(parent, last))
    if last.isdigit():
        parent[int(last)] = recorder
    else:
        setattr(parent, last, recorder)
    return recorder
