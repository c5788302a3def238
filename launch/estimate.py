"""Compiles a training step for devices that this machine may lack; estimates memory, FLOPs, communication and time."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec
from ml_collections import ConfigDict

from common import sharding
from common.config import complete, run_module
from common.errors import UserError, check
from common.model.transformer import compute_dtype
from common.train import dry_run
from common.train.state import Step
from common.train.task import BatchSpec, Task
from common.variables import AbstractModel
from launch.collectives import Collectives, read_collectives
from launch.topology import Chip, Topology
from launch.traffic import kernel_bytes, loop_factor

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class TooLarge(UserError):
    """Raised if a training step needs more memory of a chip than a program may use (`Chip.memory`).

    Attributes:
      missing: bytes by which the step exceeds this memory on each chip.
    """

    def __init__(self, message: str, missing: int):
        super().__init__(message)
        self.missing = missing


@dataclass(frozen=True)
class Bound:
    """Seconds that each part of a chip needs for a training step at full speed.

    Attributes:
      compute: seconds for the FLOPs at the chip's peak FLOP/s (`Topology.peak`).
      memory: seconds for the HBM traffic (`Estimate.traffic`). Some of these bytes may stay in on-chip memory, so the
        value may exceed the actual time. None if the GPU or CPU compiler compiled the step.
      links: seconds to receive data from other chips of the slice over all links (ICI or NVLink).
      network: seconds to receive data from other slices over the data-centre network (DCN). The chips of a host share
        the host's bandwidth equally. None if there is one slice, or if the speed of the network is unknown.
    """

    compute: float
    memory: float | None
    links: float
    network: float | None = None

    @property
    def parts(self) -> dict[str, float]:
        """{"compute", "memory", "links" or "network": seconds}, without the parts that are None."""
        return {part: seconds for part, seconds in vars(self).items() if seconds is not None}

    @property
    def seconds(self) -> float:
        """Seconds of the slowest part.

        This is a lower bound of the step time, except if the slowest part is "memory", whose value may be too high.
        """
        return max(self.parts.values())

    @property
    def binds(self) -> str:
        """Name of the slowest part."""
        return max(self.parts, key=self.parts.__getitem__)


def time_bound(
    chip: Chip,
    peak: float,
    flops: float,
    traffic: float | None,
    received: float,
    between: float | None = None,
) -> Bound:
    """Returns the seconds that each part of a chip needs for a step, from the FLOPs and bytes of one chip.

    Args:
      peak: peak FLOP/s of the chip.
      flops: FLOPs of the chip in a step.
      traffic: bytes of the chip's HBM traffic in a step; None if unknown.
      received: bytes that the chip receives from other chips of its slice in a step.
      between: bytes that the chip receives from other slices in a step; None if there is one slice.
    """
    memory = None if traffic is None else traffic / chip.bandwidth
    known = between is not None and chip.network is not None
    network = between * chip.host / chip.network if known else None
    return Bound(flops / peak, memory, received / chip.links, network)


@dataclass(frozen=True)
class Estimate:
    """Costs of a compiled training step.

    Attributes:
      held: {use of memory, such as "optimizer": bytes on each device}.
      flops: FLOPs of all matrix products and convolutions on all devices (`common.train.flops`).
      compiled_flops: FLOPs of one device by the compiler's count, which counts each loop body once; None if the
        GPU compiler compiled the step, because it does not count FLOPs.
      traffic: bytes that one device reads and writes: (the compiler's count + `kernels`) *
        `launch.traffic.loop_factor`; None if the GPU compiler compiled the step.
      kernels: bytes of the operands and results of Pallas kernels on one device. Each loop body counts once.
      dtype: dtype of activations.
      bound: seconds that each part of a chip needs for a step; None if the speed of the devices is unknown.
    """

    config: ConfigDict
    batch: BatchSpec
    topology: Topology
    mesh: Mesh
    abstract_model: AbstractModel
    held: Mapping[str, int]
    flops: float
    compiled_flops: float | None
    traffic: float | None
    kernels: float
    collectives: Collectives
    dtype: str
    bound: Bound | None

    @property
    def tokens_per_second(self) -> float | None:
        """Estimated tokens (`BatchSpec.tokens`) per second; None if the speed of the devices is unknown."""
        return self.batch.tokens / self.bound.seconds if self.bound else None

    @property
    def chip_hours(self) -> float | None:
        """Estimated chip-hours of the run.

        None if the speed of the devices is unknown, or the number of steps is unknown or 0.
        """
        steps = self.config.train.steps
        if not self.bound or not steps:
            return None
        return steps * self.bound.seconds * len(self.topology.devices) / 3600


def prepare(config: ConfigDict, topology: Topology) -> tuple[ConfigDict, Task, Mesh]:
    """Returns the validated configuration, its task without data, and its mesh on the topology's devices.

    Raises a UserError if the configuration is invalid, or its mesh does not match the devices.
    """
    program = run_module(config)
    with complete("--config"):
        mesh = topology.mesh(config.mesh)
    if topology.stands_in and config.model.get("dtype") == "auto":
        config = config.copy_and_resolve_references()
        config.model.dtype = "bfloat16"  # On TPUs and GPUs, "auto" stands for bfloat16.
    return *program.prepare(config, mesh, read_data=False), mesh


def estimate(config: ConfigDict, topology: Topology) -> Estimate:
    """Compiles the training step of a configuration for the devices of a topology, and estimates its costs.

    Raises:
      TooLarge: the step does not fit into the memory of the chips.
      UserError: `prepare` fails, the task returns None from `batch_spec`, or the compiler fails.
    """
    config, task, mesh = prepare(config, topology)
    multiple = sharding.num_batch_shards(mesh) * config.train.accumulate
    spec = task.batch_spec(multiple)
    check(
        spec is not None,
        f"the task of --config, {type(task).__module__}:{type(task).__qualname__}, returned None from batch_spec:"
        " define batch_spec, so that it returns the shapes of a batch, or choose another configuration",
    )
    # The dtype "auto" depends on the platform of the current mesh (`common.sharding.backend`).
    with jax.set_mesh(mesh):
        step = Step.of(config, task, mesh)
        dtype = str(compute_dtype(config.model.get("dtype", "float32")))
    rows = sharding.batch_sharding(mesh)
    batch = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows)
        for name, x in spec.arrays.items()
    }
    try:
        held = dry_run.compile_for(step, batch)
    except jax.errors.JaxRuntimeError as error:
        message = str(error)
        missing = _missing(message, topology.chip.memory) if topology.chip else None
        if missing is None:
            first, *_ = message.splitlines() or [type(error).__name__]
            raise UserError(
                f"the training step cannot be compiled for --topology={topology.name} ({first}): correct the cause, or"
                " choose another --topology"
            ) from error
        raise _too_large(missing, topology) from error
    compiled, flops = step.compiled[step.cache_key(batch, 0)]
    memory = compiled.memory_analysis()
    # The sum counts donated arguments twice, as arguments and as outputs: subtract them once.
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes
    total += memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
    total -= memory.alias_size_in_bytes
    held["padding and the program"] = max(0, total - sum(held.values()))
    # Without a chip (cpu:8), the memory is unknown. The TPU compiler has already compared the step with the memory.
    checked = topology.chip is None or topology.devices[0].platform == "tpu"
    if not checked and total > topology.chip.memory:
        raise _too_large(total - topology.chip.memory, topology)
    costs = compiled.cost_analysis() or {}
    devices = len(topology.devices)
    program = compiled.as_text()
    sent = read_collectives(program, devices // topology.slices)
    kernels = kernel_bytes(program)
    moved = (costs["bytes accessed"] + kernels) * loop_factor(program) if costs else None
    bound = None
    if topology.chip:
        # Take the larger count: if devices duplicate work, the compiler's count may exceed a device's share.
        share = max(flops / devices, costs.get("flops", 0.0))
        known = None if topology.stands_in else moved
        between = sent.received_between if topology.slices > 1 else None
        bound = time_bound(
            topology.chip, topology.peak(dtype), share, known, sent.received, between
        )
    return Estimate(
        config,
        spec,
        topology,
        mesh,
        step.abstract_model,
        held,
        flops,
        costs.get("flops"),
        moved,
        kernels,
        sent,
        dtype,
        bound,
    )


def _missing(message: str, capacity: int) -> int | None:
    """Returns the bytes that the step needs beyond a chip's `capacity`; None if `message` is about another error."""
    amount = r"([\d.]+)([KMGT]?)"
    if match := re.search(rf"Exceeded hbm capacity by {amount}", message):
        return _bytes(*match.groups())
    used = rf"Used {amount} of [\d.]+[KMGT]? hbm", rf"\({amount}\) exceeds available HBM"
    for form in used:
        if match := re.search(form, message):
            return _bytes(*match.groups()) - capacity
    return None


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])


