"""Records whether a run shared the machine with other processes, because its seconds then depend on their load."""

import os
import time
from collections.abc import Sequence
from typing import Any

import psutil

from common.runtime.signals import Signals

SHARED = 0.05
"""A run shared the machine if other processes used more than this fraction of the machine's CPU time."""


def cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    # Containers and Slurm restrict a process to some cores. macOS has no `sched_getaffinity`.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Conditions:
    """Use of the machine by this run and by other processes.

    Attributes:
      sessions: an id for each start or resume of the run. Runs that train in turns have the same id, if the steps at
        which they begin are at most one turn apart. The id of all other runs is "alone".
    """

    def __init__(
        self, sessions: Sequence[str] = (), stopped: bool = False, signals: Signals | None = None
    ) -> None:
        """Begins to measure the use of the machine.

        Args:
          stopped: whether the run was suspended before the checkpoint from which it resumes.
          signals: the `Signals` of the training, which record whether this process was suspended; None before training.
        """
        self.sessions, self._stopped = [*sessions], stopped
        self._signals = signals or Signals()
        self._since, self._busy, self._own = time.monotonic(), _busy(), _own()

    def begin(self, session: str, signals: Signals) -> "Conditions":
        """Returns the conditions of a run that now starts or resumes, with the id `session` added to `sessions`.

        `others` of the result measures from now on.
        """
        return Conditions([*self.sessions, session], self.stopped, signals)

    @property
    def stopped(self) -> bool:
        """Whether the run was suspended and continued, in this process or before the checkpoint it resumed from."""
        return self._stopped or self._signals.continued

    def others(self) -> float:
        """Returns the fraction (0 to 1) of the machine's CPU time that other processes used since `__init__`."""
        capacity = (time.monotonic() - self._since) * (os.cpu_count() or 1)
        used = (_busy() - self._busy) - (_own() - self._own)
        return min(max(used / capacity, 0.0), 1.0) if capacity > 0 else 0.0

    def describe(self) -> dict[str, Any]:
        """Returns the field `timing` of a run's summary: `sessions`, `others()` and `kind`.

        A session is the time from a start or resume of the run to its next interruption or its end. `kind` is the first
        of these values that applies:
        - "paused": the run was suspended; or it has several sessions, and the id of at least one is "alone".
        - "turns": no session has the id "alone".
        - "shared": other processes used more than `SHARED` of the CPU time.
        - "alone": none of these.
        """
        others, turns = self.others(), all(session != "alone" for session in self.sessions)
        if self.stopped or (len(self.sessions) > 1 and not turns):
            kind = "paused"
        elif turns:
            kind = "turns"
        else:
            kind = "shared" if others > SHARED else "alone"
        return {"kind": kind, "sessions": self.sessions, "others": round(others, 3)}


def _busy() -> float:
    """Returns the CPU seconds that all processes of the machine have used."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0) + getattr(times, "steal", 0.0)
    # `sum(times)` counts the time of virtual machines twice, because `user` includes their time.
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    return sum(times) - idle - guests


def _own() -> float:
    """Returns the CPU seconds that this process and its terminated child processes have used."""
    return sum(psutil.Process().cpu_times()[:4])
