"""The dry run: parameters, first batch, memory and FLOPs of the compiled step, without training."""

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common import variables
from common.report.table import text
from common.runtime.processes import is_main
from common.train.prefetch import put
from common.train.state import Step
from common.train.task import Task
from common.variables import AbstractModel

MIB = 2**20


def parameter_rows(
    abstract_model: AbstractModel,
) -> tuple[tuple[str, ...], list[tuple[str, int, int, int]]]:
    """Columns and rows of the table of parameters by group, with a total."""
    rows = variables.count_by_group(abstract_model)
    rows.append(("all", *variables.count(abstract_model).values()))
    return ("group", "trainable", "frozen", "total"), rows


def show_parameters(abstract_model: AbstractModel) -> None:
    """Prints the table of parameters."""
    columns, rows = parameter_rows(abstract_model)
    print(text(columns, [(name, *(f"{n:,}" for n in numbers)) for name, *numbers in rows]))


def held(tree: Any) -> int:
    """Bytes per device of sharded arrays, which may be abstract."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def compile_for(step: Step, batch: Mapping[str, Any]) -> dict[str, int]:
    """Compiles the step for a batch, which may be abstract, without allocating parameters.

    Returns:
      Bytes on each device by purpose.
    """
    trainable, opt_state, frozen = step.arguments()
    with jax.set_mesh(step.mesh):
        step.compile(trainable, opt_state, frozen, batch)
    compiled, _ = step.compiled[step.cache_key(batch, 0)]
    return {
        "parameters, trained": held(trainable),
        "parameters, frozen": held(frozen),
        "optimizer": held(opt_state),
        "batch": held(batch),
        # Donated inputs share their buffers with the outputs.
        "activations, gradients and the like": compiled.memory_analysis().temp_size_in_bytes,
    }


def show(config: ConfigDict, task: Task, mesh: Mesh) -> None:
    """Compiles the step for the first batch and prints its parameters, memory and FLOPs. Allocates no parameter."""
    step = Step.of(config, task, mesh)
    first, _ = next(iter(task.batches(None)))
    batch = put(first, mesh)
    sizes = compile_for(step, batch)
    sizes["in all"] = sum(sizes.values())
    _, flops = step.compiled[step.cache_key(batch, 0)]
    if not is_main():
        return
    show_parameters(step.abstract_model)
    _show_batch(batch)
    rows = [(name, f"{size / MIB:,.1f}") for name, size in sizes.items()]
    print(f"\n{text(('on each device', 'MiB'), rows)}")
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit:
        print(f"it has {limit / MIB:,.1f} MiB")
    print(
        f"\na step on this batch takes {flops:.3g} floating-point operations in matrix products on all devices;"
        f" {config.train.steps:,} steps of it {flops * config.train.steps:.3g}. Nothing was trained."
    )


def _show_batch(batch: Mapping[str, jax.Array]) -> None:
    rows = [(name, "x".join(map(str, x.shape)) or "1", x.dtype.name) for name, x in batch.items()]
    print(f"\n{text(('first batch, of all processes', 'shape', 'type'), rows)}")
