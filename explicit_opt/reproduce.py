"""The paper's table and figures, measured beside printed: python -m explicit_opt.reproduce table1 --scale=tiny

Runs what is missing, goes on with what was cut off, and writes CSV, Markdown and PNG into --out. Any field of the
configurations is an option, as in explicit_opt.train: --config.data.source=files:DIR. --protocol=printed stops and
selects as the paper does.
"""

from argparse import Namespace
from typing import Any

from common.runtime import program

TARGETS = {
    "table1": "experiments",
    "fig1": "experiments",
    "fig2": "experiments",
    "fig3": "experiments",
    "formula": "arithmetic",
    "sensitivity": "arithmetic",
}
"""The paper's table and figures, and two tables of the page of proof, with the module of each."""

CORPORA = {
    **dict.fromkeys(("table1", "fig1", "fig3", "formula"), ("babylm",)),
    **dict.fromkeys(("fig2", "sensitivity"), ("mnist",)),
    "claims": ("babylm", "mnist"),
}
"""What each target reads."""

SCALES = ("tiny", "laptop", "paper")

PROTOCOLS = ("ours", "printed")
"""How runs are stopped and selected (see explicit_opt.experiments.ExperimentSuite)."""


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
        help="where babylm (a folder of texts) or mnist (a folder of IDX files) is, if not data/CORPUS",
    )
    reproduce("explicit_opt", TARGETS, parser, _own)


def _own(options: Namespace) -> dict[str, Any]:
    from pathlib import Path

    from common.config import check, check_choice

    target, printed = options.target, options.protocol == "printed"
    check_choice("--protocol", options.protocol, PROTOCOLS)
    check(not printed or target != "formula", "--protocol=printed: formula trains nothing")
    check(
        not printed or target != "claims",
        "--protocol=printed: claims are about the best checkpoints",
    )
    check(
        not printed or not options.sweep,
        "--protocol=printed holds out no data for --sweep to choose by",
    )
    check(
        target != "formula" or not (options.turns or options.sweep),
        "formula trains nothing: no --turns, no --sweep",
    )
    places = {}
    for given in options.data:
        corpus, equals, place = given.partition("=")
        check(bool(equals and place), f"--data={given}: it is CORPUS=DIR")
        check_choice("--data", corpus, CORPORA["claims"])
        check(corpus in CORPORA[target], f"--data={given}: {target} reads no {corpus}")
        check(Path(place).is_dir(), f"--data={given}: there is no folder {place}")
        places[corpus] = Path(place)
    return {"protocol": options.protocol, "places": places}


if __name__ == "__main__":
    program.run(main)
