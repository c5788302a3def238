"""Handles Ctrl-C, SIGTERM and SIGHUP: the run finishes its step, saves a checkpoint and prints how to resume.

A signal also interrupts a running evaluation. The resumed run repeats this evaluation.
"""

import signal
from collections.abc import Callable
from types import FrameType

from common.runtime.processes import Votes


class Signals:
    """A context manager that records the first SIGINT, SIGTERM and SIGHUP instead of ending the process.

    A second SIGINT or SIGTERM goes to the previous handler, which usually ends the process. If a recorded signal has
    not stopped the run, `release` or the end of the context passes the signal on to its previous handler. A process
    that ignores SIGHUP, as below nohup, still ignores it.

    Attributes:
      received: number of the last signal; None before the first signal. A vote may set the number of a signal that
        another process received.
      continued: whether the process was suspended and continued (SIGCONT) within the context.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.continued = False
        self._before: dict[int, object] = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        # After a terminal is closed, both the shell and the kernel send SIGHUP: the second SIGHUP must not end a run
        # that is saving.
        if number != signal.SIGHUP:
            signal.signal(number, self._before[number])

    def _continue(self, number: int, frame: FrameType | None) -> None:
        self.continued = True

    def __enter__(self) -> "Signals":
        self._before[signal.SIGCONT] = signal.signal(signal.SIGCONT, self._continue)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind:  # The exception already ends the run, so do not raise the signal again.
            self.received = None
        self.release()

    def interruption(self) -> Callable[[], None]:
        """Returns a function that raises Interrupted on all processes after a signal on any process.

        All processes must call the returned function equally often, such as between the batches of an evaluation.
        """
        votes = Votes()

        def check() -> None:
            if votes.due():
                (number,) = votes.cast([self.received or 0])
                if number:
                    self.received = number
                    raise Interrupted

        return check

    def release(self) -> None:
        """Restores the previous signal handlers. Raises a recorded signal again, to call its previous handler."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.received:
            number, self.received = self.received, None
            signal.raise_signal(number)


class Interrupted(Exception):
    """Raised after a signal, to interrupt an evaluation."""
