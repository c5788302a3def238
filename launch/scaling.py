"""Estimates weak scaling (constant work per chip) without hardware: python -m launch.scaling --out=DIR"""

from pathlib import Path
from typing import TYPE_CHECKING

from common.runtime.program import run

if TYPE_CHECKING:
    from launch.estimate import Estimate

SHAPES = {8: "2x4", 32: "4x8", 128: "8x16", 256: "16x16"}
"""Number of chips -> shape of the slice (2D torus)."""

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
    "the compiler's effort",
)


def main() -> None:
    from common import config

    parser = config.parser_for("launch.scaling")
    parser.add_argument(
        "--kind", choices=("v5e", "v6e", "cpu"), default="v5e", help="device kind (default: v5e)"
    )
    parser.add_argument("--out", type=Path, default=Path("results/launch"), metavar="DIR")
    options = parser.parse_args()

    import jax

    from common.report.table import publish
    from launch import topology
    from launch.estimate import estimate

    cpu = options.kind == "cpu"
    config.check(
        cpu or topology.has_compiler(),
        f"--kind={options.kind} needs the TPU compiler: pip install {topology.LIBTPU}, or use --kind=cpu",
    )
    largest = max(SHAPES)
    topology.prepare(f"cpu:{largest}" if cpu else f"{options.kind}:{SHAPES[largest]}")
    jax.config.update("jax_exec_time_optimization_effort", -1.0)
    rows = []
    for name, (path, field, each) in RUNS.items():
        for chips, shape in SHAPES.items():
            experiment = config.load(path)
            config.override(experiment, field, str(each * chips))
            experiment.mesh.update({"data": 1, "fsdp": chips, "tensor": 1})
            slice_name = f"cpu:{chips}" if cpu else f"{options.kind}:{shape}"
            rows.append((name, *_row(estimate(experiment, topology.find(slice_name)))))
            print(*rows[-1], sep="  ", flush=True)
    publish(options.out / "weak_scaling", COLUMNS, rows)
    _figure(rows).savefig(options.out / "weak_scaling.png", dpi=150)


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
        "little (--quick)",
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
