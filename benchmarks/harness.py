"""Times the cases of a benchmark in interleaved rounds, compares pairs of cases, and describes the machine.

A machine's speed drifts (other programs, heat, clock rates). Therefore every round times each case once. The ratio of
two cases is the median over rounds of the ratio within a round, which cancels the drift.
"""

import argparse
import importlib.metadata
import json
import math
import multiprocessing
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from common.config import int_arg, parser_for
from common.train.conditions import cores

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "torch", "transformers", "peft")


def make_parser(
    description: str, name: str, *, rounds: int, types: bool = False, peers: bool = False
) -> argparse.ArgumentParser:
    """Returns a parser with the options --rounds and --out.

    Args:
      name: name of the benchmark and of its file in results/benchmarks.
      rounds: default of --rounds.
      types: whether to add the option --types, the dtypes to time.
      peers: whether to add the option --without_torch.
    """
    parser = parser_for(f"benchmarks.{name}")
    parser.description = description
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--rounds", type=int_arg("--rounds"), default=rounds, help="timed calls per case"
    )
    parser.add_argument("--out", default=f"results/benchmarks/{name}.json")
    if types:
        types = ["float32", "bfloat16"]
        parser.add_argument("--types", nargs="+", default=types, choices=types)
    if peers:
        parser.add_argument("--without_torch", action="store_true", help="do not time PyTorch")
    return parser


@dataclass(frozen=True)
class Timing:
    """Seconds of one case in each round."""

    seconds: tuple[float, ...]

    @property
    def min(self) -> float:
        return min(self.seconds)

    @property
    def median(self) -> float:
        return float(np.median(self.seconds))

    @property
    def max(self) -> float:
        return max(self.seconds)


@dataclass(frozen=True)
class Ratio:
    """Time of `case` divided by time of `baseline`, in each round. Below 1, `case` is faster."""

    case: str
    baseline: str
    rounds: tuple[float, ...]

    @property
    def name(self) -> str:
        return f"{self.case} / {self.baseline}"

    @property
    def median(self) -> float:
        return float(np.median(self.rounds))

    @property
    def interval(self) -> tuple[float, float]:
        """Interval for the true median, with measured ratios as its ends.

        From six rounds on, the interval covers the true median with a probability of at least 95 %. This is the
        interval of the sign test, which makes no assumption about the distribution. With fewer rounds, the interval
        goes from the smallest to the largest ratio, and covers the true median less often.
        """
        n, ratios = len(self.rounds), sorted(self.rounds)
        # The interval leaves out the k smallest and the k largest ratios. The probability that the true median lies
        # outside is 2 * tails[k].
        tails = np.cumsum([math.comb(n, k) for k in range(n)]) / 2**n
        k = max(int((2 * tails <= 0.05).sum()) - 1, 0)
        return ratios[k], ratios[n - 1 - k]


def compare(
    cases: Mapping[str, Callable[[], object]], *, rounds: int, warmup: int, settle: int = 0
) -> dict[str, Timing]:
    """Times the cases in interleaved rounds: A B C, then B C A, then C A B, and so on.

    Args:
      cases: {case: function that returns when the work is done}.
      rounds: timed calls per case, at least 1.
      warmup: untimed calls per case before the first round (compilation, caches).
      settle: untimed calls before each timed call. These calls warm the caches, and reclaim RAM that a virtual
        machine returned to its host while other cases ran.
    """
    for case in cases.values():
        for _ in range(warmup):
            case()
    names = list(cases)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        # Rotate the order, because the previous case affects the time of a case (caches, heat).
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            for _ in range(settle):
                cases[name]()
            start = time.perf_counter()
            cases[name]()
            seconds[name].append(time.perf_counter() - start)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


@contextmanager
def isolated(
    factories: Mapping[str | tuple[str, ...], Callable[[], Callable[[], object]]],
) -> Iterator[dict]:
    """Runs the cases of each factory in a separate process. Yields {case: function}, the `cases` of `compare`.

    In one process, cases would disturb each other by spinning threads and unreleased memory. If a key is a name, its
    factory returns the function of this case. If a key is a tuple of names, its factory returns a tuple of functions,
    one for each case, and these cases share a process. Factories and the results of cases must be picklable.
    """
    spawn = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        cases = {}
        for names, factory in factories.items():
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(factory, theirs), daemon=True)
            process.start()
            stack.callback(process.join)
            stack.callback(process.terminate)
            theirs.close()
            names = (names,) if isinstance(names, str) else names
            cases |= {name: partial(_call, ours, index) for index, name in enumerate(names)}
        yield cases


