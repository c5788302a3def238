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
from common.config import check
from common.train.checkpoint import (
    Checkpoints,
    abstract,
    draw_reservoirs,
    stored,
    verify_frozen,
)
from common.train.task import NO_PRETRAINED_WEIGHTS, ModelState, PretrainedWeights
from common.variables import AbstractModel, Params


def load_best(
    checkpoints: Checkpoints,
    abstract_model: Any,
    config: ConfigDict,
    mesh: Any,
    step: int | None = None,
    outside: PretrainedWeights = NO_PRETRAINED_WEIGHTS,
) -> ModelState:
    """The values of a run's best checkpoint (or that of `step`) on `mesh`, reservoirs drawn again and verified."""
    kept, meta, drawn = _kept(
        lambda target: checkpoints.restore_best(target, step),
        abstract_model,
        config,
        mesh,
        outside.values,
    )
    verify_frozen(meta, drawn, outside.fingerprint)
    return replace(kept, frozen={**outside.values, **kept.frozen})


def _kept(
    restore: Callable[[Any], tuple[Any, dict]],
    abstract_model: AbstractModel,
    config: ConfigDict,
    mesh: Any,
    outside: Params,
) -> tuple[ModelState, dict, str]:
    """What checkpoint and seed give, without what lies `outside`; the meta; the fingerprint of the drawn layers."""
    frozen, drawn = draw_reservoirs(abstract_model, config.seed, mesh)
    target = {
        "trainable": abstract(abstract_model.trainable, mesh),
        "frozen": stored(abstract_model, config.checkpoint.store_frozen, mesh, outside),
    }
    state, meta = restore(target)
    values = ModelState(abstract_model, state["trainable"], {**frozen, **state["frozen"]}, mesh)
    return values, meta, drawn


def load_run(
    workdir: Path,
    config: ConfigDict,
    build: Callable[[nnx.Rngs], nnx.Module],
    mesh: Any,
    outside: Callable[[AbstractModel], PretrainedWeights] = lambda abstract_model: (
        NO_PRETRAINED_WEIGHTS
    ),
    snapshots: Sequence[int] = (),
    best: int = 0,
) -> ModelState:
    """What a program that uses a trained run starts from. `outside` is that of its task.

    Args:
      snapshots: the mean of the trained values at these steps, in the place of the best checkpoint.
      best: the mean of so many of the best checkpoints, in its place.
    """
    abstract_model = variables.abstract(lambda: build(variables.ParamKeys(0)))
    given = outside(abstract_model)
    with closing(Checkpoints(workdir)) as checkpoints:
        if best:
            return load_top(checkpoints, abstract_model, config, mesh, best, given)
        if not snapshots:
            return load_best(checkpoints, abstract_model, config, mesh, outside=given)
        return _mean(
            checkpoints.restore_snapshot, list(snapshots), abstract_model, config, mesh, given
        )


def load_top(
    checkpoints: Checkpoints,
    abstract_model: AbstractModel,
    config: ConfigDict,
    mesh: Any,
    count: int,
    outside: PretrainedWeights = NO_PRETRAINED_WEIGHTS,
) -> ModelState:
    """The mean of the trained values of the `count` best checkpoints by validation.

    Raises:
      UserError: the run has not kept as many.
    """
    there = checkpoints.top()
    check(
        count <= len(there),
        f"the {count} best checkpoints are not there: the run has kept {len(there)}"
        " (--config.checkpoint.keep_best says how many training keeps)",
    )
    return _mean(checkpoints.restore_top, there[:count], abstract_model, config, mesh, outside)


def _mean(
    restore: Callable[..., tuple[Any, dict]],
    steps: Sequence[int],
    abstract_model: AbstractModel,
    config: ConfigDict,
    mesh: Any,
    outside: PretrainedWeights,
) -> ModelState:
    """The mean of the trained values of these checkpoints, which are read one after the other."""
    mean: ModelState | None = None
    for step in steps:
        kept, meta, drawn = _kept(
            partial(restore, step=step), abstract_model, config, mesh, outside.values
        )
        verify_frozen(meta, drawn, outside.fingerprint)
        share = jax.tree.map(lambda x: x / len(steps), kept.trainable)
        if mean is not None:
            share = jax.tree.map(jnp.add, mean.trainable, share)
        mean = replace(kept, trainable=share, frozen={**outside.values, **kept.frozen})
    return mean


def load_own(
    workdir: Path, config: ConfigDict, build: Callable[[nnx.Rngs], nnx.Module], mesh: Any
) -> tuple[ModelState, str]:
    """As `load_run`, without the frozen values that lie outside of the run, and these files' fingerprint; they are not
    looked at."""
    abstract_model = variables.abstract(lambda: build(variables.ParamKeys(0)))
    given = {n: v for n, v in abstract_model.frozen.items() if n not in abstract_model.drawn}
    with closing(Checkpoints(workdir)) as checkpoints:
        kept, meta, drawn = _kept(checkpoints.restore_best, abstract_model, config, mesh, given)
    outside = meta.get("outside", "")
    verify_frozen(meta, drawn, outside)
    return kept, outside
