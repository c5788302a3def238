"""Tests the best checkpoint of an ended run, and writes `summary.json`."""

import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import jax
from ml_collections import ConfigDict

from common import variables
from common.cached import cached_json
from common.config import to_json
from common.metrics.aucc import aucc, time_to
from common.metrics.predictions import PREDICTIONS
from common.report.curve_plot import plot_curve
from common.runtime.processes import is_main
from common.runtime.signals import Signals
from common.storage.folders import copy_of
from common.track.tracker import SUMMARY
from common.train.restore import best_params, mean_of_best
from common.train.run import Run
from common.train.workdir import differences, has_checkpoints


def finish(run: Run, signals: Signals) -> dict:
    """Tests the best checkpoint, and writes summary, predictions and a plot of the curve. Returns the summary."""
    run.state.conditions.stopped |= signals.continued
    timing = run.state.conditions.describe()
    run.checkpoints.wait()
    run.checkpoints.share()
    signals.release()  # All checkpoints are on disk, so a signal may end the process.
    predictions, tests = None, {"test": {}}
    if run.config.eval.test:
        load = run.checkpoints, run.train_step.abstract_model, run.mesh
        last = run.model_state
        best = replace(last, trainable=best_params(*load, run.state.curve.best.step))
        with run.clock.section("eval"):
            predictions = run.task.predict(best, "test")
            tests["test"] = (
                predictions.metrics() if predictions else run.task.evaluate(best, "test")
            )
            if run.task.tests_last:
                tests["test_last"] = run.task.evaluate(last, "test")
            if run.config.checkpoint.keep_best > 1:
                arrays, _ = mean_of_best(*load, len(run.checkpoints.top()))
                mean = replace(last, trainable=arrays["trainable"])
                tests["test_mean_of_best"] = run.task.evaluate(mean, "test")
    summary = summarize(run, tests) | {"timing": timing}
    if is_main():
        if predictions:
            predictions.save(run.workdir / PREDICTIONS)
            run.tracker.file(run.workdir / PREDICTIONS)
        run.tracker.summary(summary)
        if run.step:
            path = run.workdir / "curve.png"
            plot_curve({run.workdir.resolve().name: run.state.curve}, path)
            run.tracker.image("curve", path)
    return summary


def summarize(run: Run, tests: dict[str, dict[str, float]]) -> dict:
    """Returns the summary of an ended run.

    Args:
      tests: name of a test, such as "test" or "test_last" -> metrics.
    """
    state, model = run.state, run.train_step.abstract_model
    seconds, curve, best = run.clock.seconds(), state.curve, state.curve.best
    return {
        "objective": run.task.objective,
        "steps": run.step,
        "epochs": run.step / run.task.batches_per_epoch if run.task.batches_per_epoch else None,
        "stopped_by": state.stop_reason,
        "best_valid": best.value,
        "best_step": best.step,
        "final_valid": curve.points[-1].value,
        **tests,
        "aucc": {axis: aucc(curve, axis) for axis in ("seconds", "hours", "step", "flops")},
        "seconds_to": {str(percent): time_to(curve, percent / 100) for percent in (95, 99, 100)},
        **{f"{name}_seconds": value for name, value in seconds.items()},
        "startup_seconds": run.startup_seconds,
        "tokens_per_second": state.tokens / seconds["train"] if seconds["train"] else 0.0,
        "tokens": state.tokens,
        "flops": state.flops,
        "params": variables.count(model),
        "seed": None if run.task.seedless else run.config.seed,
        # A run has several commits if it was resumed with changed code.
        "commit": " ".join(state.commits),
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "processes": jax.process_count(),
        "config": to_json(run.config),
        "curve": curve.to_json(),
    }


def ended(config: ConfigDict, workdir: Path) -> dict | None:
    """Returns the summary of the run in `workdir` if it is finished, without reading data.

    Returns:
      The summary on process 0, {} on the other processes. None on all processes if the run is not finished, has another
      configuration, or is older than the files of its data or pretrained weights.
    """
    path = workdir / SUMMARY
    return cached_json(
        path,
        lambda summary: (
            summary["steps"] == config.train.steps
            and not differences(summary["config"], config)
            and (bool(summary["test"]) or not config.eval.test)
            and has_checkpoints(workdir)
            and changed(config) < path.stat().st_mtime
        ),
    )


def changed(config: ConfigDict) -> float:
    """Returns the time of the last change of data files and pretrained run, in seconds since 1970; 0 without files."""
    kind, _, place = config.data.source.partition(":")
    places = [place] if kind == "files" else []
    if kind == "import" and (module := find_spec(place.partition(":")[0])) and module.origin:
        places.append(module.origin)
    places += [config.pretrained] if config.get("pretrained") else []
    folders = [copy_of(os.path.expanduser(place)) for place in places]
    files = [f for folder in folders for f in (folder, *folder.rglob("*")) if f.exists()]
    # Also read the time of a symbolic link, which may have been changed to point to other, older files.
    known = [stat for f in files for stat in (f.stat(), f.lstat())]
    return max((max(stat.st_mtime, stat.st_ctime) for stat in known), default=0.0)


def summary_of_ended(run: Run) -> dict | None:
    """Returns the summary that an ended run has written, so that the run is not tested again.

    Returns:
      The summary on process 0, {} on the other processes. None on all processes if the summary is missing, has no test
      results, or has another number of steps or other decoding options.
    """
    path = run.workdir / SUMMARY
    stored = cached_json(
        path,
        lambda summary: (
            summary["steps"] == run.step
            and summary["config"].get("decode") == to_json(run.config).get("decode")
            and (bool(summary["test"]) or not run.config.eval.test)
        ),
    )
    if stored is not None and is_main():
        path.touch()  # Makes the summary newer than the data files, which `ended` requires.
    return stored
