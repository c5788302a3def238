"""A run in memory: training state, run state, and the open files of the workdir."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common import variables
from common.config import to_json
from common.metrics.curve import Curve
from common.model.layers import stack_layers, unstack_layers
from common.report.table import text
from common.runtime.processes import barrier, check_agreement, is_main, warn
from common.sharding import shardings
from common.storage.addresses import address, shown
from common.track.progress import Progress, peak_flops
from common.track.tracker import METRICS, Tracker
from common.train.checkpoint import Checkpoints
from common.train.clock import Clock
from common.train.run_state import RunState
from common.train.state import Step, TrainState
from common.train.task import ModelState, Task
from common.train.workdir import open_workdir
from common.variables import AbstractModel, Params


@dataclass
class Run:
    """State and open files of a run, for the training loop and its hooks.

    Attributes:
      frozen: path -> frozen value. Values of repeating layers may be stacked (`common.model.layers`).
      pretrained: fingerprint of the pretrained weights; "" without pretrained weights.
      fingerprints: result of `Task.fingerprints`. Every checkpoint has it, so that a run resumes with equal data only.
      stopping: whether the loop ends after the current step.
      tracker, progress: metrics files and progress bar of process 0; None on all other processes.
      startup_seconds: seconds from the call of `loop.fit` or `turns.fit_in_turns` to the end of the run's first step in
        this process; 0 until then.
    """

    config: ConfigDict
    task: Task
    workdir: Path
    mesh: Mesh
    checkpoints: Checkpoints
    train_step: Step
    train_state: TrainState
    frozen: dict[str, jax.Array]
    state: RunState
    pretrained: str
    fingerprints: dict[str, str]
    tracker: Tracker | None = None
    progress: Progress | None = None
    stopping: bool = False
    startup_seconds: float = 0.0

    @property
    def step(self) -> int:
        """Number of training steps so far. The last step may still be running."""
        return self.train_state.step

    @property
    def clock(self) -> Clock:
        return self.state.clock

    @property
    def model_state(self) -> ModelState:
        """The model with its current values, for `Task.evaluate`. Copies stacked arrays to an array for each layer."""
        model = self.train_step.abstract_model
        values = unstack_layers(self.train_state.params), unstack_layers(self.frozen)
        return ModelState(model, *values, self.mesh)

    def metadata(self) -> dict[str, Any]:
        """Returns the JSON part of a checkpoint."""
        identity = {"step": self.step, "outside": self.pretrained, "seed": self.config.seed}
        return self.state.to_json() | identity | {"fingerprints": self.fingerprints}

    def save(self) -> None:
        """Starts writing a checkpoint to resume from."""
        with self.clock.section("checkpoint"):
            arrays = self.trained() | {"optimizer": unstack_layers(self.train_state.opt_state)}
            self.checkpoints.save(self.step, arrays, self.metadata())

    def trained(self) -> dict[str, Any]:
        """Returns the arrays of a checkpoint without optimizer state: the trained values, and an empty "frozen"."""
        return {"trainable": unstack_layers(self.train_state.params), "frozen": {}}


def open_run(
    config: ConfigDict, task: Task, workdir: Path, mesh: Mesh, stack: ExitStack, name: str = ""
) -> Run:
    """Locks the workdir, and starts the run or resumes the run from its newest intact checkpoint.

    Args:
      stack: exit stack that closes the run's files.
      name: prefix of every line of the progress bar; "" for no prefix.

    Raises:
      UserError: the task is incomplete (`check_complete`), the workdir cannot be used (`open_workdir`) or is not shared
        by all processes, the run cannot be resumed (`resume.resume`), its `metrics.jsonl` is damaged, a method of the
        task raises a UserError (such as `Task.save` for another tokenizer), or the processes differ in configuration,
        data, frozen values or pretrained weights.
    """

    step = Step.of(config, task, mesh)
    stack.callback(step.cancel)
    fingerprints = task.fingerprints()
    several = jax.process_count() > 1
    if several:  # Before any file is written, compare data and configuration.
        from common.train import agreement

        check_agreement(lambda: agreement.inputs(config, fingerprints))
    upload = open_workdir(workdir, config, stack) if is_main() else None
    barrier("the workdir is open")
    if several and not address(workdir):
        agreement.check_shared(workdir)
    kept = config.checkpoint.keep, config.checkpoint.keep_best
    checkpoints = Checkpoints(workdir, *kept, upload)
    stack.callback(checkpoints.close)
    checkpoints.share()
    resumed = bool(checkpoints.steps())
    if resumed:
        from common.train import resume

        begun = resume.resume(step, checkpoints, fingerprints)
    else:
        begun = _start(step, checkpoints)
    if is_main():  # After `resume`, which may refuse the task's data.
        task.save(workdir)
    run = Run(config, task, workdir, mesh, checkpoints, step, *begun, fingerprints)
    if resumed:
        run.state.stop_reason = resume.still_ended(config, run.state, run.step)
        if is_main():
            print(f"resuming from step {run.step} of {shown(workdir)}")
    if is_main():
        _open_displays(run, stack, name, resumed)
    return run


def _start(step: Step, checkpoints: Checkpoints) -> tuple[TrainState, Params, RunState, str]:
    """Starts a new run: initialises its values, and starts writing its frozen values.

    Returns the values of the fields `train_state`, `frozen`, `state` and `pretrained` of `Run`. Raises a UserError if
    the processes have different frozen or pretrained values.
    """
    task, model = step.task, step.abstract_model
    # An earlier start may have been killed before its first checkpoint to resume from.
    checkpoints.discard_best(())
    train_state = step.start()
    state = RunState(Curve(task.objective, task.mode))
    pretrained = task.pretrained_weights(model)
    values, fingerprint, platform = {}, "", ""
    if model.frozen:
        from common.train import frozen

        platform = frozen.host()
        values, fingerprint = frozen.draw_on_mesh(model, step.seed, step.mesh)
    drawn = {"the fingerprint of the drawn frozen values": fingerprint[:16]}
    weights = {"the fingerprint of the pretrained weights": pretrained.fingerprint[:16]}
    check_agreement(lambda: drawn | weights)
    with state.clock.section("start"):
        initial = jax.block_until_ready(
            task.start(unstack_layers(train_state.params), values | dict(pretrained.values))
        )
    params = {
        name: jax.device_put(initial[name], sharding)
        for name, sharding in shardings(model.trainable, step.mesh).items()
    }
    train_state.params = stack_layers(params, step.scanned.trainable)
    values |= {name: x for name, x in initial.items() if name in model.frozen}
    if values:
        meta = {"drawn": fingerprint, "platform": platform, "names": sorted(values)}
        # Replaces the values of an earlier start of the run that was killed before its first checkpoint.
        checkpoints.replace("frozen", 0, {"frozen": values}, meta)
    values = stack_layers(values | dict(pretrained.values), step.scanned.frozen)
    return train_state, values, state, pretrained.fingerprint


def _open_displays(run: Run, stack: ExitStack, name: str, resumed: bool) -> None:
    """Opens metrics.jsonl, wandb and the progress bar; prints the table of parameter counts."""
    config = to_json(run.config)
    run.tracker = Tracker(run.workdir, config, run.step if resumed else None)
    stack.callback(run.tracker.finish)
    evaluated = [point.step for point in run.state.curve.points]
    if lost := [step for step in evaluated if step not in run.tracker.kept_steps]:
        warn(
            f"{shown(run.workdir / METRICS)} lacks lines of steps up to {lost[-1]}: the run goes on without"
            " them; restore the file if you need them"
        )
    run.tracker.table("parameters", *show_parameters(run.train_step.abstract_model))
    dtype = config["model"].get("dtype", "float32")
    peak = peak_flops(jax.devices()[0].device_kind, "bfloat16" if dtype == "auto" else dtype)
    run.progress = Progress(
        run.config.train.steps,
        run.step,
        name=name,
        unit=run.task.unit,
        peak_flops=peak * jax.device_count() if peak else None,
    )
    stack.callback(run.progress.close)


def show_parameters(model: AbstractModel) -> tuple[tuple[str, ...], list[tuple]]:
    """Prints a table of parameter counts, with a row for each part of the model; returns the columns and rows."""
    columns = "group", "trainable", "frozen", "total"
    rows = [*variables.count_by_group(model), ("all", *variables.count(model).values())]
    print(text(columns, [(name, *(f"{n:,}" for n in numbers)) for name, *numbers in rows]))
    return columns, rows
