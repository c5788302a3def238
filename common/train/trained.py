"""A trained model out of a workdir: the values of its best checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    frozen, drawn = draw_reservoirs(structure, config.seed, mesh)
    target = {
        "trainable": abstract(structure.trainable, mesh),
        "frozen": stored(structure, config.checkpoint.store_frozen, mesh, outside.values),
    }
    state, meta = checkpoints.restore_best(target, step)
    verify_frozen(meta, drawn, outside.fingerprint)
    frozen = {**frozen, **outside.values, **state["frozen"]}
    return Values(structure, state["trainable"], frozen, mesh)


def load_run(
    workdir: Path,
    config: ConfigDict,
    build: Callable[[nnx.Rngs], nnx.Module],
    mesh: Any,
    outside: Callable[[Structure], Outside] = lambda structure: NOTHING,
) -> Values:
    """What a program that uses a trained run starts from. `outside` is that of its task."""
    checkpoints = Checkpoints(workdir)
    structure = variables.abstract(lambda: build(variables.Keys(0)))
    try:
        return load_best(checkpoints, structure, config, mesh, outside=outside(structure))
    finally:
        checkpoints.close()
