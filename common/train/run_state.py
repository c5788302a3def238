"""The part of the state of a run that checkpoints store as JSON."""

from dataclasses import dataclass, field
from typing import Any

from common.metrics.curve import Curve
from common.train.clock import Clock
from common.train.conditions import Conditions
from common.train.workdir import commit

PLAIN = ("data_state", "tokens", "flops", "stop_reason", "evals_since_best")
"""Fields of `RunState` that checkpoints store and load without conversion."""


@dataclass
class RunState:
    """State of a run apart from its arrays and step number.

    Attributes:
      data_state: data state from which to continue (see `Task.batches`); None at the start.
      tokens: number of tokens so far, or of other units (`Task.unit`): sum of the weights that `Task.loss` returned.
      flops: FLOPs of all training steps so far.
      stop_reason: "steps", "seconds" or "patience" after the run has ended; "" before.
      evals_since_best: number of evaluations since the best evaluation, for early stopping.
      last_evaluation: step and training seconds of the last evaluation; (-1, 0) before the first evaluation.
      commits: commits of the code that trained the run.
      conditions: use of the machine by the run and by other processes.
    """

    curve: Curve
    data_state: dict | None = None
    clock: Clock = field(default_factory=Clock)
    tokens: float = 0.0
    flops: float = 0.0
    stop_reason: str = ""
    evals_since_best: int = 0
    last_evaluation: tuple[int, float] = (-1, 0.0)
    commits: list[str] = field(default_factory=lambda: [commit()])
    conditions: Conditions = field(default_factory=Conditions)

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in PLAIN} | {
            "clock": self.clock.seconds(),
            "curve": self.curve.to_json(),
            "commits": self.commits,
            "sessions": self.conditions.sessions,
            "stopped": self.conditions.stopped,
            "last_evaluation": self.last_evaluation,
        }
