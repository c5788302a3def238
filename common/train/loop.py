"""The one training loop. It knows no task and no paper by name.

config -> mesh -> abstract model -> shardings -> initial values -> [restore] -> steps with hooks -> summary
"""

import math
import random
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common.errors import UserError
from common.runtime.processes import all_reduce_max
from common.runtime.signals import Preempted, Signals
from common.train.conditions import turns_id
from common.train.fields import validate
from common.train.hooks import Evaluate, Hook, Log, Save, Snapshot, StepMetrics, Stop, Trace
from common.train.prefetch import device_prefetch
from common.train.profile import Profile
from common.train.run import Run, open_run
from common.train.summary import finish, summary_of_ended
from common.train.task import Task

VOTE_EVERY = 10
"""Steps between two votes of several processes (signals, clocks): each is a collective call."""


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

    Whatever else the machine does slows all of them alike, so their training seconds can be compared. Results are
    those of runs without turns. With a `turn` of 0 each run is trained to its end before the next one.

    Raises:
      UserError: as `fit`; the other runs are saved.
      Preempted: a signal came; all runs are saved.
    """
    begun, profile = time.perf_counter(), profile or Profile()
    for job in jobs:
        validate(job.config)
        profile.check(job.config.train.steps)
    session = turns_id() if turn else "alone"
    with ExitStack() as stack:
        stack.enter_context(jax.set_mesh(mesh))
        signals = stack.enter_context(Signals())
        runs = [open_run(*job, mesh, session, stack) for job in jobs]
        kept = [summary_of_ended(run) if run.state.stop_reason else None for run in runs]
        live = []
        for run in runs:
            if not run.state.stop_reason:
                hooks = make_hooks(signals, replace(profile, folder=run.workdir / "profile"))
                stack.callback(_close, hooks)
                live.append((run, train(run, hooks, signals, begun, turn)))
        _take_turns(live)
        return [
            finish(run, signals) if summary is None else summary
            for run, summary in zip(runs, kept, strict=True)
        ]


def make_hooks(signals: Signals, profile: Profile, pause_at: int | None = None) -> list[Hook]:
    """The hooks of a run, in the order in which the loop calls them."""
    return [Stop(signals, pause_at), Trace(profile), Log(), Snapshot(), Evaluate(), Save()]


def _close(hooks: Sequence[Hook]) -> None:
    for hook in hooks:
        hook.close()


def _take_turns(live: list[tuple[Run, Iterator[None]]]) -> None:
    """Trains every run to its end. The order is drawn anew for every round: a fixed one would meet a periodic load
    always at the same run."""
    order = random.Random(0)
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
            if run.step:
                run.save()
                run.checkpoints.wait()
        raise failure


def train(
    run: Run, hooks: Sequence[Hook], signals: Signals, begun: float, turn: int = 0
) -> Iterator[None]:
    """Trains until a hook stops the run. Yields after every `turn` steps, with no step in flight and the clock stopped.

    Args:
      begun: when the program began to set up the run, by `time.perf_counter`.
      turn: 0 never yields.
    """
    run.stopping = False
    for hook in hooks:
        hook.start(run)
    if run.step >= run.config.train.steps:  # nothing to train: the start is all there is
        run.state.stop_reason = "steps"
        run.save()
        return
    step, state = run.train_step, run.train_state
    unread: tuple | None = None
    with run.clock.section("train"):
        for batch, data_state in device_prefetch(run.task.batches(run.state.data_state), run.mesh):
            key = step.cache_key(batch, state.step)
            if key not in step.compiled:
                unread = _read(run, hooks, unread)
                with run.clock.section("compile"):
                    step.compile(state.params, state.opt_state, run.frozen, batch, state.step)
            for hook in hooks:
                hook.before_step(run)
            state.params, state.opt_state, metrics = step(
                state.params, state.opt_state, run.frozen, batch, state.step, key
            )
            state.step += 1
            run.state.data_state = data_state
            # The step just dispatched runs while the metrics of the one before it are read.
            _read(run, hooks, unread)
            unread = state.step, metrics, step.flops(key)
            if not run.startup_seconds:
                unread = _read(run, hooks, unread)
                run.startup_seconds = time.perf_counter() - begun
            for hook, vote in zip(hooks, _votes(run, hooks), strict=True):
                if hook.due(run, vote):
                    unread = _read(run, hooks, unread)
                    hook.act(run)
            if run.stopping:
                break
            if turn and state.step % turn == 0:
                unread = _read(run, hooks, unread)
                with run.clock.paused():
                    yield
    if signals.received and not run.state.stop_reason:
        run.checkpoints.wait()
        name = signal.Signals(signals.received).name
        raise Preempted(
            signals.received,
            f"{name}: saved step {run.step} in {run.workdir}; the same command resumes there",
        )


def _votes(run: Run, hooks: Sequence[Hook]) -> list[int]:
    """The votes of all processes, by hook; 0 where several processes do not vote after this step."""
    if jax.process_count() > 1 and run.step % VOTE_EVERY:
        return [0] * len(hooks)
    return all_reduce_max(np.asarray([hook.vote(run) for hook in hooks])).tolist()


def _read(run: Run, hooks: Sequence[Hook], unread: tuple[int, Any, float] | None) -> None:
    """Waits for the metrics of a step, checks that they are finite and hands them to the hooks.

    Raises:
      UserError: the loss or the gradient is not finite.
    """
    if unread is None:
        return
    step, metrics, flops = unread
    values = {name: float(value) for name, value in metrics.items()}
    if not math.isfinite(values["loss"]) or not math.isfinite(values["gradient_norm"]):
        kept = f"the last good checkpoint in {run.workdir} is kept"
        raise UserError(
            f"the loss is {values['loss']} and the gradient norm {values['gradient_norm']} at step {step};"
            f" stopped, {kept if run.checkpoints.exist else 'before the first checkpoint'}"
            " (try a lower learning rate)"
        )
    run.state.tokens += values["weight"]
    run.state.flops += flops
    for hook in hooks:
        hook.after_step(run, StepMetrics(step, values, flops))
