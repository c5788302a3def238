"""Times the cases of a benchmark in interleaved rounds, compares pairs of cases, and describes the machine.

A machine's speed drifts (other programs, heat, clock rates). Therefore every round times each case once. The ratio of
two cases is the median over rounds of the ratio within a round, so drift from round to round cancels.
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
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

from common.arguments import int_arg
from common.config import parser_for
from common.errors import check
from common.report.table import text

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
    parser = parser_for(f"benchmarks.{name}", description)
    parser.add_argument(
        "--rounds", type=int_arg("--rounds"), default=rounds, help="timed calls per case"
    )
    out = Path(f"results/benchmarks/{name}.json")
    parser.add_argument(
        "--out", type=Path, default=out, help="file to write (default: %(default)s)"
    )
    if types:
        types = ["float32", "bfloat16"]
        parser.add_argument("--types", nargs="+", default=types, choices=types)
    if peers:
        parser.add_argument("--without_torch", action="store_true", help="do not time PyTorch")
    return parser


def check_installed(*packages: str) -> None:
    """Raises a UserError if one of the `packages`, which benchmarks/requirements.txt installs, is missing."""
    missing = [name for name in packages if find_spec(name) is None]
    check(
        not missing,
        f"this benchmark needs packages that are not installed ({', '.join(missing)}): pip install -r"
        " benchmarks/requirements.txt",
    )


Seconds = tuple[float, ...]  # seconds of one case in each round


def compare(
    cases: Mapping[str, Callable[[], object]], *, rounds: int, warmup: int, settle: int = 0
) -> dict[str, Seconds]:
    """Times the cases in interleaved rounds: A B C, then B C A, then C A B, and so on. Returns {case: its `Seconds`}.

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
        # Rotate the order, because a case affects the time of the next case (caches, heat).
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            for _ in range(settle):
                cases[name]()
            start = time.perf_counter()
            cases[name]()
            seconds[name].append(time.perf_counter() - start)
    return {name: tuple(values) for name, values in seconds.items()}


