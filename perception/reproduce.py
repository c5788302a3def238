"""The paper's tables and figure, measured beside printed: python -m perception.reproduce table2

Runs what is missing and can be run, goes on with what was cut off, and writes CSV, Markdown and PNG into --out. Any
field of the configuration is an option, as in perception.train. Table 2 trains nothing and allocates nothing; Figure 1
takes the printed Table 1 and whatever runs of it are in --out. --dry-run lists the cells of Table 1.
"""

from argparse import Namespace
from typing import Any

from common.runtime import program

TARGETS = {"table1": "tables", "table2": "tables", "fig1": "figures"}
"""The paper's tables and figure, with the module of each."""

SCALES = ("tiny", "laptop", "paper")


def main() -> None:
    from common.train.command import reproduce, reproduce_parser

    parser = reproduce_parser("perception", TARGETS, SCALES)
    parser.add_argument(
        "--recipe", default="fixed", help="fixed (the default), or paper: its slips included"
    )
    parser.add_argument("--backbones", default="", help="some of the rows: arctic_xs,openelm_270m")
    parser.add_argument("--datasets", default="", help="some of the columns: sst2,emotion")
    parser.add_argument(
        "--modes",
        default="",
        help="some of lora,full,full_pretrained,full_pretrained_tokenizer (default: the table's, lora,full)",
    )
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="DATASET=DIR",
        help="where a data set is: a folder, or a source such as tfds:imdb_reviews",
    )
    parser.add_argument(
        "--pretrained",
        action="append",
        default=[],
        metavar="BACKBONE=DIR",
        help="where the weights of a backbone are",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list the cells, train none", dest="dry_run"
    )
    reproduce("perception", TARGETS, parser, _own)


def _own(options: Namespace) -> dict[str, Any]:
    from pathlib import Path

    from common.config import check, check_choice
    from common.train.command import CLAIMS
    from configs.perception import RECIPES
    from perception.datasets import DATASETS
    from perception.experiments import MODES, backbones

    check_choice("--recipe", options.recipe, RECIPES)
    known = {"backbones": backbones(), "datasets": tuple(DATASETS), "modes": MODES}
    chosen = {n: tuple(filter(None, getattr(options, n).split(","))) for n in known}
    for name, some in chosen.items():
        for one in some:
            check_choice(f"--{name}", one, known[name])

    def places(name: str, among: tuple[str, ...]) -> dict[str, str]:
        found = {}
        for given in getattr(options, name):
            key, equals, place = given.partition("=")
            check(bool(equals and place), f"--{name}={given}: it is NAME=DIR")
            check_choice(f"--{name}", key, among)
            check(
                Path(place).is_dir()
                or (name == "data" and (":" in place or Path(place).is_file())),
                f"--{name}={given}: there is no directory {place}",
            )
            found[key] = place
        return found

    data, weights = places("data", known["datasets"]), places("pretrained", known["backbones"])
    check(
        options.target == "table1" or not options.dry_run,
        f"--dry-run is for table1, not for {options.target}",
    )
    check(
        options.target in ("table1", CLAIMS) or not (options.turns or options.sweep),
        f"{options.target} trains nothing: --turns and --sweep are for table1 and {CLAIMS}",
    )
    return {
        **chosen,
        "recipe": options.recipe,
        "places": {n: p if ":" in p else f"files:{p}" for n, p in data.items()},
        "weights": {n: Path(p) for n, p in weights.items()},
    }


if __name__ == "__main__":
    program.run(main)
