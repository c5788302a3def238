"""Reproduces the paper's tables and figures: python -m reservoir.reproduce table1 --scale=tiny

Trains missing runs, resumes interrupted runs, and writes CSV, Markdown and PNG into --out. As in reservoir.train,
--config.FIELD=VALUE overrides a field of the configuration, here of all runs except fine-tuning runs, which need
--finetune=FIELD=VALUE. --dry-run lists the runs and their cost.
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
"""Table or figure -> module of `reservoir` that defines a function of that name. "controls" is our own table."""


def main() -> None:
    from common.reproduce import reproduce, reproduce_parser

    parser = reproduce_parser("reservoir", TARGETS, __doc__)
    parser.add_argument(
        "--settings",
        default="",
        help="comma-separated list from iwslt,iwslt_deep,wmt,enwik8,roberta (default: all of the table or figure)",
    )
    parser.add_argument(
        "--models",
        default="",
        help='comma-separated list of rows, such as "Transformer,LayerDrop" (default: all rows)',
    )
    parser.add_argument(
        "--depths",
        default="",
        help="comma-separated list of depths, such as 6,8:3. 8:3 means 8 layers with 3 reservoirs; 6 means 6"
        " layers with the default number of reservoirs",
    )
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="SETTING=DIR",
        help="data folder of a setting (iwslt, ...), of a fine-tuning task (sst2, mnli), or of the probing tasks"
        " (probing)",
    )
    parser.add_argument(
        "--finetune",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="override a field of the fine-tuning runs in fig2, fig6, fig11 and claims, such as train.steps=100",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="list the runs of a table or figure and their cost without training",
        dest="dry_run",
    )
    reproduce("reservoir", TARGETS, parser, _own)


def _own(options: Namespace) -> dict[str, Any]:
    from common.arguments import check_unused
    from common.config import check_choice
    from common.errors import check
    from common.reproduce import CLAIMS, named_paths
    from common.storage.addresses import shown
    from reservoir.downstream import FIGURES, TASKS
    from reservoir.targets import MODELS, SETTINGS

    settings, models = (
        tuple(filter(None, text.split(","))) for text in (options.settings, options.models)
    )
    for setting in settings:
        check_choice("--settings", setting, SETTINGS)
    for model in models:
        check_choice("--models", model, MODELS)
    for override in options.finetune:
        check(
            "=" in override, f"--finetune={override} must be FIELD=VALUE, such as train.steps=100"
        )
    tuned = (*FIGURES, CLAIMS)
    if options.target not in tuned:
        check_unused(options, ["finetune"], f"--finetune is only for {', '.join(tuned)}")
    if options.target == CLAIMS:
        check_unused(options, ["dry_run"], f"--dry-run is for tables and figures, not for {CLAIMS}")
    data_paths = named_paths("--data", options.data, (*SETTINGS, *TASKS, "probing"))
    for setting, path in data_paths.items():
        check(
            path.is_dir(),
            f"--data={setting}={shown(path)} is not a directory: give the folder that contains the data",
        )
    return {
        "settings": settings,
        "models": models,
        "depths": _depths(options.depths),
        "data_paths": data_paths,
        "finetune": tuple(options.finetune),
    }


def _depths(text: str) -> dict[int, int | None]:
    """Parses "6,8:3" as {6: None, 8: 3}: number of layers -> number of reservoirs, or None for the default number."""
    from common.errors import check

    depths: dict[int, int | None] = {}
    for part in filter(None, text.split(",")):
        layers, colon, reservoirs = part.partition(":")
        check(
            layers.isdecimal() and int(layers) > 0 and (reservoirs.isdecimal() or not colon),
            f"--depths={text}: {part!r} must be LAYERS or LAYERS:RESERVOIRS, such as 6 or 8:3, with at least 1 layer",
        )
        check(
            int(layers) not in depths,
            f"--depths={text}: the depth {layers} occurs twice; name each depth once",
        )
        depths[int(layers)] = int(reservoirs) if colon else None
    return depths


if __name__ == "__main__":
    program.run(main, trains=True)
