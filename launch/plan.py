"""Estimates memory, FLOPs, communication and time of a run on devices that this machine may lack.

python -m launch.plan --config=configs/wmt_ffn_res.py --topology=v5e:4x4
"""

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from common.errors import check
from common.runtime.program import run

if TYPE_CHECKING:
    from ml_collections import ConfigDict

    from launch.estimate import Estimate

MIB = 2**20

STEPS = (
    "--config.train.steps=N, or --config.data.tokens=N for a language model of explicit_opt; a digit classifier of"
    " explicit_opt cannot be estimated"
)
"""What to add to a command whose number of steps is unknown, for error messages."""


def arguments() -> ArgumentParser:
    from common.arguments import float_arg
    from common.config import parser_for

    parser = parser_for("launch.plan", __doc__)
    parser.add_argument("--config", required=True, metavar="FILE[:ARG]", help="configuration file")
    parser.add_argument(
        "--topology",
        required=True,
        metavar="KIND:SHAPE",
        help="a TPU slice such as v5e:4x4 or v5p:2x2x2, several slices such as 2xv5e:16x16, the GPUs of a host such as"
        " h100:8, or CPU devices such as cpu:8",
    )
    parser.add_argument(
        "--price", type=float_arg("--price"), help="price of a chip-hour, in any currency"
    )
    parser.add_argument(
        "--shardings", action="store_true", help="also print the sharding of every parameter"
    )
    parser.add_argument(
        "--sweep",
        action="store_true",
        help="try all meshes and several batch sizes; report the fastest mesh and batch size that fit into memory",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="compile with less optimization: faster, but memory and traffic differ from a real run",
    )
    parser.add_argument(
        "--decode",
        action="store_true",
        help="compile text generation instead of a training step; report the bytes that each device receives per token",
    )
    parser.epilog = "Every field of the configuration can be overridden: --config.mesh.fsdp=4"
    return parser


def parse(argv: list[str]) -> "tuple[Namespace, ConfigDict]":
    """Returns the options of a command line, and its configuration with all overrides."""
    from common import config

    fields, rest = config.split_fields(argv)
    options = arguments().parse_args(rest)
    experiment = config.load(options.config)
    config.override_all(experiment, fields)
    return options, experiment


def main() -> None:
    import os
    import sys

    # Suppress XLA's log messages. The variable must be set before JAX is imported.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

    options, experiment = parse(sys.argv[1:])
    check(
        options.price is None or options.price >= 0,
        f"--price must be at least 0, got {options.price}",
    )
    flags = {
        "--price": options.price is not None,
        "--shardings": options.shardings,
        "--sweep": options.sweep,
    }
    given = [name for name, is_given in flags.items() if is_given]
    others = " and ".join(given)
    check(
        not (options.decode and given),
        f"--decode cannot be combined with {others}: leave out --decode, or leave out {others}",
    )

    from common.report.table import text
    from launch import decoding, sweep, topology
    from launch.estimate import estimate

    topology.prepare(options.topology, options.quick)
    devices = topology.find(options.topology)
    if options.decode:
        table = decoding.table_rows(decoding.traffic(experiment, devices))
        print(text(("quantity", "value", ""), table))
        return
    result = sweep.best(experiment, devices) if options.sweep else estimate(experiment, devices)
    show(result, options.price, options.shardings)


def show(estimate: "Estimate", price: float | None, shardings: bool) -> None:
    """Prints an estimate as a table. If `shardings` is True, first prints the sharding of every parameter.

    `price` is the price of a chip-hour; None prints no cost.
    """
    from common.report.table import text
    from launch.estimate import shardings as sharding_rows

    if shardings:
        columns = ("parameters", "shape", "split over", "count")
        print(text(columns, sharding_rows(estimate.abstract_model, estimate.mesh)))
    print(text(("quantity", "value", ""), rows(estimate, price)))


