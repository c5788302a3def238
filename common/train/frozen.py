"""Frozen values of a run: initialised or loaded at the start, written once, and read at every resume.

Pretrained weights (`Task.pretrained_weights`) are not written, but read from their own files at every start and resume.
"""

import json
import platform
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.sharding import Mesh

from common.errors import check
from common.freezing import draw_frozen, fingerprint
from common.runtime.processes import all_gather, check_agreement, warn
from common.sharding import abstract, place, shardings
from common.storage.addresses import shown
from common.train.checkpoint import Checkpoints, DamagedCheckpoint, checksum
from common.train.task import PretrainedWeights
from common.variables import AbstractModel, Params


def draw_on_mesh(model: AbstractModel, seed: int, mesh: Mesh) -> tuple[Params, str]:
    """Returns the seed-initialised frozen values on the mesh, and their fingerprint."""
    values: dict[str, np.ndarray] = draw_frozen(model, seed)
    return place(values, shardings(model.seed_initialised, mesh)), fingerprint(values)


def load(
    checkpoints: Checkpoints,
    model: AbstractModel,
    seed: int,
    pretrained: PretrainedWeights,
    meta: Mapping[str, Any],
    mesh: Mesh,
    repair: bool = False,
) -> Params:
    """Returns the frozen values of a run, on the mesh. Warns if this platform draws other values from the seed.

    A run from before commit 939e222 (22 November 2026) has not written its frozen values: this function draws the
    values again from the seed. If the checkpoint has frozen values, the caller uses the values in the checkpoint.

    Args:
      meta: the JSON part of a checkpoint of the run.
      repair: whether to write damaged values again that `_restore` has drawn from the seed.

    Raises:
      UserError: the pretrained weights have changed since the start of the run, the written values cannot be restored
        (`_restore`), or processes have different values.
    """
    check(
        meta.get("outside", "") == pretrained.fingerprint,
        "the files of the pretrained weights differ from the weights with which the run in"
        f" {shown(checkpoints.directory.parent)} began: restore the original files, or start a new run in another"
        " folder",
    )
    written = checkpoints.frozen_metadata()
    check_agreement(lambda: {"the file of the frozen values": json.dumps(written)})
    expected = written["drawn"] if written else meta.get("reservoirs")
    initial = draw_frozen(model, seed)
    drawn = fingerprint(initial)
    if expected not in (drawn, None):
        where = written["platform"] if written else "another platform"
        warn(
            f"the frozen values drawn from seed {seed} on this platform ({host()}) differ from the values of"
            f" the run ({where}); {'the run uses its saved values' if written else 'results may differ'}"
        )
    if written:
        values = _restore(checkpoints, model, initial, written, mesh, repair)
    else:
        check_agreement(lambda: {"the fingerprint of the drawn frozen values": drawn[:16]})
        values = place(initial, shardings(model.seed_initialised, mesh))
    return values | dict(pretrained.values)


def _restore(
    checkpoints: Checkpoints,
    model: AbstractModel,
    initial: Mapping[str, np.ndarray],
    written: dict[str, Any],
    mesh: Mesh,
    repair: bool,
) -> Params:
    """Returns the written frozen values; if they are damaged but equal `initial`, `initial` with a warning.

    Args:
      initial: the values drawn from the seed on this platform.
      written: the `meta` of the written values.
      repair: whether to write damaged values again.

    Raises:
      UserError: `Checkpoints.restore_from` fails, and the values differ from `initial`.
    """
    names = {name: model.frozen[name] for name in written["names"]}
    try:
        arrays, _ = checkpoints.restore_from("frozen", 0, {"frozen": abstract(names, mesh)})
        return arrays["frozen"]
    except DamagedCheckpoint as error:
        damaged = error  # A thread that is handling an exception cannot save (`unless_failing`).
    # The fingerprint is of the drawn values. `Task.start` may have added values or replaced drawn values.
    same = fingerprint(initial) == written["drawn"] and sorted(initial) == written["names"]
    if all(all_gather(same)):
        values = place(initial, shardings(model.seed_initialised, mesh))
        if int(checksum({"frozen": values})) == written["checksum"]:
            warn(f"{damaged.fault}: drawing the frozen values from the seed again")
            if repair:
                checkpoints.replace("frozen", 0, {"frozen": values}, written)
            return values
    raise damaged


def host() -> str:
    """Describes the platform: processor type and NumPy version. The last bit of a random value may depend on both."""
    return f"{platform.machine()}, NumPy {np.__version__}"
