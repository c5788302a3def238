"""The training loop of all tasks and papers.

config -> mesh -> abstract model -> shardings -> initial or restored values -> steps with hooks -> summary
"""

import math
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common.errors import Preempted, UserError
from common.runtime.processes import Votes, all_reduce_max, barrier
from common.runtime.signals import Signals
from common.storage.addresses import shown
from common.train.fields import validate
from common.train.hooks import Evaluate, Hook, Log, Save, Snapshot, Stop
from common.train.prefetch import device_prefetch, put
from common.train.run import Run, open_run
from common.train.summary import finish
from common.train.task import Task

if TYPE_CHECKING:
    from common.train.profile import Profile


def fit(
    config: ConfigDict, task: Task, workdir: Path, mesh: Mesh, profile: "Profile | None" = None
) -> dict:
    """Trains, or resumes, the run in `workdir`.

    Args:
      profile: the steps to trace; None traces nothing.

    Returns:
      The summary. If the run had ended and its summary is reused, {} on all processes except process 0.

    Raises:
      UserError: the configuration, workdir or data are invalid, or the loss or gradient is not finite.
      Preempted: a signal stopped the run; a checkpoint is saved.
    """
    begun = time.perf_counter()
    validate(config)
    if profile:
        profile.check(config.train.steps)
    with ExitStack() as stack:
        stack.enter_context(jax.set_mesh(mesh))
        signals = stack.enter_context(Signals())
        run = open_run(config, task, workdir, mesh, stack)
        if run.state.stop_reason:
            from common.train.finished import kept_summary

            if (summary := kept_summary(run)) is not None:
                return summary
        else:
            run.state.conditions.begin("alone", signals)
            if profile:
                stack.callback(profile.close)
            for _ in train(run, make_hooks(signals, profile), signals, begun):
                pass
        return finish(run, signals)


def make_hooks(signals: Signals, profile: "Profile | None" = None) -> list[Hook]:
    """Returns the hooks of a run, in the order of their calls."""
    traces = [profile] if profile else []
    return [Stop(signals), *traces, Log(), Snapshot(), Evaluate(signals), Save()]


def train(
    run: Run, hooks: Sequence[Hook], signals: Signals, begun: float, turn: int = 0
) -> Iterator[None]:
    """Trains until a hook stops the run.

    Yields at each step that is a multiple of `turn`, with no step in flight and the clock stopped.

    Args:
      begun: value of `time.perf_counter()` before the setup of the run.
      turn: number of steps between yields; 0 to never yield.

    Raises:
      UserError: the loss or the gradient is not finite, or `Task.batches` ends.
      Preempted: a signal stopped the run; a checkpoint is saved.
    """
    run.stopping = False
    for hook in hooks:
        hook.start(run)
    if run.step >= run.config.train.steps and not run.stopping:
        run.state.stop_reason, run.stopping = "steps", True
    if run.stopping:
        run.save()
    else:
        with run.clock.section("train"):
            yield from _steps(run, hooks, signals, begun, turn)
    if signals.received and not run.state.stop_reason:
        run.checkpoints.wait()
        name = signal.Signals(signals.received).name
        raise Preempted(
            signals.received,
            f"{name}: saved step {run.step} in {shown(run.workdir)}; the same command resumes the run",
        )


def _steps(
    run: Run, hooks: Sequence[Hook], signals: Signals, begun: float, turn: int
) -> Iterator[None]:
    """Trains step by step; see `train`."""
    step, state, votes = run.train_step, run.train_state, Votes()
    unread: tuple | None = None
    met: set[tuple] = set()
    for batch, data_state in device_prefetch(run.task.batches(run.state.data_state), run.mesh):
        key = step.cache_key(batch, state.step)
        # Threads may have compiled this step on some processes only, so `step.compiled` must not decide whether this
        # process waits at the barrier.
        if key not in met:
            met.add(key)
            unread = _read(run, hooks, unread)
            with run.clock.section("compile"):
                step.compile(batch, state.step)
                # Without this barrier, faster processes would wait within the section "train".
                barrier("compiled")
            votes.hasten()  # A compilation may take minutes, so the processes vote right after this step.
        for hook in hooks:
            hook.before_step(run)
        state.params, state.opt_state, metrics = step(
            state.params, state.opt_state, run.frozen, batch, state.step, key
        )
        state.step += 1
        run.state.data_state = data_state
        # Read the metrics of the previous step while the dispatched step runs.
        _read(run, hooks, unread)
        unread = state.step, metrics, step.compiled[key][1]
        if not run.startup_seconds:
            unread = _read(run, hooks, unread)
            run.startup_seconds = time.perf_counter() - begun
            if state.step < run.config.train.steps:
                _compile_ahead(run, signals)
                votes.hasten()
        agreed = [0] * len(hooks)
        if votes.due():
            agreed = votes.cast([hook.vote(run) for hook in hooks])
        for hook, vote in zip(hooks, agreed, strict=True):
            if hook.due(run, vote):
                unread = _read(run, hooks, unread)
                hook.act(run)
        if run.stopping:
            return
        if turn and state.step % turn == 0:
            unread = _read(run, hooks, unread)
            with run.clock.section(None):
                yield
    raise UserError(
        f"Task.batches ended after step {state.step}; it must yield batches without end"
    )


def _compile_ahead(run: Run, signals: Signals) -> None:
    """Starts threads that compile the training step for all shapes of `Task.batch_samples`.

    On accelerators, training continues meanwhile. On CPUs, the threads would slow the steps. This function therefore
    waits until all shapes are compiled, or until a signal arrives. The wait counts as compilation time. The processes
    vote about once a second whether to stop waiting.
    """

    def stopped(ended: bool) -> bool:
        compiling, number = all_reduce_max(np.asarray([not ended, signals.received or 0]))
        return not compiling or bool(number)

    samples = (put(batch, run.mesh) for batch in run.task.batch_samples())
    run.train_step.compile_ahead(samples, run.step)
    if run.mesh.devices.flat[0].platform == "cpu":
        with run.clock.section("compile"):
            run.train_step.wait(stopped)


def _read(run: Run, hooks: Sequence[Hook], unread: tuple[int, Any, float] | None) -> None:
    """Waits for the metrics of a step, adds its weight and FLOPs to the run state, and passes the metrics to the hooks.

    Args:
      unread: (step, metrics, FLOPs) of the step; None to do nothing.

    Raises:
      UserError: the loss or the gradient norm is not finite.
    """
    if unread is None:
        return
    step, metrics, flops = unread
    values = {name: float(value) for name, value in metrics.items()}
    if not math.isfinite(values["loss"]) or not math.isfinite(values["gradient_norm"]):
        # A workdir with checkpoints does not accept another learning rate.
        other = " and another --workdir" if run.checkpoints.exist else ""
        raise UserError(
            f"the loss is {values['loss']} and the gradient norm {values['gradient_norm']} at step {step}: training"
            f" stopped; start again with a lower --config.optimizer.learning_rate{other}"
        )
    run.state.tokens += values["weight"]
    run.state.flops += flops
    for hook in hooks:
        hook.after_step(run, step, values, flops)
