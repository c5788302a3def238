"""A trace of some steps, which xprof and TensorBoard open: where their time goes."""

from dataclasses import dataclass
from pathlib import Path

import jax

from common.config import check
from common.runtime.processes import is_main


@dataclass
class Profile:
    """Traces the steps `first` to `last`, both included; 0 traces none.

    Attributes:
      folder: where the trace goes.
    """

    first: int = 0
    last: int = 0
    folder: Path | None = None
    running: bool = False

    @classmethod
    def parse(cls, given: str) -> "Profile":
        """ "FIRST:LAST", counted from 1; "" for none.

        Raises:
          UserError: it is something else.
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
        """A run of as many steps has to reach the first one.

        Raises:
          UserError: it does not.
        """
        check(
            self.first <= steps,
            f"--profile={self.first}:{self.last} begins behind the last step of the run, {steps}",
        )

    def before(self, number: int) -> None:
        """Called ahead of step `number`."""
        if self.folder is not None and not self.running and self.first <= number <= self.last:
            jax.profiler.start_trace(self.folder)
            self.running = True

    def after(self, number: int) -> None:
        """Called when step `number` is done."""
        if self.running and number >= self.last:
            self.close()

    def close(self) -> None:
        """Writes what was traced."""
        if self.running:
            jax.profiler.stop_trace()
            self.running = False
            if is_main():
                print(f"trace of steps {self.first} to {self.last} at most: {self.folder}")
