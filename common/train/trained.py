"""A trained model out of a workdir: the values of its best checkpoint, of a snapshot, or the mean of several."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from common import variables
from common.config import require
from common.train.checkpoint import (
    Checkpoints,
    abstract,
    draw_reservoirs,
    stored,
    verify_frozen,
)
from common.train.task import NOTHING, Outside, Values
from common.variables import Arrays, Structure


def load_best(
    checkpoints: Checkpoints,
    structure: Any,
    config: ConfigDict,
    mesh: Any,
    step: int | None = None,
    outside: Outside = NOTHING,
) -> Values:
    """The values of a run's best checkpoint (or that of `step`) on `mesh`, reservoirs drawn again and verified."""
    kept, meta, drawn = _kept(
        lambda target: checkpoints.restore_best(target, step),
        structure,
        config,
        mesh,
        outside.values,
    )
    verify_frozen(meta, drawn, outside.fingerprint)
    return replace(kept, frozen={**outside.values, **kept.frozen})


def _kept(
    restore: Callable[[Any], tuple[Any, dict]],
    structure: Structure,
    config: ConfigDict,
    mesh: Any,
    outside: Arrays,
) -> tuple[Values, dict, str]:
    """What checkpoint and seed give, without what lies `outside`; the meta; the fingerprint of the drawn layers."""
    frozen, drawn = draw_reservoirs(structure, config.seed, mesh)
    target = {
        "trainable": abstract(structure.trainable, mesh),
        "frozen": stored(structure, config.checkpoint.store_frozen, mesh, outside),
    }
    state, meta = restore(target)
    values = Values(structure, state["trainable"], {**frozen, **state["frozen"]}, mesh)
    return values, meta, drawn


def load_run(
    workdir: Path,
    config: ConfigDict,
    build: Callable[[nnx.Rngs], nnx.Module],
    mesh: Any,
    outside: Callable[[Structure], Outside] = lambda structure: NOTHING,
    snapshots: Sequence[int] = (),
    best: int = 0,
) -> Values:
    """What a program that uses a trained run starts from. `outside` is that of its task.

    Args:
      snapshots: the mean of the trained values at these steps, in the place of the best checkpoint.
      best: the mean of so many of the best checkpoints, in its place.
    """
    structure = variables.abstract(lambda: build(variables.Keys(0)))
    given = outside(structure)
    with closing(Checkpoints(workdir)) as checkpoints:
        if best:
            return load_top(checkpoints, structure, config, mesh, best, given)
        if not snapshots:
            return load_best(checkpoints, structure, config, mesh, outside=given)
        return _mean(checkpoints.restore_snapshot, list(snapshots), structure, config, mesh, given)


def load_top(
    checkpoints: Checkpoints,
    structure: Structure,
    config: ConfigDict,
    mesh: Any,
    count: int,
    outside: Outside = NOTHING,
) -> Values:
    """The mean of the trained values of the `count` best checkpoints by validation.

    Raises:
      UserError: the run has not kept as many.
    """
    there = checkpoints.top()
    require(
        count <= len(there),
        f"the {count} best checkpoints are not there: the run has kept {len(there)}"
        " (--config.checkpoint.keep_best says how many training keeps)",
    )
    return _mean(checkpoints.restore_top, there[:count], structure, config, mesh, outside)


def _mean(
    restore: Callable[..., tuple[Any, dict]],
    steps: Sequence[int],
    structure: Structure,
    config: ConfigDict,
    mesh: Any,
    outside: Outside,
) -> Values:
    """The mean of the trained values of these checkpoints, which are read one after the other."""
    mean: Values | None = None
    for step in steps:
        kept, meta, drawn = _kept(
            partial(restore, step=step), structure, config, mesh, outside.values
        )
        verify_frozen(meta, drawn, outside.fingerprint)
        share = jax.tree.map(lambda x: x / len(steps), kept.trainable)
        if mean is not None:
            share = jax.tree.map(jnp.add, mean.trainable, share)
        mean = replace(kept, trainable=share, frozen={**outside.values, **kept.frozen})
    return mean


def load_own(
    workdir: Path, config: ConfigDict, build: Callable[[nnx.Rngs], nnx.Module], mesh: Any
) -> tuple[Values, str]:
    """As `load_run`, without the frozen values that lie outside of the run, and these files' fingerprint; they are not
    looked at."""
    structure = variables.abstract(lambda: build(variables.Keys(0)))
    given = {n: v for n, v in structure.frozen.items() if n not in structure.drawn}
    with closing(Checkpoints(workdir)) as checkpoints:
        kept, meta, drawn = _kept(checkpoints.restore_best, structure, config, mesh, given)
    outside = meta.get("outside", "")
    verify_frozen(meta, drawn, outside)
    return kept, outside
