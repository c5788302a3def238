"""Compares finished runs: python -m common.report RUN RUN --out=DIR"""

from pathlib import Path

from common import program
from common.config import check_folder, parser_for
from common.errors import UserError


def _horizon(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def main() -> None:
    from common.report import comparison, figures
    from common.report.groups import differences, groups
    from common.report.runs import load_local, load_wandb
    from common.report.table import publish

    parser = parser_for("common.report")
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="folders of runs, folders of such, or summary files"
    )
    parser.add_argument("--wandb", metavar="ENTITY/PROJECT", help="take all runs of this project")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/report"), help="default runs/report", metavar="DIR"
    )
    parser.add_argument(
        "--axis", default="seconds", choices=("seconds", "hours", "step", "flops"), help="of AUCC"
    )
    parser.add_argument(
        "--horizon",
        type=_horizon,
        default="longest",
        metavar="X",
        help="where AUCC ends, in units of the axis: a number, longest (default) or shortest",
    )
    parser.add_argument(
        "--reference",
        default="own",
        choices=("own", "all"),
        help="times to percentages of a run's own best value or of the best of all",
    )
    options = parser.parse_args()
    if bool(options.runs) == bool(options.wandb):
        raise UserError("name the runs to compare, or a wandb project with --wandb")
    check_folder("--out", options.out)
    runs = load_wandb(options.wandb) if options.wandb else load_local(*options.runs)
    compared = groups(runs)
    measure = (options.axis, options.horizon)
    tables = {
        "runs": comparison.run_table(compared),
        "differences": differences(compared),
        "aucc": comparison.aucc_table(compared, *measure),
        "times": comparison.time_table(compared, *measure, reference=options.reference),
        "seeds": comparison.seed_table(compared, *measure),
    }
    drawn = {"curves": figures.curves_figure(compared, *measure)}
    if all(group.layers for group in compared):
        for x in ("updatable", "total"):
            drawn[f"layers_{x}"] = figures.layers_figure(compared, x, *measure)
    for name, table in tables.items():
        publish(options.out / name, *table)
    for name, figure in drawn.items():
        figure.savefig(options.out / f"{name}.png")
    print(f"figures: {', '.join(str(options.out / f'{name}.png') for name in drawn)}")


if __name__ == "__main__":
    program.run(main)
