"""The one training loop. It knows no task by name and no paper.

config -> mesh -> abstract model -> shardings -> values -> [restore] -> batch, step, (evaluate), (save) ... -> summary.
"""

import math
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common import sharding
from common.config import to_json
from common.errors import UserError
from common.metrics.aucc import aucc
from common.metrics.curve import Curve, Point
from common.metrics.predictions import PREDICTIONS
from common.report.curve_plot import plot_curve
from common.runtime.processes import all_reduce_max, barrier, is_main
from common.runtime.signals import Preempted, Signals
from common.track.progress import Progress, peak_flops
from common.track.tracker import Tracker
from common.train.checkpoint import Checkpoints, draw_reservoirs, stored, verify_frozen
from common.train.clock import Clock
from common.train.conditions import Conditions, turns_id
from common.train.dry_run import parameter_rows, show_parameters
from common.train.fields import validate
from common.train.prefetch import device_prefetch
from common.train.profile import Profile
from common.train.restore import load_best, load_top
from common.train.state import Step, initial_values, optimizer_shardings
from common.train.summary import found_before, summarize
from common.train.task import ModelState, Task
from common.train.workdir import check_shared, commit, open_workdir

# How often several processes compare notes (signals, clocks): a collective call each time.
AGREE_EVERY = 10


class Job(NamedTuple):
    """A run to be trained."""

    config: ConfigDict
    task: Task
    workdir: Path


def fit(
    config: ConfigDict, task: Task, workdir: Path, mesh: Mesh, profile: Profile | None = None
) -> dict:
    """Trains, or resumes, the run in `workdir`; returns its summary. `profile` says which steps are traced.

    Raises:
      UserError: the configuration, the workdir or the data are at fault, or the loss is no longer finite.
      Preempted: a signal came; the run is saved.
    """
    (summary,) = fit_in_turns([Job(config, task, workdir)], mesh, 0, profile)
    return summary


def fit_in_turns(
    jobs: Sequence[Job], mesh: Mesh, turn: int, profile: Profile | None = None
) -> list[dict]:
    """Trains, or resumes, several runs, `turn` steps of each at a time; returns their summaries.

    Whatever else the machine does meanwhile slows all of them alike, so their training seconds can be compared. Their
    results are those of runs without turns. With a `turn` of 0 each run is trained to its end before the next.

    Raises:
      UserError: as `fit`; the other runs are saved.
      Preempted: a signal came; all runs are saved.
    """
    begun = time.perf_counter()
    for job in jobs:
        validate(job.config)
        if profile is not None:
            profile.check(job.config.train.steps)
    session = turns_id() if turn else "alone"
    with ExitStack() as stack:
        for job in jobs:
            _open(job, stack)
        stack.enter_context(jax.set_mesh(mesh))
        signals = stack.enter_context(Signals())
        runs = []
        for job in jobs:
            run = Run(*job, mesh, signals, begun, profile or Profile())
            stack.callback(run.close)
            run.open(session)
            runs.append(run)
        ended = [run for run in runs if run.finished]
        _take_turns([run for run in runs if run not in ended], turn)
        known = {id(run): found_before(run) for run in ended}
        return [run.finish() if known.get(id(run)) is None else known[id(run)] for run in runs]


def _open(job: Job, stack: ExitStack) -> None:
    """Locks the workdir of a run until the end of `stack`, and writes there what using the run needs."""
    lock = open_workdir(job.workdir, job.config) if is_main() else None
    if lock:
        stack.callback(lock.release)
    barrier("the workdir is open")
    if lock:
        job.task.save(job.workdir)
    else:
        check_shared(job.workdir)


def _take_turns(runs: Sequence["Run"], turn: int) -> None:
    """Trains every run to its end. The order is drawn anew for every round: a fixed one would meet a load with a period
    of its own always at the same run, and one that turns back would give the outer runs turns of twice the length."""
    order = random.Random(0)
    live = [(run, run.train(run.config.train.steps, turn)) for run in runs]
    failure: Exception | None = None
    while live and not failure:
        for run, steps in tuple(live):
            try:
                next(steps)
                continue
            except StopIteration:
                pass
            except (Preempted, UserError) as error:
                failure = error
            live.remove((run, steps))
            if failure:
                break
        order.shuffle(live)
    if failure:
        for run, _ in live:
            if run.number:
                run.save()
                run.checkpoints.wait()
        raise failure


