"""Compares groups of finished runs: python -m common.report GROUP_A GROUP_B --out=DIR"""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from common.arguments import add_margin, check_folder, check_unused, int_arg
from common.config import float_or_text, parser_for
from common.errors import check
from common.runtime import program
from common.storage.addresses import copy_of


def _parser() -> ArgumentParser:
    parser = parser_for("common.report", __doc__)
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="GROUP",
        help="a folder of runs, a run's folder or summary.json, a glob, the address of one of these in a bucket, or"
        " wandb:ENTITY/PROJECT[:GROUP]; all other groups are compared with the first group; NAME=GROUP names a group in"
        " tables and figures",
    )
    parser.add_argument(
        "--out",
        type=copy_of,
        default=Path("runs/report"),
        help="folder of the tables and figures (default: runs/report)",
        metavar="DIR",
    )
    parser.add_argument(
        "--axis",
        default="seconds",
        choices=("seconds", "hours", "step", "flops"),
        help="x-axis of the curves, AUCCs and times (default: seconds)",
    )
    parser.add_argument(
        "--horizon",
        type=float_or_text,
        default="longest",
        metavar="X",
        help="end of the curves: a number in units of --axis, longest (end of the longest run, default) or shortest"
        " (end of the shortest run)",
    )
    parser.add_argument(
        "--reference",
        default="own",
        choices=("own", "all"),
        help="best value that is 100 %% in the table of times: each run's own best value (own, default) or the best"
        " value of all runs (all)",
    )
    add_margin(parser)
    parser.add_argument(
        "--metrics",
        default="",
        metavar="METRIC,METRIC",
        help="compare only these metrics, such as weighted_f1 (default: all)",
    )
    parser.add_argument(
        "--sets",
        default="",
        metavar="NAME,NAME",
        help="names of data sets, which replace {} in each GROUP; writes only the verdicts, corrected together over"
        " all data sets",
    )
    parser.add_argument(
        "--examples",
        nargs=2,
        metavar=("A", "B"),
        help="compare no groups, but show the test examples on which the runs A and B differ most; A and B are the"
        " folders or the summary.json files of two runs",
    )
    parser.add_argument(
        "--most",
        type=int_arg("--most"),
        default=10,
        help="number of test examples that --examples shows (default: 10)",
    )
    return parser


def main() -> None:
    parser = _parser()
    options = parser.parse_args()
    drawing = {name: getattr(options, name) for name in ("axis", "horizon", "reference")}
    given = [name for name, value in drawing.items() if value != parser.get_default(name)]
    if options.examples:
        if options.out != parser.get_default("out"):
            given.append("out")
        unused = ["margin", "metrics", "sets", *given]
        check_unused(options, unused, "--examples prints a table of examples and no verdict")
        _show_examples(options)
        return
    if options.sets:
        check_unused(options, given, "with --sets, only verdicts are written")

    from common.report import report
    from common.report.groups import named_groups

    chosen = {
        "margins": report.parse_margins(options.margin),
        "metrics": _split("--metrics", options.metrics),
    }
    check_folder("--out", options.out)
    if options.sets:
        sets = {name: named_groups(texts) for name, texts in _arguments_of_sets(options).items()}
        report.write_verdicts(sets, options.out, **chosen)
    else:
        report.write(named_groups(options.runs), options.out, **chosen, **drawing)


def _show_examples(options: Namespace) -> None:
    import numpy as np

    from common.metrics.predictions import TEST_AGAIN
    from common.report.runs import load_group
    from common.report.significance import paired_predictions
    from common.report.table import text

    check(
        not options.runs,
        f"--examples takes two runs and no further GROUP: leave out {', '.join(options.runs)}",
    )
    pair = []
    for argument in options.examples:
        runs = load_group(argument)
        check(
            len(runs) == 1,
            f"--examples: {argument} names {len(runs)} runs, but each argument must name one run: give a run's folder",
        )
        pair += runs
    without = [run.place for run in pair if run.predictions is None]
    check(
        not without,
        f"the run {', '.join(without[:1])} has no predictions.npz, which --examples needs: choose another run, or"
        f" {TEST_AGAIN}",
    )
    mine, theirs = paired_predictions(pair)
    difference_E = mine.costs_E - theirs.costs_E
    order = np.argsort(-np.abs(difference_E), kind="stable")[: options.most]
    described = [(mine.describe(number), theirs.describe(number)) for number in order]
    names = list(described[0][0])
    shared = [name for name in names if all(a[name] == b[name] for a, b in described)]
    differing = [name for name in names if name not in shared]
    rows = [
        (
            *(int(number), *(a[name] for name in shared)),
            *(side[name] for name in differing for side in (a, b)),
            f"{difference_E[number]:+.3f}",
        )
        for number, (a, b) in zip(order, described, strict=True)
    ]
    sides = [f"{side}: {run.name}" for side, run in zip("AB", pair, strict=True)]
    columns = ("example", *shared, *(f"{name}, {side}" for name in differing for side in sides))
    print(text((*columns, f"cost, A - B ({mine.cost_unit})"), rows))


def _arguments_of_sets(options: Namespace) -> dict[str, list[str]]:
    """Returns {name of a data set: the arguments GROUP, in which this name replaces {}}."""
    fixed = [argument for argument in options.runs if "{}" not in argument]
    check(
        not fixed,
        f"--sets={options.sets}: {', '.join(fixed)} must contain {{}}, which stands for a data set's name",
    )
    names = _split("--sets", options.sets)
    twice = sorted({name for name in names if names.count(name) > 1})
    check(not twice, f"--sets={options.sets} names {', '.join(twice)} twice: give each name once")
    return {name: [argument.replace("{}", name) for argument in options.runs] for name in names}


def _split(option: str, text: str) -> list[str]:
    """Splits `text` at its commas into names. Raises a UserError if `text` has only commas and spaces."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    check(bool(names) or not text, f"{option}={text} has no name: give names separated by commas")
    return names


if __name__ == "__main__":
    program.run(main)
