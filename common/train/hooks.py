"""What happens between training steps: stopping, evaluation, checkpoints, logs and traces, behind one interface.

The loop calls every hook in order. A decision that depends on a clock or a signal of one process is put to the vote
(`Hook.vote`), so that all processes decide alike.
"""

import math
import time
from typing import NamedTuple

from common.metrics.aucc import aucc
from common.metrics.curve import Point
from common.runtime.signals import Signals
from common.train.profile import Profile
from common.train.run import Run


class StepMetrics(NamedTuple):
    """Of a training step that is done: `values` are loss, weight, gradient_norm and learning_rate."""

    step: int
    values: dict[str, float]
    flops: float


class Hook:
    """Does nothing; a hook overrides what it needs."""

    def start(self, run: Run) -> None:
        """Called before the first step of this process."""

    def before_step(self, run: Run) -> None:
        """Called before the next step is dispatched."""

    def after_step(self, run: Run, metrics: StepMetrics) -> None:
        """Called when a step is done: while the next one runs, or before anything is due."""

    def vote(self, run: Run) -> int:
        """What this process wants; the largest vote of all processes reaches `due`."""
        del run
        return 0

    def due(self, run: Run, vote: int) -> bool:
        """Whether `act` is called now, the same on all processes."""
        del run, vote
        return False

    def act(self, run: Run) -> None:
        """Called with no step in flight."""

    def close(self) -> None:
        """Called once, whatever happened."""


class Stop(Hook):
    """Ends the loop at the last step, at the time limit, at step `pause_at`, or at a signal."""

    def __init__(self, signals: Signals, pause_at: int | None = None):
        self._signals, self._pause_at = signals, pause_at

    def vote(self, run: Run) -> int:
        # Larger than any signal: the time limit ends the run, a signal only interrupts it.
        limit = run.config.train.max_seconds
        received = self._signals.received or 0
        return received + _LIMIT * (bool(limit) and run.clock["train"] >= limit)

    def due(self, run: Run, vote: int) -> bool:
        late, signal = divmod(vote, _LIMIT)
        if signal:  # A signal that arrives after the vote is handled at the next vote.
            self._signals.received = signal
        if run.step >= run.config.train.steps:
            run.state.stop_reason = "steps"
        elif late:
            run.state.stop_reason = "seconds"
        paused = self._pause_at is not None and run.step >= self._pause_at
        return bool(run.state.stop_reason or signal or paused)

    def act(self, run: Run) -> None:
        run.stopping = True


_LIMIT = 1000


class Snapshot(Hook):
    """Keeps the trained values of every N-th step for good (`checkpoint.snapshots`)."""

    def due(self, run: Run, vote: int) -> bool:
        return _every(run.config.checkpoint.snapshots, run.step)

    def act(self, run: Run) -> None:
        with run.clock.section("checkpoint"):
            run.checkpoints.save_snapshot(run.step, run.trained(), run.metadata())


class Evaluate(Hook):
    """Measures the validation split, keeps the best values, and stops early (`eval.patience`)."""

    def start(self, run: Run) -> None:
        self._last = run.clock["train"]
        if run.step == 0 and run.config.eval.start and not run.state.curve.points:
            self.act(run)

    def vote(self, run: Run) -> int:
        seconds = run.config.eval.seconds
        return bool(seconds) and run.clock["train"] - self._last >= seconds

    def due(self, run: Run, vote: int) -> bool:
        # The end is always evaluated; a stop by a signal is not: it may have only seconds left.
        ended = run.state.stop_reason in ("steps", "seconds")
        return bool(vote) or ended or _every(run.config.eval.steps, run.step)

    def act(self, run: Run) -> None:
        with run.clock.section("eval"):
            metrics = run.task.evaluate(run.model_state, "valid")
        value, curve, state = metrics[run.task.objective], run.state.curve, run.state
        best = math.isfinite(value) and (not curve.points or curve.better(value, curve.best.value))
        curve.add(Point(run.step, run.clock["train"], state.flops, value))
        state.evals_since_best = 0 if best else state.evals_since_best + 1
        if run.config.eval.patience and state.evals_since_best >= run.config.eval.patience:
            state.stop_reason = "patience"
            run.stopping = True
        self._show(run, metrics, best)
        with run.clock.section("checkpoint"):
            if best:
                run.checkpoints.save_best(run.step, run.trained(), run.metadata())
            if run.config.checkpoint.keep_best > 1 and math.isfinite(value):
                score = value if run.task.mode == "max" else -value
                run.checkpoints.save_top(run.step, run.trained(), run.metadata(), score)
        self._last = run.clock["train"]

    def _show(self, run: Run, metrics: dict[str, float | str], best: bool) -> None:
        seconds, curve = run.clock["train"], run.state.curve
        logged = {f"valid/{name}": value for name, value in metrics.items()}
        area = aucc(curve) if curve.points else 0.0
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
    """Writes checkpoints to resume from, the last one when the loop stops."""

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
    """Sends the metrics of the steps to the progress bar and the tracker."""

    def after_step(self, run: Run, metrics: StepMetrics) -> None:
        limit = run.config.train.max_seconds
        left = limit - run.clock["train"] if limit else None
        step, values, flops = metrics
        run.progress.update(step, values["loss"], int(values["weight"]), flops, left)
        if _every(run.config.train.log_steps, step):
            run.tracker.log(step, {f"train/{name}": value for name, value in values.items()})


class Trace(Hook):
    """Traces the steps that --profile names."""

    def __init__(self, profile: Profile):
        self._profile = profile

    def before_step(self, run: Run) -> None:
        self._profile.before(run.step + 1)

    def after_step(self, run: Run, metrics: StepMetrics) -> None:
        self._profile.after(metrics.step)

    def close(self) -> None:
        self._profile.close()


def _every(count: int, step: int) -> bool:
    return bool(count) and step % count == 0
