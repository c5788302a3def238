"""Plans which training methods fit into a time budget.

A training method is an argument of `perception.ways.find`, such as "lora" (LoRA on pretrained weights).
"""

import math
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

from common.errors import UserError

SECONDS = {"s": 1, "m": 60, "h": 3600}

LEARNING_RATES = ("1e-4", "3e-4", "1e-3")
"""Learning rates that are tried with seed 1 for every method with training steps. Each method then uses the rate with
the best weighted F1 on the split `eval.select`."""

SEEDS = 3
"""Number of seeds that a verdict needs (`common.report.significance.LEAST_SEEDS`)."""

EVALUATIONS = 5
"""Maximum number of evaluations on the split `eval.select` in each planned run with training steps."""

LEAST_STEPS = 100
"""`make_plan` leaves out methods until the time suffices for this number of training steps in each run."""

USED = 0.9
"""Fraction of the time that `make_plan` uses. The rest is a reserve for steps that are slower than measured."""


class Cost(NamedTuple):
    """Seconds of a training method, measured in a short run or estimated from another method.

    Attributes:
      start: start of a run, which reads data and weights, and compiles programs or loads compiled programs.
      step: one training step.
      evaluation: one evaluation on the split `eval.select`.
      test: one evaluation on the test examples.
    """

    start: float
    step: float
    evaluation: float
    test: float

    def fixed(self, seeds: int) -> float:
        """Returns the seconds that all runs of the training method spend outside training steps."""
        # The runs with the chosen learning rate evaluate their best and their last step on the test examples.
        return runs(seeds) * (self.start + EVALUATIONS * self.evaluation) + 2 * seeds * self.test


class Plan(NamedTuple):
    """The training methods, steps and seeds that fit into a time budget.

    Attributes:
      ways: the affordable training methods (arguments of `ways.find`, without the baseline). If "head" is affordable,
        it is the first. The others are in order of preference.
      steps: number of training steps of each run. Only the runs of "head" have no steps: logistic regression solves the
        head.
      seeds: number of seeds of each method with its chosen learning rate.
      left_out: training method -> reason why it is not trained.
      fields: overrides "--config.a.b=VALUE" for all runs.
    """

    ways: list[str]
    steps: int
    seeds: int
    left_out: dict[str, str]
    fields: Sequence[str] = ()


def parse_seconds(text: str) -> float:
    """Converts a positive duration such as "90s", "10m" or "1.5h" to seconds; raises a UserError for any other text."""
    found = re.fullmatch(r"(\d*\.?\d+)([smh])", text)
    seconds = float(found[1]) * SECONDS[found[2]] if found else 0.0
    if not seconds:
        raise UserError(
            f"--budget={text} must be a positive decimal number followed directly by s, m or h, such as 90s or 1.5h"
        )
    return seconds


def format_seconds(seconds: float) -> str:
    """Formats a duration, such as "45 s", "12 min" or "3.2 h"."""
    if seconds <= 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


class TimeLimitReached(Exception):
    """The time limit of `time_limit` was reached.

    The base class is not TimeoutError, because a TimeoutError is an OSError: code that reads or writes a file would
    turn it into an error about the file.
    """


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeLimitReached if the block runs longer than `seconds`.

    Does not interrupt a compilation in the main thread, but raises the exception after the compilation. Only the main
    thread can use this context manager, because it sets a signal handler.
    """

    reached = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal reached
        # During a compilation, try again later instead of raising. While the main thread waits, JAX compiles in another
        # thread, and a program that exits at that time crashes. JAX also swallows an exception that is raised while it
        # writes its cache of compiled programs.
        if _is_compiling(frame):
            signal.setitimer(signal.ITIMER_REAL, 0.1)
        else:
            reached = True
            raise TimeLimitReached

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except Exception as error:
        if reached:  # `error` may be a ValueError that hides TimeLimitReached: JAX's C++ code replaces exceptions.
            raise TimeLimitReached from error
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _is_compiling(frame: FrameType | None) -> bool:
    """Returns whether `frame` or one of its callers is in JAX's compiler."""
    while frame is not None:
        if frame.f_globals.get("__name__") == "jax._src.compiler":
            return True
        frame = frame.f_back
    return False


def runs(seeds: int) -> int:
    """Returns a method's number of runs: each learning rate with seed 1, the best with each further seed."""
    return len(LEARNING_RATES) + seeds - 1


def make_plan(costs: Mapping[str, Cost], seconds: float, most_steps: int) -> Plan:
    """Plans as many training methods as fit into `seconds`, in order of preference.

    All runs train the same number of steps. Methods fit if there is time for LEAST_STEPS steps per run. If not even
    the first method fits with SEEDS seeds, it is planned with one seed, which is too few for a verdict. If even one
    seed does not fit, the plan has no method.

    Args:
      costs: training method -> its cost, in order of preference.
      most_steps: maximum number of training steps of each run.
    """
    names = list(costs)
    for count, seeds in [*((count, SEEDS) for count in range(len(names), 0, -1)), (1, 1)]:
        steps = _steps([costs[name] for name in names[:count]], seeds, seconds)
        if steps >= LEAST_STEPS:
            left_out = _lacking(costs, names[count:], SEEDS)
            return Plan(names[:count], min(steps, most_steps), seeds, left_out)
    return Plan([], 0, 0, _lacking(costs, names, 1))


def _steps(costs: Sequence[Cost], seeds: int, seconds: float) -> int:
    """Returns the largest number of steps per run for which all runs fit into USED * `seconds`; it may be negative."""
    if not costs:
        return 0
    left = USED * seconds - sum(cost.fixed(seeds) for cost in costs)
    return math.floor(left / sum(runs(seeds) * cost.step for cost in costs))


def _lacking(costs: Mapping[str, Cost], names: Sequence[str], seeds: int) -> dict[str, str]:
    """Returns {training method: reason to leave it out}: how long its runs of LEAST_STEPS steps would take."""
    return {
        name: f"{runs(seeds)} runs of {LEAST_STEPS} steps would take about"
        f" {format_seconds(costs[name].fixed(seeds) + runs(seeds) * LEAST_STEPS * costs[name].step)}"
        for name in names
    }
