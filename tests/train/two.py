"""Cases of training in two processes: `python -m tests.train.two FOLDER CASE...` is one of the processes.

Each process prints one line of JSON per case: [case, result]. After the last case, the processes train on different
data, which ends both processes with an error.
"""

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np
import psutil
import pytest

from common.errors import Preempted, UserError
from common.runtime import processes, program
from common.sharding import make_mesh
from common.train import agreement, ahead, checkpoint, clock, frozen, loop
from common.train.evaluate import PerExample
from common.train.loop import fit
from common.train.state import Step
from common.train.turns import Job, fit_in_turns
from common.train.workdir import lock_workdir
from tests.train import toy

DELAY = 3.0
"""Delay of the compilation in `late_compilation`, in seconds."""

LONG_DELAY, STEP = 20.0, 50.0
"""Delay of a compilation and simulated duration of a training step in `two_late_compilations`, in seconds."""


class TwoToy(toy.Toy):
    """The toy task, evaluated in batches of one example on each process.

    Args:
      data: fingerprint of the train split.
      batches: number of evaluation batches.
      during: function called before each evaluation batch.
    """

    def __init__(self, data: str = "equal", batches: int = 1, during: Callable = lambda: None):
        super().__init__()
        self.data, self.count, self.during = data, batches, during
        self.rows = PerExample(self._errors)

    def fingerprints(self) -> dict[str, str]:
        return {"the train split": self.data}

    def _errors(self, model, batch):
        return {"error": abs(model(batch["x"]) - batch["x"].sum(1, keepdims=True))[:, 0]}

    def evaluate(self, values, split):
        self.evaluated.append(split)

        def batches():
            for number in range(self.count):
                self.during()
                ids = 2 * number + jax.process_index() + np.zeros(1, np.int32)
                yield {"x": np.ones((1, 2), np.float32), "ids": ids}

        found = self.rows(values, batches(), 2 * self.count)
        return {"error": float(found["error"].mean())}


def train(workdir: Path, task: toy.Toy | None = None, **fields: object) -> dict:
    fields = {"eval__test": False} | fields
    return fit(toy.config(**fields), task or TwoToy(), workdir, make_mesh({"data": -1}))


def fault(call: Callable[[], object]) -> str:
    with pytest.raises((UserError, Preempted)) as caught:
        call()
    return str(caught.value)


def last() -> bool:
    return jax.process_index() == 1


def differing_data(workdir: Path) -> str:
    return fault(lambda: train(workdir, TwoToy(f"of process {jax.process_index()}")))


def differing_config(workdir: Path) -> str:
    return fault(lambda: train(workdir, seed=1 + last()))


def differing_draws(workdir: Path) -> str:
    draw = frozen.draw_frozen
    with pytest.MonkeyPatch.context() as patch:
        change = np.float32(1e-7 * last())
        drawn = lambda *a: {name: x + change for name, x in draw(*a).items()}  # noqa: E731
        patch.setattr(frozen, "draw_frozen", drawn)
        return fault(lambda: train(workdir))


def separate_workdirs(workdir: Path) -> str:
    """Each process has its own folder, with the lock file of an earlier start."""
    folder = workdir / str(jax.process_index())
    with lock_workdir(folder):
        pass
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "VISIBLE_SECONDS", 1)
        return fault(lambda: train(folder)).replace(str(workdir), "W")


def unreadable_checkpoint(workdir: Path) -> int:
    """Returns the step from which a run resumes.

    The run has checkpoints of steps 5 and 10. Process 1 cannot read the checkpoint of step 10.
    """
    train(workdir, train__steps=10)
    read = checkpoint._meta

    def broken(path: Path) -> dict:
        if last() and path.name == "10":
            raise OSError("Input/output error")
        return read(path)

    task = TwoToy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "_meta", broken)
        train(workdir, task, train__steps=15)
    return task.starts[0]["next"]


def late_checkpoints() -> AbstractContextManager:
    """Returns a context manager that delays the background threads of process 1 before each barrier of a checkpoint."""
    unless_failing = checkpoint.unless_failing

    def late(barrier: Callable[..., None]) -> Callable[..., None]:
        def wait(**arguments: object) -> None:
            if last() and threading.current_thread() is not threading.main_thread():
                time.sleep(0.2)
            barrier(**arguments)

        return unless_failing(wait)

    return mock.patch.object(checkpoint, "unless_failing", late)


