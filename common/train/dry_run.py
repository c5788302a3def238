"""The dry run: prints parameter counts, shapes of the first batch, memory and FLOPs of a step, without training."""

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common.errors import check
from common.report.table import text
from common.runtime.processes import is_main
from common.train.prefetch import device_prefetch
from common.train.run import show_parameters
from common.train.state import Step
from common.train.task import Task

MIB = 2**20


def held(tree: Any) -> int:
    """Returns how many bytes of a tree of sharded arrays each device holds. The arrays may be abstract."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def compile_for(step: Step, batch: Mapping[str, Any]) -> dict[str, int]:
    """Compiles the step for a batch, which may be abstract, without allocating parameters.

    Returns {use of memory, such as "optimizer": bytes on each device}.
    """
    trainable, opt_state, frozen = step.arguments()
    with jax.set_mesh(step.mesh):
        step.compile(batch)
    compiled = step.compiled[step.cache_key(batch, 0)].run
    return {
        "parameters, trained": held(trainable),
        "parameters, frozen": held(frozen),
        "optimizer": held(opt_state),
        "batch": held(batch),
        # The new parameters and optimizer state take no memory: they reuse the buffers of the donated inputs.
        "activations, gradients and the like": compiled.memory_analysis().temp_size_in_bytes,
    }


def show(config: ConfigDict, task: Task, mesh: Mesh) -> None:
    """Compiles the step for the first batch; prints parameter counts, shapes of the batch, memory and FLOPs."""
    step = Step.of(config, task, mesh)
    first = next(device_prefetch(task.batches(None), mesh, ahead=0), None)
    check(first is not None, "Task.batches yielded no batch; it must yield batches without end")
    batch, _ = first
    sizes = compile_for(step, batch)
    sizes["in all"] = sum(sizes.values())
    flops = step.compiled[step.cache_key(batch, 0)].flops
    if not is_main():
        return
    show_parameters(step.abstract_model)
    rows = [(name, "x".join(map(str, x.shape)) or "1", x.dtype.name) for name, x in batch.items()]
    print(f"\n{text(('first batch, of all processes', 'shape', 'type'), rows)}")
    rows = [(name, f"{size / MIB:,.1f}") for name, size in sizes.items()]
    print(f"\n{text(('on each device', 'MiB'), rows)}")
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit:
        print(f"each device has {limit / MIB:,.1f} MiB")
    print(
        f"\na step on this batch takes {flops:.3g} FLOPs in matrix products and convolutions on all"
        f" devices; {config.train.steps:,} such steps take {flops * config.train.steps:.3g} FLOPs. Nothing was trained."
    )
