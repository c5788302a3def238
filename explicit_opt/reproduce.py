"""Reproduces the paper's table and figures: python -m explicit_opt.reproduce table1 --scale=tiny

Trains missing runs, resumes interrupted ones, and writes CSV, Markdown and PNG files to --out. Accepts overrides like
explicit_opt.train: --config.data.source=files:DIR. --protocol=printed uses the paper's early stopping and selection.
"""

from argparse import Namespace
from typing import Any

from common.runtime import program

TARGETS = {
    "table1": "experiments",
    "fig1": "experiments",
    "fig2": "experiments",
    "fig3": "experiments",
    "formula": "analysis",
    "sensitivity": "analysis",
}
"""Target -> the module that defines it."""

CORPORA = {
    **dict.fromkeys(("table1", "fig1", "fig3", "formula"), ("babylm",)),
    **dict.fromkeys(("fig2", "sensitivity"), ("mnist",)),
    "claims": ("babylm", "mnist"),
}
"""Target -> the corpora that it reads."""

SCALES = ("tiny", "laptop", "paper")

PROTOCOLS = ("ours", "printed")
"""Early stopping and selection (see explicit_opt.experiments.ExperimentSuite)."""


def main() -> None:
    from common.train.command import reproduce, reproduce_parser

    parser = reproduce_parser("explicit_opt", TARGETS, SCALES)
    parser.add_argument(
        "--protocol",
        default="ours",
        help="ours: early stopping by held-out data, best checkpoint (the default); printed: last values",
    )
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="CORPUS=DIR",
        help="directory of babylm (texts) or mnist (IDX files), if not data/CORPUS; may be repeated",
    )
    reproduce("explicit_opt", TARGETS, parser, _own)


def _own(options: Namespace) -> dict[str, Any]:
    from pathlib import Path

    from common.config import check, check_choice

    target, printed = options.target, options.protocol == "printed"
    check_choice("--protocol", options.protocol, PROTOCOLS)
    check(
        not printed or target not in ("formula", "claims"),
        f"--protocol=printed cannot be used with {target}: it applies to trained tables and figures only",
    )
    check(
        not printed or not options.sweep,
        "--protocol=printed cannot be used with --sweep: it holds out no validation data",
    )
    check(
        target != "formula" or not (options.turns or options.sweep),
        "formula trains no model: remove --turns and --sweep",
    )
    data = {}
    for option in options.data:
        corpus, equals, directory = option.partition("=")
        check(bool(equals and directory), f"--data={option}: write --data=CORPUS=DIR")
        check_choice("--data", corpus, CORPORA["claims"])
        check(corpus in CORPORA[target], f"--data={option}: {target} does not read {corpus}")
        check(Path(directory).is_dir(), f"--data={option}: no directory {directory}")
        data[corpus] = Path(directory)
    return {"protocol": options.protocol, "data": data}


if __name__ == "__main__":
    program.run(main)
