"""Measures how well backskipping estimates gradients: python -m reservoir.gradients NAME=RUNS --out=DIR

    python -m reservoir.train --config=configs/iwslt_t_res.py:tiny --config.model.backskip.estimator=identity \\
        --config.checkpoint.snapshots=100 --workdir=runs/identity
    python -m reservoir.gradients runs/identity --out=runs/gradients

NAME= is optional. Reads every snapshot of each run. On training batches, compares the gradient of a step that skips the
reservoirs with the gradient of an ordinary step with the same noise and dropout (the true gradient). Compares only the
gradients of trained layers below the uppermost reservoir. Writes gradients.csv, gradients.md and gradients.png.
"""

from pathlib import Path

from common.runtime import program

COLUMNS = ("group", "seed", "step", "cosine", "cosine of means", "relative size")


def main() -> None:
    from common.arguments import check_folder, int_arg
    from common.config import parser_for
    from common.storage.addresses import copy_of

    parser = parser_for("reservoir.gradients", __doc__)
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="NAME=RUNS",
        help="finished runs with backskipping and snapshots: a folder of runs, a run's folder or a glob",
    )
    parser.add_argument(
        "--batches",
        type=int_arg("--batches"),
        default=4,
        metavar="N",
        help="number of training batches (default: 4)",
    )
    parser.add_argument(
        "--draws",
        type=int_arg("--draws"),
        default=32,
        metavar="N",
        help="draws of noise and dropout for each batch (default: 32)",
    )
    parser.add_argument(
        "--out",
        type=copy_of,
        default=Path("runs/gradients"),
        metavar="DIR",
        help="folder of the table and the figure (default: runs/gradients)",
    )
    options = parser.parse_args()
    check_folder("--out", options.out)

    from common.report.groups import named_groups
    from common.report.table import publish
    from common.sharding import make_mesh
    from common.storage.folders import output
    from reservoir.gradient_agreement import draw, measure

    mesh = make_mesh({"data": -1})
    measured, rows = {}, []
    for group in named_groups(options.runs):
        measured[group.name] = []
        for run in group.runs:
            points = list(measure(run.folder, mesh, options.batches, options.draws))
            measured[group.name].append(points)
            rows += [(group.name, run.seed, step, *found) for step, found in points]
            print(f"{run.name}: {len(points)} snapshots measured", flush=True)
    with output(options.out):
        publish(options.out / "gradients", COLUMNS, rows)
        draw(measured, options.out / "gradients.png")


if __name__ == "__main__":
    program.run(main)
