"""Writes a profiler trace of training steps, for xprof or TensorBoard."""

from dataclasses import dataclass
from pathlib import Path

import jax

from common.errors import check
from common.runtime.processes import is_main
from common.train.hooks import Hook
from common.train.run import Run


@dataclass
class Profile(Hook):
    """Traces the steps `first` to `last`, both included and counted from 1.

    Attributes:
      folder: folder of the running trace; None if no trace is running.
    """

    first: int
    last: int
    folder: Path | None = None

    @classmethod
    def parse(cls, text: str) -> "Profile":
        """Parses --profile=FIRST:LAST, two integers. Raises a UserError unless 1 <= FIRST <= LAST."""
        first, _, last = text.partition(":")
        check(
            first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last),
            f"--profile={text} must be FIRST:LAST, two steps with 1 <= FIRST <= LAST",
        )
        return cls(int(first), int(last))

    def check(self, steps: int, trained: int = 0) -> None:
        """Raises a UserError if no step to trace comes after step `trained` of a run of `steps` steps."""
        option = f"--profile={self.first}:{self.last}"
        remedy = "choose earlier steps" if steps else "leave out --profile"
        check(
            self.first <= steps,
            f"{option} begins after the last step of the run, {steps}: {remedy}",
        )
        check(
            trained < self.last,
            f"{option} ends before the next step of the run, {trained + 1}: choose later steps",
        )

    def before_step(self, run: Run) -> None:
        if self.folder is None and self.first <= run.step + 1 <= self.last:
            self.folder = run.workdir / "profile"
            jax.profiler.start_trace(self.folder)

    def after_step(self, run: Run, step: int, metrics: dict[str, float], flops: float) -> None:
        if step >= self.last:
            self.close()

    def close(self) -> None:
        """Stops and writes the running trace. Does nothing if no trace is running."""
        if self.folder is None:
            return
        jax.profiler.stop_trace()
        if is_main():
            print(
                f"trace of steps {self.first} to {self.last}, as far as this command trained them: {self.folder}"
            )
        self.folder = None
