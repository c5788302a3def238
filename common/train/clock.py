"""Wall-clock time of a run by section. Checkpoints keep it, so it adds up over restarts."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

SECTIONS = ("start", "train", "compile", "eval", "checkpoint")


class Clock:
    """Seconds per section. "train" is the time of the loop without its other sections."""

    def __init__(self, seconds: dict[str, float] | None = None):
        self._seconds = {name: 0.0 for name in SECTIONS} | (seconds or {})
        self._section = None

    @contextmanager
    def section(self, name: str | None) -> Iterator[None]:
        """Counts the time inside for `name` instead of the enclosing section; None counts it for no section."""
        before = self._switch(name)
        try:
            yield
        finally:
            self._switch(before)

    def paused(self) -> AbstractContextManager[None]:
        """Counts the time inside for no section."""
        return self.section(None)

    def _switch(self, name: str | None) -> str | None:
        now = time.perf_counter()
        if self._section is not None:
            self._seconds[self._section] += now - self._since
        before, self._section, self._since = self._section, name, now
        return before

    def seconds(self) -> dict[str, float]:
        """Seconds of every section up to now."""
        self._switch(self._section)
        return dict(self._seconds)

    def __getitem__(self, name: str) -> float:
        return self.seconds()[name]
