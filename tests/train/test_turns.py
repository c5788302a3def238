"""Several runs that take turns in one process: results as in separate runs, and comparable training seconds."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.errors import Preempted, UserError
from common.runtime.signals import Signals
from common.train import conditions as conditions_module
from common.train.conditions import Conditions
from common.train.loop import fit
from common.train.turns import Job, fit_in_turns
from tests.train import toy


def job(folder: Path, name: str, task: toy.Toy | None = None, **fields: object) -> Job:
    return Job(toy.config(**fields), task or toy.Toy(), folder / name)


def checksum(workdir: Path) -> int:
    latest = max((workdir / "checkpoints" / "latest").iterdir(), key=lambda path: int(path.name))
    return json.loads((latest / "meta" / "metadata").read_text())["checksum"]


def values(summary: dict) -> list[tuple]:
    return [(p["step"], p["value"]) for p in summary["curve"]["points"]]


UNEQUAL = {"one": {"seed": 1}, "two": {"seed": 2, "train__steps": 13}, "three": {"seed": 3}}
"""Fields of three runs with different seeds, of which "two" has fewer steps."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of the runs `UNEQUAL`, trained one after the other."""
    folder = tmp_path_factory.mktemp("alone")
    for name, fields in UNEQUAL.items():
        fit(*job(folder, name, **fields), toy.mesh())
    return folder


@pytest.mark.parametrize(
    "turn", [3, *(pytest.param(turn, marks=pytest.mark.medium) for turn in (1, 50))]
)
def test_turns_change_no_result(tmp_path, alone, turn):
    jobs = [job(tmp_path, name, **fields) for name, fields in UNEQUAL.items()]
    for name, summary in zip(UNEQUAL, fit_in_turns(jobs, toy.mesh(), turn), strict=True):
        expected = json.loads((alone / name / "summary.json").read_text())
        assert values(summary) == values(expected) and summary["test"] == expected["test"]
        assert checksum(tmp_path / name) == checksum(alone / name)
        assert summary["timing"]["kind"] == "turns"


class Noted(toy.Toy):
    """The toy task. Records the order of evaluations over all runs. Sends SIGTERM in evaluation number `stop_at`."""

    def __init__(self, name: str, order: list[str], stop_at: int = 0, **options):
        super().__init__(**options)
        self.name, self.order, self.stop_at = name, order, stop_at

    def evaluate(self, values, split):
        self.order.append(self.name)
        if self.stop_at and self.order.count(self.name) == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().evaluate(values, split)