@contextmanager
def isolated(
    factories: Mapping[str | tuple[str, ...], Callable[[], Callable[[], object]]],
) -> Iterator[dict]:
    """Runs the cases of each factory in a separate process. Yields {case: function}, the `cases` of `compare`.

    In one process, cases would disturb each other by spinning threads and unreleased memory. The factory of a name
    returns the function of the case. The factory of a tuple of names returns a tuple of functions, one for each case;
    these cases share a process. Factories and the results of cases must be picklable. If the process of a case has
    ended, calling the case raises an EOFError or an OSError.
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


def compare_isolated(
    factories: Mapping[str, Callable[[], Callable[[], object]]], *, rounds: int, warmup: int
) -> tuple[dict[str, Seconds], dict[str, int]]:
    """Times cases as `compare` with `settle=1`, each case in a separate process.

    Returns {case: its `Seconds`} and {case: peak memory of its process in bytes}.
    """
    pairs = {(n, f"{n}: memory"): partial(_with_memory, make) for n, make in factories.items()}
    with isolated(pairs) as calls:
        cases = {name: calls[name] for name in factories}
        timings = compare(cases, rounds=rounds, warmup=warmup, settle=1)
        return timings, {name: calls[f"{name}: memory"]() for name in factories}


def _with_memory(make: Callable[[], Callable]) -> tuple[Callable, Callable[[], int]]:
    return make(), peak_bytes


def ratios(timings: Mapping[str, Seconds], case: str, baseline: str) -> tuple[float, ...]:
    """Returns the time of `case` divided by the time of `baseline`, in each round. Below 1, `case` is faster."""
    return tuple(a / b for a, b in zip(timings[case], timings[baseline], strict=True))


def interval(rounds: Sequence[float]) -> tuple[float, float]:
    """Returns an interval for the true median of ratios, given the ratios of all rounds.

    From six rounds on, the interval covers the true median with a probability of at least 95 %. This is the interval
    of the sign test, which assumes only that rounds are independent. With fewer rounds, the interval goes from the
    smallest to the largest ratio, and covers the true median less often.
    """
    n, ordered = len(rounds), sorted(rounds)
    # The interval leaves out the k smallest and the k largest ratios. The probability that the true median lies outside
    # is 2 * tails[k] / 2**n.
    tails = accumulate(math.comb(n, k) for k in range(n))
    k = max(sum(2 * tail / 2**n <= 0.05 for tail in tails) - 1, 0)
    return ordered[k], ordered[n - 1 - k]


def report(
    title: str,
    timings: Mapping[str, Seconds],
    targets: Mapping[tuple[str, str], float | None],
    path: Path,
    further: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """Prints times and their ratios as tables, and writes them to a JSON file. Returns the content of the file.

    Args:
      title: description of the measured work, with its sizes.
      targets: {(case, baseline): upper bound of the median of `ratios`; None without a target}.
      path: path of the JSON file.
      further: other measurements, written to the JSON file only.
    """
    cases, compared = {}, {}
    for name, seconds in timings.items():
        times = {"min": min(seconds), "median": median(seconds), "max": max(seconds)}
        cases[name] = times | {"seconds": seconds}
    for pair, target in targets.items():
        rounds = ratios(timings, *pair)
        compared[" / ".join(pair)] = {
            "median": median(rounds),
            "min": min(rounds),
            "max": max(rounds),
            "target": target,
            "met": None if target is None else median(rounds) <= target,
        }
    found = {"title": title, "machine": machine(), "cases": cases, "ratios": compared}
    where = found["machine"]
    print(f"{title}\n{where['cpu']}, {where['cores']} cores, {where['commit']}\n")
    milliseconds = [
        (name, *(1e3 * row[key] for key in ("min", "median", "max"))) for name, row in cases.items()
    ]
    print(text(("case", "min ms", "median ms", "max ms"), milliseconds))
    verdicts = {None: "", True: "yes", False: "no"}
    rows = [(name, r["median"], r["target"], verdicts[r["met"]]) for name, r in compared.items()]
    print(text(("time ratio", "median", "at most", "met"), rows))
    found |= further or {}
    write_json(path, found)
    return found


def write_json(path: Path, record: Mapping[str, object]) -> None:
    """Writes a record of measurements as JSON, and prints the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(f"written to {path}")


def peak_bytes(who: int = resource.RUSAGE_SELF) -> int:
    """Returns the peak resident memory, in bytes, of this process.

    Args:
      who: `resource.RUSAGE_CHILDREN` for the largest of the ended child processes instead.
    """
    # `ru_maxrss` is in kilobytes on Linux and in bytes on macOS.
    return resource.getrusage(who).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def machine() -> dict[str, object]:
    """Describes the machine, the package versions and the commit of a measurement."""
    # List devices only if this process has imported JAX, because listing them reserves an accelerator.
    jax = sys.modules.get("jax")
    from common.train.conditions import cores  # imports JAX; must follow the check for JAX

    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": _cpu_info("model name") or platform.processor(),
        "amx": "amx_tile" in _cpu_info("flags").split(),
        "cores": cores(),
        "load_average": os.getloadavg()[0],
        "jax_devices": [device.device_kind for device in jax.devices()] if jax else [],
        "platform": platform.platform(),
        "versions": versions,
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _cpu_info(field: str) -> str:
    """Returns a field of the first CPU in /proc/cpuinfo, or "" if the field or the file is missing."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


def commit(checkout: Path = Path(__file__).parent) -> str:
    """Returns the short commit hash, with "-dirty" if tracked files differ; "no commit" without git or a commit."""
    git = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(git, cwd=checkout, capture_output=True, text=True)
    except FileNotFoundError:
        return "no commit"
    return done.stdout.strip() or "no commit"
