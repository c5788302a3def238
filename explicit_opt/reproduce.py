"""The paper's table and figures, measured beside printed: python -m explicit_opt.reproduce table1 --scale=tiny

Runs what is missing, goes on with what was cut off, and writes CSV, Markdown and PNG into --out. Any field of the
configurations is an option, as in explicit_opt.train: --config.data.source=files:DIR. --protocol=printed stops and
selects as the paper does.
"""

from argparse import Namespace

from common import program

TARGETS = {
    "table1": "experiments",
    "fig1": "experiments",
    "fig2": "experiments",
    "fig3": "experiments",
    "formula": "arithmetic",
    "sensitivity": "arithmetic",
}
"""The paper's table and figures, and two tables of the page of proof, with the module of each."""

SCALES = ("tiny", "laptop", "paper")

PROTOCOLS = ("ours", "printed")
"""How runs are stopped and selected (see explicit_opt.experiments.Laboratory)."""


def main() -> None:
    from common.train.command import reproduce, reproduce_parser

    parser = reproduce_parser("explicit_opt", TARGETS, SCALES)
    parser.add_argument(
        "--protocol",
        default="ours",
        help="ours: early stopping by held-out data, best checkpoint (the default); printed: last values",
    )
    reproduce("explicit_opt", TARGETS, parser, _own)


def _own(options: Namespace) -> dict[str, str]:
    from common.config import choose, require

    choose("--protocol", options.protocol, PROTOCOLS)
    require(
        options.target != "formula" or options.protocol == "ours",
        f"--protocol={options.protocol}: formula trains nothing",
    )
    return {"protocol": options.protocol}


if __name__ == "__main__":
    program.run(main)