def test_each_round_trains_every_run_once_in_a_new_order(tmp_path):
    order: list[str] = []
    fields = {"eval__test": False, "eval__steps": 1, "train__steps": 30}
    # With equal scores, no step after the first is the best, so no further best checkpoint is saved.
    jobs = [job(tmp_path, name, Noted(name, order, scores=[1.0]), **fields) for name in "abc"]
    fit_in_turns(jobs, toy.mesh(), 1)
    rounds = ["".join(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert len(rounds) == 30 and all(set(one) == set("abc") for one in rounds)
    assert len(set(rounds)) == 6, "every order of three runs occurs"


@pytest.mark.medium
def test_signal_saves_all_runs_in_turns_and_they_resume(tmp_path, capsys):
    order: list[str] = []
    jobs = [
        job(tmp_path, "a"),
        job(tmp_path, "b", Noted("b", order, stop_at=2)),
        job(tmp_path, "c"),
    ]
    with pytest.raises(Preempted, match=r"b; .* resumes the run, and the 2 runs that took turns"):
        fit_in_turns(jobs, toy.mesh(), 4)
    lines = capsys.readouterr().err.splitlines()
    assert {line.partition(": step ")[0] for line in lines} == {*"abc"}, "each line names its run"
    jobs = [job(tmp_path, name) for name in "abc"]
    resumed = fit_in_turns(jobs, toy.mesh(), 4)
    whole = fit(*job(tmp_path / "alone", "a"), toy.mesh())
    assert [values(summary) for summary in resumed] == [values(whole)] * 3
    assert all(len(summary["timing"]["sessions"]) == 2 for summary in resumed)
    assert len({tuple(summary["timing"]["sessions"]) for summary in resumed}) == 1


@pytest.mark.medium
@pytest.mark.parametrize(("ahead", "kind"), [(3, "turns"), (6, "paused")])
def test_runs_more_than_a_turn_apart_count_as_not_alternating(tmp_path, ahead, kind):
    """After the process was killed, one run may be ahead of the other.

    The run that is behind then trains the missing steps alone. If these are more than a turn, the summaries do not
    say that the runs took turns.
    """
    fields = {"eval__test": False, "checkpoint__steps": 3}
    stopped = [job(tmp_path, n, Noted(n, [], stop_at=1), **fields) for n in "ab"]
    for number, one in zip((3, 3 + ahead), stopped, strict=True):
        one.config.eval.steps = number
        with pytest.raises(Preempted):
            fit_in_turns([one], toy.mesh(), 3)
    jobs = [job(tmp_path, name, **fields) for name in "ab"]
    for one, number in zip(jobs, (3, 3 + ahead), strict=True):
        one.config.eval.steps = number
    summaries = fit_in_turns(jobs, toy.mesh(), 3)
    assert {summary["timing"]["kind"] for summary in summaries} == {kind}


def test_failing_run_leaves_the_others_saved(tmp_path):
    jobs = [job(tmp_path, "a"), job(tmp_path, "b", toy.Toy(poison=7)), job(tmp_path, "c")]
    with pytest.raises(UserError, match="the loss is nan"):
        fit_in_turns(jobs, toy.mesh(), 3)
    for name in "ac":
        steps = [int(path.name) for path in (tmp_path / name / "checkpoints" / "latest").iterdir()]
        assert max(steps) >= 6


def test_finished_runs_take_no_turns(tmp_path):
    first = fit(*job(tmp_path, "a"), toy.mesh())
    jobs = [job(tmp_path, "a"), job(tmp_path, "b", seed=2)]
    again, other = fit_in_turns(jobs, toy.mesh(), 3)
    assert values(again) == values(first) and again["timing"] == first["timing"]
    assert other["timing"]["kind"] == "turns"


def test_run_resumed_alone_is_marked_as_paused(tmp_path):
    fit(*job(tmp_path, "a", train__steps=10), toy.mesh())
    assert fit(*job(tmp_path, "a"), toy.mesh())["timing"]["kind"] == "paused"


def test_suspended_process_is_marked_as_paused():
    with Signals() as signals:
        conditions = Conditions().begin("turns x", signals)
        assert conditions.describe()["kind"] == "turns"
        os.kill(os.getpid(), signal.SIGCONT)
    assert conditions.describe()["kind"] == "paused"


def test_runs_that_were_suspended_before_they_resumed_are_marked_as_paused(tmp_path):
    class Suspended(toy.Toy):
        def evaluate(self, values, split):
            os.kill(os.getpid(), signal.SIGCONT)
            os.kill(os.getpid(), signal.SIGTERM)
            return super().evaluate(values, split)

    with pytest.raises(Preempted):
        fit_in_turns([job(tmp_path, "a", Suspended()), job(tmp_path, "b")], toy.mesh(), 5)
    resumed = fit_in_turns([job(tmp_path, name) for name in "ab"], toy.mesh(), 5)
    assert [summary["timing"]["kind"] for summary in resumed] == ["paused"] * 2


def test_processor_time_of_other_processes_is_measured(monkeypatch):
    """In ten seconds on two cores, this process uses 4 and other processes 5 of the 20 processor seconds."""
    clock = {"now": 100.0, "busy": 50.0, "own": 7.0}
    monkeypatch.setattr(conditions_module.time, "monotonic", lambda: clock["now"])
    monkeypatch.setattr(conditions_module, "_busy", lambda: clock["busy"])
    monkeypatch.setattr(conditions_module, "_own", lambda: clock["own"])
    monkeypatch.setattr(conditions_module.os, "cpu_count", lambda: 2)
    conditions = Conditions(["alone"])
    clock.update(now=110.0, busy=59.0, own=11.0)
    assert conditions.others() == pytest.approx(5 / 20)
    assert conditions.describe() == {"kind": "shared", "sessions": ["alone"], "others": 0.25}
    clock.update(busy=54.9)
    assert conditions.describe()["kind"] == "alone"


def test_processor_times_of_all_processes_and_of_this_process():
    busy, own = conditions_module._busy(), conditions_module._own()
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        pass
    used = conditions_module._own() - own
    assert 0 < used < 1.0
    assert conditions_module._busy() - busy > used / 2


@contextmanager
def _load(code: str) -> Iterator[None]:
    """While the context is open, runs the Python code in as many processes as the machine has cores."""
    import subprocess

    started = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


HALF = "import time\nwhile True:\n t = time.monotonic() % 8\n if t > 4: time.sleep(8 - t)\n"
"""Code that uses the processor for four seconds, then sleeps for four seconds, again and again."""


class Heavy(toy.Toy):
    """A toy task with steps of several milliseconds, whose time is mostly processor time."""

    def loss(self, model, batch, key):
        import jax
        import jax.numpy as jnp

        error, weight = super().loss(model, batch, key)
        square = jnp.full((256, 256), batch["x"].mean())
        busy = jax.lax.fori_loop(0, 20, lambda _, x: jnp.tanh(x @ x), square)
        return error + 0.0 * busy.sum(), weight


@pytest.mark.timing
def test_only_turns_give_equal_runs_equal_seconds_within_3_percent(tmp_path):
    def seconds(folder: Path, turn: int) -> list[float]:
        jobs = [
            job(folder, name, Heavy(), train__steps=1500, train__log_steps=1000, eval__steps=750)
            for name in "abc"
        ]
        return [summary["train_seconds"] for summary in fit_in_turns(jobs, toy.mesh(), turn)]

    def spread(found: list[float]) -> float:
        return max(found) / min(found) - 1

    with _load(HALF):
        assert spread(seconds(tmp_path / "turns", 5)) < 0.03
        assert spread(seconds(tmp_path / "without", 0)) > 0.03
