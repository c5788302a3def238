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
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common.config import check_choice, check_least, check_seed
from common.errors import Preempted, UserError, check
from common.runtime.processes import Votes, barrier
from common.runtime.signals import Signals
from common.storage.addresses import shown
from common.track.tracker import WANDB_MODES
from common.train import optimizer as optimizers
from common.train.hooks import Evaluate, Hook, Log, Save, Snapshot, Stop
from common.train.prefetch import device_prefetch
from common.train.run import Run, open_run
from common.train.summary import finish
from common.train.task import Task
from common.train.workdir import has_checkpoints

if TYPE_CHECKING:
    from common.train.profile import Profile


def validate(config: ConfigDict) -> None:
    """Raises a UserError if a field of the training loop has an invalid value. Each paper checks its own fields."""
    optimizers.validate(config.optimizer)
    check_choice("--config.wandb.mode", config.wandb.mode, WANDB_MODES)
    check_choice("--config.train.reduce_dtype", config.train.reduce_dtype, ("float32", "bfloat16"))
    check_seed("--config.seed", config.seed)
    cache = config.get("data", {}).get("cache_dir", "")
    check(":/" not in cache, f"--config.data.cache_dir={cache} must be a folder on this machine")
    check_least(config, [f"train.{name}" for name in ("steps", "max_seconds", "scan_layers")], 0)
    check_least(config, [f"eval.{name}" for name in ("steps", "seconds", "patience")], 0)
    check_least(config, [f"checkpoint.{name}" for name in ("steps", "seconds", "snapshots")], 0)
    check_least(config, ("train.accumulate", "train.log_steps"))
    check_least(config, ("checkpoint.keep", "checkpoint.keep_best"))
    check(
        bool(config.eval.steps or config.eval.seconds),
        "--config.eval.steps and --config.eval.seconds are both 0: set one of them above 0, the interval between"
        " evaluations",
    )
    check(
        bool(config.train.steps or config.eval.start),
        "--config.train.steps=0 trains nothing: set it above 0, or evaluate the initial model with"
        " --config.eval.start=true",
    )


def fit(
    config: ConfigDict, task: Task, workdir: Path, mesh: Mesh, profile: "Profile | None" = None
) -> dict:
    """Trains, or resumes, the run in `workdir`, and traces the steps of `profile`. Returns the summary.

    If the run had ended and its summary is reused, returns {} on all processes except process 0.

    Raises:
      UserError: `validate`, `Profile.check`, `open_run`, `train`, `finish` or the last upload to a bucket fails, or
        `profile` is given for a run that has ended.
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
            check(
                profile is None,
                f"--profile: the run in {shown(workdir)} has ended, so no step can be traced: leave out --profile, or"
                " choose another --workdir",
            )
            from common.train.finished import kept_summary

            if (summary := kept_summary(run)) is not None:
                return summary
        else:
            run.state.conditions = run.state.conditions.begin("alone", signals)
            if profile:
                profile.check(config.train.steps, run.step)
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

    Yields after each step that is a multiple of `turn`, except the last step, so that other runs can take their turns.
    At a yield, no step of this run is in flight, and the run's clock is stopped.

    Args:
      begun: value of `time.perf_counter()` before the setup of the run.
      turn: number of steps between yields; 0 to never yield.

    Raises:
      UserError: the loss or the gradient is not finite, `Task.batches` ends, or a method of the task returns an invalid
        value.
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
    step, state, votes = run.train_step, run.train_state, Votes()
    unread: tuple | None = None
    seen: set[tuple] = set()
    for batch, data_state in device_prefetch(run.task.batches(run.state.data_state), run.mesh):
        key = step.cache_key(batch, state.step)
        # Threads may have compiled this step on some processes only, so `step.compiled` must not decide whether this
        # process waits at the barrier.
        if key not in seen:
            seen.add(key)
            unread = _read(run, hooks, unread)
            with run.clock.section("compile"):
                step.compile(batch, state.step)
                # Without this barrier, faster processes would wait within the section "train".
                barrier("compiled")
            votes.hasten()  # A signal may have arrived during the compilation, which may take minutes.
        for hook in hooks:
            hook.before_step(run)
        metrics = step(state, run.frozen, batch, key)
        run.state.data_state = data_state
        # Read the metrics of the previous step while the dispatched step runs.
        _read(run, hooks, unread)
        unread = state.step, metrics, step.compiled[key].flops
        if not run.startup_seconds:
            unread = _read(run, hooks, unread)
            run.startup_seconds = time.perf_counter() - begun
            if state.step < run.config.train.steps:
                samples = [*run.task.batch_samples()]
                if samples or len(run.task.losses()) > 1:
                    from common.train.ahead import compile_ahead

                    compile_ahead(run, batch, samples, signals)
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


def _read(run: Run, hooks: Sequence[Hook], unread: tuple[int, Any, float] | None) -> None:
    """Waits for the metrics of a step, adds tokens and FLOPs to the run state, and passes the metrics to the hooks.

    `unread` is (step, metrics, FLOPs), or None to do nothing. Returns None, so that `unread = _read(run, hooks,
    unread)` marks the step as read. Raises a UserError if the loss or the gradient norm is not finite.
    """
    if unread is None:
        return
    step, metrics, flops = unread
    values = {name: float(value) for name, value in metrics.items()}
    if not math.isfinite(values["loss"]) or not math.isfinite(values["gradient_norm"]):
        # Suggest another workdir if this one has checkpoints: a run cannot resume with another learning rate.
        other = " and another --workdir" if has_checkpoints(run.workdir) else ""
        remedy = f"start again with a lower --config.optimizer.learning_rate{other}"
        if step == 1:  # No update has used the learning rate.
            remedy = "correct the data or the initial values of the model"
        raise UserError(
            f"the loss is {values['loss']} and the gradient norm {values['gradient_norm']} at step {step} of"
            f" {shown(run.workdir)}: training stopped; {remedy}"
        )
    run.state.tokens += values["weight"]
    run.state.flops += flops
    for hook in hooks:
        hook.after_step(run, step, values, flops)
