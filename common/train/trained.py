"""A trained model out of a workdir: the values of its best checkpoint, of a snapshot, or the mean of some snapshots."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from common import variables
from common.train.checkpoint import (
    Checkpoints,
    abstract,
    draw_reservoirs,
    stored,
    verify_frozen,
)
from common.train.task import NOTHING, Outside, Values
from common.variables import Structure


def load_best(
    checkpoints: Checkpoints,
    structure: Any,
    config: ConfigDict,
    mesh: Any,
    step: int | None = None,
    outside: Outside = NOTHING,
) -> Values:
    """The values of a run's best checkpoint (or that of `step`) on `mesh`, reservoirs drawn again and verified."""
    return _load(
        lambda target: checkpoints.restore_best(target, step), structure, config, mesh, outside
    )


def _load(
    restore: Callable[[Any], tuple[Any, dict]],
    structure: Structure,
    config: ConfigDict,
    mesh: Any,
    outside: Outside,
) -> Values:
    frozen, drawn = draw_reservoirs(structure, config.seed, mesh)
    target = {
        "trainable": abstract(structure.trainable, mesh),
        "frozen": stored(structure, config.checkpoint.store_frozen, mesh, outside.values),
    }
    state, meta = restore(target)
    verify_frozen(meta, drawn, outside.fingerprint)
    frozen = {**frozen, **outside.values, **state["frozen"]}
    return Values(structure, state["trainable"], frozen, mesh)


def load_run(
    workdir: Path,
    config: ConfigDict,
    build: Callable[[nnx.Rngs], nnx.Module],
    mesh: Any,
    outside: Callable[[Structure], Outside] = lambda structure: NOTHING,
    snapshots: Sequence[int] = (),
) -> Values:
    """What a program that uses a trained run starts from. `outside` is that of its task.

    Args:
      snapshots: the mean of the trained values at these steps, in the place of the best checkpoint.
    """
    checkpoints = Checkpoints(workdir)
    structure = variables.abstract(lambda: build(variables.Keys(0)))
    given = structure, config, mesh, outside(structure)
    try:
        if not snapshots:
            return load_best(checkpoints, *given[:3], outside=given[3])
        mean: Values | None = None
        for step in snapshots:

            def restore(target: Any, step: int = step) -> tuple[Any, dict]:
                return checkpoints.restore_snapshot(target, step)

            values = _load(restore, *given)
            share = jax.tree.map(lambda x: x / len(snapshots), values.trainable)
            if mean is not None:
                share = jax.tree.map(jnp.add, mean.trainable, share)
            mean = replace(values, trainable=share)
        return mean
    finally:
        checkpoints.close()