class Run:
    """One run, from its first step or its last checkpoint to its summary."""

    def __init__(
        self,
        config: ConfigDict,
        task: Task,
        workdir: Path,
        mesh: Any,
        signals: Signals,
        begun: float,
        profile: Profile,
    ):
        self.config, self.task, self.workdir = config, task, workdir
        self.mesh, self.signals = mesh, signals
        self.begun = begun
        self.profile = replace(profile, folder=workdir / "profile")
        self.step = Step.of(config, task, mesh)
        self.abstract_model = self.step.abstract_model
        self.where = sharding.shardings(self.abstract_model.trainable, mesh)
        self.checkpoints = Checkpoints(workdir, config.checkpoint.keep, config.checkpoint.keep_best)
        self.frozen, self.drawn = draw_reservoirs(self.abstract_model, config.seed, mesh)
        self.outside = task.outside(self.abstract_model)
        self.frozen |= self.outside.values
        everything = config.checkpoint.store_frozen
        self.stored = stored(self.abstract_model, everything, mesh, self.outside.values)
        self.number = 0
        self.position: dict | None = None
        self.clock = Clock()
        self.curve = Curve(task.objective, task.mode)
        self.tokens = self.flops = 0.0
        self.finished = ""
        self.worse = 0
        self.saved_at = 0.0
        self.first_step = 0.0
        self.commits = [commit()]
        self.conditions = Conditions()
        self.tracker: Tracker | None = None
        self.progress: Progress | None = None

    # What a checkpoint holds.

    def _arrays(self) -> dict:
        kept = {n: x for n, x in self.frozen.items() if n in self.stored}
        return {"trainable": self.trainable, "frozen": kept, "optimizer": self.opt_state}

    def _used(self) -> dict:
        """What a trained model needs of them."""
        return {name: part for name, part in self._arrays().items() if name != "optimizer"}

    def _meta(self) -> dict:
        return {
            "step": self.number,
            "position": self.position,
            "clock": self.clock.seconds(),
            "curve": self.curve.to_json(),
            "tokens": self.tokens,
            "flops": self.flops,
            "finished": self.finished,
            "worse": self.worse,
            "commits": self.commits,
            "sessions": self.conditions.sessions,
            "reservoirs": None if self.config.checkpoint.store_frozen else self.drawn,
            "outside": self.outside.fingerprint,
            "seed": self.config.seed,
        }

    def _begin(self) -> bool:
        """Values for step 0, or those of the last checkpoint. Returns whether there was one."""
        self.trainable = initial_values(self.task, self.abstract_model, self.config.seed, self.mesh)
        init = self.step.optimizer.init
        where = optimizer_shardings(self.step.optimizer, self.trainable, self.where, self.mesh)
        self.opt_state = jax.jit(init, out_shardings=where)(self.trainable)
        if not self.checkpoints.exist:
            with self.clock.section("start"):
                values = jax.block_until_ready(self.task.start(self.trainable))
            self.frozen |= {n: x for n, x in values.items() if n in self.abstract_model.frozen}
            self.trainable = {n: values[n] for n in self.trainable}
            return False
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self._arrays()
        )
        # What was given at the start is nowhere but in the checkpoint.
        target["frozen"] = self.stored
        state, meta = self.checkpoints.restore(target, self._warn)
        verify_frozen(meta, self.drawn, self.outside.fingerprint)
        self.trainable, self.opt_state = state["trainable"], state["optimizer"]
        self.frozen |= state["frozen"]
        self.number, self.position = meta["step"], meta["position"]
        self.clock = Clock(meta["clock"])
        self.curve = Curve.from_json(meta["curve"])
        self.tokens, self.flops, self.worse = meta["tokens"], meta["flops"], meta["worse"]
        self.conditions.sessions = meta.get("sessions", ["alone"])
        self.commits = list(dict.fromkeys([*meta.get("commits", []), *self.commits]))
        # A run that was given more steps, seconds or patience goes on.
        train, patience = self.config.train, self.config.eval.patience
        if self.number >= train.steps:
            self.finished = meta["finished"] or "steps"
        elif meta["finished"] == "patience" and patience and self.worse >= patience:
            self.finished = "patience"
        elif train.max_seconds and self.clock["train"] >= train.max_seconds:
            self.finished = "seconds"
        return True

    # The loop.

    def open(self, session: str = "alone") -> None:
        """Values, files and displays; says what is trained and where it resumes. `session`: see `Conditions`."""
        resumed = self._begin()
        if not self.finished:
            self.conditions.begin(self.conditions.sessions, session)
        if is_main():
            show_parameters(self.abstract_model)
            if resumed:
                print(f"going on from step {self.number} of {self.workdir}")
        wandb = self.config.wandb
        self.tracker = Tracker(
            self.workdir,
            to_json(self.config),
            wandb_mode=wandb.mode,
            project=wandb.project,
            name=wandb.name or None,
            group=wandb.group or None,
            resume_step=self.number if resumed else None,
            enabled=is_main(),
        )
        self.tracker.table("parameters", *parameter_rows(self.abstract_model))
        kind, dtype = jax.devices()[0].device_kind, getattr(self.config.model, "dtype", "float32")
        peak = peak_flops(kind, jnp.bfloat16 if dtype == "auto" else dtype)
        self.progress = Progress(
            self.config.train.steps,
            self.number,
            unit=self.task.unit,
            enabled=is_main(),
            peak_flops=peak * jax.device_count() if peak else None,
        )

    def close(self) -> None:
        """Ends displays and files."""
        self.profile.close()
        if self.progress:
            self.progress.close()
        if self.tracker:
            self.tracker.finish()
        self.checkpoints.close()

    def train(self, until: int, turn: int = 0) -> Iterator[None]:
        """Trains up to step `until`, or to an earlier end: by patience, by time, or by a signal.

        Yields after every `turn` steps, with no step in flight and the clock stopped; never where that is 0.
        """
        pending: tuple[int, dict, float] | None = None
        evaluated = self.clock["train"]
        self.saved_at = time.perf_counter()
        if self.number == 0 and self.config.eval.start and not self.curve.points:
            self._evaluate()
        if self.number >= self.config.train.steps:
            self.finished = "steps"
            self.save()
            return
        with self.clock.section("train"):
            for batch, position in device_prefetch(self.task.batches(self.position), self.mesh):
                kind = self.step.kind(batch, self.number)
                if kind not in self.step.compiled:
                    pending = self._read(pending)
                    with self.clock.section("compile"):
                        given = self.trainable, self.opt_state, self.frozen, batch
                        self.step.compile(*given, self.number)
                self.profile.before(self.number + 1)
                self.trainable, self.opt_state, metrics = self.step(
                    self.trainable, self.opt_state, self.frozen, batch, self.number, kind
                )
                self.number += 1
                self.position = position
                # The step just dispatched runs while the one before it is read: no waiting in the hot path.
                self._read(pending)
                pending = self.number, metrics, float(self.step.compiled[kind][1])
                if not self.first_step:
                    pending = self._read(pending)
                    self.first_step = time.perf_counter() - self.begun

                stop, due_eval, due_save = self._due(evaluated, until)
                every = self.config.checkpoint.snapshots
                due_snapshot = bool(every) and self.number % every == 0
                if due_eval or due_save or due_snapshot or stop:
                    pending = self._read(pending)
                if due_snapshot:
                    with self.clock.section("checkpoint"):
                        self.checkpoints.save_snapshot(self.number, self._used(), self._meta())
                if due_eval:
                    self._evaluate()
                    evaluated = self.clock["train"]
                    stop = stop or self.finished == "patience"
                if due_save or stop:
                    self.save()
                if stop:
                    break
                if turn and self.number % turn == 0:
                    pending = self._read(pending)
                    with self.clock.paused():
                        yield
        if self.signals.received and not self.finished:
            self._leave()

    def _due(self, evaluated: float, until: int) -> tuple[bool, bool, bool]:
        """(stop, evaluate, save), the same on all processes."""
        train, evaluation, checkpoint = self.config.train, self.config.eval, self.config.checkpoint
        last = self.number >= train.steps
        pause = self.number >= until
        stop = late = evaluate = save = False
        if jax.process_count() == 1 or self.number % AGREE_EVERY == 0:
            seconds = self.clock["train"]
            late = bool(train.max_seconds) and seconds >= train.max_seconds
            evaluate = bool(evaluation.seconds) and seconds - evaluated >= evaluation.seconds
            save = (
                bool(checkpoint.seconds)
                and time.perf_counter() - self.saved_at >= checkpoint.seconds
            )
            received = self.signals.received or 0
            votes = all_reduce_max(np.asarray([received, late, evaluate, save]))
            stop, late, evaluate, save = map(bool, votes)
            if stop:  # One that came here meanwhile is for the next time.
                self.signals.received = int(votes[0])
        if last or late:
            self.finished = "steps" if last else "seconds"
        evaluate |= bool(evaluation.steps) and self.number % evaluation.steps == 0
        save |= bool(checkpoint.steps) and self.number % checkpoint.steps == 0
        # The end is always evaluated; a stop by signal is not: it may have only seconds left.
        return stop or last or late or pause, evaluate or last or late, save

    def _read(self, pending: tuple[int, dict, float] | None) -> None:
        """Takes in the metrics of a step, which waits until it is done."""
        if pending is None:
            return None
        number, metrics, flops = pending
        values = {name: float(value) for name, value in metrics.items()}
        if not math.isfinite(values["loss"]) or not math.isfinite(values["gradient_norm"]):
            kept = f"the last good checkpoint in {self.workdir} is kept"
            raise UserError(
                f"the loss is {values['loss']} and the gradient norm {values['gradient_norm']} at step {number};"
                f" stopped, {kept if self.checkpoints.exist else 'before the first checkpoint'}"
                " (try a lower learning rate)"
            )
        self.profile.after(number)
        self.tokens += values["weight"]
        self.flops += flops
        limit = self.config.train.max_seconds
        left = limit - self.clock["train"] if limit else None
        self.progress.update(number, values["loss"], int(values["weight"]), flops, left)
        if number % self.config.train.log_steps == 0:
            self.tracker.log(number, {f"train/{name}": value for name, value in values.items()})
        return None

    def _evaluate(self) -> None:
        with self.clock.section("eval"):
            metrics = self.task.evaluate(self._values(), "valid")
        value = metrics[self.task.objective]
        better = math.isfinite(value) and (
            not self.curve.points or self.curve.better(value, self.curve.best.value)
        )
        self.curve.add(Point(self.number, self.clock["train"], self.flops, value))
        self.worse = 0 if better else self.worse + 1
        if self.config.eval.patience and self.worse >= self.config.eval.patience:
            self.finished = "patience"
        logged = {f"valid/{name}": number for name, number in metrics.items()}
        logged |= {
            "aucc": aucc(self.curve) if self.curve.points else 0.0,
            "train_seconds": self.clock["train"],
        }
        self.tracker.log(self.number, logged)
        shown = ", ".join(
            f"{name} {value!r}" if isinstance(value, str) else f"{name} {value:.4g}"
            for name, value in metrics.items()
        )
        self.progress.write(
            f"step {self.number}: {self.task.select} {shown} ({self.clock['train']:.0f} s of training)"
            + (", the best so far" if better else "")
        )
        if better:
            with self.clock.section("checkpoint"):
                self.checkpoints.save_best(self.number, self._used(), self._meta())
        if self.config.checkpoint.keep_best > 1 and math.isfinite(value):
            score = value if self.task.mode == "max" else -value
            with self.clock.section("checkpoint"):
                self.checkpoints.save_top(self.number, self._used(), self._meta(), score)

    def _values(self) -> ModelState:
        return ModelState(self.abstract_model, self.trainable, self.frozen, self.mesh)

    def save(self) -> None:
        """Writes a checkpoint."""
        with self.clock.section("checkpoint"):
            self.checkpoints.save(self.number, self._arrays(), self._meta())
        self.saved_at = time.perf_counter()

    def _leave(self) -> None:
        self.checkpoints.wait()
        name = signal.Signals(self.signals.received).name
        raise Preempted(
            self.signals.received,
            f"{name}: saved step {self.number} in {self.workdir}; the same command goes on from there",
        )

    # The end.

    def finish(self) -> dict:
        """Tests the best values and writes the summary."""
        self.conditions.stopped |= self.signals.continued
        timing = self.conditions.describe()
        self.checkpoints.wait()
        self.signals.release()
        best = self.curve.best.step
        values = load_best(
            self.checkpoints, self.abstract_model, self.config, self.mesh, best, self.outside
        )
        predictions, test, last, mean = None, {}, None, None
        if self.config.eval.test:
            with self.clock.section("eval"):
                predictions = self.task.predict(values, "test")
                test = predictions.metrics() if predictions else self.task.evaluate(values, "test")
                last = self.task.evaluate(self._values(), "test") if self.task.tests_last else None
                mean = self._test_mean()
        summary = summarize(self, test, last, mean) | {"timing": timing}
        if is_main():
            if predictions:
                predictions.save(self.workdir / PREDICTIONS)
                self.tracker.file(self.workdir / PREDICTIONS)
            self.tracker.summary(summary)
            if self.number:
                path = self.workdir / "curve.png"
                plot_curve({self.workdir.resolve().name: self.curve}, path)
                self.tracker.image("curve", path)
        return summary

    def _test_mean(self) -> dict | None:
        """The test of the mean of the best checkpoints, where the run keeps several."""
        if self.config.checkpoint.keep_best == 1:
            return None
        given = self.abstract_model, self.config, self.mesh
        count = len(self.checkpoints.top())
        return self.task.evaluate(load_top(self.checkpoints, *given, count, self.outside), "test")

    def _warn(self, line: str) -> None:
        if is_main():
            print(f"warning: {line}", file=sys.stderr)
