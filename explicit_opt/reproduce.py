"""The paper's table and figures, measured beside printed: python -m explicit_opt.reproduce table1 --scale=tiny

Runs what is missing, goes on with what was cut off, and writes CSV, Markdown and PNG into --out. Any field of the
configurations is an option, as in explicit_opt.train: --config.data.source=files:DIR
"""

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


def main() -> None:
    from common.train.command import reproduce, reproduce_parser

    reproduce("explicit_opt", TARGETS, reproduce_parser("explicit_opt", TARGETS, SCALES))


if __name__ == "__main__":
    program.run(main)