def saved_steps(workdir: Path) -> list[int]:
    """Returns the steps of the latest checkpoints of a run."""
    return sorted(int(path.name) for path in (workdir / "checkpoints/latest").iterdir())


def checkpoints_at_the_same_time(workdir: Path) -> list[int]:
    """Returns the steps of the latest checkpoints of a run.

    The run saves a best checkpoint while the latest checkpoint still waits for process 1.
    """
    with late_checkpoints():
        train(workdir, train__steps=3, eval__steps=1, checkpoint__steps=1)
    return saved_steps(workdir)


def checkpoints_in_turns(workdir: Path) -> list[list[int]]:
    """Trains two runs in turns. Returns the steps of the latest checkpoints of each run.

    A run saves a checkpoint while the checkpoint of the other run still waits for process 1.
    """
    fields = {"train__steps": 3, "eval__steps": 3, "eval__test": False, "checkpoint__steps": 1}
    folders = [workdir / "one", workdir / "two"]
    jobs = [Job(toy.config(**fields), TwoToy(), folder) for folder in folders]
    with late_checkpoints():
        fit_in_turns(jobs, make_mesh({"data": -1}), 1)
    return [saved_steps(folder) for folder in folders]


def coordinator_hosts(workdir: Path) -> list[str]:
    """Returns the addresses at which this process listens on the port of JAX's coordinator."""
    port = int(os.environ["TRAINLESS_COORDINATOR"].rpartition(":")[2])
    sockets = psutil.Process().net_connections(kind="inet")
    return [s.laddr.ip for s in sockets if s.status == "LISTEN" and s.laddr.port == port]


def late_compilation(workdir: Path) -> dict[str, float]:
    """Returns training and compilation seconds of a run. The compilation in process 1 ends `DELAY` seconds late."""
    compile_step = Step.compile

    def late(*arguments: object) -> None:
        compile_step(*arguments)
        time.sleep(DELAY * last())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Step, "compile", late)
        summary = train(workdir, train__steps=3)
    return {name: summary[f"{name}_seconds"] for name in ("train", "compile")}


class TwoShapes(TwoToy):
    """From step 11 on, the batches have twice as many rows, so the step is compiled a second time."""

    def batches(self, start):
        for batch, position in super().batches(start):
            copies = 1 + (position["next"] > 10)
            yield {name: np.tile(x, (copies, 1)) for name, x in batch.items()}, position


def two_late_compilations(workdir: Path) -> dict[str, dict[str, float]]:
    """Compares a run of 20 steps with the same run in which each process once compiles 20 s late.

    Returns:
      {run: measurements of this process}; see `measured`.
    """
    return {
        "undisturbed": measured(workdir / "undisturbed", {}),
        "late": measured(workdir / "late", {1: 1, 2: 0}),
    }


def measured(workdir: Path, late: dict[int, int]) -> dict[str, float]:
    """Trains 20 steps. Each step advances the clock of the run by `STEP` simulated seconds.

    The clock adds these seconds to the real time of waits, compilations and steps.

    Args:
      late: {number of the compilation: process that compiles `LONG_DELAY` seconds late}.

    Returns:
      "train" and "compile" seconds; "waited", the longest wait for the compilation of the other process; "grown", the
      largest growth of the training seconds from the start of a compilation to the end of the wait that follows.
    """
    steps, compile_step, call_step, barrier = loop._steps, Step.compile, Step.__call__, loop.barrier
    runs, before, grown, waited = [], [], [], []
    simulated = SimpleNamespace(seconds=0.0)
    simulated.perf_counter = lambda: time.perf_counter() + simulated.seconds

    def noted_steps(run, *arguments):
        runs.append(run)
        return steps(run, *arguments)

    def late_compile(*arguments):
        before.append(runs[0].clock["train"])
        compile_step(*arguments)
        if late.get(len(before)) == jax.process_index():
            time.sleep(LONG_DELAY)

    def timed_barrier(name):
        begun = time.monotonic()
        barrier(name)
        if name == "compiled":
            waited.append(time.monotonic() - begun)
            grown.append(runs[0].clock["train"] - before[-1])

    def long_step(*arguments):
        simulated.seconds += STEP
        return call_step(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "time", simulated)
        patch.setattr(loop, "_steps", noted_steps)
        patch.setattr(loop, "barrier", timed_barrier)
        patch.setattr(Step, "compile", late_compile)
        patch.setattr(Step, "__call__", long_step)
        summary = train(workdir, TwoShapes(), train__steps=20, eval__steps=100)
    assert len(before) == 2
    seconds = {name: summary[f"{name}_seconds"] for name in ("train", "compile")}
    return seconds | {"waited": max(waited, default=0.0), "grown": max(grown, default=0.0)}


