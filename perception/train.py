"""Trains a text classifier: python -m perception.train --config=configs/perception.py:tiny"""

import shlex
from pathlib import Path

from ml_collections import ConfigDict

from common.runtime import program


def main() -> None:
    from common.train.command import train

    train("perception", print_summary, download=fetch_pretrained)


def fetch_pretrained(config: ConfigDict) -> None:
    """Downloads the model --config.pretrained to the local Hugging Face cache, unless the option names a directory.

    Raises a UserError if the option is empty or missing, or the download fails.
    """
    from common.errors import check
    from perception import hub

    check(
        bool(config.get("pretrained")),
        "--download needs --config.pretrained=NAME, a name on the Hugging Face hub",
    )
    if not Path(config.pretrained).expanduser().is_dir():
        hub.download(config.pretrained)


def print_summary(summary: dict, workdir: Path) -> None:
    """Prints the results of a finished run, and a command that classifies texts with the trained model."""
    from common.report.table import text
    from common.storage.addresses import shown

    select, counts = summary["config"]["eval"]["select"], summary["params"]
    rows = []
    if best := summary["test"]:
        last = summary["test_last"]
        rows += [
            ("test weighted F1, best step", f"{best['weighted_f1']:.2f}"),
            ("test weighted F1, last step", f"{last['weighted_f1']:.2f}"),
            (
                "test accuracy, best and last step",
                f"{best['accuracy']:.2f}, {last['accuracy']:.2f}",
            ),
        ]
    rows += [
        (
            f"best step, by weighted F1 on {select}",
            f"{summary['best_step']} ({summary['best_valid']:.2f})",
        ),
        ("parameters trained", f"{counts['trainable']:,} of {counts['total']:,}"),
        ("training", f"{summary['steps']} steps in {summary['train_seconds']:.0f} s"),
        ("compute", f"{summary['flops']:.3g} floating-point operations on {summary['device']}"),
        ("speed", f"{summary['tokens_per_second']:,.0f} examples/s"),
    ]
    print(text(("", workdir.name), rows))
    print(f"curve: {shown(workdir / 'curve.png')}   summary: {shown(workdir / 'summary.json')}")
    print("classify your own texts, one per line:")
    run = shlex.quote(shown(workdir))
    print(f'  echo "(a text)" | python -m perception.classify --workdir={run}')


if __name__ == "__main__":
    program.run(main, joins=True)
