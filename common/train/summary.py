"""What a run leaves behind in `summary.json`."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import jax
import numpy as np
from ml_collections import ConfigDict

from common import variables
from common.config import to_json
from common.metrics.aucc import aucc, time_to
from common.metrics.curve import Curve
from common.runtime.processes import all_reduce_max, is_main
from common.track.tracker import SUMMARY
from common.train.clock import Clock
from common.train.task import Task
from common.train.workdir import differences, has_checkpoints
from common.variables import AbstractModel


class Ended(Protocol):
    """What is asked of a run."""

    config: ConfigDict
    task: Task
    workdir: Path
    abstract_model: AbstractModel
    number: int
    finished: str
    curve: Curve
    clock: Clock
    tokens: float
    flops: float
    first_step: float
    commits: list[str]


def summarize(
    run: Ended,
    test: dict[str, float],
    last: dict[str, float] | None = None,
    mean: dict[str, float] | None = None,
) -> dict:
    """Everything that was measured of a run that has ended.

    Args:
      test: of the best values; last: of the last ones, where the task asks for them; mean: of the mean of the best
        checkpoints, where the run keeps several.
    """
    seconds, best = run.clock.seconds(), run.curve.best
    return {
        "objective": run.task.objective,
        "steps": run.number,
        "epochs": run.number / run.task.batches_per_epoch if run.task.batches_per_epoch else None,
        "stopped_by": run.finished,
        "best_valid": best.value,
        "best_step": best.step,
        "final_valid": run.curve.points[-1].value,
        "test": test,
        **({} if last is None else {"test_last": last}),
        **({} if mean is None else {"test_mean_of_best": mean}),
        "aucc": {axis: aucc(run.curve, axis) for axis in ("seconds", "hours", "step", "flops")},
        "seconds_to": {
            str(percent): time_to(run.curve, percent / 100) for percent in (95, 99, 100)
        },
        **{f"{name}_seconds": value for name, value in seconds.items()},
        "startup_seconds": run.first_step,
        "tokens_per_second": run.tokens / seconds["train"] if seconds["train"] else 0.0,
        "tokens": run.tokens,
        "flops": run.flops,
        "params": variables.count(run.abstract_model),
        "seed": None if run.task.seedless else run.config.seed,
        # More than one where a run was gone on with by other code.
        "commit": " ".join(run.commits),
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "processes": jax.process_count(),
        "config": to_json(run.config),
        "curve": run.curve.to_json(),
    }


def ended(config: ConfigDict, workdir: Path) -> dict | None:
    """The summary of a run that has made all the steps that are asked for, where nothing among its sources has changed
    since: no data have to be read for it, and none of these places need be there any more.

    None, on all processes, where there is none or that is not certain; processes other than the first get {}.
    """
    found, known = {}, False
    if is_main():
        # Missing, or damaged.
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            path = workdir / SUMMARY
            found = json.loads(path.read_text())
            known = (
                found["steps"] == config.train.steps
                and not differences(found["config"], config)
                and (bool(found["test"]) or not config.eval.test)
                and has_checkpoints(workdir)
                and changed(config) < path.stat().st_mtime
            )
    return found if all_reduce_max(np.asarray([known]))[0] else None


def changed(config: ConfigDict) -> float:
    """When the files of the data or of a pretrained model were last written or put there, in seconds since 1970.

    0 where there are none, or no longer; data that are no files are known by the configuration alone.
    """
    kind, _, place = config.data.source.partition(":")
    places = [place] if kind == "files" else []
    places += [config.pretrained] if config.get("pretrained") else []
    folders = [Path(os.path.expanduser(place)) for place in places]
    files = [f for folder in folders for f in (folder, *folder.rglob("*")) if f.exists()]
    # Of a link both: it may be turned to other files that are older.
    known = [stat for f in files for stat in (f.stat(), f.lstat())]
    return max((max(stat.st_mtime, stat.st_ctime) for stat in known), default=0.0)


def found_before(run: Ended) -> dict | None:
    """The summary that this run left when it ended: nothing is measured again elsewhere or by other code.

    None, on all processes, where there is none of as many steps and the same settings of decoding; processes
    other than the first get {}.
    """
    found = {}
    if is_main():
        with suppress(OSError, ValueError):  # missing, or damaged: it is made again
            found = json.loads((run.workdir / SUMMARY).read_text())
    asked = json.loads(json.dumps(to_json(run.config)))
    known = found.get("steps") == run.number
    known &= found.get("config", {}).get("decode") == asked.get("decode")
    known &= bool(found.get("test")) or not run.config.eval.test
    if known:
        (run.workdir / SUMMARY).touch()  # compared with the run's data and weights, as they are now
    return found if all_reduce_max(np.asarray([known]))[0] else None
