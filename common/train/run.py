"""One run in memory: the training state, the run state, and the files of the workdir."""

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common import sharding
from common.config import to_json
from common.metrics.curve import Curve
from common.runtime.processes import barrier, is_main, warn
from common.track.progress import Progress, peak_flops
from common.track.tracker import Tracker
from common.train import frozen
from common.train.checkpoint import Checkpoints
from common.train.clock import Clock
from common.train.conditions import Conditions
from common.train.dry_run import parameter_rows, show_parameters
from common.train.state import Step, TrainState, initial_params, optimizer_shardings
from common.train.task import ModelState, Task
from common.train.workdir import check_shared, commit, open_workdir

_OLD_NAMES = {"position": "data_state", "finished": "stop_reason", "worse": "evals_since_best"}
"""Fields of the run state under other names in checkpoints that were written before November 2026."""


@dataclass
class RunState:
    """What a checkpoint keeps of a run beside its arrays, as JSON.

    Attributes:
      data_state: where the training data go on; None at the start.
      clock: seconds of training, compilation, evaluation and so on.
      curve: the validation curve.
      tokens: trained on so far, in the unit of the task.
      flops: of the training steps so far.
      stop_reason: "steps", "seconds" or "patience" once the run has ended, else "".
      evals_since_best: evaluations since the best one, for early stopping.
      commits: of the code that trained the run.
      conditions: what else the machine did meanwhile.
    """

    curve: Curve
    data_state: dict | None = None
    clock: Clock = field(default_factory=Clock)
    tokens: float = 0.0
    flops: float = 0.0
    stop_reason: str = ""
    evals_since_best: int = 0
    commits: list[str] = field(default_factory=lambda: [commit()])
    conditions: Conditions = field(default_factory=Conditions)

    def to_json(self) -> dict[str, Any]:
        return {
            "data_state": self.data_state,
            "clock": self.clock.seconds(),
            "curve": self.curve.to_json(),
            "tokens": self.tokens,
            "flops": self.flops,
            "stop_reason": self.stop_reason,
            "evals_since_best": self.evals_since_best,
            "commits": self.commits,
            "sessions": self.conditions.sessions,
        }

    @classmethod
    def from_json(cls, meta: dict[str, Any]) -> "RunState":
        """The state of a resumed run; today's commit joins those of the checkpoint."""
        meta = {_OLD_NAMES.get(name, name): value for name, value in meta.items()}
        plain = ("data_state", "tokens", "flops", "stop_reason", "evals_since_best")
        state = cls(
            Curve.from_json(meta["curve"]),
            clock=Clock(meta["clock"]),
            **{name: meta[name] for name in plain},
        )
        state.commits = list(dict.fromkeys([*meta.get("commits", []), *state.commits]))
        state.conditions.sessions = meta.get("sessions", ["alone"])
        return state


@dataclass
class Run:
    """Everything that the loop and its hooks work on.

    Attributes:
      train_step: compiled once for each shape of a batch.
      train_state: what a step changes.
      frozen: values that no step changes, by path.
      state: everything else that a checkpoint keeps.
      pretrained: fingerprint of pretrained weights that stay in their files; "" without any.
      stopping: whether the loop ends after this step.
      startup_seconds: from the start of the program to the end of the first step; 0 before.
    """

    config: ConfigDict
    task: Task
    workdir: Path
    mesh: Mesh
    train_step: Step
    train_state: TrainState
    frozen: dict[str, jax.Array]
    state: RunState
    checkpoints: Checkpoints
    pretrained: str
    tracker: Tracker | None = None
    progress: Progress | None = None
    stopping: bool = False
    startup_seconds: float = 0.0

    @property
    def step(self) -> int:
        """Training steps done."""
        return self.train_state.step

    @property
    def clock(self) -> Clock:
        return self.state.clock

    @property
    def model_state(self) -> ModelState:
        """The current values, as evaluation takes them."""
        model = self.train_step.abstract_model
        return ModelState(model, self.train_state.params, self.frozen, self.mesh)

    def metadata(self) -> dict[str, Any]:
        """The JSON part of a checkpoint."""
        return self.state.to_json() | {
            "step": self.step,
            "outside": self.pretrained,
            "seed": self.config.seed,
        }

    def save(self) -> None:
        """Starts writing a checkpoint to resume from."""
        with self.clock.section("checkpoint"):
            arrays = self.trained() | {"optimizer": self.train_state.opt_state}
            self.checkpoints.save(self.step, arrays, self.metadata())

    def trained(self) -> dict[str, Any]:
        """The arrays of a checkpoint that a trained model needs."""
        return {"trainable": self.train_state.params, "frozen": {}}


