"""What a person reads at the end of a run."""

import shlex
import sys
from pathlib import Path

from common.report.table import text

EXAMPLES = {
    "de": "Mein Bruder kam am 7. März 2011 nach Hamburg.",
    "en": "My brother came to Hamburg on 7 March 2011.",
}


def print_summary(summary: dict, workdir: Path) -> None:
    """The figures of a finished run, and what can be done with it."""
    counts, aucc = summary["params"], summary["aucc"]
    reached = summary["seconds_to"]
    rows = [
        ("test BLEU", f"{summary['test']['bleu']:.2f}"),
        ("best validation BLEU", f"{summary['best_valid']:.2f} at step {summary['best_step']}"),
        ("AUCC", f"{aucc['seconds']:.1f} BLEU seconds, {aucc['hours']:.4f} BLEU hours"),
        ("time to 95 / 99 / 100 %", " / ".join(f"{reached[p]:.0f} s" for p in ("95", "99", "100"))),
        ("parameters", f"{counts['total']:,}, of which {counts['frozen']:,} were never trained"),
        ("training", f"{summary['steps']} steps in {summary['train_seconds']:.0f} s"),
        ("speed", f"{summary['tokens_per_second']:,.0f} target tokens/s on {summary['device']}"),
    ]
    print(text(("", workdir.name), rows))
    print(f"curve: {workdir / 'curve.png'}   summary: {workdir / 'summary.json'}")
    source = summary["config"]["data"]["source_language"]
    example = EXAMPLES.get(source, f"(a sentence in the language {source})")
    print("translate a sentence of your own:")
    command = f"{_python()} -m reservoir.translate --workdir={shlex.quote(str(workdir))}"
    print(f'  echo "{example}" | {command}')


def _python() -> str:
    """The interpreter that runs this, as one would type it here."""
    path = Path(sys.executable)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else "python"
