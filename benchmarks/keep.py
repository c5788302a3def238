"""Copies finished runs without their checkpoints: python -m benchmarks.keep RUNS results/PAPER/laptop/runs

Copies only the files that tables, verdicts and figures read: the summary, the requested configuration, the predictions
and the metrics of evaluations. Skips unfinished runs.
"""

import json
import shutil
from pathlib import Path

from common.config import parser_for
from common.errors import check
from common.experiments import REQUESTED_CONFIG, portable
from common.metrics.predictions import PREDICTIONS
from common.runtime import program
from common.track.tracker import METRICS, SUMMARY


def keep(run: Path, folder: Path) -> None:
    """Copies a finished run into `folder`, without the paths of this machine (`portable`). Replaces an earlier copy."""
    kept = folder / run.name
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    summary = json.loads((run / SUMMARY).read_text())
    if "config" in summary:
        portable(summary["config"])
    (kept / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")
    for name in (REQUESTED_CONFIG, PREDICTIONS):
        if (run / name).exists():
            shutil.copyfile(run / name, kept / name)
    if (run / METRICS).exists():  # TF-IDF runs have no metrics.
        lines = (run / METRICS).read_text().splitlines()
        evaluated = [
            line for line in lines if any(key.startswith("valid/") for key in json.loads(line))
        ]
        (kept / METRICS).write_text("".join(f"{line}\n" for line in evaluated))


def main() -> None:
    parser = parser_for("benchmarks.keep", __doc__)
    parser.add_argument("runs", type=Path, help="folder with the runs")
    parser.add_argument("folder", type=Path, help="folder to copy the runs to")
    options = parser.parse_args()
    # A trained run is finished if it has a summary and its requested configuration. A run without metrics (TF-IDF) is
    # finished if it has a summary.
    runs = sorted(
        path.parent
        for path in options.runs.glob(f"*/{SUMMARY}")
        if (path.parent / REQUESTED_CONFIG).exists() or not (path.parent / METRICS).exists()
    )
    check(
        bool(runs),
        f"{options.runs} has no finished run: give the folder `runs` in the --out of reproduce or perception.worth",
    )
    check(
        options.folder.resolve() != options.runs.resolve(),
        f"{options.folder} is the folder of the runs: choose another folder for the copies",
    )
    for run in runs:
        keep(run, options.folder)
    size = sum(path.stat().st_size for path in options.folder.rglob("*") if path.is_file())
    print(f"kept {len(runs)} runs; {options.folder} has {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    program.run(main)
