"""Where the wall-clock time of a run goes; kept in checkpoints, so that it adds up over restarts."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

SECTIONS = ("start", "train", "compile", "eval", "checkpoint")


class Clock:
    """Seconds per section. "train" is what remains of the loop's time when the other sections are taken out."""

    def __init__(self, seconds: dict[str, float] | None = None):
        self._seconds = {name: 0.0 for name in SECTIONS} | (seconds or {})
        self._section = None

    @contextmanager
    def section(self, name: str | None) -> Iterator[None]:
        """Counts the time inside for `name`, and not for the section around it; for None see `paused`."""
        before = self._switch(name)
        try:
            yield
        finally:
            self._switch(before)

    def paused(self) -> AbstractContextManager[None]:
        """Counts the time inside for nothing."""
        return self.section(None)

    def _switch(self, name: str | None) -> str | None:
        now = time.perf_counter()
        if self._section is not None:
            self._seconds[self._section] += now - self._since
        before, self._section, self._since = self._section, name, now
        return before

    def seconds(self) -> dict[str, float]:
        """Up to now."""
        self._switch(self._section)
        return dict(self._seconds)

    def __getitem__(self, name: str) -> float:
        return self.seconds()[name]
