"""Reproduces the paper's tables and figure: python -m gmlp_lm.reproduce table3 --scale=tiny

Trains missing runs, resumes interrupted runs, and writes CSV, Markdown and PNG into --out. As in gmlp_lm.train,
--config.FIELD=VALUE overrides a field of every run's configuration, but not the seed. Tables 1 and 2 train nothing.
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
"""Table or figure -> module of `gmlp_lm` that defines a function with the name of the table or figure."""


def main() -> None:
    from common.reproduce import reproduce, reproduce_parser

    parser = reproduce_parser("gmlp_lm", TARGETS, __doc__)
    parser.add_argument(
        "--recipe",
        default="fixed",
        help="paper (the paper's text), code (the authors' program) or fixed (default; nearly equal parameter counts)",
    )
    parser.add_argument(
        "--corpora",
        help="comma-separated corpora: enwik8,enwik9,wikitext2,wikitext103 (default: all four; with --scale=tiny"
        " wikitext2). --scale=tiny replaces a corpus without --data by the Python manual",
    )
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="CORPUS=PATH",
        help="one file, which is split 90/5/5 into train, valid and test, or a folder with a file for each split"
        " (default: the folder data/CORPUS; for enwik8 and enwik9 the file CORPUS in this folder)",
    )
    reproduce("gmlp_lm", TARGETS, parser, _own)


def _own(options: Namespace) -> dict[str, Any]:
    from common.arguments import check_unused
    from common.config import check_choice
    from common.errors import check
    from common.reproduce import named_paths
    from configs.language import CORPORA, RECIPES

    check_choice("--recipe", options.recipe, RECIPES)
    if TARGETS.get(options.target) == "settings":
        reason = f"{options.target} trains nothing and reads no data"
        check_unused(options, ("corpora", "data", "turns", "sweep"), reason)
    default = "wikitext2" if options.scale == "tiny" else ",".join(CORPORA)
    corpora = tuple((options.corpora or default).split(","))
    for corpus in corpora:
        check_choice("--corpora", corpus, CORPORA)
    data_paths = named_paths("--data", options.data, CORPORA)
    for corpus in data_paths:
        check(
            corpus in corpora,
            f"--data={corpus}=PATH has no effect, because {options.target} uses only {', '.join(corpora)}: leave out"
            f" --data={corpus}=PATH, or set --corpora={','.join((*corpora, corpus))}",
        )
    return {"recipe": options.recipe, "corpora": corpora, "data_paths": data_paths}


if __name__ == "__main__":
    program.run(main, trains=True)
