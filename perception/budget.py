"""Plans which ways of training a machine can afford within a time budget.

A way (`perception.comparison.WAYS`) is, for example, LoRA on pretrained weights, or full training of random weights.
"""

import math
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from common.errors import UserError

SECONDS = {"s": 1, "m": 60, "h": 3600}

LEARNING_RATES = ("1e-4", "3e-4", "1e-3")
"""Learning rates that every trained way tries with seed 1; validation chooses one."""

SEEDS = 3
"""Seeds of a verdict (`common.report.verdict.LEAST_SEEDS`)."""

EVALUATIONS = 5
"""Evaluations on the validation examples in each run."""

LEAST_STEPS = 100
"""A way that cannot train this many steps is left out."""

USED = 0.9
"""Fraction of the remaining time that is planned. The rest is for steps that are slower than measured."""


class Cost(NamedTuple):
    """Measured seconds of a way of training.

    Attributes:
      start: reading data and weights, and loading compiled programs, once in each run.
      step: one training step.
      evaluation: one evaluation on the validation examples.
      test: one evaluation on the test examples.
    """

    start: float
    step: float
    evaluation: float
    test: float

    def fixed(self, seeds: int) -> float:
        """Returns the seconds of all runs of the way without their training steps."""
        # A tested run evaluates its best and its last step.
        return runs(seeds) * (self.start + EVALUATIONS * self.evaluation) + 2 * seeds * self.test


class Plan(NamedTuple):
    """What is trained.

    Attributes:
      ways: the affordable ways, in their order of preference.
      steps: training steps of each run, equal for all ways.
      seeds: runs of each way with its chosen learning rate.
      left_out: way -> why it is not trained.
      fields: overrides "--config.a.b=VALUE" of all runs.
    """

    ways: list[str]
    steps: int
    seeds: int
    left_out: dict[str, str]
    fields: Sequence[str] = ()


def parse_seconds(text: str) -> float:
    """Returns the seconds of "90s", "10m" or "1.5h"; a UserError for any other text."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    seconds = float(found[1]) * SECONDS[found[2]] if found else 0.0
    if not seconds:
        raise UserError(
            f"--budget={text} must be a positive time with its unit, such as 90s, 10m or 2h"
        )
    return seconds


def format_seconds(seconds: float) -> str:
    """Returns seconds in their most readable unit: "45 s", "12 min" or "3.2 h"."""
    if seconds <= 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises a TimeoutError in the context after `seconds`. A compilation that is running then ends first.

    Only the main thread can use it.
    """

    def stop(number: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def runs(seeds: int) -> int:
    """Returns the number of runs of a way: each learning rate with seed 1, and the chosen one with the other seeds."""
    return len(LEARNING_RATES) + seeds - 1


def make_plan(costs: Mapping[str, Cost], seconds: float, most_steps: int) -> Plan:
    """Returns the longest list of ways, from the first, that `seconds` can pay for.

    The ways share the time so that all train the same number of steps. If no way can be trained with SEEDS seeds, the
    first way is trained with one seed, too few for a verdict.

    Args:
      costs: way -> its cost, in the order of preference.
      most_steps: largest number of training steps.
    """
    names = list(costs)
    for count in range(len(names), 0, -1):
        steps = _steps([costs[name] for name in names[:count]], SEEDS, seconds)
        if steps >= LEAST_STEPS:
            return Plan(
                names[:count], min(steps, most_steps), SEEDS, _lacking(costs, names[count:], SEEDS)
            )
    steps = _steps([costs[name] for name in names[:1]], 1, seconds)
    if steps >= LEAST_STEPS:
        return Plan(names[:1], min(steps, most_steps), 1, _lacking(costs, names[1:], SEEDS))
    return Plan([], 0, 0, _lacking(costs, names, 1))


def _steps(costs: Sequence[Cost], seeds: int, seconds: float) -> int:
    """Returns the number of training steps, equal for all runs, that `seconds` can pay for."""
    if not costs:
        return 0
    left = USED * seconds - sum(cost.fixed(seeds) for cost in costs)
    return math.floor(left / sum(runs(seeds) * cost.step for cost in costs))


def _lacking(costs: Mapping[str, Cost], names: Sequence[str], seeds: int) -> dict[str, str]:
    return {
        name: f"{runs(seeds)} runs of {LEAST_STEPS} steps would take about"
        f" {format_seconds(costs[name].fixed(seeds) + runs(seeds) * LEAST_STEPS * costs[name].step)}"
        for name in names
    }