def open_run(
    config: ConfigDict, task: Task, workdir: Path, mesh: Mesh, session: str, stack: ExitStack
) -> Run:
    """Locks the workdir and starts the run, or resumes it from its newest checkpoint.

    Args:
      session: see `Conditions`.
      stack: closes the run's files.

    Raises:
      UserError: the workdir holds another run, or no checkpoint in it is intact.
    """
    _lock(config, task, workdir, stack)
    checkpoints = Checkpoints(workdir, config.checkpoint.keep, config.checkpoint.keep_best)
    stack.callback(checkpoints.close)
    begin = _resume if checkpoints.exist else _start
    run = begin(config, task, workdir, mesh, checkpoints)
    if not run.state.stop_reason:
        run.state.conditions.begin(session)
    _open_displays(run, stack)
    return run


def _lock(config: ConfigDict, task: Task, workdir: Path, stack: ExitStack) -> None:
    """Locks the workdir, and writes to it what using the model needs."""
    lock = open_workdir(workdir, config) if is_main() else None
    if lock:
        stack.callback(lock.release)
    barrier("the workdir is open")
    if lock:
        task.save(workdir)
    else:
        check_shared(workdir)


def _start(
    config: ConfigDict, task: Task, workdir: Path, mesh: Mesh, checkpoints: Checkpoints
) -> Run:
    """A run at step 0. Its frozen values are written once, beside the checkpoints."""
    step = Step.of(config, task, mesh)
    model = step.abstract_model
    params = initial_params(task, model, config.seed, mesh)
    where = sharding.shardings(model.trainable, mesh)
    where = optimizer_shardings(step.optimizer, params, where, mesh)
    opt_state = jax.jit(step.optimizer.init, out_shardings=where)(params)
    train_state = TrainState(0, params, opt_state)
    state = RunState(Curve(task.objective, task.mode))
    pretrained = task.outside(model)
    values, fingerprint = frozen.draw_on_mesh(model, config.seed, mesh)
    with state.clock.section("start"):
        given = jax.block_until_ready(task.start(train_state.params))
    train_state.params = {name: given[name] for name in train_state.params}
    values |= {name: x for name, x in given.items() if name in model.frozen}
    frozen.save(checkpoints, values, fingerprint)
    values |= pretrained.values
    fixed = (step, train_state, values, state, checkpoints, pretrained.fingerprint)
    return Run(config, task, workdir, mesh, *fixed)


def _resume(
    config: ConfigDict, task: Task, workdir: Path, mesh: Mesh, checkpoints: Checkpoints
) -> Run:
    """A run from its newest intact checkpoint."""
    step = Step.of(config, task, mesh)
    names = ("trainable", "optimizer", "frozen")
    arrays, meta = checkpoints.restore(dict(zip(names, step.arguments(), strict=True)), warn)
    pretrained = task.outside(step.abstract_model)
    values = frozen.load(checkpoints, step.abstract_model, config.seed, pretrained, meta, mesh)
    values |= arrays["frozen"]
    train_state = TrainState(meta["step"], arrays["trainable"], arrays["optimizer"])
    state = RunState.from_json(meta)
    state.stop_reason = _still_ended(config, meta["step"], state)
    if is_main():
        print(f"resuming from step {meta['step']} of {workdir}")
    fixed = (step, train_state, values, state, checkpoints, pretrained.fingerprint)
    return Run(config, task, workdir, mesh, *fixed)


def _still_ended(config: ConfigDict, step: int, state: RunState) -> str:
    """Why a resumed run has ended; "" where it was given more steps, seconds or patience."""
    limit, patience = config.train.max_seconds, config.eval.patience
    if step >= config.train.steps:
        return state.stop_reason or "steps"
    if state.stop_reason == "patience" and patience and state.evals_since_best >= patience:
        return "patience"
    return "seconds" if limit and state.clock["train"] >= limit else ""


def _open_displays(run: Run, stack: ExitStack) -> None:
    """Opens metrics.jsonl, wandb and the progress bar, and prints the table of parameters."""
    model, wandb = run.train_step.abstract_model, run.config.wandb
    if is_main():
        show_parameters(model)
    run.tracker = Tracker(
        run.workdir,
        to_json(run.config),
        wandb_mode=wandb.mode,
        project=wandb.project,
        name=wandb.name or None,
        group=wandb.group or None,
        resume_step=run.step if run.checkpoints.exist else None,
        enabled=is_main(),
    )
    stack.callback(run.tracker.finish)
    run.tracker.table("parameters", *parameter_rows(model))
    kind, dtype = jax.devices()[0].device_kind, getattr(run.config.model, "dtype", "float32")
    peak = peak_flops(kind, jnp.bfloat16 if dtype == "auto" else dtype)
    run.progress = Progress(
        run.config.train.steps,
        run.step,
        unit=run.task.unit,
        enabled=is_main(),
        peak_flops=peak * jax.device_count() if peak else None,
    )
    stack.callback(run.progress.close)
