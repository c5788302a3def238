"""Resumes a run from its newest intact checkpoint."""

import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any

from ml_collections import ConfigDict

from common.errors import UserError, check, reason_of
from common.metrics.curve import Curve
from common.model.layers import stack_layers
from common.runtime.processes import all_or_none, barrier, is_main, warn
from common.storage.addresses import shown
from common.train import frozen
from common.train.checkpoint import Checkpoints
from common.train.clock import Clock
from common.train.conditions import Conditions
from common.train.run_state import PLAIN, RunState
from common.train.state import Step, TrainState
from common.variables import Params

_OLD_NAMES = {"position": "data_state", "finished": "stop_reason", "worse": "evals_since_best"}
"""Old name -> current name of the renamed fields of `RunState`.

`run_state` needs the old names to read checkpoints from before commit 939e222 (22 November 2026)."""


def resume(
    step: Step, checkpoints: Checkpoints, fingerprints: Mapping[str, str]
) -> tuple[TrainState, Params, RunState, str]:
    """Reads the newest intact checkpoint of a run. Moves damaged newer checkpoints (`_newest_intact`).

    Returns the values of the fields `train_state`, `frozen`, `state` and `pretrained` of `Run`. Deletes newer "best"
    and "top" checkpoints, whose steps are not in the validation curve.

    Args:
      fingerprints: result of `Task.fingerprints`.

    Raises:
      UserError: the data or a tokenizer have changed since the checkpoint was saved, or `_newest_intact`,
        `Task.pretrained_weights` or `frozen.load` fails.
    """
    model = step.abstract_model
    arrays, meta, state = _newest_intact(checkpoints, latest_arrays(step))
    # Checkpoints from commit 67e2be9 (28 November 2026) or earlier lack the field `fingerprints`.
    saved = meta.get("fingerprints", {})
    changed = [name for name, x in saved.items() if fingerprints.get(name, x) != x]
    check(
        not changed,
        f"{' and '.join(changed)} changed since the run in {shown(checkpoints.directory.parent)} began: restore the"
        " data, or choose another --workdir",
    )
    checkpoints.discard_best([point.step for point in state.curve.points])
    pretrained = step.task.pretrained_weights(model)
    values = frozen.load(checkpoints, model, step.seed, pretrained, meta, step.mesh, repair=True)
    trained = (
        stack_layers(arrays[name], step.scanned.trainable) for name in ("trainable", "optimizer")
    )
    values = stack_layers(values | arrays["frozen"], step.scanned.frozen)
    return TrainState(meta["step"], *trained), values, state, pretrained.fingerprint


def latest_arrays(step: Step) -> dict[str, Any]:
    """Returns the `target` to read a "latest" checkpoint (`Checkpoints.read`)."""
    names = ("trainable", "optimizer", "frozen")
    return dict(zip(names, step.arguments(step.abstract_model), strict=True))


def _newest_intact(checkpoints: Checkpoints, target: dict[str, Any]) -> tuple[Any, dict, RunState]:
    """Returns arrays, `meta` and run state of the newest checkpoint that every process can read (`Checkpoints.read`).

    Moves damaged newer checkpoints to the folder "damaged", with a warning for each. Raises a UserError if no
    checkpoint is intact, or if a checkpoint does not fit into memory or does not match the model.
    """
    damaged: dict[int, str] = {}
    for step in reversed(checkpoints.steps()):
        try:
            arrays, meta = checkpoints.read("latest", step, target)
            state = all_or_none(partial(run_state, meta))
        except UserError:
            raise
        # Orbax and its storage library may raise any type of exception for a damaged file.
        except Exception as error:
            damaged[step] = reason_of(error)
            continue
        # Move damaged checkpoints only if an older checkpoint is readable: otherwise the storage may have failed.
        for newer, reason in damaged.items():
            _set_aside(checkpoints, newer)
            warn(
                f"the checkpoint of step {newer} is damaged ({reason}): moved to"
                f" {shown(checkpoints.directory / 'damaged')}, resuming from step {step}"
            )
        return arrays, meta, state
    reasons = "; ".join(f"step {step}: {reason}" for step, reason in damaged.items())
    raise UserError(
        f"no intact checkpoint in {shown(checkpoints.directory)} ({reasons}): restore the files, or choose another"
        " --workdir to start again"
    )


def _set_aside(checkpoints: Checkpoints, step: int) -> None:
    if is_main():
        damaged = checkpoints.directory / "damaged"
        damaged.mkdir(exist_ok=True)
        paths = (damaged / f"{step}.{n}" for n in itertools.count())
        target = next(path for path in paths if not path.exists())
        (checkpoints.directory / "latest" / str(step)).rename(target)
    barrier(f"set aside {step}")
    checkpoints.reload()


def still_ended(config: ConfigDict, state: RunState, step: int) -> str:
    """Returns the stop reason of a run that resumes at `step`, or "" if the run continues.

    An ended run continues if its configuration now allows more steps, seconds or patience, or if a signal interrupted
    its last evaluation.
    """
    limit, patience = config.train.max_seconds, config.eval.patience
    if not state.stop_reason and state.last_evaluation[0] != step:
        return ""
    if step >= config.train.steps:
        return state.stop_reason or "steps"
    if state.stop_reason == "patience" and patience and state.evals_since_best >= patience:
        return "patience"
    return "seconds" if limit and state.clock["train"] >= limit else ""


def run_state(meta: dict[str, Any]) -> RunState:
    """Returns the run state that `RunState.to_json` wrote. Adds the current commit to `commits`, if missing.

    Raises a ValueError if a field of `meta` is missing or damaged.
    """
    meta = {_OLD_NAMES.get(name, name): value for name, value in meta.items()}
    try:
        plain = {name: meta[name] for name in PLAIN}
        state = RunState(Curve.from_json(meta["curve"]), clock=Clock(meta["clock"]), **plain)
        state.commits = list(dict.fromkeys([*meta.get("commits", []), *state.commits]))
        state.conditions = Conditions(meta.get("sessions", ["alone"]), meta.get("stopped", False))
        points = [(point.step, point.seconds) for point in state.curve.points]
        # Checkpoints from before commit fc5cf5c (23 November 2026) lack the field `last_evaluation`.
        last = points[-1] if points else state.last_evaluation
        state.last_evaluation = tuple(meta.get("last_evaluation", last))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"its JSON part lacks a field or is damaged: {reason_of(error)}"
        ) from error
    return state
