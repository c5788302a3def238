"""Trains several runs in turns, so that load from other processes slows all runs equally."""

import random
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common.errors import Preempted, UserError
from common.runtime.signals import Signals
from common.train.finished import kept_summary
from common.train.loop import make_hooks, train, validate
from common.train.run import Run, open_run
from common.train.summary import finish
from common.train.task import Task


class Job(NamedTuple):
    """A run to be trained."""

    config: ConfigDict
    task: Task
    workdir: Path


def fit_in_turns(jobs: Sequence[Job], mesh: Mesh, turn: int) -> list[dict]:
    """Trains, or resumes, several runs in turns of `turn` steps; returns their summaries (see `loop.fit`).

    In every round, each run trains up to the next multiple of `turn` steps, and then waits for all other runs. The
    training seconds of runs that begin at most one turn apart can thus be compared. Turns do not change the trained
    values. If `turn` is 0, each run is trained to its end before the next run starts.

    Raises:
      UserError: training one of the runs fails (see `loop.fit`). All other runs that have trained a step are saved.
      Preempted: a signal stopped the runs. All runs that have trained a step are saved.
    """
    begun = time.perf_counter()
    for job in jobs:
        validate(job.config)
    with ExitStack() as stack:
        stack.enter_context(jax.set_mesh(mesh))
        signals = stack.enter_context(Signals())
        names = [job.workdir.name if turn else "" for job in jobs]
        runs = [open_run(*job, mesh, stack, name) for job, name in zip(jobs, names, strict=True)]
        kept = [kept_summary(run) if run.state.stop_reason else None for run in runs]
        open_runs = [run for run in runs if not run.state.stop_reason]
        steps = [run.step for run in open_runs]
        # After a kill, runs may resume more than one turn apart. The run that is behind then trains its last turns
        # alone, so the training seconds of the runs cannot be compared: the session is "alone".
        together = turn and steps and max(steps) - min(steps) <= turn
        session = f"turns {secrets.token_hex(4)}" if together else "alone"
        live = []
        for run in open_runs:
            run.state.conditions = run.state.conditions.begin(session, signals)
            live.append((run, train(run, make_hooks(signals), signals, begun, turn)))
        _take_turns(live)
        return [
            finish(run, signals) if summary is None else summary
            for run, summary in zip(runs, kept, strict=True)
        ]


def _take_turns(live: list[tuple[Run, Iterator[None]]]) -> None:
    """Trains every run to its end. Shuffles the runs each round: periodic load then cannot always slow the same run."""
    order = random.Random(0)
    failure: Exception | None = None
    try:
        while live:
            for run, steps in tuple(live):
                live.remove((run, steps))
                if next(steps, "ended") is None:
                    live.append((run, steps))
            order.shuffle(live)
    except (Preempted, UserError) as error:
        failure = error
    # Save the runs here, not in the `except` block, where saving would fail (see `checkpoint.unless_failing`).
    if failure:
        for run, _ in live:
            if run.step:
                run.save()
                run.checkpoints.wait()
        if isinstance(failure, Preempted) and live:
            runs = "the run" if len(live) == 1 else f"the {len(live)} runs"
            others = f"{failure}, and {runs} that took turns with it"
            failure = Preempted(failure.number, others)
        raise failure
