"""How a run shared the machine while its seconds were measured."""

import os
import secrets
import time
from typing import Any

import psutil

SHARED = 0.05
"""Above this share of the machine's processor time in other processes a run counts as shared."""


def turns_id() -> str:
    """A new name for a set of runs that take turns: runs with equal names ran in the same minutes."""
    return f"turns {secrets.token_hex(4)}"


class Conditions:
    """Records how a run shared the machine.

    Attributes:
      sessions: one for each start of the run: `turns_id`, or "alone" without turns.
      stopped: whether the process was stopped and continued meanwhile (SIGSTOP, SIGCONT).
    """

    def __init__(self) -> None:
        self.sessions: list[str] = []
        self.stopped = False
        self._begin()

    def begin(self, session: str) -> None:
        """Notes a start of the run, behind those of its checkpoint."""
        self.sessions = [*self.sessions, session]
        self._begin()

    def _begin(self) -> None:
        self._since, self._busy, self._own = time.monotonic(), _busy(), _own()

    def others(self) -> float:
        """The share of the machine's processor time in other processes since the last start, 0 to 1."""
        capacity = (time.monotonic() - self._since) * (os.cpu_count() or 1)
        used = (_busy() - self._busy) - (_own() - self._own)
        return min(max(used / capacity, 0.0), 1.0) if capacity > 0 else 0.0

    def describe(self) -> dict[str, Any]:
        """For the summary of a run; `kind` is turns, paused, shared or alone."""
        others = self.others()
        if self.stopped:
            kind = "paused"
        elif all(session != "alone" for session in self.sessions):
            kind = "turns"
        elif len(self.sessions) > 1:
            kind = "paused"
        else:
            kind = "shared" if others > SHARED else "alone"
        return {"kind": kind, "sessions": self.sessions, "others": round(others, 3)}


def _busy() -> float:
    """Processor seconds of all processes."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0) + getattr(times, "steal", 0.0)
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # also in user
    return sum(times) - idle - guests


def _own() -> float:
    """Processor seconds of this process and of its children that have ended."""
    return sum(psutil.Process().cpu_times()[:4])
