"""Trains softmax layers on text or digits: python -m explicit_opt.train --config=configs/babylm_cat.py:tiny"""

from pathlib import Path

from common.runtime import program


def main() -> None:
    from common.train.command import train

    train("explicit_opt", print_summary)


def print_summary(summary: dict, workdir: Path) -> None:
    """Prints the results of a finished run."""
    from common.report.table import text
    from common.storage.addresses import shown

    objective = summary["objective"]
    rows = [
        (name if name == "train_perplexity" else f"test {name}", f"{value:.4g}")
        for name, value in summary["test"].items()
    ]
    first = summary["curve"]["points"][0]
    if first["step"] == 0:
        rows.append((f"validation {objective} before training", f"{first['value']:.4g}"))
    rows += [
        (
            f"best validation {objective}",
            f"{summary['best_valid']:.4g} at step {summary['best_step']}",
        ),
        ("start", f"{summary['config']['start']}, {summary['start_seconds']:.2f} s"),
        ("training", f"{summary['steps']} steps in {summary['train_seconds']:.1f} s"),
        ("parameters", f"{summary['params']['total']:,}"),
    ]
    print(text(("", workdir.name), rows))
    curve = f"curve: {shown(workdir / 'curve.png')}   " if summary["steps"] else ""
    print(f"{curve}summary: {shown(workdir / 'summary.json')}")


if __name__ == "__main__":
    program.run(main, joins=True)
