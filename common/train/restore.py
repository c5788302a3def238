"""Loads the configuration and the trained model of a run: the best checkpoint, or an average of checkpoints."""

from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path

from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common import variables
from common.config import from_json
from common.errors import check
from common.storage.addresses import shown
from common.train import frozen
from common.train.checkpoint import SNAPSHOTS, Checkpoints, model_arrays
from common.train.task import NO_PRETRAINED_WEIGHTS, ModelState, PretrainedWeights
from common.train.workdir import CONFIG, saved_config
from common.variables import AbstractModel


def read_config(
    workdir: Path, option: str = "--workdir", paper: str = "", task: str = ""
) -> ConfigDict:
    """Returns the configuration of the run in `workdir`.

    Raises a UserError if the folder holds no run, a run of another paper or task, or an unreadable or damaged
    configuration.

    Args:
      option: command-line option that names the folder, for error messages.
      paper: name of the paper's folder, if the run must belong to one paper; "" for any paper.
      task: value that the configuration field `task` must have; "" for any task.
    """
    path = workdir / CONFIG
    with suppress(OSError):  # Permission denied: `saved_config` raises the UserError.
        check(
            path.is_file(),
            f"{option}={shown(workdir)} holds no run ({CONFIG} is missing): give the workdir of a run",
        )
    config = from_json(saved_config(path))
    # Runs from before commit a3ffa8f (22 November 2026) lack the field `paper`. Runs from before commit 22489c7
    # (21 November 2026) also lack the field `task`.
    found = config.get("paper", ""), config.get("task", "")
    remedy = "give the workdir of another run"
    if found[0]:
        remedy = f"{found[0]}/README.md lists the programs of {found[0]}"
    check(
        paper in ("", found[0] or paper) and task in ("", found[1] or task),
        f"{option}={shown(workdir)} is a run of {_described(*found)}, not of {_described(paper, task)}; {remedy}",
    )
    return config


def _described(paper: str, task: str) -> str:
    return (paper or "another program") + (f" with the task {task}" if task else "")


def snapshots(workdir: Path) -> list[int]:
    """Returns the steps of a run's snapshots, ascending."""
    paths = (workdir / "checkpoints" / SNAPSHOTS).glob("*")
    return sorted(int(path.name) for path in paths if path.name.isdecimal())


def check_snapshot(workdir: Path, step: int) -> None:
    """Raises a UserError if the run has no snapshot at `step`."""
    existing = snapshots(workdir)
    remedy = (
        "train the run again with --config.checkpoint.snapshots=N, to save a snapshot every N steps"
    )
    if existing:
        remedy = f"choose one of the steps {', '.join(map(str, existing))}"
    check(
        step in existing,
        f"the run has no snapshot of step {step} in {shown(workdir / 'checkpoints' / SNAPSHOTS)}: {remedy}",
    )


def load_run(
    workdir: Path,
    config: ConfigDict,
    build: Callable[[nnx.Rngs], nnx.Module],
    mesh: Mesh,
    pretrained_weights: Callable[[AbstractModel], PretrainedWeights] | None = None,
    snapshots: Sequence[int] = (),
    best: int = 0,
) -> ModelState:
    """Loads the trained model of a run, by default from the best checkpoint.

    Args:
      build, pretrained_weights: functions like the methods of `Task`. `pretrained_weights` is None for a run without
        pretrained weights.
      snapshots: steps of snapshots to average instead of the best checkpoint.
      best: number of "top" checkpoints (`Checkpoints.top`) to average, largest scores first; 0 to average none.

    Raises:
      UserError: a checkpoint is missing, or `Checkpoints.restore_from`, `frozen.load` or `pretrained_weights` fails.
    """
    model = variables.abstract(build)
    with closing(Checkpoints(workdir)) as checkpoints:
        target = model_arrays(model, mesh)
        if best:
            kept = checkpoints.top()
            few = (
                f"only {len(kept)}; average at most {len(kept)}"
                if kept
                else "none; leave out the average"
            )
            check(
                best <= len(kept),
                f"cannot average the {best} best checkpoint{'s' * (best > 1)}: {shown(workdir)} has kept {few}, or"
                " train again with a larger --config.checkpoint.keep_best",
            )
            arrays, meta = checkpoints.restore_mean("top", [*kept][:best], target)
        elif snapshots:
            for step in snapshots:
                check_snapshot(workdir.absolute(), step)
            arrays, meta = checkpoints.restore_mean(SNAPSHOTS, snapshots, target)
        else:
            arrays, meta = checkpoints.restore_best(target)
        pretrained = pretrained_weights(model) if pretrained_weights else NO_PRETRAINED_WEIGHTS
        values = frozen.load(checkpoints, model, config.seed, pretrained, meta, mesh)
    return ModelState(model, arrays["trainable"], values | arrays["frozen"], mesh)
