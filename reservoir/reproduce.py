"""Reproduces the paper's tables and figures: python -m reservoir.reproduce table1 --scale=tiny

Trains missing runs, resumes interrupted runs, and writes CSV, Markdown and PNG into --out. Any field of the
configurations is an option, as in reservoir.train. --dry-run lists the runs and their cost.
"""

from argparse import Namespace
from typing import Any

from common.runtime import program

TARGETS = {
    **dict.fromkeys(("table1", "table2", "table3", "table5", "table6", "table7"), "tables"),
    **dict.fromkeys(("fig1", "fig3", "fig4", "fig5", "fig7"), "plots"),
    **dict.fromkeys(("fig8", "fig9", "fig10", "fig12", "fig13"), "plots"),
    "controls": "tables",
    "table4": "downstream",
    **dict.fromkeys(("fig2", "fig6", "fig11"), "downstream"),
}
"""Table or figure -> module that makes it. "controls" is ours."""

SCALES = ("tiny", "laptop", "paper")


def main() -> None:
    from common.train.command import reproduce, reproduce_parser

    parser = reproduce_parser("reservoir", TARGETS, SCALES)
    parser.add_argument(
        "--settings",
        default="",
        help="a list from iwslt,iwslt_deep,wmt,enwik8,roberta (default: all of the target)",
    )
    parser.add_argument(
        "--models",
        default="",
        help='a list of rows, such as "Transformer,LayerDrop" (default: all)',
    )
    parser.add_argument(
        "--depths",
        default="",
        help="a list of depths, such as 6,8:3; 8:3 has 3 reservoirs (without :R the number of the scale's"
        " nearest depth)",
    )
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="SETTING=DIR",
        help="data folder of a setting (default: its configuration's), of sst2 or mnli, or of probing",
    )
    parser.add_argument(
        "--finetune",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="a field of the fine-tuning runs of fig2, fig6 and fig11, such as train.steps=100",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="list the runs and their cost; train nothing",
        dest="dry_run",
    )
    reproduce("reservoir", TARGETS, parser, _own)


def _own(options: Namespace) -> dict[str, Any]:
    from pathlib import Path

    from common.config import check, check_choice
    from common.train.command import CLAIMS
    from reservoir.downstream import FIGURES, TASKS
    from reservoir.targets import MODELS, SETTINGS

    settings, models = (
        tuple(filter(None, text.split(","))) for text in (options.settings, options.models)
    )
    for setting in settings:
        check_choice("--settings", setting, SETTINGS)
    for model in models:
        check_choice("--models", model, MODELS)
    for given in options.finetune:
        check("=" in given, f"--finetune={given} must be FIELD=VALUE")
    check(
        not options.finetune or options.target in (*FIGURES, CLAIMS),
        f"--finetune is for {', '.join((*FIGURES, CLAIMS))}: {options.target} fine-tunes nothing",
    )
    check(
        not options.dry_run or options.target != CLAIMS,
        f"--dry-run is for tables and figures, not for {CLAIMS}",
    )
    data_paths = {}
    for given in options.data:
        setting, equals, path = given.partition("=")
        check(bool(equals and path), f"--data={given} must be SETTING=DIR")
        check_choice("--data", setting, (*SETTINGS, *TASKS, "probing"))
        check(Path(path).is_dir(), f"--data={given}: there is no directory {path}")
        data_paths[setting] = Path(path)
    return {
        "settings": settings,
        "models": models,
        "depths": _depths(options.depths),
        "data_paths": data_paths,
        "finetune": tuple(options.finetune),
    }


def _depths(text: str) -> dict[int, int | None]:
    """Parses "6,8:3" as {6: None, 8: 3}: number of layers -> number of reservoirs, if given.

    Raises:
      UserError: a number is malformed, or a depth occurs twice.
    """
    from common.config import check

    found: dict[int, int | None] = {}
    for part in filter(None, text.split(",")):
        layers, colon, reservoirs = part.partition(":")
        check(
            layers.isdecimal() and int(layers) > 0 and (reservoirs.isdecimal() or not colon),
            f"--depths={text}: {part!r} is neither LAYERS nor LAYERS:RESERVOIRS",
        )
        check(int(layers) not in found, f"--depths={text}: {layers} layers are named twice")
        found[int(layers)] = int(reservoirs) if colon else None
    return found


if __name__ == "__main__":
    program.run(main)
