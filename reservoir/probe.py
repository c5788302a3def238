"""Probes every encoder layer of a run: python -m reservoir.probe --workdir=RUN --data=DIR (section 4.3, Table 4)"""

import time

from common.runtime import program


def main() -> None:
    from common.arguments import check_folder, int_arg
    from common.config import check_choice, parser_for
    from common.errors import check
    from common.sharding import make_mesh
    from common.storage.folders import open_folder, output
    from reservoir.probing.classifier import GRIDS
    from reservoir.probing.data import TABLE_4, TASKS, load_task
    from reservoir.probing.features import POOLS, open_reader
    from reservoir.probing.table import Table

    parser = parser_for("reservoir.probe", __doc__)
    parser.add_argument(
        "--workdir", required=True, type=open_folder, metavar="RUN", help="folder of the run"
    )
    parser.add_argument(
        "--data", required=True, type=open_folder, metavar="DIR", help="folder of the probing tasks"
    )
    parser.add_argument(
        "--tasks",
        default=",".join(TABLE_4),
        metavar="A,B",
        help="comma-separated probing tasks (default: the tasks of Table 4)",
    )
    parser.add_argument(
        "--grid",
        default="quick",
        choices=GRIDS,
        help="hyperparameter grid of the classifiers (default: quick)",
    )
    parser.add_argument(
        "--pool",
        choices=POOLS,
        help="sentence vector: first (state of the first token, default for masked language models) or mean (over"
        " tokens, default for translators)",
    )
    parser.add_argument(
        "--seeds",
        type=int_arg("--seeds"),
        default=1,
        help="number of seeds of each classifier (default: 1)",
    )
    parser.add_argument(
        "--out", type=open_folder, metavar="DIR", help="output folder (default: RUN/probing)"
    )
    options = parser.parse_args()
    names = options.tasks.split(",")
    for name in names:
        check_choice("--tasks", name, TASKS)
    check(
        len(set(names)) == len(names),
        f"--tasks={options.tasks} names a task twice: name each task once",
    )
    tasks = [load_task(options.data, name) for name in names]
    read = open_reader(options.workdir, make_mesh({"data": -1}), options.pool)
    out = options.out or options.workdir / "probing"
    check_folder("--out", out)

    table = Table(read.layers, options.seeds, options.grid)
    for task in tasks:
        start = time.monotonic()
        features = {split: read(sentences) for split, sentences in task.sentences.items()}
        middle = time.monotonic()
        table.add(task, features)
        count, cut = (sum(map(size, task.sentences.values())) for size in (len, read.cut))
        plural = "s" * (cut != 1)
        print(
            f"{task.name}: {count:,} sentences read in {middle - start:.0f} s, classifiers trained"
            f" in {time.monotonic() - middle:.0f} s",
            *[f"({cut:,} sentence{plural} truncated to the model's maximum length)"] * bool(cut),
            flush=True,
        )
    with output(out):
        table.write(out)


if __name__ == "__main__":
    program.run(main)
