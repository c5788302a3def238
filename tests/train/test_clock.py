"""The clock counts training seconds without compilation, evaluation and checkpoints, as required for the AUCC."""

from pathlib import Path

import pytest

from common.train import clock as clocks
from common.train.checkpoint import Checkpoints
from common.train.clock import SECTIONS, Clock
from common.train.state import Step
from tests.train import toy

HOUR = 3600.0


class FakeTime:
    """A stand-in for the module `time`. `advance` adds seconds to the clock, which by default stands still."""

    def __init__(self, perf_counter=lambda: 50.0):
        self._perf_counter, self.added = perf_counter, 0.0

    def perf_counter(self) -> float:
        return self._perf_counter() + self.added

    def advance(self, seconds: float) -> None:
        self.added += seconds


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    """Replaces the module `time` in common.train.clock by a clock that only the test advances."""
    time = FakeTime()
    monkeypatch.setattr(clocks, "time", time)
    return time


def test_seconds_count_for_the_innermost_section(time: FakeTime) -> None:
    clock = Clock()
    time.advance(100)  # time outside of all sections is not counted
    with clock.section("train"):
        time.advance(1)
        with clock.section("compile"):
            time.advance(20)
            with clock.section("eval"):
                time.advance(300)
            time.advance(40)
        time.advance(2)
    time.advance(100)
    expected = dict.fromkeys(SECTIONS, 0.0) | {"train": 3, "compile": 60, "eval": 300}
    assert clock.seconds() == expected


def test_open_section_counts_up_to_now(time: FakeTime) -> None:
    clock = Clock()
    with clock.section("train"):
        for second in (1, 2, 3):
            time.advance(1)
            assert clock["train"] == clock.seconds()["train"] == second
        before = clock.seconds()
        time.advance(1)
        assert before["train"] == 3, "a returned reading does not change"
    assert clock["train"] == 4


def test_section_ends_on_exception(time: FakeTime) -> None:
    clock = Clock()
    with clock.section("train"):
        with pytest.raises(ValueError), clock.section("eval"):
            time.advance(5)
            raise ValueError
        time.advance(1)
    assert clock["eval"] == 5 and clock["train"] == 1


def test_restored_clock_adds_to_checkpoint_seconds(time: FakeTime) -> None:
    """An old checkpoint may lack a section. The seconds of this section start at 0."""
    clock = Clock({"train": 10.0, "eval": 4.0})
    with clock.section("train"):
        time.advance(2)
    expected = dict.fromkeys(SECTIONS, 0.0) | {"train": 12, "eval": 4}
    assert clock.seconds() == expected


@pytest.mark.parametrize("eval_start", [False, True])
def test_training_seconds_exclude_compilation_evaluation_and_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eval_start: bool
) -> None:
    """Here, compilation, the start, evaluation and checkpoints take simulated hours. Training takes seconds."""
    time = FakeTime(clocks.time.perf_counter)
    monkeypatch.setattr(clocks, "time", time)

    def takes(hours: int, of: type, name: str) -> None:
        inner = getattr(of, name)

        def slow(*arguments, **options):
            time.advance(hours * HOUR)
            return inner(*arguments, **options)

        monkeypatch.setattr(of, name, slow)

    takes(1, Step, "compile")
    takes(10, toy.Toy, "evaluate")
    takes(100, Checkpoints, "save_as")
    takes(1000, toy.Toy, "start")
    task = toy.Toy(scores=[3.0, 2.0, 2.5, 2.5, 2.5])
    summary = toy.run(tmp_path, task, eval__start=eval_start, checkpoint__snapshots=10)

    # The run has one batch shape, 4 evaluations (5 with eval.start) and the test. It saves checkpoints after 5, 10, 15
    # and 20 steps, two best checkpoints, and snapshots at 10 and 20.
    hours = {"compile": 1, "eval": 10 * (5 + eval_start), "checkpoint": 100 * 8, "start": 1000}
    for section, expected in hours.items():
        assert summary[f"{section}_seconds"] == pytest.approx(expected * HOUR, abs=HOUR / 2), (
            section
        )
    assert summary["train_seconds"] < HOUR / 2
    seconds = [point["seconds"] for point in summary["curve"]["points"]]
    assert seconds == sorted(seconds) and seconds[-1] <= summary["train_seconds"]
    assert summary["aucc"]["seconds"] < 3 * HOUR / 2
