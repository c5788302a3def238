"""Evaluates the best checkpoint of an ended run on the test split, and writes `summary.json`."""

from dataclasses import replace
from typing import Any, get_args

import jax

from common import variables
from common.config import to_json
from common.errors import UserError, check
from common.metrics.aucc import aucc, reaching
from common.metrics.curve import Axis
from common.metrics.predictions import PREDICTIONS
from common.report.curve_plot import plot_curve
from common.runtime.processes import is_main, warn
from common.runtime.signals import Signals
from common.storage.addresses import shown
from common.train.checkpoint import DamagedCheckpoint, model_arrays
from common.train.run import Run


def finish(run: Run, signals: Signals) -> dict:
    """Writes and returns the summary. Writes a plot of the curve if the run has trained a step.

    If `eval.test` is set, evaluates these parameters on the test split: the best checkpoint; the last step, if
    `Task.tests_last` is set; the mean of the "top" checkpoints, if `checkpoint.keep_best` is above 1 and the run has
    kept any. Writes the test predictions of the best checkpoint, if the task makes predictions. During the test, a
    signal ends the process.

    Raises a UserError if no evaluation had a finite value, or if a "best" (`_restore_best`) or "top" checkpoint cannot
    be restored.
    """
    timing = run.state.conditions.describe()
    remedy = "start again with a lower --config.optimizer.learning_rate and another --workdir"
    if not run.step:  # No update has used the learning rate.
        remedy = "correct the data or the initial values of the model, and start again with another --workdir"
    check(
        bool(run.state.curve.points),
        f"every evaluation of {shown(run.workdir)} gave NaN or infinity as {run.task.objective}: {remedy}",
    )
    run.checkpoints.wait()
    run.checkpoints.share()
    signals.release()  # All checkpoints are on disk, so a signal may end the process.
    predictions, tests, kept = None, {"test": {}}, {}
    if run.config.eval.test:
        last, model = run.model_state, run.train_step.abstract_model
        target = model_arrays(model, run.mesh)
        try:
            trainable = _restore_best(run, target)["trainable"]
            best = replace(last, trainable=trainable, keep=kept.__setitem__)
            with run.clock.section("eval"):
                tests["test"] = run.task.evaluate(best, "test")
                # A subclass's `evaluate` that does not call `Task.evaluate` keeps no predictions.
                predictions = kept.get("test") or run.task.predict(best, "test")
                if run.task.tests_last:
                    tests["test_last"] = run.task.evaluate(last, "test")
                if run.config.checkpoint.keep_best > 1 and (top := [*run.checkpoints.top()]):
                    arrays, _ = run.checkpoints.restore_mean("top", top, target)
                    mean = replace(last, trainable=arrays["trainable"])
                    tests["test_mean_of_best"] = run.task.evaluate(mean, "test")
        except DamagedCheckpoint as error:
            raise UserError(
                f"{error}; to end the run without a test, repeat the command with --config.eval.test=false"
            ) from error
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


def _restore_best(run: Run, target: dict[str, Any]) -> dict[str, Any]:
    """Returns the arrays of the best checkpoint; `target` as in `Checkpoints.read`.

    If the best checkpoint is missing or damaged, replaces it by the "latest" checkpoint of the same step, with a
    warning. Raises a DamagedCheckpoint if there is no such checkpoint, or if it is damaged too.
    """
    checkpoints, step = run.checkpoints, run.state.curve.best.step
    try:
        return checkpoints.restore_from("best", step, target)[0]
    except DamagedCheckpoint as error:
        damaged = error  # A thread that is handling an exception cannot save (`unless_failing`).
    if step not in checkpoints.steps():
        raise damaged
    from common.train.resume import latest_arrays

    arrays, meta = checkpoints.restore_from("latest", step, latest_arrays(run.train_step))
    del arrays["optimizer"]
    checkpoints.replace("best", step, arrays, meta)
    warn(f"{damaged.fault}: replaced by the latest checkpoint, which is of the same step")
    return arrays


def summarize(run: Run, tests: dict[str, dict[str, float]]) -> dict:
    """Returns the fields of an ended run's summary, except `timing`. `tests` is {name of a test field: metrics}."""
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
        "aucc": {a: aucc(curve, a) if curve.end(a) else 0.0 for a in get_args(Axis)},
        "seconds_to": {
            str(percent): reaching(curve, percent / 100).seconds for percent in (95, 99, 100)
        },
        **{f"{name}_seconds": value for name, value in seconds.items()},
        "startup_seconds": run.startup_seconds,
        "tokens_per_second": state.tokens / seconds["train"] if seconds["train"] else 0.0,
        "tokens": state.tokens,
        "unit": run.task.unit,
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
