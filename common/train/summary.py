"""The end of a run: the test of its best values, and `summary.json`."""

import os
from dataclasses import replace
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
from common.track.tracker import SUMMARY
from common.train.restore import best_params, mean_of_best
from common.train.run import Run
from common.train.workdir import differences, has_checkpoints


def finish(run: Run, signals: Signals) -> dict:
    """Tests the best values, writes `summary.json`, predictions and the plot of the curve; returns the summary."""
    run.state.conditions.stopped |= signals.continued
    timing = run.state.conditions.describe()
    run.checkpoints.wait()
    signals.release()  # nothing is left to save
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
    """Everything that was measured of a run that has ended.

    Args:
      tests: "test", of the best values; "test_last", of the last ones, where the task asks for them;
        "test_mean_of_best", of the mean of the best checkpoints, where the run keeps several.
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
        # Several for a run that was resumed by other code.
        "commit": " ".join(state.commits),
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "processes": jax.process_count(),
        "config": to_json(run.config),
        "curve": curve.to_json(),
    }


def ended(config: ConfigDict, workdir: Path) -> dict | None:
    """The summary of a finished run with this configuration, if its data and pretrained weights have not changed since.
    Reads no data.

    Returns:
      None, on all processes, without such a summary; on processes other than the first {} instead of the summary.
    """
    path = workdir / SUMMARY
    return cached_json(
        path,
        lambda found: (
            found["steps"] == config.train.steps
            and not differences(found["config"], config)
            and (bool(found["test"]) or not config.eval.test)
            and has_checkpoints(workdir)
            and changed(config) < path.stat().st_mtime
        ),
    )


def changed(config: ConfigDict) -> float:
    """When the files of the data or of a pretrained model last changed, in seconds since 1970; 0 without such files."""
    kind, _, place = config.data.source.partition(":")
    places = [place] if kind == "files" else []
    places += [config.pretrained] if config.get("pretrained") else []
    folders = [Path(os.path.expanduser(place)) for place in places]
    files = [f for folder in folders for f in (folder, *folder.rglob("*")) if f.exists()]
    # Of the link too: it may point to other, older files by now.
    known = [stat for f in files for stat in (f.stat(), f.lstat())]
    return max((max(stat.st_mtime, stat.st_ctime) for stat in known), default=0.0)


def summary_of_ended(run: Run) -> dict | None:
    """The summary that an ended run has written, so that nothing is measured again.

    Returns:
      None, on all processes, without a summary of as many steps and the same decoding; on processes other than the
      first {} instead of the summary.
    """
    path = run.workdir / SUMMARY
    found = cached_json(
        path,
        lambda found: (
            found["steps"] == run.step
            and found["config"].get("decode") == to_json(run.config).get("decode")
            and (bool(found["test"]) or not run.config.eval.test)
        ),
    )
    if found is not None and is_main():
        path.touch()  # newer than the data that it was compared with
    return found
