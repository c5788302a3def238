"""Resumes a run from its newest intact checkpoint."""

from typing import TYPE_CHECKING, Any

from common.metrics.curve import Curve
from common.model.layers import stack_layers
from common.train import frozen
from common.train.checkpoint import Checkpoints
from common.train.clock import Clock
from common.train.conditions import Conditions
from common.train.run_state import PLAIN, RunState
from common.train.state import Step, TrainState
from common.variables import Params

if TYPE_CHECKING:
    from common.train.run import Run

_OLD_NAMES = {"position": "data_state", "finished": "stop_reason", "worse": "evals_since_best"}
"""{old name: current name} of the fields of `RunState` that 939e222 (22 November 2026) renamed."""


def resume(step: Step, checkpoints: Checkpoints) -> tuple[TrainState, Params, RunState, str]:
    """Reads the newest intact checkpoint of a run.

    Deletes best checkpoints at steps that are not in the validation curve. A killed run saved these checkpoints after
    its newest checkpoint to resume from.

    Returns:
      The values of the fields `train_state`, `frozen`, `state` and `pretrained` of `Run`.
    """
    names, model = ("trainable", "optimizer", "frozen"), step.abstract_model
    arrays, meta = checkpoints.restore(dict(zip(names, step.arguments(model), strict=True)))
    state = run_state(meta)
    checkpoints.discard_best([point.step for point in state.curve.points])
    pretrained = step.task.pretrained_weights(model)
    values = frozen.load(checkpoints, model, step.seed, pretrained, meta, step.mesh)
    trained = (stack_layers(arrays[name], step.scanned.trainable) for name in names[:2])
    values = stack_layers(values | arrays["frozen"], step.scanned.frozen)
    return TrainState(meta["step"], *trained), values, state, pretrained.fingerprint


def still_ended(run: "Run") -> str:
    """Returns the stop reason of a resumed run, or "" if the run continues.

    An ended run continues if its configuration now allows more steps, seconds or patience, or if a signal interrupted
    its last evaluation.
    """
    config, state = run.config, run.state
    limit, patience = config.train.max_seconds, config.eval.patience
    if not state.stop_reason and state.last_evaluation[0] != run.step:
        return ""
    if run.step >= config.train.steps:
        return state.stop_reason or "steps"
    if state.stop_reason == "patience" and patience and state.evals_since_best >= patience:
        return "patience"
    return "seconds" if limit and state.clock["train"] >= limit else ""


def run_state(meta: dict[str, Any]) -> RunState:
    """Returns the run state that `RunState.to_json` wrote. Adds the current commit to `commits`, if missing."""
    meta = {_OLD_NAMES.get(name, name): value for name, value in meta.items()}
    plain = {name: meta[name] for name in PLAIN}
    state = RunState(Curve.from_json(meta["curve"]), clock=Clock(meta["clock"]), **plain)
    state.commits = list(dict.fromkeys([*meta.get("commits", []), *state.commits]))
    state.conditions = Conditions(meta.get("sessions", ["alone"]), meta.get("stopped", False))
    points = [(point.step, point.seconds) for point in state.curve.points]
    # Checkpoints from before fc5cf5c (23 November 2026) lack the field `last_evaluation`.
    last = points[-1] if points else state.last_evaluation
    state.last_evaluation = tuple(meta.get("last_evaluation", last))
    return state