def rows(estimate: "Estimate", price: float | None = None) -> list[tuple[str, str, str]]:
    """Returns an estimate as table rows (quantity, value, remark).

    A `price` per chip-hour adds the cost of the run, if the chip-hours are known.
    """
    from common import variables

    topology, batch, chips = estimate.topology, estimate.batch, len(estimate.topology.devices)
    counts = variables.count(estimate.abstract_model)
    mesh = " x ".join(f"{axis}={size}" for axis, size in estimate.mesh.shape.items())
    lines = [("devices", f"{chips}", f"{topology.name}, {mesh}, {estimate.dtype}")]
    if topology.stands_in:
        remark = "the CPU compiler, whose program differs from the program for these devices"
        lines.append(("compiler", "", remark))
    lines += [
        ("parameters, trained", f"{counts['trainable']:,}", ""),
        ("parameters, frozen", f"{counts['frozen']:,}", ""),
        ("tokens of a step", f"{batch.tokens:,}", _shapes(estimate)),
        *(
            (f"MiB on each device: {name}", f"{size / MIB:,.1f}", "")
            for name, size in estimate.held.items()
        ),
    ]
    total, chip = sum(estimate.held.values()), topology.chip
    room = f"of {chip.memory / MIB:,.0f}: {total / chip.memory:.0%}" if chip else ""
    lines.append(("MiB on each device: in all", f"{total / MIB:,.1f}", room))
    lines += [
        (
            "FLOPs of a step",
            f"{estimate.flops:.4g}",
            "matrix products and convolutions, before compilation",
        ),
        ("FLOPs of a token", f"{estimate.flops / batch.tokens:.4g}", ""),
    ]
    if estimate.compiled_flops is not None:
        remark = "all operations on all devices; one iteration of each loop"
        flops = f"{estimate.compiled_flops * chips:.4g}"
        lines.append(("FLOPs of a step, compiled", flops, remark))
    lines += [
        (f"{kind}, each device", f"{count:,} x", f"{received / MIB:,.3f} MiB received")
        for kind, count, received in estimate.collectives.rows
    ]
    if estimate.collectives.unknown_loops:
        remark = "loops with collectives and an unknown trip count: one iteration counted"
        lines.append(("", f"{estimate.collectives.unknown_loops}", remark))
    return lines + _times(estimate, price)


def _shapes(estimate: "Estimate") -> str:
    shapes = {name: "x".join(map(str, x.shape)) for name, x in estimate.batch.arrays.items()}
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items())


def _times(estimate: "Estimate", price: float | None) -> list[tuple[str, str, str]]:
    if not estimate.bound:
        name = estimate.topology.name
        return [("time", "", f"the speed of {name} is unknown: use a TPU slice or GPUs")]
    lines = [
        (
            f"ms of a step, {part}",
            f"{1e3 * seconds:,.4g}",
            "binds" if part == estimate.bound.binds else "",
        )
        for part, seconds in estimate.bound.parts.items()
    ]
    if estimate.bound.memory is None:
        reason = "unknown without the TPU compiler"
        if estimate.topology.chip.gpu:
            reason = "no compiler counts the memory traffic of GPUs: time steps on a GPU, --profile=10:20"
        lines.append(("ms of a step, memory", "", reason))
    if estimate.topology.slices > 1 and estimate.bound.network is None:
        lines.append(("ms of a step, network", "", "the speed between these slices is unknown"))
    steps = estimate.config.train.steps
    # Without the memory bound, a step may take much longer than estimated.
    kind = "at most" if estimate.bound.memory is None else "estimated"
    lines.append((f"tokens per second, {kind}", f"{estimate.tokens_per_second:,.0f}", ""))
    hours = estimate.chip_hours
    if hours is None:
        remark = f"the number of steps is 0, or unknown without data: add {STEPS}"
        return [*lines, ("chip-hours of the run", "", remark)]
    wall = steps * estimate.bound.seconds / 3600
    remark = f"{steps:,} steps, {wall:,.2f} hours, if every batch had the longest rows"
    lines.append(("chip-hours of the run, estimated", f"{hours:,.2f}", remark))
    if price is not None:
        cost = f"{hours * price:,.2f}"
        lines.append(("cost of the run, estimated", cost, f"{price} per chip-hour"))
    return lines


if __name__ == "__main__":
    run(main)
