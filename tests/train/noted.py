"""Trains runs that record the examples of every step.

`python -m tests.train.noted --config=...` trains like `python -m reservoir.train --config=...`.
`python -m tests.train.noted FOLDER CACHE STEP TASK...` trains several tasks one after the other, each up to step STEP.
"""

import json
import sys
import zlib
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from importlib import import_module
from itertools import product
from pathlib import Path

from common.runtime import program
from common.train.task import Task

STEPS = 60
TASKS = {
    "translation": (
        "reservoir",
        "configs/wmt_ffn_res.py:tiny",
        {"data.vocab_size": 300, "data.tokens_per_batch": 512, "data.buckets": (32,)}
        | {"model.width": 32, "model.hidden": 64, "model.heads": 2, "eval.sentences": 8}
        | {"decode.beams": 2, "decode.extra": 4},
    ),
    "bytes": (
        "gmlp_lm",
        "configs/enwik8_gmlp.py:tiny",
        {"data.batch": 8},
    ),
    "classes": (
        "perception",
        "configs/perception.py:tiny",
        {"data.vocab_size": 300, "data.buckets": (64,)},
    ),
}


def rows(batch: dict) -> list[int]:
    """Returns an identifier for each row of a batch: its example number or, if the batch has no `ids`, a checksum."""
    if "ids" in batch:
        return batch["ids"].tolist()
    return [zlib.crc32(b"".join(map(bytes, row))) for row in zip(*batch.values(), strict=True)]


def note_batches(task: Task, workdir: Path, first: int) -> None:
    """Wraps `task.batches`, to log the row identifiers of every batch, even if only prefetched, beside the workdir.

    Args:
      first: the step of the first batch.
    """
    inner = task.batches

    def noted(start: dict | None) -> Iterator:
        import jax

        folder = notes(workdir)
        folder.mkdir(exist_ok=True)
        place = {"process": jax.process_index(), "of": jax.process_count()}
        with (folder / f"{place['process']}.jsonl").open("a", buffering=1) as file:
            for step, (batch, position) in enumerate(inner(start), first):
                file.write(json.dumps(place | {"step": step, "rows": rows(batch)}) + "\n")
                yield batch, position

    task.batches = noted


def notes(workdir: Path) -> Path:
    return workdir.with_name(f"{workdir.name}-notes")


def seen(workdir: Path) -> dict[int, set[tuple[int, ...]]]:
    """Returns {step: set of global batches}.

    A global batch is the tuple of its row identifiers. The set of a step has one element if all starts of the run
    logged the same batch.
    """
    parts = defaultdict(lambda: defaultdict(set))
    for file in notes(workdir).iterdir():
        for line in map(json.loads, file.read_text().splitlines()):
            parts[line["step"], line["of"]][line["process"]].add(tuple(line["rows"]))
    found = defaultdict(set)
    for (step, of), by_process in parts.items():
        if len(by_process) == of:  # a killed run may have prefetched a batch in some processes only
            for choice in product(*(by_process[k] for k in range(of))):
                found[step].add(sum(choice, ()))
    return found


EVERYWHERE = {
    "train.steps": STEPS,
    "train.log_steps": 1,
    "eval.steps": 10**6,
    "checkpoint.steps": 10**6,
    "wandb.mode": "disabled",
}


def session(
    folder: Path, cache: Path, until: int, tasks: Iterable[str] = TASKS, devices: list | None = None
) -> None:
    """Starts or resumes each task and trains it up to step `until`, on all devices or on `devices`."""
    import time

    import jax

    from benchmarks.tiny_run import Pause
    from common.config import load
    from common.runtime.signals import Signals
    from common.sharding import make_mesh
    from common.train.loop import make_hooks, train
    from common.train.run import open_run

    mesh = make_mesh({"data": -1}, devices)
    for name in tasks:
        paper, path, fields = TASKS[name]
        config = load(path)
        config.update_from_flattened_dict(EVERYWHERE | fields | {"data.cache_dir": str(cache)})
        config, task = import_module(f"{paper}.run").prepare(config, mesh)
        with ExitStack() as stack:
            stack.enter_context(jax.set_mesh(mesh))
            signals = stack.enter_context(Signals())
            run = open_run(config, task, folder / name, mesh, stack)
            note_batches(task, run.workdir, run.step + 1)
            stop, *others = make_hooks(signals)
            hooks = [stop, Pause(until), *others]
            deque(train(run, hooks, signals, time.perf_counter()), maxlen=0)


def main() -> None:
    from common.runtime import processes
    from common.train import loop

    if sys.argv[1].startswith("--config"):
        from reservoir.train import main as train

        open_run = loop.open_run

        def noted(config, task, workdir, *rest):
            run = open_run(config, task, workdir, *rest)
            note_batches(task, workdir, run.step + 1)
            return run

        loop.open_run = noted
        train()
    else:
        processes.initialize()
        folder, cache, until, *tasks = sys.argv[1:]
        session(Path(folder), Path(cache), int(until), tasks)


if __name__ == "__main__":
    program.run(main, joins=True)
