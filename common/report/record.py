"""Writes the folder of a finished run of any training program, for `common.report`."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common.atomic import write_atomic
from common.config import check_int
from common.errors import UserError, check, reason_of
from common.metrics.curve import Curve, as_number
from common.metrics.kinds import load
from common.metrics.predictions import PREDICTIONS, Predictions
from common.report.runs import Run, run_of
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
    """Writes `summary.json` and, with `predictions`, `predictions.npz` to a folder. Returns the run.

    Numbers may be Python numbers, or scalars of NumPy and JAX.

    Args:
      folder: folder on this machine, without a `summary.json`. Its last part is the name of the run.
      metric: name of the validation metric.
      mode: "max" if larger values of the metric are better, "min" if smaller values are better.
      points: the validations, ordered by step. Each has "step" and "value", and may have "seconds" and "flops": the
        training time and the training FLOPs up to this step.
      seed: seed of the run; None for a run without randomness.
      config: settings of the run, such as {"model": "ours", "learning_rate": 1e-3}. Runs with equal settings and
        different seeds are a group.
      test: metrics on the test split. Must have `metric`, unless the predictions have it.
      predictions: predictions for each test example. Their metrics are added to `test`. Only metrics of predictions get
        verdicts on the test split.

    Raises:
      UserError: an argument is wrong, the folder already has a `summary.json`, or a file cannot be written. Then
        `summary.json` is not written.
    """
    text = os.fspath(folder)
    check("://" not in text, f"folder must be on this machine, got {text}: give a local path")
    folder = Path(text)
    check(
        not (folder / SUMMARY).exists(),
        f"{folder} already has a {SUMMARY}: choose another folder, or delete this one",
    )
    if seed is not None:
        check_int("seed", seed, 0)
    check(isinstance(metric, str) and metric != "", f"metric must be a name, got {metric!r:.80}")
    for name, values in (("config", config), ("test", test or {})):
        check(isinstance(values, Mapping), f"{name} must be a dictionary, got {values!r:.80}")
    check("paper" not in config, "config has the reserved name 'paper': choose another name")
    curve = Curve.from_json({"name": metric, "mode": mode, "points": points})
    check(bool(curve.points), f"points has no point with a finite {metric}: give at least one")
    own = {n: as_number(f"the test metric {n}", x) for n, x in (test or {}).items()}
    checked = None if predictions is None else _as_read(predictions)
    measured = {} if checked is None else checked.metrics()
    check(metric in own | measured, f"test has no value of the validation metric {metric}: add it")
    for name, value in (measured | own).items():
        check(math.isfinite(value), f"the test metric {name} must be finite, got {value}")
        other = measured.get(name, value)
        check(
            math.isclose(value, other, rel_tol=1e-3),
            f"the test metric {name} is {value:g} in test, but {other:g} from the predictions: correct one of them, or"
            f" leave out {name} in test",
        )
    summary = {
        "test": measured | own,
        "params": {"trainable": None, "total": None},
        "seed": seed,
        "config": {"paper": "", **config},
        "curve": curve.to_json(),
    }
    try:
        encoded = json.dumps(summary, indent=2, allow_nan=False, default=lambda x: x.item())
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(
            "the settings in config must be finite numbers, texts, true, false, None, or lists of these"
            f" ({reason_of(error)}): convert other values to texts"
        ) from error
    if checked is not None:
        checked.save(folder / PREDICTIONS)
    write_atomic(folder / SUMMARY, lambda file: file.write(f"{encoded}\n".encode()))
    return run_of(json.loads(encoded), folder.resolve().name, folder / SUMMARY, folder)


def _as_read(predictions: Predictions) -> Predictions:
    """Returns the predictions as the reader of runs reads them. Raises a UserError if it would refuse them."""
    with TemporaryDirectory() as scratch:
        path = Path(scratch) / PREDICTIONS
        try:
            predictions.save(path)
            read = load(path)
            read.metrics()
        except Exception as error:  # Any attribute may have any wrong value.
            reason = reason_of(error).replace(str(path), "the file of them")
            raise UserError(f"the predictions cannot be used: {reason}") from error
    return read