def _too_large(missing: int, topology: Topology) -> TooLarge:
    capacity = topology.chip.memory
    by = " (by the CPU compiler's count)" if topology.stands_in else ""
    return TooLarge(
        f"the training step needs {(capacity + missing) / 2**30:.2f} GiB{by} on each chip of {topology.name}, but a"
        f" program may use {capacity / 2**30:.2f} GiB of a chip ({missing / 2**30:.2f} GiB are missing): use more chips"
        " or a larger --config.train.accumulate",
        missing,
    )


def shardings(abstract_model: AbstractModel, mesh: Mesh) -> list[tuple[str, str, str, int]]:
    """Returns rows (name, shape, partition, number of arrays) of all parameters.

    Arrays of equal shape and partition share a row if their names differ only in numbers, which the row shows as *.
    """
    rows: dict[tuple[str, str, str], int] = {}
    for kind in (abstract_model.trainable, abstract_model.frozen):
        for name, place in sharding.shardings(kind, mesh).items():
            shape = "x".join(map(str, kind[name].shape)) or "1"
            row = (re.sub(r"\d+", "*", name), shape, _shown(place.spec))
            rows[row] = rows.get(row, 0) + 1
    return sorted((*row, count) for row, count in rows.items())


def _shown(spec: PartitionSpec) -> str:
    parts: list[Any] = [part if isinstance(part, tuple) else (part,) for part in spec]
    return " ".join("+".join(filter(None, part)) or "-" for part in parts)
