"""Writes a table of measurements before and after changes of the code: python -m benchmarks.before_after

The program measures nothing. It reads the tables in results/launch and results/benchmarks; the last column of each row
names the command that measures.
"""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from common.config import parser_for
from common.report.table import markdown, text
from common.runtime import program

RESULTS = Path(__file__).parent.parent / "results"


class Change(NamedTuple):
    """A row of the table.

    Attributes:
      measure: name and unit of the measured quantity.
      before, after: values; `before` is None if no older program was measured.
      code: the older and the newer commit, the only commit, or two modes of one commit.
      most: upper bound of `after`; None without a target.
      command: module that measures, with its options.
    """

    measure: str
    before: float | None
    after: float
    code: str
    most: float | None
    command: str

    def cells(self) -> tuple:
        met = "" if self.most is None else "yes" if self.after <= self.most else "no"
        return *self[:4], self.most, met, f"`python -m {self.command}`"


COLUMNS = ("measure", "before", "after", "code", "target", "met", "command")


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def exchanges(results: Path) -> Iterator[Change]:
    """Yields the MiB of gradients that a device receives in a step with one and with four microbatches.

    A case is a topology, a mesh and a dtype of the exchange. If exchange.csv has several commits of a case, `before` is
    the first commit and `after` the last. Otherwise `before` has one microbatch and `after` has four. The target with
    four microbatches is 2 % above the last commit's traffic with one microbatch.
    """
    traffic = ("all-reduce", "reduce-scatter", "collective-permute")
    received: dict[str, dict[tuple[str, str], float]] = {}
    for row in _read(results / "launch/exchange.csv"):
        commits = received.setdefault(row["case"], {})
        commits[row["code"], row["microbatches"]] = sum(float(row[name]) for name in traffic)
    for case, found in received.items():
        codes = list(dict.fromkeys(code for code, _ in found))
        old, new = codes[0], codes[-1]
        command = "launch.scaling --exchange"
        most = 1.02 * found[new, "1"]
        if old != new:
            for number, target in (("1", None), ("4", most)):
                name = f"gradients received, {case}, microbatches: {number} (MiB)"
                values = found[old, number], found[new, number]
                yield Change(name, *values, f"{old}, {new}", target, command)
        elif (new, "4") in found:
            name = f"gradients received, {case}, microbatches: 1 and 4 (MiB)"
            yield Change(name, found[new, "1"], found[new, "4"], new, most, command)


def decoding(results: Path) -> Iterator[Change]:
    """Yields the MiB that a device receives for each generated token, by run and mesh.

    In `before`, the compiler partitions decoding. In `after`, the rows of a batch are split over the devices
    (`common.decode.rows`). The target is 5 MiB.
    """
    received: dict[str, list[float]] = {}
    for row in _read(results / "launch/decoding.csv"):
        name = f"decoding, {row['run']}, {row['mesh']}, received for a token (MiB)"
        received.setdefault(name, []).append(float(row["MiB received for a token"]))
    for name, (before, after) in received.items():
        yield Change(name, before, after, "by the compiler, by rows", 5.0, "launch.decoding")


def attention(results: Path) -> Iterator[Change]:
    """Yields the GB that a v5e chip reads and writes in a step of RoBERTa, for each rate of attention dropout.

    The target at every rate is 25 % below the first row of attention.csv.
    """
    rows = _read(results / "launch/attention.csv")
    most = 0.75 * float(rows[0]["GB of a step"])
    old, new = rows[0], rows[-1]
    for rate in dict.fromkeys(row["attention dropout"] for row in rows):
        found = [float(row["GB of a step"]) for row in rows if row["attention dropout"] == rate]
        name = f"RoBERTa at T=512, attention dropout {rate}, bytes of a step (GB)"
        codes = f"{old['code']}, {new['code']}"
        yield Change(name, found[0], found[-1], codes, most, "launch.scaling --attention")


def compilation(results: Path) -> Iterator[Change]:
    """Yields the CPU seconds of compiling a translator with 32 encoder layers, and the seconds until step 1.

    `before` is the first row with 32 layers in compilation.json, and `after` the second. The targets are 8 CPU seconds
    to compile a bucket, and a third of the seconds until step 1 in the first row.
    """
    rows = json.loads((results / "benchmarks/compilation.json").read_text())["rows"]
    old, new = (row for row in rows if row["layers"] == 32)
    command = "benchmarks.compilation --layers 32"
    for column, name, most in (
        ("lower and compile CPU s", "each bucket (CPU s)", 8.0),
        ("before step 1 s", "before step 1 (s)", old["before step 1 s"] / 3),
    ):
        name = f"compilation, 32 layers, {name}"
        same = old["commit"] == new["commit"]
        codes = "unrolled, scanned" if same else f"{old['commit']}, {new['commit']}"
        yield Change(name, old[column], new[column], codes, most, command)


def placement(results: Path) -> Iterator[Change]:
    """Yields the estimated milliseconds of a step, for each run and number of v5e chips (8 to 256).

    `before` is from commit f090e73, in which the compiler chose the collectives that sum gradients, and meshes kept
    JAX's device order; `after` is from commit d733b7c.
    """
    old = "f090e73"
    tables = [_read(results / f"launch/weak_scaling{of}.csv") for of in (f"_{old}", "")]
    for before, after in zip(*tables, strict=True):
        name = f"estimated step, {after['run']}, {after['chips']} chips (ms)"
        values = (float(row["ms of a step, estimated"]) for row in (before, after))
        yield Change(name, *values, f"{old}, d733b7c", None, "launch.scaling")


def steps(results: Path) -> Iterator[Change]:
    """Yields two time ratios on CPUs for each row of step.csv, a recipe in one dtype on one machine.

    A recipe is a training step or a decoder. The ratios are our time / PyTorch's time, and our time / the time of our
    matrix products alone.
    """
    for row in _read(results / "benchmarks/step.csv"):
        for column, most in (("ours / PyTorch", 1.0), ("ours / products", 1.4)):
            machine = f"{row['cores']} cores of {row['cpu']}"
            name = f"{row['recipe']} in {row['dtype']} on {machine}, {column}"
            yield Change(name, None, float(row[column]), row["commit"], most, "benchmarks.step")


def write(results: Path = RESULTS) -> str:
    """Writes results/launch/before_after.md. Returns the table for the terminal."""
    measures = exchanges, decoding, attention, compilation, placement, steps
    rows = [change.cells() for measure in measures for change in measure(results)]
    page = f"""# Before and after

Written by `python -m benchmarks.before_after` from the tables beside this page,
[compilation.json](../benchmarks/compilation.json) and [step.csv](../benchmarks/step.csv). Bytes and estimated
milliseconds are properties of compiled programs. Ratios of steps and decoders are medians;
[step.md](../benchmarks/step.md) has their ranges and the machines. Ratios have no value before,
because no older program was measured on these machines.

{markdown(COLUMNS, rows)}"""
    (results / "launch/before_after.md").write_text(page)
    return text(COLUMNS, rows)


def main() -> None:
    parser_for("benchmarks.before_after", __doc__).parse_args()
    print(write())


if __name__ == "__main__":
    program.run(main)
