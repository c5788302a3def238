"""Reproduces the paper's table and figures: python -m explicit_opt.reproduce table1 --scale=tiny

Trains missing runs, resumes interrupted runs, and writes CSV, Markdown and PNG files to --out. --config.FIELD=VALUE
overrides a field of every run's configuration, except fields that the target sets, such as the seed.
--protocol=printed stops training as the paper does, and reports the metrics of the last epoch.
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
"""Target -> module of `explicit_opt` that defines a function with the target's name."""

CORPORA = {
    **dict.fromkeys(("table1", "fig1", "fig3", "formula"), ("babylm",)),
    **dict.fromkeys(("fig2", "sensitivity"), ("mnist",)),
    "claims": ("babylm", "mnist"),
}
"""Target -> corpora whose files the target reads."""

PROTOCOLS = ("ours", "printed")
"""Values of --protocol; `experiments.ExperimentSuite` documents them."""


def main() -> None:
    from common.reproduce import reproduce, reproduce_parser

    parser = reproduce_parser("explicit_opt", TARGETS, __doc__)
    parser.add_argument(
        "--protocol",
        default="ours",
        help="ours (default): stop early on held-out data, report the best checkpoint; printed: stop as the paper does,"
        " report the last epoch",
    )
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="CORPUS=DIR",
        help="directory of babylm (texts) or mnist (IDX files); may be repeated; default data/CORPUS, or with"
        " --scale=tiny small data that need no download",
    )
    reproduce("explicit_opt", TARGETS, parser, _own)


def _own(options: Namespace) -> dict[str, Any]:
    from common.arguments import check_unused
    from common.config import check_choice
    from common.errors import check
    from common.reproduce import named_paths
    from common.storage.addresses import shown

    target, printed = options.target, options.protocol == "printed"
    check_choice("--protocol", options.protocol, PROTOCOLS)
    check(
        not printed or target not in ("formula", "claims"),
        f"--protocol=printed cannot be used with the target {target}: leave out --protocol",
    )
    if printed:
        reason = "with --protocol=printed, a sweep would choose settings by the metrics that are reported"
        check_unused(options, ["sweep"], reason)
    if target == "formula":
        check_unused(options, ("turns", "sweep"), "the target formula trains no model")
    data = named_paths("--data", options.data, CORPORA["claims"])
    for corpus, path in data.items():
        option = f"--data={corpus}={shown(path)}"
        check(
            corpus in CORPORA[target],
            f"{option}: the target {target} does not read the corpus {corpus}; remove the option",
        )
        check(
            path.is_dir(), f"{option} is not a directory: give the folder with the data of {corpus}"
        )
    return {"protocol": options.protocol, "data": data}


if __name__ == "__main__":
    program.run(main, trains=True)
