"""Compares groups of finished runs: python -m common.report GROUP_A GROUP_B --out=DIR"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.config import check, check_folder, parser_for, positive_int_arg
from common.errors import UserError
from common.runtime import program

if TYPE_CHECKING:
    from common.report.groups import Layers
    from common.report.runs import Run


def _horizon(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _one(argument: str) -> "Run":
    from common.report.runs import load_group

    runs = load_group(argument)
    check(
        len(runs) == 1,
        f"--examples: {argument} names {len(runs)} runs, but each argument must name one",
    )
    return runs[0]


def _layers_of(config: Mapping[str, Any]) -> "Layers | None":
    """Counts layers by `layers_of` of the paper's module `layers`, if it has one."""
    from common.report import groups

    # The first runs of this repository, all of that paper, did not store it.
    paper = str(config.get("paper", "reservoir"))
    try:
        module = import_module(f"{paper}.layers") if paper.isidentifier() else groups
    except ModuleNotFoundError:
        module = groups
    return module.layers_of(config)


def main() -> None:
    from common.report import comparison, figures
    from common.report.groups import differences, groups
    from common.report.runs import load_wandb
    from common.report.table import publish, text
    from common.report.versus import (
        against_first,
        example_table,
        explanation,
        named_groups,
        parse_margins,
        sentence_table,
        verdict_table,
    )

    parser = parser_for("common.report")
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="GROUP",
        help="a folder of runs, a run's folder or summary.json, a glob, or wandb:ENTITY/PROJECT:GROUP; every group is"
        " compared with the first",
    )
    parser.add_argument("--wandb", metavar="ENTITY/PROJECT", help="take all runs of this project")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/report"), help="default runs/report", metavar="DIR"
    )
    parser.add_argument(
        "--axis",
        default="seconds",
        choices=("seconds", "hours", "step", "flops"),
        help="axis of the AUCC",
    )
    parser.add_argument(
        "--horizon",
        type=_horizon,
        default="longest",
        metavar="X",
        help="end of the AUCC: a number in units of the axis, longest (default) or shortest",
    )
    parser.add_argument(
        "--reference",
        default="own",
        choices=("own", "all"),
        help="give times to percentages of each run's own best value (own) or of the best value of all runs (all)",
    )
    parser.add_argument(
        "--margin",
        action="append",
        default=[],
        metavar="METRIC=X",
        help="margin of equivalence, such as bleu=0.5",
    )
    parser.add_argument(
        "--examples",
        nargs=2,
        metavar=("A", "B"),
        help="only show the test examples on which two runs differ most",
    )
    parser.add_argument(
        "--most",
        type=positive_int_arg("--most"),
        default=10,
        help="number of examples (default 10)",
    )
    options = parser.parse_args()
    if options.examples:
        check(
            not (options.runs or options.wandb),
            "--examples takes two runs: leave out GROUP arguments and --wandb",
        )
        pair = [_one(argument) for argument in options.examples]
        print(text(*example_table(*pair, options.most)))
        return
    margins = parse_margins(options.margin)
    if bool(options.runs) == bool(options.wandb):
        raise UserError(
            "name the runs to compare: either GROUP arguments or a wandb project with --wandb"
        )
    check_folder("--out", options.out)
    if options.wandb:
        compared = groups(load_wandb(options.wandb), layers_of=_layers_of)
    else:
        compared = named_groups(options.runs, _layers_of)
    found = against_first(compared, margins)
    measure = (options.axis, options.horizon)
    tables = {
        "runs": comparison.run_table(compared),
        "differences": differences(compared),
        "aucc": comparison.aucc_table(compared, *measure),
        "times": comparison.time_table(compared, *measure, reference=options.reference),
        "seeds": comparison.seed_table(compared, *measure),
    }
    if found:
        tables["verdicts"] = verdict_table(compared[0], found)
        sentences = sentence_table(compared)
        tables |= {"sentences": sentences} if sentences else {}
    drawn = {"curves": figures.curves_figure(compared, *measure)}
    if all(group.layers for group in compared):
        for x in ("updatable", "total"):
            drawn[f"layers_{x}"] = figures.layers_figure(compared, x, *measure)
    for name, table in tables.items():
        publish(options.out / name, *table)
        if name == "verdicts":
            print(explanation(found, compared))
    for name, figure in drawn.items():
        figure.savefig(options.out / f"{name}.png")
    print(f"figures: {', '.join(str(options.out / f'{name}.png') for name in drawn)}")


if __name__ == "__main__":
    program.run(main)
