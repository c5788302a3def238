"""A tiny translation run for benchmarks, without periodic evaluation and checkpoints."""

import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import jax

from common.config import load
from common.runtime.signals import Signals
from common.sharding import make_mesh
from common.train import loop
from common.train.hooks import Hook
from common.train.loop import make_hooks
from common.train.run import Run, open_run
from reservoir.tasks.translation import Translation


class Pause(Hook):
    """Stops the loop after step `step`. The next call of `loop.train` continues the run."""

    def __init__(self, step: int):
        self._step = step

    def due(self, run: Run, vote: int) -> bool:
        return run.step >= self._step

    def act(self, run: Run) -> None:
        run.stopping = True


@contextmanager
def tiny_run(workdir: Path | None = None, model: Mapping[str, int] | None = None) -> Iterator[Run]:
    """Opens a tiny translation run on all devices of all processes.

    Args:
      workdir: directory shared by the processes; None uses a temporary directory.
      model: overrides of the tiny model's fields.
    """
    config = load("configs/wmt_ffn_res.py:tiny")
    config.model.update(model or {})
    config.wandb.mode = "offline"
    config.eval.steps = config.checkpoint.steps = 10**9
    config.checkpoint.seconds = 0.0
    mesh = make_mesh(config.mesh)
    task = Translation(config, mesh)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        stack.enter_context(jax.set_mesh(mesh))
        yield open_run(config, task, workdir or Path(folder), mesh, stack)


def train(run: Run, steps: int) -> float:
    """Trains `steps` more steps; returns target tokens per second of training time."""
    tokens, seconds = run.state.tokens, run.clock["train"]
    with Signals() as signals:
        stop, *others = make_hooks(signals)
        hooks = [stop, Pause(run.step + steps), *others]
        deque(loop.train(run, hooks, signals, time.perf_counter()), maxlen=0)
    return (run.state.tokens - tokens) / (run.clock["train"] - seconds)
