"""Compiles the training step in threads, after step 1, for the batch shapes and loss functions of later steps."""

from collections.abc import Iterable, Mapping
from concurrent import futures
from itertools import chain

import jax
import numpy as np

from common.runtime.processes import all_reduce_max, barrier
from common.runtime.signals import Signals
from common.train.conditions import cores
from common.train.prefetch import put
from common.train.run import Run
from common.train.state import Step
from common.train.task import Batch


def compile_ahead(
    run: Run, first: Mapping[str, jax.Array], samples: Iterable[Batch], signals: Signals
) -> None:
    """Lowers the training step for all loss functions and batch shapes, and starts threads to compile it.

    Starts at most one thread for each CPU core that this process may use. On accelerators, training continues
    meanwhile, and `Step.compile` raises the threads' errors.

    On CPUs, where the threads would slow the steps, this function waits until all shapes are compiled, or until a
    signal arrives on any process, and raises the threads' errors. The wait counts as compilation time.

    Args:
      first: the global batch of the first step, on the mesh.
      samples: this process's rows of batches of the other shapes, or of all shapes (`Task.batch_samples`).
    """
    step, losses = run.train_step, run.task.losses()
    threads = futures.ThreadPoolExecutor(cores(), thread_name_prefix="compile")
    # Lower in this thread: lowering is Python code, and in another thread it would slow the training loop.
    with run.clock.section("compile"):
        for batch in chain([first], (put(sample, run.mesh) for sample in samples)):
            for loss in losses:
                key = step.key_of(loss, batch)
                if key not in step.compiled and not signals.received:
                    lowered = step.lower(loss, batch)
                    step.compiling[key] = threads.submit(step.compile_now, key, *lowered)
        # Without this barrier, faster processes would wait within the section "train".
        barrier("lowered")
    threads.shutdown(wait=False)
    if run.mesh.devices.flat[0].platform == "cpu":
        with run.clock.section("compile"):
            _wait(step, signals)


def _wait(step: Step, signals: Signals) -> None:
    """Waits for the threads of all processes, until a signal arrives on any process. Raises the threads' errors.

    The processes vote at least once a second. After a signal, cancels the compilations that have not begun.
    """
    while True:
        waiting, number = all_reduce_max(np.asarray([bool(step.compiling), signals.received or 0]))
        if number or not waiting:
            break
        ended, _ = futures.wait(
            step.compiling.values(), timeout=1, return_when=futures.FIRST_COMPLETED
        )
        step.compiling = {key: one for key, one in step.compiling.items() if one not in ended}
        for future in ended:
            future.result()
    step.cancel()