def _call(connection: Connection, index: int) -> object:
    connection.send(index)
    return connection.recv()


def _serve(factory: Callable[[], Callable[[], object]], connection: Connection) -> None:
    index = connection.recv()
    made = factory()
    cases = made if isinstance(made, tuple) else (made,)
    while True:
        connection.send(cases[index]())
        index = connection.recv()


def ratio(timings: Mapping[str, Timing], case: str, baseline: str) -> Ratio:
    """Returns the ratios of two cases that one call of `compare` timed."""
    pairs = zip(timings[case].seconds, timings[baseline].seconds, strict=True)
    return Ratio(case, baseline, tuple(a / b for a, b in pairs))


def scaled(timing: Timing, factor: float) -> Timing:
    """Returns a timing with all times multiplied by `factor`, to extrapolate from a part of the work to the whole."""
    return Timing(tuple(factor * seconds for seconds in timing.seconds))


def report(
    title: str,
    timings: Mapping[str, Timing],
    ratios: Sequence[Ratio],
    targets: Mapping[str, float],
    path_json: str | os.PathLike[str],
    further: Mapping[str, object] | None = None,
) -> bool:
    """Prints timings and ratios as a table, writes them as JSON, and returns whether all targets are met.

    Args:
      title: description of the measured work, with its sizes.
      targets: {`Ratio.name`: upper bound of the ratio's median}. A ratio need not have a target.
      further: other measurements, written to the JSON file only.
    """
    if unknown := targets.keys() - {item.name for item in ratios}:
        known = ", ".join(item.name for item in ratios)
        raise ValueError(
            f"targets for {', '.join(sorted(unknown))}, which are no ratios: choose from {known}"
        )
    record = {
        "title": title,
        "machine": machine(),
        "cases": {
            name: {
                "min": timing.min,
                "median": timing.median,
                "max": timing.max,
                "seconds": timing.seconds,
            }
            for name, timing in timings.items()
        },
        "ratios": {item.name: _judge(item, targets.get(item.name)) for item in ratios},
        **(further or {}),
    }
    print(_table(record))
    path = Path(path_json)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(f"\nwritten to {path}")
    return all(row["met"] is not False for row in record["ratios"].values())


def peak_bytes(usage: resource.struct_rusage) -> int:
    """Returns the peak resident memory in bytes. `ru_maxrss` is in kilobytes on Linux and in bytes on macOS."""
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def machine() -> dict[str, object]:
    """Describes the machine, the package versions and the commit of a measurement."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    # List devices only if JAX is already imported. Importing JAX here would reserve an accelerator.
    jax = sys.modules.get("jax")
    return {
        "cpu": _cpu_info("model name") or platform.processor(),
        "amx": "amx_tile" in _cpu_info("flags").split(),
        "cores": cores(),
        "load_average": os.getloadavg()[0],
        "jax_devices": [device.device_kind for device in jax.devices()] if jax else [],
        "platform": platform.platform(),
        "versions": versions,
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _judge(item: Ratio, target: float | None) -> dict[str, object]:
    return {
        "median": item.median,
        "min": min(item.rounds),
        "max": max(item.rounds),
        "target": target,
        "met": None if target is None else item.median <= target,
    }


def _table(record: Mapping[str, Mapping]) -> str:
    where = record["machine"]
    verdicts = {None: "", True: "yes", False: "no"}
    cases = [("case", "min ms", "median ms", "max ms")]
    for name, row in record["cases"].items():
        cases.append((name, *(f"{1e3 * row[key]:.1f}" for key in ("min", "median", "max"))))
    ratios = [("time ratio", "median", "target", "met")]
    for name, row in record["ratios"].items():
        target = "" if row["target"] is None else f"<= {row['target']:.2g}"
        ratios.append((name, f"{row['median']:.3g}", target, verdicts[row["met"]]))
    width = max(len(row[0]) for row in cases + ratios)
    lines = [
        f"{row[0]:<{width}}" + "".join(f"{cell:>12}" for cell in row[1:])
        for row in [*cases, ("", "", "", ""), *ratios]
    ]
    heading = f"{record['title']}\n{where['cpu']}, {where['cores']} cores, {where['commit']}"
    return heading + "\n\n" + "\n".join(line.rstrip() for line in lines)


def _cpu_info(field: str) -> str:
    """Returns a field of the first CPU in /proc/cpuinfo, or "" if the field is missing."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


def _commit() -> str:
    """Returns the short commit hash, with "-dirty" if files differ from the commit, or "no commit" outside git."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
        )
    except FileNotFoundError:
        return "no commit"
    return done.stdout.strip() or "no commit"