def stopped_step(workdir: Path, task: toy.Toy, **fields: object) -> int:
    """Returns the step of the checkpoint that is saved after SIGTERM."""
    line = fault(lambda: train(workdir, task, train__steps=60, **fields))
    return int(re.fullmatch(r"SIGTERM: saved step (\d+) in .*", line)[1])


def terminate() -> None:
    """Sends SIGTERM to process 1."""
    if last():
        os.kill(os.getpid(), signal.SIGTERM)


def signal_in_evaluation(workdir: Path) -> tuple[int, int]:
    """Returns (saved step, number of evaluated batches) if process 1 gets SIGTERM in an evaluation of slow batches."""
    done = []

    def during() -> None:
        done.append(time.sleep(0.05))
        if len(done) == 20:
            terminate()

    step = stopped_step(workdir, TwoToy(batches=200, during=during))
    return step, len(done)


class Late(TwoToy):
    """Delays every batch by `seconds`. Process 1 gets SIGTERM before step `at`.

    With `shapes`, every batch from step `at` + 3 on has a new number of rows.
    """

    def __init__(self, at: int, seconds: float = 0.0, shapes: bool = False):
        super().__init__()
        self.at, self.seconds, self.shapes = at, seconds, shapes

    def batches(self, start):
        for batch, position in super().batches(start):
            time.sleep(self.seconds)
            step = position["next"] - 2  # two batches are copied to the devices in advance
            if step == self.at:
                terminate()
            if self.shapes:
                copies = 1 + max(0, step - self.at)
                batch = {name: np.tile(x, (copies, 1)) for name, x in batch.items()}
            yield batch, position


def signal_between_slow_steps(workdir: Path) -> int:
    return stopped_step(workdir, Late(3, seconds=0.5), eval__steps=100)


def signal_between_compilations(workdir: Path) -> int:
    """Returns the saved step.

    The clock of votes is frozen: without compilations, processes vote at steps 1, 3, 7, 15, ...
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: 0.0))
        return stopped_step(workdir, Late(32, shapes=True), eval__steps=100)


class ManyShapes(TwoToy):
    """Has ten shapes to compile ahead."""

    def batch_samples(self):
        batch, _ = next(self.batches(None))
        return ({name: np.tile(x, (n, 1)) for name, x in batch.items()} for n in range(2, 12))


def signal_while_compiling_ahead(workdir: Path) -> tuple[int, int]:
    """Returns (saved step, number of shapes whose compilation has begun on this process).

    The shapes are compiled one after the other, each in half a second. Process 1 gets SIGTERM while it compiles its
    second shape.
    """
    begun, compile_one = [], Step.compile_now

    def slow(step: Step, *arguments: object) -> None:
        if threading.current_thread() is threading.main_thread():
            return compile_one(step, *arguments)
        begun.append(arguments)
        if len(begun) == 2:
            terminate()
        return time.sleep(0.5)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Step, "compile_now", slow)
        patch.setattr(ahead, "cores", lambda: 1)
        return stopped_step(workdir, ManyShapes(), eval__steps=100), len(begun)


CASES = {
    case.__name__: case
    for case in (
        differing_data,
        differing_config,
        differing_draws,
        separate_workdirs,
        unreadable_checkpoint,
        checkpoints_at_the_same_time,
        checkpoints_in_turns,
        coordinator_hosts,
        late_compilation,
        signal_in_evaluation,
        signal_between_slow_steps,
        signal_between_compilations,
        signal_while_compiling_ahead,
    )
}

SLOW_CASES = {"two_late_compilations": two_late_compilations}
"""Cases that take a minute, and are not in `CASES`."""


def main() -> None:
    processes.initialize()
    folder, *cases = sys.argv[1:]
    for name in cases:
        print(json.dumps([name, (CASES | SLOW_CASES)[name](Path(folder) / name)]), flush=True)
    train(Path(folder) / "exit", TwoToy(f"of process {jax.process_index()}"))


if __name__ == "__main__":
    program.run(main, joins=True)
