"""Ctrl-C and SIGTERM: finish the step, save a checkpoint, print how to resume."""

import signal
from types import FrameType


class Signals:
    """A context that stores the first SIGINT or SIGTERM in `received`; a second one acts at once.

    Attributes:
      continued: whether the process was suspended (SIGSTOP, SIGCONT) meanwhile.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.continued = False
        self._before: dict[int, object] = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        signal.signal(number, self._before[number])

    def _continue(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.continued = True

    def __enter__(self) -> "Signals":
        self._before[signal.SIGCONT] = signal.signal(signal.SIGCONT, self._continue)
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        """Restores the previous signal handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


class Preempted(Exception):
    """A signal stopped the run, which is saved. The exit code is 128 + the signal's number, as in a shell."""

    def __init__(self, number: int, message: str):
        super().__init__(message)
        self.exit_code = 128 + number
