"""Hooks: actions between training steps, such as stopping, evaluation, checkpoints and logging.

The loop calls all hooks in order. If a decision depends on the clock or a signal of one process, the processes vote
(`Hook.vote`), so that all processes make the same decision.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import replace

from common.errors import check
from common.metrics.aucc import aucc
from common.metrics.curve import Point
from common.runtime.processes import is_main
from common.runtime.signals import Interrupted, Signals
from common.train.checkpoint import SNAPSHOTS
from common.train.run import Run


class Hook:
    """Base class of hooks. The default methods do nothing."""

    def start(self, run: Run) -> None:
        """Called before the first step, at every start or resume of the run."""

    def before_step(self, run: Run) -> None:
        """Called before the next step is dispatched."""

    def after_step(self, run: Run, step: int, metrics: dict[str, float], flops: float) -> None:
        """Called after a step has finished. The next step may be running already.

        Args:
          step: number of the step, from 1.
          metrics: "loss", "weight" (see `Task.loss`), "gradient_norm" and "learning_rate".
          flops: FLOPs of the step over all devices.
        """

    def vote(self, run: Run) -> int:
        """Returns the vote of this process. `due` receives the maximum over all processes.

        After a step without a vote (`common.runtime.processes.Votes`), `due` receives 0.
        """
        return 0

    def due(self, run: Run, vote: int) -> bool:
        """Returns whether to call `act` now. The result must be equal on all processes."""
        return False

    def act(self, run: Run) -> None:
        """Called if `due` returns True, with no step in flight."""


class Stop(Hook):
    """Stops the loop at the last step, at the time limit, or after a signal."""

    def __init__(self, signals: Signals):
        self._signals = signals

    def vote(self, run: Run) -> int:
        # The vote is the signal number, plus _LIMIT if the time limit is reached. The time limit ends the run. A signal
        # only interrupts the run.
        limit = run.config.train.max_seconds
        received = self._signals.received or 0
        return received + _LIMIT * (bool(limit) and run.clock["train"] >= limit)

    def due(self, run: Run, vote: int) -> bool:
        late, signal = divmod(vote, _LIMIT)
        # Use the signal of the vote, which is equal on all processes, not a signal that has arrived since the vote.
        if signal:
            self._signals.received = signal
        elif run.step >= run.config.train.steps:
            run.state.stop_reason = "steps"
        elif late:
            run.state.stop_reason = "seconds"
        return bool(run.state.stop_reason or signal)

    def act(self, run: Run) -> None:
        run.stopping = True


_LIMIT = 1000
"""Added to a vote of `Stop` if the time limit is reached; larger than every signal number."""


class Snapshot(Hook):
    """Saves the trained values every `checkpoint.snapshots` steps. A snapshot is never deleted."""

    def due(self, run: Run, vote: int) -> bool:
        return _every(run.config.checkpoint.snapshots, run.step)

    def act(self, run: Run) -> None:
        with run.clock.section("checkpoint"):
            run.checkpoints.save_as(SNAPSHOTS, run.step, run.trained(), run.metadata())


class Evaluate(Hook):
    """Evaluates on the validation split, saves a checkpoint at a new best value, and stops early (`eval.patience`).

    If `checkpoint.keep_best` is above 1, also keeps the checkpoints with the `checkpoint.keep_best` best values.

    After a signal, the process may have only seconds to save a checkpoint, so the hook skips or interrupts the
    evaluation. The resumed run does this evaluation before its first step or, if the time of the evaluation depends on
    the clock (`eval.seconds`, `train.max_seconds`), after its first step.
    """

    def __init__(self, signals: Signals):
        self._signals = signals

    def start(self, run: Run) -> None:
        config, step = run.config, run.step
        last = step >= config.train.steps or _every(config.eval.steps, step)
        due = last if step else config.eval.start
        if due and run.state.last_evaluation[0] != step:
            self.act(run)

    def vote(self, run: Run) -> int:
        seconds, (_, last) = run.config.eval.seconds, run.state.last_evaluation
        return bool(seconds) and run.clock["train"] - last >= seconds

    def due(self, run: Run, vote: int) -> bool:
        if run.stopping and not run.state.stop_reason:
            return False
        ended = run.state.stop_reason in ("steps", "seconds")
        return bool(vote) or ended or _every(run.config.eval.steps, run.step)

    def act(self, run: Run) -> None:
        try:
            with run.clock.section("eval"):
                values = replace(run.model_state, interruption=self._signals.interruption())
                metrics = run.task.evaluate(values, "valid")
        except Interrupted:
            run.state.stop_reason, run.stopping = "", True
            return
        del values  # Free this copy of the stacked arrays before `Run.trained` makes another copy.
        objective = run.task.objective
        check(
            isinstance(metrics, Mapping) and objective in metrics,
            f"Task.evaluate returned {metrics!r:.80} without the objective {objective!r}; return a metric of this name,"
            " or set Task.objective to another name",
        )
        # Metrics are stored as JSON, which cannot store NumPy or JAX arrays.
        plain = {name: float | int | str for name in metrics} | {objective: float | int}
        wrong = [name for name, x in metrics.items() if not isinstance(x, plain[name])]
        check(
            not wrong,
            f"Task.evaluate returned {metrics!r:.80}, but {' and '.join(wrong)} must be a Python number: convert NumPy"
            " and JAX values with float()",
        )
        value, curve, state = metrics[objective], run.state.curve, run.state
        best = math.isfinite(value) and (not curve.points or curve.better(value, curve.best.value))
        state.last_evaluation = run.step, run.clock["train"]
        curve.add(Point(run.step, run.clock["train"], state.flops, value))
        state.evals_since_best = 0 if best else state.evals_since_best + 1
        if run.config.eval.patience and state.evals_since_best >= run.config.eval.patience:
            state.stop_reason = "patience"
            run.stopping = True
        if is_main():
            _show_evaluation(run, metrics, best)
        with run.clock.section("checkpoint"):
            if best:
                run.checkpoints.save_as("best", run.step, run.trained(), run.metadata())
            if run.config.checkpoint.keep_best > 1 and math.isfinite(value):
                score = value if run.task.mode == "max" else -value
                run.checkpoints.save_top(run.step, run.trained(), run.metadata(), score)


def _show_evaluation(run: Run, metrics: dict[str, float | str], best: bool) -> None:
    seconds, curve = run.clock["train"], run.state.curve
    logged = {f"valid/{name}": value for name, value in metrics.items()}
    area = aucc(curve) if curve.end("seconds") else 0.0
    run.tracker.log(run.step, logged | {"aucc": area, "train_seconds": seconds})
    shown = ", ".join(
        f"{name} {value!r}" if isinstance(value, str) else f"{name} {value:.4g}"
        for name, value in metrics.items()
    )
    run.progress.write(
        f"step {run.step}: {run.task.select} {shown} ({seconds:.0f} s of training)"
        + (", the best so far" if best else "")
    )


class Save(Hook):
    """Saves checkpoints to resume from (`checkpoint.steps`, `checkpoint.seconds`), also when the loop stops."""

    def start(self, run: Run) -> None:
        self._last = time.perf_counter()

    def vote(self, run: Run) -> int:
        seconds = run.config.checkpoint.seconds
        return bool(seconds) and time.perf_counter() - self._last >= seconds

    def due(self, run: Run, vote: int) -> bool:
        return bool(vote) or run.stopping or _every(run.config.checkpoint.steps, run.step)

    def act(self, run: Run) -> None:
        run.save()
        self._last = time.perf_counter()


class Log(Hook):
    """On process 0, updates the progress bar after each step, and logs metrics every `train.log_steps` steps."""

    def after_step(self, run: Run, step: int, metrics: dict[str, float], flops: float) -> None:
        if not is_main():
            return
        limit, seconds = run.config.train.max_seconds, run.clock.seconds()
        left = limit - seconds["train"] if limit else None
        weight = int(metrics["weight"])
        run.progress.update(step, metrics["loss"], weight, flops, left, seconds["compile"])
        if _every(run.config.train.log_steps, step):
            run.tracker.log(step, {f"train/{name}": value for name, value in metrics.items()})


def _every(count: int, step: int) -> bool:
    return bool(count) and step % count == 0
