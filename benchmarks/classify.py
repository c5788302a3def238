"""Times perception.classify against the bare forward pass of its batches: python -m benchmarks.classify

`perception.classify` reads and checks a CSV file, tokenizes, splits long texts into windows, sorts, computes, averages
and writes the labelled file. The bare forward pass only computes the logits of the same batches, which are already on
the devices. The times exclude loading the model and compilation. The model has arctic-embed-xs's shape (6 layers of
width 384), random weights and dtype float32.
"""

import contextlib
import csv
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

from common.arguments import int_arg
from common.runtime import program

TARGET = 1 / 0.9  # upper bound of (time of classify) / (time of the bare forward pass)


def main() -> None:
    from benchmarks.harness import compare, make_parser, report

    parser = make_parser(__doc__, "classify", rounds=11)
    parser.add_argument(
        "--texts", type=int_arg("--texts"), default=128, help="rows of the CSV file"
    )
    options = parser.parse_args()

    import jax

    from common.atomic import write_atomic
    from common.data.manual import python
    from common.sharding import make_mesh
    from common.train.command import fit
    from common.train.prefetch import put
    from configs import perception as recipes
    from perception import loading
    from perception.classify import BLOCK
    from perception.labelling import Answers, Labeller, Network
    from perception.text_tables import open_table

    config = recipes.get_config("laptop")
    fields = {"data.source": "embedded:python", "model.dtype": "float32", "train.steps": 0}
    config.update_from_flattened_dict(fields | {"eval.start": True, "wandb.mode": "disabled"})
    mesh = make_mesh(config.mesh)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Suppress the table of parameters, which training prints. The progress goes to stderr.
        with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
            fit(config, folder / "run", mesh)
        trained = loading.load(folder / "run", mesh)
        texts = [text for (text,), _ in python("train")][: options.texts]
        with (folder / "new.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["text"], *([text] for text in texts)])
        table, answers = open_table(folder / "new.csv"), Answers("label", trained.classes)

        def classify() -> None:
            # Like `perception.classify`, read the table once to check all rows before labelling any.
            for _ in table.blocks(BLOCK, [["text"]], answers.columns):
                pass
            labelled = Labeller(Network(trained, 64), answers)(
                table.blocks(BLOCK, [["text"]], answers.columns)
            )
            path = folder / "labelled.csv"
            write_atomic(path, lambda file: table.write(file, answers.columns, labelled))

        batches = [put(x.inputs, mesh) for x in trained.batches(trained.windows(texts))]

        def bare() -> None:
            running: list[jax.Array] = []
            # Like `Trained.probabilities_of`, start a batch before waiting for the previous batch.
            for inputs in batches:
                running.append(trained.logits(inputs))
                if len(running) > 1:
                    running.pop(0).block_until_ready()
            jax.block_until_ready(running)

        cpu_seconds: dict[str, list[float]] = {"classify": [], "bare": []}

        def counted(case: str, work: Callable[[], None]) -> None:
            """Calls `work` and records the CPU time. Other programs influence CPU time less than wall-clock time."""
            started = time.process_time()
            work()
            cpu_seconds[case].append(time.process_time() - started)

        cases = {"classify": classify, "bare": bare}
        timings = compare(
            {case: partial(counted, case, work) for case, work in cases.items()},
            rounds=options.rounds,
            warmup=1,
        )
    windows = sum(map(len, trained.windows(texts)))
    report(
        f"{len(texts)} texts of the Python manual in {windows} windows of at most 128 tokens,"
        f" {len(batches)} batches",
        timings,
        {("classify", "bare"): TARGET},
        options.out,
        {
            "texts_per_second": {case: len(texts) / median(timings[case]) for case in cases},
            # The first call of each case is the warm-up.
            "cpu_seconds": {case: seconds[1:] for case, seconds in cpu_seconds.items()},
        },
    )


if __name__ == "__main__":
    program.run(main)
