"""Ctrl-C and SIGTERM: finish the step, save, say how to go on."""

import signal
from types import FrameType


class Signals:
    """While entered, the first SIGINT or SIGTERM is remembered in `received`; a second one acts at once.

    Attributes:
      continued: whether the process was stopped (SIGSTOP) and went on (SIGCONT).
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
        """From here on a signal acts at once: nothing is left to save."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


class Preempted(Exception):
    """The run was asked to stop and has saved itself. The exit code is 128 + the signal's number, as a shell has it."""

    def __init__(self, number: int, message: str):
        super().__init__(message)
        self.exit_code = 128 + number
