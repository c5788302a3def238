"""Prints the summary of a finished run and, for some tasks, a command that uses the trained model."""

import shlex
import sys
from pathlib import Path

from common.report.table import text
from common.storage.addresses import shown

EXAMPLES = {
    "de": "Mein Bruder kam am 7. März 2011 nach Hamburg.",
    "en": "My brother came to Hamburg on 7 March 2011.",
}


_MEASURES = {
    "bleu": ("BLEU", ".2f"),
    "perplexity": ("perplexity", ".3f"),
    "bits_per_byte": ("bits per byte", ".3f"),
    "accuracy": ("accuracy", ".2f"),
}
"""`objective` of a summary -> (printed name, number format)."""


def print_summary(summary: dict, workdir: Path) -> None:
    """Prints the results of a run and, for a translator or masked language model, a command that uses the model."""
    counts, aucc = summary["params"], summary["aucc"]
    reached, test = summary["seconds_to"], dict(summary["test"])
    objective = summary["objective"]
    measure, form = _MEASURES.get(objective, (objective, ".4g"))
    unit = summary.get("unit", "tokens")  # Summaries from before 24 November 2026 lack the unit.
    best = f"{summary['best_valid']:{form}} at step {summary['best_step']}"
    others = {} if objective == "bleu" else {n: v for n, v in test.items() if n != objective}
    tested = [(f"test {measure}", f"{test[objective]:{form}}")] if test else []
    rows = [
        *tested,
        *((f"test {name}", f"{value:.3f}") for name, value in others.items()),
        (f"best validation {measure}", best),
        ("AUCC", f"{aucc['seconds']:.1f} {measure} seconds, {aucc['hours']:.4f} {measure} hours"),
        (
            "time to 95 / 99 / 100 % of best",
            " / ".join(f"{reached[p]:.0f} s" for p in ("95", "99", "100")),
        ),
        ("parameters", f"{counts['total']:,}, of which {counts['frozen']:,} were frozen"),
        ("training", f"{summary['steps']} steps in {summary['train_seconds']:.0f} s"),
        ("speed", f"{summary['tokens_per_second']:,.0f} {unit}/s on {summary['device']}"),
    ]
    print(text(("", workdir.name), rows))
    print(f"curve: {shown(workdir / 'curve.png')}   summary: {shown(workdir / 'summary.json')}")
    # Choose by the task, because a user's task may also have the objective "bleu" or "perplexity".
    if next_command := _NEXT.get(summary["config"].get("task")):
        next_command(summary, workdir)


def _translate(summary: dict, workdir: Path) -> None:
    source = summary["config"]["data"]["source_language"]
    example = EXAMPLES.get(source, f"(a sentence in the language {source})")
    print("translate a sentence of your own:")
    command = f"{_python()} -m reservoir.translate --workdir={shlex.quote(shown(workdir))}"
    print(f'  echo "{example}" | {command}')


def _fine_tune(summary: dict, workdir: Path) -> None:
    print("fine-tune this model on a classification task:")
    run = shlex.quote(shown(workdir))
    embedded = summary["config"]["data"]["source"].startswith("embedded:")
    config = f"--config=configs/sst2.py{':tiny' if embedded else ''}"
    print(f"  {_python()} -m reservoir.finetune {config} --config.pretrained={run}")


_NEXT = {"translation": _translate, "masked_lm": _fine_tune}
"""`config.task` -> function that prints a command for the trained model."""


def _python() -> str:
    """Returns the Python interpreter as a path relative to the working directory, or "python" if it lies elsewhere."""
    path = Path(sys.executable)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else "python"
