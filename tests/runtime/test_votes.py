"""Votes of several processes: all processes vote at the same call, about once a second."""

import numpy as np
import pytest

from common.runtime import processes
from common.runtime.processes import Votes


class Clock:
    """A fake clock of one process, and a fake collective maximum.

    Args:
      slower: milliseconds since the previous vote, as the other process reports them in every vote.
      count: number of processes.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slower: int = 0, count: int = 2):
        self.now, self.slower = 0.0, slower
        monkeypatch.setattr(processes.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(processes.jax, "process_count", lambda: count)
        monkeypatch.setattr(processes, "all_reduce_max", self.reduce)

    def reduce(self, votes: np.ndarray) -> np.ndarray:
        return np.maximum(votes, [0] * (len(votes) - 1) + [self.slower])

    def votes(self, votes: Votes, calls: int, seconds: float) -> list[int]:
        """Returns the numbers of the calls at which the processes vote. Each call takes `seconds`."""
        found = []
        for call in range(1, calls + 1):
            self.now += seconds
            if votes.due():
                assert votes.cast([15, 0]) == [15, 0]
                found.append(call)
        return found


def test_votes_are_about_a_second_apart(monkeypatch):
    found = Clock(monkeypatch).votes(Votes(), 500, 0.05)
    assert found[:5] == [1, 3, 7, 15, 31], "the distance doubles at first"
    assert 18 <= found[-1] - found[-2] <= 20


def test_votes_are_at_most_25_calls_apart(monkeypatch):
    """The limit is needed because calls may become slower."""
    found = Clock(monkeypatch).votes(Votes(), 5000, 0.0001)
    assert found[-1] - found[-2] == 25


@pytest.mark.parametrize("seconds", [0.6, 2.0])
def test_processes_vote_at_every_slow_call(monkeypatch, seconds):
    clock, votes = Clock(monkeypatch), Votes()
    clock.votes(votes, 5000, 0.001)
    assert clock.votes(votes, 25, seconds)[0] <= 25
    assert clock.votes(votes, 5, seconds) == [1, 2, 3, 4, 5]


def test_slowest_process_determines_the_calls_between_votes(monkeypatch):
    found = Clock(monkeypatch, slower=1000).votes(Votes(), 20, 0.001)
    assert found == [*range(1, 21)]


def test_hastened_vote_is_at_the_next_call(monkeypatch):
    clock, votes = Clock(monkeypatch), Votes()
    clock.votes(votes, 1000, 0.001)
    votes.hasten()
    assert clock.votes(votes, 1, 0.001) == [1]


def test_single_process_votes_at_every_call(monkeypatch):
    assert Clock(monkeypatch, count=1).votes(Votes(), 50, 0.001) == [*range(1, 51)]
