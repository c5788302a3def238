"""Frozen values of a run: drawn from the seed or given at the start, written once, read back ever after."""

import platform
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from common.config import check
from common.runtime.processes import warn
from common.sharding import place, shardings
from common.train.checkpoint import Checkpoints, abstract
from common.train.task import PretrainedWeights
from common.variables import AbstractModel, Params, draw_frozen, fingerprint


def draw_on_mesh(model: AbstractModel, seed: int, mesh: Mesh) -> tuple[Params, str]:
    """The frozen values that follow from the seed, on the mesh, and their fingerprint."""
    values: dict[str, np.ndarray] = draw_frozen(model, seed)
    return place(values, shardings(model.drawn, mesh)), fingerprint(values)


def save(checkpoints: Checkpoints, values: Mapping[str, jax.Array], drawn: str) -> None:
    """Writes the frozen values of a run beside its checkpoints, with the fingerprint of the drawn ones."""
    if values:
        meta = {"drawn": drawn, "platform": _platform(), "names": sorted(values)}
        checkpoints.save_frozen(dict(values), meta)


def load(
    checkpoints: Checkpoints,
    model: AbstractModel,
    seed: int,
    pretrained: PretrainedWeights,
    meta: Mapping[str, Any],
    mesh: Mesh,
) -> Params:
    """The frozen values of a run, on the mesh.

    A run that was written before November 2026 has none on disk: they are drawn again, or lie in its checkpoints.

    Args:
      meta: the JSON part of a checkpoint of the run.

    Raises:
      UserError: the pretrained weights are other files than those that the run began with.
    """
    check(
        meta.get("outside", "") == pretrained.fingerprint,
        "the pretrained weights are not those that this run began with: their files have changed,"
        " or another folder is named",
    )
    written = checkpoints.frozen_metadata()
    expected = written["drawn"] if written else meta.get("reservoirs")
    initial = draw_frozen(model, seed)
    drawn = fingerprint(initial)
    if expected not in (drawn, None):
        where = written["platform"] if written else "another platform"
        warn(
            f"the frozen layers drawn from seed {seed} here ({_platform()}) differ from those of the run ({where});"
            f" {'the run keeps its own' if written else 'results will differ'}"
        )
    if written:
        names = {name: model.frozen[name] for name in written["names"]}
        values = checkpoints.restore_frozen(abstract(names, mesh))
    else:
        values = place(initial, shardings(model.drawn, mesh))
    return values | dict(pretrained.values)


def _platform() -> str:
    """The processor and NumPy version, on which the last bit of an initial value depends."""
    return f"{platform.machine()}, NumPy {np.__version__}"
