"""Measures the wall-clock seconds of a run's sections: `Task.start`, training, compilation, evaluation, checkpoints."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

SECTIONS = ("start", "train", "compile", "eval", "checkpoint")


class Clock:
    """Measures the seconds of each section. The seconds of a section exclude nested sections.

    Args:
      seconds: {section: seconds} up to the checkpoint from which the run resumes; None for a new run.
    """

    def __init__(self, seconds: dict[str, float] | None = None):
        self._seconds = {name: 0.0 for name in SECTIONS} | (seconds or {})
        self._section = None

    @contextmanager
    def section(self, name: str | None) -> Iterator[None]:
        """Context manager that adds the time of its block to section `name`; to no section if `name` is None.

        The time of a nested section counts for the nested section alone.
        """
        before = self._switch(name)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, name: str | None) -> str | None:
        now = time.perf_counter()
        if self._section is not None:
            self._seconds[self._section] += now - self._since
        before, self._section, self._since = self._section, name, now
        return before

    def seconds(self) -> dict[str, float]:
        """Returns {section: seconds up to now}."""
        self._switch(self._section)
        return dict(self._seconds)

    def __getitem__(self, name: str) -> float:
        return self.seconds()[name]
