"""The paper's tables and figure, measured beside printed: python -m gmlp_lm.reproduce table3 --scale=tiny

Runs what is missing, goes on with what was cut off, and writes CSV, Markdown and PNG into --out. Any field of the
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
"""The paper's tables and figure, with the module of each."""

SCALES = ("tiny", "laptop", "paper")


def main() -> None:
    from common.train.command import reproduce, reproduce_parser

    parser = reproduce_parser("gmlp_lm", TARGETS, SCALES)
    parser.add_argument(
        "--recipe", default="fixed", help="paper, code, or fixed: equal parameters (the default)"
    )
    parser.add_argument(
        "--corpora",
        help="some of enwik8,enwik9,wikitext2,wikitext103 (default: all; tiny: wikitext2's"
        " settings on embedded text)",
    )
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="CORPUS=PATH",
        help="where a corpus is: a file that is cut 90/5/5, or a folder of three (default data/CORPUS)",
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
        f"{options.target} reads no data: no --corpora, no --data",
    )
    check(
        trains or not (options.turns or options.sweep),
        f"{options.target} trains nothing: no --turns, no --sweep",
    )
    default = "wikitext2" if options.scale == "tiny" else ",".join(CORPORA)
    corpora = tuple((options.corpora or default).split(","))
    places = {}
    for corpus in corpora:
        check_choice("--corpora", corpus, CORPORA)
    for given in options.data:
        corpus, equals, place = given.partition("=")
        check(bool(equals and place), f"--data={given}: it is CORPUS=PATH")
        check_choice("--data", corpus, CORPORA)
        check(
            corpus in corpora, f"--data={given}: {corpus} is not in --corpora={','.join(corpora)}"
        )
        check(Path(place).exists(), f"--data={given}: there is no {place}")
        places[corpus] = Path(place)
    return {"recipe": options.recipe, "corpora": corpora, "places": places}


if __name__ == "__main__":
    program.run(main)
