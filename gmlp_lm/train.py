"""Trains a language model on bytes or subwords: python -m gmlp_lm.train --config=configs/enwik8_gmlp.py:tiny"""

import shlex
from pathlib import Path

from common.runtime import program


def main() -> None:
    from common.train.command import train

    train("gmlp_lm", print_summary)


def print_summary(summary: dict, workdir: Path) -> None:
    """Prints the results of a finished run and a command that samples text from the model."""
    from common.report.table import text
    from common.storage.addresses import shown

    unit = summary.get("unit", "tokens")  # missing before commit 9c07d7a (24 November 2026)
    rows = [
        *((f"test {name}", f"{value:.4f}") for name, value in summary["test"].items()),
        (
            "best validation bits per byte",
            f"{summary['best_valid']:.4f} at step {summary['best_step']}",
        ),
        ("AUCC (bits, hours)", f"{summary['aucc']['hours']:.4f}"),
        ("training", f"{summary['steps']} steps in {summary['train_seconds']:.1f} s"),
        ("speed", f"{summary['tokens_per_second']:,.0f} {unit}/s"),
        ("parameters", f"{summary['params']['total']:,}"),
    ]
    print(text(("", workdir.name), rows))
    print(f"curve: {shown(workdir / 'curve.png')}   summary: {shown(workdir / 'summary.json')}")
    run = shlex.quote(shown(workdir))
    print(f'try it: python -m gmlp_lm.sample --workdir={run} --prompt="The "')


if __name__ == "__main__":
    program.run(main, joins=True)
