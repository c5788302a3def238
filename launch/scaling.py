"""Estimates weak scaling, gradient exchange and memory traffic on TPUs or CPUs: python -m launch.scaling --out=DIR

This machine may lack the devices. All programs are compiled with less optimization, like `launch.plan --quick`. Weak
scaling keeps the work of a chip constant. `--exchange` instead writes how many MiB each of eight devices receives in a
step, with one and with four microbatches. `--attention` instead writes how many bytes a chip reads and writes in a step
of RoBERTa.
"""

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from common.arguments import check_folder
from common.errors import check
from common.runtime.program import run

if TYPE_CHECKING:
    from launch.estimate import Estimate

SHAPES = {8: "2x4", 32: "4x8", 128: "8x16", 256: "16x16"}
"""Number of chips -> shape of the slice."""

RUNS = {
    "WMT, FFN reservoirs": ("configs/wmt_ffn_res.py", "data.tokens_per_batch", 8192),
    "RoBERTa, FFN reservoirs": ("configs/roberta_ffn_res.py", "data.batch", 16),
}
"""Name of a run -> (configuration, field of the batch size, batch size per chip).

A chip processes 8,192 tokens per step. The batch equals the configured batch on 8 chips for WMT and on 128 chips for
RoBERTa.
"""

COLUMNS = (
    "run",
    "chips",
    "tokens of a step",
    "GFLOPs of a chip",
    "GFLOPs of a chip, compiled",
    "parameters, MiB on a chip",
    "optimizer, MiB on a chip",
    "all, MiB on a chip",
    "received, MiB by a chip",
    "ms of a step, estimated",
    "binds",
)

EXCHANGE = {
    "cpu:8, data=8": ("cpu:8", {"data": 8, "fsdp": 1}, "float32"),
    "v5e:2x4, data=8": ("v5e:2x4", {"data": 8, "fsdp": 1}, "float32"),
    "v5e:2x4, data=8, bfloat16": ("v5e:2x4", {"data": 8, "fsdp": 1}, "bfloat16"),
    "cpu:8, fsdp=8": ("cpu:8", {"data": 1, "fsdp": 8}, "float32"),
    "v5e:2x4, fsdp=8": ("v5e:2x4", {"data": 1, "fsdp": 8}, "float32"),
    "v5e:2x4, fsdp=8, bfloat16": ("v5e:2x4", {"data": 1, "fsdp": 8}, "bfloat16"),
}
"""Name of a case of `--exchange` -> (topology, mesh, dtype of the exchange)."""

EXCHANGED = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")
EXCHANGE_COLUMNS = ("code", "case", "microbatches", *EXCHANGED, "all, MiB on a chip")

ATTENTION_DROPOUT = (0.1, 0.0)
"""Values of `model.attention_dropout` in `--attention`."""

ATTENTION_COLUMNS = (
    "code",
    "case",
    "attention dropout",
    "GB of a step",
    "of which Pallas kernels",
    "all, MiB on a chip",
)


def main() -> None:
    from common import config

    parser = config.parser_for("launch.scaling", __doc__)
    parser.add_argument(
        "--kind",
        choices=("v5e", "v6e", "cpu"),
        help="device kind of the weak scaling (default: v5e)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/launch"),
        metavar="DIR",
        help="folder of the tables and figures (default: runs/launch)",
    )
    parser.add_argument(
        "--exchange",
        action="store_true",
        help="instead, write the MiB that a device receives per step to DIR/exchange.csv; keep rows of other commits",
    )
    parser.add_argument(
        "--attention",
        action="store_true",
        help="instead, write the bytes that a chip reads and writes in a step of RoBERTa to DIR/attention.csv;"
        " keep rows of other commits",
    )
    options = parser.parse_args()
    check_folder("--out", options.out)
    compared = [name for name in COMPARISONS if getattr(options, name)]
    check(
        not (compared and options.kind),
        f"--kind={options.kind} has no effect with --{' and --'.join(compared)}, whose devices are fixed: leave out"
        " --kind",
    )
    kind = options.kind or "v5e"
    for name in compared:
        _compare(options.out / name, *COMPARISONS[name])
    if compared:
        return

    from common.report.table import publish
    from launch import topology
    from launch.estimate import estimate

    cpu = kind == "cpu"
    check(
        cpu or topology.has_compiler(),
        f"--kind={kind} needs the TPU compiler: pip install {topology.LIBTPU}, or use --kind=cpu",
    )
    largest = max(SHAPES)
    topology.prepare(f"cpu:{largest}" if cpu else f"{kind}:{SHAPES[largest]}", quick=True)
    rows = []
    for name, (path, field, each) in RUNS.items():
        for chips, shape in SHAPES.items():
            experiment = config.load(path)
            config.override(experiment, field, str(each * chips))
            experiment.mesh.update({"data": 1, "fsdp": chips, "tensor": 1})
            slice_name = f"cpu:{chips}" if cpu else f"{kind}:{shape}"
            rows.append((name, *_row(estimate(experiment, topology.find(slice_name)))))
            print(*rows[-1], sep="  ", flush=True)
    publish(options.out / "weak_scaling", COLUMNS, rows)
    _figure(rows).savefig(options.out / "weak_scaling.png", dpi=150)


