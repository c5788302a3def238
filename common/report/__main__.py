"""Compares groups of finished runs: python -m common.report GROUP_A GROUP_B --out=DIR"""

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.config import check, check_folder, parser_for, positive_int_arg
from common.runtime import program
from common.storage.folders import copy_of, output

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
        f"--examples: {argument} names {len(runs)} runs, but each argument must name one run",
    )
    return runs[0]


def _layers_of(config: Mapping[str, Any]) -> "Layers | None":
    """Counts the layers of a configuration by `PAPER.layers.layers_of`, or by `groups.layers_of` for other papers."""
    from common.report import groups

    # The oldest runs lack the field `paper`. All these runs belong to the paper "reservoir".
    paper = str(config.get("paper", "reservoir"))
    try:
        module = import_module(f"{paper}.layers") if paper.isidentifier() else groups
    except ModuleNotFoundError:
        module = groups
    return getattr(module, "layers_of", groups.layers_of)(config)


def _parser() -> ArgumentParser:
    parser = parser_for("common.report")
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="GROUP",
        help="a folder of runs, a run's folder or summary.json, a glob, or wandb:ENTITY/PROJECT:GROUP; each group is"
        " compared with the first group",
    )
    parser.add_argument(
        "--wandb", metavar="ENTITY/PROJECT", help="compare all runs of this project"
    )
    parser.add_argument(
        "--out",
        type=copy_of,
        default=Path("runs/report"),
        help="folder of the tables and figures (default: runs/report)",
        metavar="DIR",
    )
    axes = ("seconds", "hours", "step", "flops")
    parser.add_argument(
        "--axis", default="seconds", choices=axes, help="x-axis of the AUCC (default: seconds)"
    )
    parser.add_argument(
        "--horizon",
        type=_horizon,
        default="longest",
        metavar="X",
        help="end of the AUCC on the x-axis: a number, or the end of the longest (default) or shortest run",
    )
    parser.add_argument(
        "--reference",
        default="own",
        choices=("own", "all"),
        help="best value that the percentages in the table of times refer to: of each run (own, default) or of all runs"
        " (all)",
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
        help="show only the test examples on which the runs A and B differ most",
    )
    count = positive_int_arg("--most")
    parser.add_argument(
        "--most",
        type=count,
        default=10,
        help="number of test examples that --examples shows (default: 10)",
    )
    return parser


def main() -> None:
    options = _parser().parse_args()

    from common.report.table import text
    from common.report.versus import example_table

    if options.examples:
        check(
            not (options.runs or options.wandb),
            "--examples takes two runs: leave out GROUP arguments and --wandb",
        )
        check(
            not options.margin,
            "--margin is for groups: leave it out with --examples, which gives no verdict",
        )
        pair = [_one(argument) for argument in options.examples]
        print(text(*example_table(*pair, options.most)))
    else:
        _compare(options)


def _compare(options: Namespace) -> None:
    """Prints and writes the tables of the groups, and writes the figures."""
    from common.report import comparison, figures, versus
    from common.report.groups import differences, groups
    from common.report.runs import load_wandb
    from common.report.table import publish

    margins = versus.parse_margins(options.margin)
    check(
        bool(options.runs) != bool(options.wandb),
        "name the runs to compare: either by GROUP arguments or by a wandb project, --wandb=ENTITY/PROJECT",
    )
    check_folder("--out", options.out)
    if options.wandb:
        compared = groups(load_wandb(options.wandb), layers_of=_layers_of)
    else:
        compared = versus.named_groups(options.runs, _layers_of)
    comparisons = versus.against_first(compared, margins)
    known = {one.metric for _, one in comparisons} | {compared[0].curves[0].name}
    for metric in (margin.partition("=")[0] for margin in options.margin):
        check(metric in known, f"--margin={metric}: no comparison of these runs has this metric")
    measure = (options.axis, options.horizon)
    tables = {
        "runs": comparison.run_table(compared),
        "differences": differences(compared),
        "aucc": comparison.aucc_table(compared, *measure),
        "times": comparison.time_table(compared, *measure, reference=options.reference),
        "seeds": comparison.seed_table(compared, *measure),
    }
    if comparisons:
        tables["verdicts"] = versus.verdict_table(compared[0], comparisons)
        sentences = versus.sentence_table(compared)
        tables |= {"sentences": sentences} if sentences else {}
    drawn = {"curves": figures.curves_figure(compared, *measure)}
    if all(group.layers for group in compared):
        for x in ("updatable", "total"):
            drawn[f"layers_{x}"] = figures.layers_figure(compared, x, *measure)
    paths = {name: options.out / f"{name}.png" for name in drawn}
    with output(options.out):
        for name, table in tables.items():
            publish(options.out / name, *table)
            if name == "verdicts":
                print(versus.explanation(comparisons, compared))
        for name, figure in drawn.items():
            figure.savefig(paths[name])
    print(f"figures: {', '.join(map(str, paths.values()))}")


if __name__ == "__main__":
    program.run(main)
