"""Writes the folder of a finished run of any training program, for `common.report`."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from common.atomic import write_atomic
from common.config import check_int
from common.errors import UserError, check, reason_of
from common.metrics.curve import Curve, as_number
from common.metrics.kinds import load
from common.metrics.predictions import PREDICTIONS, Predictions
from common.report.runs import Run, read_run
from common.storage.addresses import address, copy_of
from common.track.tracker import SUMMARY


def record(
    folder: str | os.PathLike[str],
    metric: str,
    mode: str,
    points: Sequence[Mapping[str, float]],
    *,
    seed: int | None,
    config: Mapping[str, Any],
    test: Mapping[str, float] | None = None,
    predictions: Predictions | None = None,
) -> Run:
    """Writes `summary.json` and, with `predictions`, `predictions.npz`. Returns the run.

    Args:
      folder: a local folder without files of these names. Its name is the name of the run.
      metric, mode: name of the validation metric; "max" if larger values are better, "min" if smaller values are.
      points: the validations, ordered by step. Each has "step" and "value", and may have "seconds" and "flops": the
        training time and the training FLOPs up to this step.
      seed: None for a run without randomness.
      config: settings of the run. Runs with equal settings and different seeds are a group; settings named as in
        `common.report.groups.IGNORED` may differ in a group.
      test: metrics on the test split. Must have `metric`, unless the predictions have it.
      predictions: predictions for the test examples, whose metrics are added to `test`, or replace values in it.

    Raises a UserError, and writes nothing, if an argument is wrong or one of the files exists.
    """
    file = copy_of(str(folder)) / SUMMARY
    check(not address(file.parent), f"folder must be on this machine, got {folder}")
    for path in (file, file.with_name(PREDICTIONS)):
        check(not path.exists(), f"{path} already exists: choose another folder, or move this file")
    check_int("seed", 0 if seed is None else seed, 0)
    needed, known = {"step", "value"}, {"step", "value", "seconds", "flops"}
    check(
        all(isinstance(p, Mapping) and set(p) == set(points[0]) for p in points)
        and all(needed <= set(p) <= known for p in points),
        'each point must have "step" and "value", and may have "seconds" and "flops" if all points have them',
    )
    curve = Curve.from_json({"name": metric, "mode": mode, "points": points})
    check(bool(curve.points), f"points has no point with a finite {metric}: give at least one")
    measured = {} if predictions is None else _measured(predictions)
    try:
        summary = {
            "test": {**(test or {}), **measured},
            "params": {"trainable": None, "total": None},
            "seed": seed,
            "config": {"paper": "", **config},
            "curve": curve.to_json(),
        }
        # `item` converts scalars of NumPy and JAX.
        text = json.dumps(summary, indent=2, allow_nan=False, default=lambda x: x.item())
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(
            "config and test must be dictionaries of finite numbers, texts, true, false, None, or lists of these"
            f" ({reason_of(error)}): convert other values to texts"
        ) from error
    as_number(f"the test metric {metric}", summary["test"].get(metric))
    if predictions is not None:
        predictions.save(file.with_name(PREDICTIONS))
    write_atomic(file, lambda opened: opened.write(f"{text}\n".encode()))
    return read_run(file)


def _measured(predictions: Predictions) -> dict[str, float]:
    """Returns the metrics of predictions. Raises a UserError unless they can be saved and read."""
    check(isinstance(predictions, Predictions), f"no predictions: {predictions!r:.80}")
    arrays = [x for x in vars(predictions).values() if isinstance(x, np.ndarray)]
    check(
        all(np.isfinite(x).all() for x in arrays if x.dtype.kind == "f"),
        "predictions has NaN or an infinite value: clip the log-probabilities, or correct the values",
    )
    with TemporaryDirectory() as scratch:
        path = Path(scratch) / PREDICTIONS
        predictions.save(path)
        try:
            return load(path).metrics()
        except UserError as error:
            raise UserError(
                f"predictions is wrong: {reason_of(error.__cause__ or error)}"
            ) from error
