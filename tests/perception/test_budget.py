"""Plans for a time budget: training methods, steps and seeds."""

import time

import pytest

from common.data.files import lines_of
from common.errors import UserError
from perception import budget
from perception.budget import Cost, format_seconds, make_plan, parse_seconds

COST = Cost(start=10.0, step=0.1, evaluation=2.0, test=5.0)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("2h", 7200), ("1.5h", 5400), (".5h", 1800)]
)
def test_times_are_parsed(text, seconds) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["10", "m", "-5m", "0s", "1e3s", "ten minutes", "10 m", "10M"])
def test_invalid_times_raise_errors(text) -> None:
    with pytest.raises(
        UserError,
        match=r"positive decimal number followed directly by s, m or h, such as 90s or 1\.5h",
    ):
        parse_seconds(text)


def test_times_are_written_in_a_readable_unit() -> None:
    assert list(map(format_seconds, (45, 720, 11_520))) == ["45 s", "12 min", "3.2 h"]


def needed(ways: int, steps: int, seeds: int) -> float:
    """Returns the budget in seconds that `ways` training methods need, each with `seeds` seeds.

    A method has one run for each of three learning rates, and one run for each further seed.
    """
    runs = 3 + seeds - 1
    each = runs * (10 + 0.1 * steps + 5 * 2) + seeds * 2 * 5
    return ways * each / budget.USED


@pytest.mark.parametrize("ways", [1, 2, 3])
def test_plan_spends_the_budget(ways) -> None:
    """A budget one second below the cost of n training methods drops the last method; for n = 1, it drops seeds."""
    costs = {f"way{i}": COST for i in range(3)}
    found = make_plan(costs, needed(ways, budget.LEAST_STEPS, 3) + 0.1, 10_000)
    assert found.ways == list(costs)[:ways] and found.steps >= budget.LEAST_STEPS
    assert list(found.left_out) == list(costs)[ways:]
    fewer = make_plan(costs, needed(ways, budget.LEAST_STEPS, 3) - 1, 10_000)
    assert len(fewer.ways) == max(ways - 1, 1)
    assert found.seeds == 3 and fewer.seeds == (3 if ways > 1 else 1)


def test_plan_uses_all_time_for_steps_up_to_the_configured_number() -> None:
    seconds = needed(2, 700, 3) + 0.1
    assert make_plan({"a": COST, "b": COST}, seconds, 10_000).steps == 700
    assert make_plan({"a": COST, "b": COST}, seconds, 500).steps == 500


def test_ways_that_exceed_the_budget_are_explained() -> None:
    found = make_plan({"a": COST}, 30, 1000)
    assert found.ways == [] and found.steps == 0
    # Three runs of 10 + 10 + 10 seconds, and two tests of 5 seconds.
    assert found.left_out == {"a": "3 runs of 100 steps would take about 100 s"}
    assert make_plan({}, 30, 1000).ways == []


def test_time_limit_waits_for_the_end_of_a_compilation() -> None:
    """A program that abandons a compilation by JAX would crash when it exits."""
    namespace = {"__name__": "jax._src.compiler", "time": time, "done": []}
    exec("def compile(seconds):\n    time.sleep(seconds)\n    done.append(seconds)", namespace)
    with pytest.raises(budget.TimeLimitReached), budget.time_limit(0.05):
        namespace["compile"](0.4)
        time.sleep(5)
    assert namespace["done"] == [0.4]


def test_time_limit_passes_through_code_that_replaces_exceptions() -> None:
    with pytest.raises(budget.TimeLimitReached), budget.time_limit(0.05):
        try:
            time.sleep(5)
        except budget.TimeLimitReached as error:
            raise ValueError("exception raised while checking equality") from error
    with pytest.raises(ValueError, match="another error"), budget.time_limit(5):
        raise ValueError("another error")


def test_time_limit_passes_through_code_that_reads_files(tmp_path) -> None:
    """TimeLimitReached must not be an OSError, because readers turn an OSError into an error about the file."""
    (tmp_path / "text").write_text("a line\n" * 200_000)
    with pytest.raises(budget.TimeLimitReached), budget.time_limit(0.05):
        while True:
            list(lines_of(tmp_path / "text"))
