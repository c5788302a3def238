"""What exchanging between processes costs: python -m benchmarks.two_processes

The training loop of a byte language model (4 layers, width 256, 16 x 256 bytes) as two processes of one device each,
started by launch/local.sh, beside one process of two devices. Each run is a program of its own; its seconds are those
of training alone, without start, compilation and evaluation.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common import program

ROOT = Path(__file__).parents[1]
CASES = ("two processes", "two devices")
TARGETS = {"two processes / two devices": 1 / 0.85}


def command(case: str, steps: int, workdir: Path) -> list[str]:
    """Of one run."""
    config = "configs/enwik8_transformer.py:tiny"
    fields = {
        "model.width": 256,
        "model.hidden": 1024,
        "model.length": 256,
        "eval.stride": 256,
        "eval.tokens": 256,
        "eval.steps": 10**9,
        "checkpoint.steps": 0,
        "checkpoint.seconds": 0.0,
        "train.steps": steps,
        "wandb.mode": "disabled",
    }
    rest = [*(f"--config.{name}={value}" for name, value in fields.items()), f"--workdir={workdir}"]
    if case == "two processes":
        logs = workdir.with_name("logs")
        launcher = ["launch/local.sh", "--module", "reservoir.train", "--log-dir", str(logs)]
        return [*launcher, "2", config, *rest]
    return [sys.executable, "-m", "reservoir.train", f"--config={config}", *rest]


def run(case: str, steps: int) -> float:
    """Seconds of training."""
    devices = "1" if case == "two processes" else "2"
    environment = {**os.environ, "PYTHON": sys.executable, "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        workdir = Path(folder) / "run"
        done = subprocess.run(
            command(case, steps, workdir),
            cwd=ROOT,
            env={**environment, "JAX_NUM_CPU_DEVICES": devices},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            sys.exit(
                f"{case}: exit code {done.returncode}\n{done.stdout[-500:]}{done.stderr[-2000:]}"
            )
        return json.loads((workdir / "summary.json").read_text())["train_seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40, help="steps of one round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default="results/benchmarks/two_processes.json")
    options = parser.parse_args()

    from benchmarks.harness import Timing, ratio, report

    seconds: dict[str, list[float]] = {case: [] for case in CASES}
    for number in range(options.rounds):
        for case in CASES if number % 2 == 0 else reversed(CASES):
            seconds[case].append(run(case, options.steps) / options.steps)
    timings = {case: Timing(tuple(found)) for case, found in seconds.items()}
    title = f"a step of the training loop, {options.steps} steps a run, float32"
    report(title, timings, [ratio(timings, *CASES)], TARGETS, options.out)


if __name__ == "__main__":
    program.run(main)
