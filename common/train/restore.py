"""Values of a trained model out of a workdir: of its best checkpoint, of a snapshot, or the mean of several."""

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common import variables
from common.config import check
from common.train import frozen
from common.train.checkpoint import Checkpoints, abstract
from common.train.task import NO_PRETRAINED_WEIGHTS, ModelState, PretrainedWeights
from common.variables import AbstractModel

Restore = Callable[[Any], tuple[Any, dict]]
"""Abstract arrays {"trainable", "frozen"} -> the arrays of a checkpoint and its JSON part."""


def load_run(
    workdir: Path,
    config: ConfigDict,
    build: Callable[[nnx.Rngs], nnx.Module],
    mesh: Mesh,
    outside: Callable[[AbstractModel], PretrainedWeights] = lambda model: NO_PRETRAINED_WEIGHTS,
    snapshots: Sequence[int] = (),
    best: int = 0,
) -> ModelState:
    """The trained model of a run, for programs that use it.

    Args:
      outside: `Task.outside` of the run's task.
      snapshots: steps whose trained values are averaged, instead of the best checkpoint.
      best: how many of the best checkpoints are averaged, instead of the best one alone.

    Raises:
      UserError: the run has no such checkpoints, or its pretrained weights have changed.
    """
    model = variables.abstract(lambda: build(variables.ParamKeys(0)))
    with closing(Checkpoints(workdir)) as checkpoints:
        if best:
            arrays, meta = mean_of_best(checkpoints, model, mesh, best)
        elif snapshots:
            restores = [partial(checkpoints.restore_snapshot, step=step) for step in snapshots]
            arrays, meta = _mean(restores, model, mesh)
        else:
            arrays, meta = checkpoints.restore_best(_target(model, mesh))
        values = frozen.load(checkpoints, model, config.seed, outside(model), meta, mesh)
    return ModelState(model, arrays["trainable"], values | arrays["frozen"], mesh)


def load_own(
    workdir: Path, config: ConfigDict, build: Callable[[nnx.Rngs], nnx.Module], mesh: Mesh
) -> tuple[ModelState, str]:
    """As `load_run`, without pretrained weights, which are not read; and their fingerprint."""
    model = variables.abstract(lambda: build(variables.ParamKeys(0)))
    with closing(Checkpoints(workdir)) as checkpoints:
        arrays, meta = checkpoints.restore_best(_target(model, mesh))
        pretrained = PretrainedWeights({}, meta.get("outside", ""))
        values = frozen.load(checkpoints, model, config.seed, pretrained, meta, mesh)
    found = ModelState(model, arrays["trainable"], values | arrays["frozen"], mesh)
    return found, pretrained.fingerprint


def best_params(
    checkpoints: Checkpoints, model: AbstractModel, mesh: Mesh, step: int
) -> variables.Params:
    """The trained values of the best checkpoint, which is that of `step`."""
    return checkpoints.restore_best(_target(model, mesh), step)[0]["trainable"]


def mean_of_best(
    checkpoints: Checkpoints, model: AbstractModel, mesh: Mesh, count: int
) -> tuple[dict, dict]:
    """Arrays, the trained ones averaged over the `count` best checkpoints by validation; and the JSON part of one.

    Raises:
      UserError: the run has not kept as many.
    """
    there = checkpoints.top()
    check(
        count <= len(there),
        f"the {count} best checkpoints are not there: the run has kept {len(there)}"
        " (--config.checkpoint.keep_best says how many training keeps)",
    )
    restores = [partial(checkpoints.restore_top, step=step) for step in there[:count]]
    return _mean(restores, model, mesh)


def _mean(restores: Sequence[Restore], model: AbstractModel, mesh: Mesh) -> tuple[dict, dict]:
    """Arrays, the trained ones averaged over checkpoints, which are read one after the other."""
    mean: dict | None = None
    for restore in restores:
        arrays, meta = restore(_target(model, mesh))
        share = jax.tree.map(lambda x: x / len(restores), arrays["trainable"])
        mean = share if mean is None else jax.tree.map(jnp.add, mean, share)
    return {"trainable": mean, "frozen": arrays["frozen"]}, meta


def _target(model: AbstractModel, mesh: Mesh) -> dict[str, Any]:
    """The abstract arrays of a checkpoint that a trained model needs."""
    return {"trainable": abstract(model.trainable, mesh), "frozen": abstract(model.frozen, mesh)}