def _compare(path: Path, columns: tuple[str, ...], make: Callable[[str], Iterator[tuple]]) -> None:
    """Writes PATH.csv and PATH.md with new rows of this commit. Keeps the rows of other commits in PATH.csv.

    Args:
      make: function from the commit (8 digits, with "+" for uncommitted changes) to its rows.
    """
    from common.report.table import publish
    from common.train.workdir import commit
    from launch import topology

    check(
        topology.has_compiler(),
        f"--{path.name} needs the TPU compiler: pip install {topology.LIBTPU}",
    )
    for name in ("cpu:8", "v5e:2x4"):
        topology.prepare(name, quick=True)
    code, rows = commit(), []
    code = code[:8] + "+" * code.endswith("+")
    if path.with_suffix(".csv").exists():
        with path.with_suffix(".csv").open() as file:
            earlier = [row for row in list(csv.reader(file))[1:] if row[0] != code]
        numbers = [[int(n) if n.isdigit() else float(n) for n in row[2:]] for row in earlier]
        rows = [(*row[:2], *cells) for row, cells in zip(earlier, numbers, strict=True)]
    for row in make(code):
        rows.append(row)
        print(*row, sep="  ", flush=True)
    publish(path, columns, rows)


def _exchange(code: str) -> Iterator[tuple]:
    """Yields the rows of `--exchange`. Compiles WMT with two encoder layers and one decoder layer."""
    from common import config
    from launch import topology
    from launch.estimate import estimate

    for case, (devices, mesh, dtype) in EXCHANGE.items():
        for microbatches in (1, 4):
            experiment = config.load("configs/wmt_transformer.py")
            experiment.model.update({"encoder_layers": 2, "decoder_layers": 1})
            experiment.mesh.update({**mesh, "tensor": 1})
            experiment.train.update({"accumulate": microbatches, "reduce_dtype": dtype})
            found = estimate(experiment, topology.find(devices))
            received = {kind: size / 2**20 for kind, _, size in found.collectives.rows}
            sizes = (received.get(kind, 0.0) for kind in EXCHANGED)
            yield code, case, microbatches, *sizes, sum(found.held.values()) / 2**20


def _attention(code: str) -> Iterator[tuple]:
    """Yields the rows of `--attention`. Compiles RoBERTa with four layers, and 16 rows of 512 tokens per chip."""
    from common import config
    from launch import topology
    from launch.estimate import estimate

    for rate in ATTENTION_DROPOUT:
        experiment = config.load("configs/roberta_transformer.py")
        experiment.model.update({"encoder_layers": 4, "attention_dropout": rate})
        experiment.data.batch = 128
        experiment.mesh.update({"data": 8, "fsdp": 1, "tensor": 1})
        found = estimate(experiment, topology.find("v5e:2x4"))
        held = sum(found.held.values()) / 2**20
        yield code, "v5e:2x4, data=8", rate, found.traffic / 1e9, found.kernels / 1e9, held


COMPARISONS = {
    "exchange": (EXCHANGE_COLUMNS, _exchange),
    "attention": (ATTENTION_COLUMNS, _attention),
}
"""{name of an option and of the table that it writes: (columns, function from the commit to the rows)}."""


def _row(estimate: "Estimate") -> tuple:
    chips = len(estimate.topology.devices)
    held, mib, bound = estimate.held, 2**20, estimate.bound
    return (
        chips,
        estimate.batch.tokens,
        estimate.flops / chips / 1e9,
        estimate.compiled_flops / 1e9,
        (held["parameters, trained"] + held["parameters, frozen"]) / mib,
        held["optimizer"] / mib,
        sum(held.values()) / mib,
        estimate.collectives.received / mib,
        *((1e3 * bound.seconds, bound.binds) if bound else (None, None)),
    )


def _figure(rows: list[tuple]):
    from common.report.panels import COLOURS, panels

    names = ("GFLOPs of a chip", "MiB on a chip", "MiB received by a chip, each step")
    figure, axes = panels(len(names))
    for number, run_name in enumerate(RUNS):
        own = [row for row in rows if row[0] == run_name]
        chips = [row[1] for row in own]
        style = {"marker": "o", "markersize": 4, "color": COLOURS[number]}
        axes[0].plot(chips, [row[3] for row in own], label=run_name, **style)
        axes[0].plot(chips, [row[4] for row in own], "--", label=f"{run_name}: compiled", **style)
        axes[1].plot(chips, [row[5] for row in own], label=f"{run_name}: parameters", **style)
        axes[1].plot(chips, [row[6] for row in own], "--", label=f"{run_name}: optimizer", **style)
        axes[2].plot(chips, [row[8] for row in own], label=run_name, **style)
    for panel, name in zip(axes, names, strict=True):
        panel.set_xscale("log", base=2)
        panel.set_xticks(list(SHAPES), [str(n) for n in SHAPES])
        panel.minorticks_off()
        panel.set(xlabel="chips", ylabel=name)
        panel.legend(frameon=False, fontsize=7)
    axes[0].set_ylim(bottom=0)
    axes[1].set_yscale("log", base=2)
    axes[2].set_ylim(bottom=0)
    return figure


if __name__ == "__main__":
    run(main)
