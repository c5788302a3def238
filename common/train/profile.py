"""A profiler trace of some training steps, for xprof or TensorBoard."""

from dataclasses import dataclass
from pathlib import Path

import jax

from common.config import check
from common.runtime.processes import is_main


@dataclass
class Profile:
    """Traces the steps `first` to `last`, both included; 0 traces nothing.

    Attributes:
      folder: of the trace.
    """

    first: int = 0
    last: int = 0
    folder: Path | None = None
    running: bool = False

    @classmethod
    def parse(cls, given: str) -> "Profile":
        """Parses "FIRST:LAST", counted from 1; "" traces nothing.

        Raises:
          UserError: the text has another form.
        """
        if not given:
            return cls()
        first, _, last = given.partition(":")
        check(
            first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last),
            f"--profile={given} must be FIRST:LAST, two steps in their order, the first of all being 1",
        )
        return cls(int(first), int(last))

    def check(self, steps: int) -> None:
        """Checks that a run of `steps` reaches the first traced step.

        Raises:
          UserError: it ends before.
        """
        check(
            self.first <= steps,
            f"--profile={self.first}:{self.last} begins behind the last step of the run, {steps}",
        )

    def before(self, number: int) -> None:
        """Starts the trace before step `number`, if that is traced."""
        if self.folder is not None and not self.running and self.first <= number <= self.last:
            jax.profiler.start_trace(self.folder)
            self.running = True

    def after(self, number: int) -> None:
        """Ends the trace after step `number`, if that is the last one."""
        if self.running and number >= self.last:
            self.close()

    def close(self) -> None:
        """Writes the trace, if one is running."""
        if self.running:
            jax.profiler.stop_trace()
            self.running = False
            if is_main():
                print(f"trace of steps {self.first} to {self.last} at most: {self.folder}")
