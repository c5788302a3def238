"""Reproduces the paper's tables and figure: python -m perception.reproduce table2

Trains missing runs, resumes interrupted runs, and writes CSV, Markdown and PNG files to --out. Fields of the
configurations are options, as in perception.train, except the seed and the fields that a cell of Table 1 sets
(`perception.experiments.FIXED`). Table 2 counts parameters without allocating them. Figure 1 uses the printed Table 1
and the finished runs in --out. --dry-run lists the cells of Table 1.
"""

from argparse import Namespace
from typing import Any

from common.runtime import program

TARGETS = {"table1": "tables", "table2": "tables", "fig1": "figures"}
"""Table or figure -> module of `perception` that defines a function with the name of the table or figure."""


def main() -> None:
    from common.reproduce import reproduce, reproduce_parser

    parser = reproduce_parser("perception", TARGETS, __doc__)
    parser.add_argument(
        "--recipe",
        default="fixed",
        help="paper: like the authors' program; fixed (default): with its mistakes corrected",
    )
    parser.add_argument(
        "--backbones", default="", help="backbones in table1, such as arctic_xs,openelm_270m"
    )
    parser.add_argument("--datasets", default="", help="data sets in table1, such as sst2,emotion")
    parser.add_argument(
        "--modes",
        default="",
        help="training methods, a subset of lora,full,full_pretrained,full_pretrained_tokenizer (default: lora,full)",
    )
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="DATASET=DIR",
        help="directory of a data set, or a source such as tfds:imdb_reviews; may be repeated",
    )
    parser.add_argument(
        "--pretrained",
        action="append",
        default=[],
        metavar="BACKBONE=DIR",
        help="directory of a backbone's weights, or the name of a model in the Hugging Face cache; may be repeated",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list the cells of table1 and exit", dest="dry_run"
    )
    reproduce("perception", TARGETS, parser, _own)


def _own(options: Namespace) -> dict[str, Any]:
    import os
    from pathlib import Path

    from common.arguments import check_unused
    from common.config import check_choice
    from common.errors import check
    from common.reproduce import CLAIMS, named_paths, named_values
    from common.storage.addresses import shown
    from configs.perception import RECIPES
    from perception import hub
    from perception.datasets import DATASETS
    from perception.experiments import MODES, backbones

    check_choice("--recipe", options.recipe, RECIPES)
    known = {"backbones": backbones(), "datasets": tuple(DATASETS), "modes": MODES}
    chosen = {n: tuple(filter(None, getattr(options, n).split(","))) for n in known}
    for name, values in chosen.items():
        for value in values:
            check_choice(f"--{name}", value, known[name])

    sources = {}
    for name, place in named_values("--data", options.data, known["datasets"]).items():
        sources[name] = place
        check(
            not place.startswith("embedded:"),
            f"--data={name}={place} is not the data set {name}: give its folder, or another source, such as tfds:NAME",
        )
        if ":" not in place or "://" in place:
            path = named_paths("--data", [f"{name}={place}"], [name])[name]
            sources[name] = f"files:{shown(path)}"
    weights = named_values("--pretrained", options.pretrained, known["backbones"])
    for name, path in weights.items():
        check(
            os.path.isdir(os.path.expanduser(path)) or bool(hub.cached(path)),
            f"--pretrained={name}={path}: {path} is neither a directory nor a model in the Hugging Face cache; name the"
            " directory of the model, or first download the model with --download of perception.train",
        )
    if options.target != "table1":
        check_unused(options, ["dry_run"], "--dry-run is only for the target table1")
    if options.target not in ("table1", CLAIMS):
        check_unused(options, ("turns", "sweep"), f"{options.target} trains no model")
    return {
        **chosen,
        "recipe": options.recipe,
        "sources": sources,
        "weights": {n: Path(p) for n, p in weights.items()},
    }


if __name__ == "__main__":
    program.run(main, trains=True)
