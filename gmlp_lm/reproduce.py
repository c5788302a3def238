"""Reproduces the paper's tables and figure: python -m gmlp_lm.reproduce table3 --scale=tiny

Trains missing runs, resumes interrupted runs, and writes CSV, Markdown and PNG into --out. Any field of the
configurations is an option, as in gmlp_lm.train. Tables 1 and 2 train nothing.
"""

from argparse import Namespace
from typing import Any

from common.runtime import program

TARGETS = {
    "table1": "settings",
    "table2": "settings",
    "table3": "experiments",
    "table4": "experiments",
    "fig4": "experiments",
}
"""Table or figure -> module that makes it."""

SCALES = ("tiny", "laptop", "paper")


def main() -> None:
    from common.train.command import reproduce, reproduce_parser

    parser = reproduce_parser("gmlp_lm", TARGETS, SCALES)
    parser.add_argument(
        "--recipe", default="fixed", help="paper, code, or fixed, the default: equal parameters"
    )
    parser.add_argument(
        "--corpora",
        help="a list from enwik8,enwik9,wikitext2,wikitext103 (default: all; at tiny wikitext2, on"
        " embedded text)",
    )
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="CORPUS=PATH",
        help="a file, to be cut 90/5/5, or a folder with three splits (default: data/CORPUS)",
    )
    reproduce("gmlp_lm", TARGETS, parser, _own)


def _own(options: Namespace) -> dict[str, Any]:
    from pathlib import Path

    from common.config import check, check_choice
    from configs.language import CORPORA, RECIPES

    check_choice("--recipe", options.recipe, RECIPES)
    trains = TARGETS.get(options.target) != "settings"
    check(
        trains or not (options.corpora or options.data),
        f"{options.target} reads no data: leave out --corpora and --data",
    )
    check(
        trains or not (options.turns or options.sweep),
        f"{options.target} trains nothing: leave out --turns and --sweep",
    )
    default = "wikitext2" if options.scale == "tiny" else ",".join(CORPORA)
    corpora = tuple((options.corpora or default).split(","))
    data_paths = {}
    for corpus in corpora:
        check_choice("--corpora", corpus, CORPORA)
    for given in options.data:
        corpus, equals, path = given.partition("=")
        check(bool(equals and path), f"--data={given} must be CORPUS=PATH")
        check_choice("--data", corpus, CORPORA)
        check(
            corpus in corpora, f"--data={given}: {corpus} is not in --corpora={','.join(corpora)}"
        )
        check(Path(path).exists(), f"--data={given}: there is no {path}")
        data_paths[corpus] = Path(path)
    return {"recipe": options.recipe, "corpora": corpora, "data_paths": data_paths}


if __name__ == "__main__":
    program.run(main)
