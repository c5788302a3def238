"""Compares the speed of two one-device processes and one two-device process: python -m benchmarks.two_processes

Both devices are on this CPU. The two processes exchange gradients over loopback. Two models train on the same data: the
tiny translation model, whose steps are short, and a larger model (LAPTOP). The case with one process and the case with
two processes take turns. Their processes stay alive between rounds.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common.errors import UserError
from common.runtime import program

TARGET = 0.85
"""Lower bound of (tokens per second of two processes) / (tokens per second of one process)."""

CASES = {"1 process x 2 devices": 1, "2 processes x 1 device": 2}
LAPTOP = {"width": 256, "hidden": 1024, "encoder_layers": 6, "decoder_layers": 2, "reservoirs": 2}
SIZES = {"tiny": ({}, 100), "laptop": (LAPTOP, 10)}
"""{size: (overrides of the model, steps of one round)}."""


def main() -> None:
    from benchmarks.harness import machine, make_parser, write_json

    parser = make_parser(__doc__, "two_processes", rounds=7)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--worker", nargs=2, metavar=("SIZE", "DIR"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(*options.worker)
        return

    one, two = CASES
    record = {"machine": machine(), "tokens_per_second": {}, "ratios": {}, "targets": {}}
    for size in options.sizes:
        rounds = measure(size, options.rounds)
        ratio = statistics.median(r[two] / r[one] for r in rounds)
        for name in CASES:
            median = statistics.median(r[name] for r in rounds)
            print(f"{size}, {name:24s} {median:10,.0f} target-side tokens/s (median)")
        met = "yes" if ratio >= TARGET else "no"
        print(f"{size}, {'ratio':24s} {ratio:10.3f}   target >= {TARGET:g}   met {met}")
        record["tokens_per_second"][size] = rounds
        record["ratios"][f"{size}: {two} over {one}"] = ratio
        record["targets"][f"{size}: {two} over {one}"] = TARGET
    write_json(options.out, record)


def measure(size: str, count: int) -> list[dict[str, float]]:
    """Returns tokens per second of both cases in each of `count` rounds."""
    steps = SIZES[size][1]
    with tempfile.TemporaryDirectory() as folder:
        groups = {name: start(size, Path(folder) / str(n), n) for name, n in CASES.items()}
        for group in groups.values():
            train(group, 10)
        rounds = []
        for number in range(count):
            order = list(CASES) if number % 2 == 0 else list(CASES)[::-1]
            rounds.append({name: train(groups[name], steps) for name in order})
        workers = [worker for group in groups.values() for worker in group]
        for worker in workers:
            worker.stdin.close()  # A worker exits only after all workers of its group have reached their end of input.
        for worker in workers:
            worker.wait()
    return rounds


def start(size: str, workdir: Path, count: int) -> list[subprocess.Popen]:
    """Starts `count` processes (`work`) with two devices in total."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(2 // count)}
    if count > 1:
        environment["TRAINLESS_COORDINATOR"] = f"127.0.0.1:{port}"
        environment["TRAINLESS_NUM_PROCESSES"] = str(count)
    command = [sys.executable, "-m", "benchmarks.two_processes", "--worker", size, str(workdir)]
    return [
        subprocess.Popen(
            command,
            env=environment | {"TRAINLESS_PROCESS_ID": str(k)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for k in range(count)
    ]


def train(group: list[subprocess.Popen], steps: int) -> float:
    """Trains `steps` steps. Returns the tokens per second of all processes together, measured by the first process."""
    for worker in group:
        worker.stdin.write(f"{steps}\n")
        worker.stdin.flush()
    speeds = []
    for worker in group:
        for line in worker.stdout:  # Skip the lines of the table of parameters.
            if line.startswith("speed "):
                speeds.append(float(line.split()[1]))
                break
        else:
            raise UserError(
                f"a worker process exited with code {worker.wait()} before it had trained {steps} steps: see its"
                " error above"
            )
    return speeds[0]


def work(size: str, workdir: str) -> None:
    """Runs a worker process. Each line of standard input is a number of steps to train."""
    from common.runtime import processes

    processes.initialize()

    from benchmarks import tiny_run

    with tiny_run.tiny_run(Path(workdir), SIZES[size][0]) as run:
        for line in sys.stdin:
            print(f"speed {tiny_run.train(run, int(line))}", flush=True)


if __name__ == "__main__":
    program.run(main, joins=True)
