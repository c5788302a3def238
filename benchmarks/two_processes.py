"""What it costs to be several processes: python -m benchmarks.two_processes

The loop with the tiny configuration, on two devices of this CPU: both in one process, or one in each of two, which
exchange gradients over loopback and compare notes now and then. All three processes live throughout and take turns.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import program

TARGET = 0.85
CASES = {"1 process x 2 devices": 1, "2 processes x 1 device": 2}
WARM_UP = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100, help="steps of one round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/two_processes.json"))
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
        return

    from benchmarks.harness import machine

    with tempfile.TemporaryDirectory() as folder:
        groups = {name: start(Path(folder) / str(n), n) for name, n in CASES.items()}
        for group in groups.values():
            train(group, WARM_UP)
        rounds = []
        for number in range(options.rounds):
            order = list(CASES) if number % 2 == 0 else list(CASES)[::-1]
            rounds.append({name: train(groups[name], options.steps) for name in order})
        workers = [worker for group in groups.values() for worker in group]
        for worker in workers:
            worker.stdin.close()  # of all: they wait for each other
        for worker in workers:
            worker.wait()

    one, two = CASES
    ratio = statistics.median(r[two] / r[one] for r in rounds)
    for name in CASES:
        median = statistics.median(r[name] for r in rounds)
        print(f"{name:24s} {median:10,.0f} target tokens/s (median)")
    met = "yes" if ratio >= TARGET else "no"
    print(f"{'ratio':24s} {ratio:10.3f}   target >= {TARGET:g}   met {met}")
    record = {
        "machine": machine(),
        "tokens_per_second": rounds,
        "ratios": {f"{two} over {one}": ratio},
        "targets": {f"{two} over {one}": TARGET},
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2) + "\n")
    print(f"written to {options.out}")


def start(workdir: Path, count: int) -> list[subprocess.Popen]:
    """`count` processes with two devices in all, which wait to be told how many steps to train."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(2 // count)}
    if count > 1:
        environment["TRAINLESS_COORDINATOR"] = f"127.0.0.1:{port}"
        environment["TRAINLESS_NUM_PROCESSES"] = str(count)
    command = [sys.executable, "-m", "benchmarks.two_processes", "--worker", str(workdir)]
    return [
        subprocess.Popen(
            command,
            env=environment | {"TRAINLESS_PROCESS_ID": str(k)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if k else None,
            text=True,
        )
        for k in range(count)
    ]


def train(group: list[subprocess.Popen], steps: int) -> float:
    """Tokens per second, as the first process has them, of all of them."""
    for worker in group:
        worker.stdin.write(f"{steps}\n")
        worker.stdin.flush()
    speeds = []
    for worker in group:
        for line in worker.stdout:  # behind the table of parameters
            if line.startswith("speed "):
                speeds.append(float(line.split()[1]))
                break
        else:
            sys.exit(f"a process ended with exit code {worker.wait()}")
    return speeds[0]


def work(workdir: Path) -> None:
    """One of the processes."""
    from common import distributed

    distributed.initialize()

    from benchmarks import tiny_run

    with tiny_run.tiny_run(workdir) as run:
        for line in sys.stdin:
            print(f"speed {tiny_run.train(run, int(line))}", flush=True)


if __name__ == "__main__":
    program.run(main)
