"""Compiles the training step in threads, before the first batch of each shape arrives."""

from collections.abc import Iterable
from concurrent import futures

import numpy as np

from common.runtime.processes import all_reduce_max, barrier
from common.runtime.signals import Signals
from common.train.conditions import cores
from common.train.prefetch import put
from common.train.run import Run
from common.train.state import Step
from common.train.task import Batch


def compile_ahead(run: Run, samples: Iterable[Batch], signals: Signals) -> None:
    """Lowers the training step for the shapes of `samples` (`Task.batch_samples`), and starts threads to compile it.

    Starts at most one thread for each CPU core that this process may use. On accelerators, training continues
    meanwhile, and `Step.compile` raises the threads' errors.

    On CPUs, where the threads would slow the steps, this function waits until all shapes are compiled, or until a
    signal arrives. The wait counts as compilation time and raises the threads' errors.
    """
    step, number = run.train_step, run.step
    threads = futures.ThreadPoolExecutor(cores(), thread_name_prefix="compile")
    # Lower the steps in this thread: lowering is Python code, and in a thread it would slow the steps of this process.
    with run.clock.section("compile"):
        for sample in samples:
            batch = put(sample, run.mesh)
            key = step.cache_key(batch, number)
            if key not in step.compiled and not signals.received:
                lowered = step.lower(batch, number)
                step.compiling[key] = threads.submit(step.compile_now, key, *lowered)
        # Without this barrier, faster processes would wait within the section "train".
        barrier("lowered")
    threads.shutdown(wait=False)
    if run.mesh.devices.flat[0].platform == "cpu":
        with run.clock.section("compile"):
            _wait(step, signals)


def _wait(step: Step, signals: Signals) -> None:
    """Waits for the threads of all processes, until a signal arrives on any process.

    After a signal, cancels the compilations that have not begun. The processes vote about once a second whether to
    wait. Raises the errors of the threads.
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
