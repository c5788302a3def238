"""The step of a configuration, compiled for devices that are not there: what it holds, computes and sends."""

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec
from ml_collections import ConfigDict

from common import sharding
from common.config import check
from common.errors import UserError
from common.model.transformer import compute_dtype
from common.train import dry_run
from common.train.state import Step
from common.train.task import BatchSpec
from common.variables import AbstractModel
from launch import hlo, roofline
from launch.hlo import Collectives
from launch.roofline import Bound
from launch.topology import Topology

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class TooLarge(UserError):
    """A step that no chip can hold its share of; `missing` bytes on each of them."""

    def __init__(self, message: str, missing: int):
        super().__init__(message)
        self.missing = missing


@dataclass(frozen=True)
class Estimate:
    """A step and its costs.

    Attributes:
      held: bytes on each device, by what they are.
      flops: of matrix products, on all devices together, counted in the program (`common.train.flops`).
      compiled_flops: of one device, as the compiler counts them: all arithmetic, and the body of a loop once.
      traffic: bytes that one device reads and writes, as the compiler counts them, but loops as often as they run.
      dtype: of activations.
      bound: None where no speed is known.
    """

    config: ConfigDict
    batch: BatchSpec
    topology: Topology
    mesh: Mesh
    abstract_model: AbstractModel
    held: Mapping[str, int]
    flops: int
    compiled_flops: float
    traffic: float
    collectives: Collectives
    dtype: str
    bound: Bound | None

    @property
    def tokens_per_second(self) -> float | None:
        """At most."""
        return self.batch.tokens / self.bound.seconds if self.bound else None

    @property
    def chip_hours(self) -> float | None:
        """Of the whole run, at least; None where that is not known."""
        steps = self.config.train.steps
        if not self.bound or not steps:
            return None
        return steps * self.bound.seconds * len(self.topology.devices) / 3600


def estimate(config: ConfigDict, topology: Topology) -> Estimate:
    """Compiles the training step for the mesh of the configuration over these devices.

    Raises:
      UserError: the configuration does not fit to them, or the compiler fails; `TooLarge`: the step does not fit into
        their memory.
    """
    check("paper" in config, "--config is no experiment: it has no field paper")
    mesh = topology.mesh(config.mesh)
    multiple = sharding.num_batch_shards(mesh) * config.train.accumulate
    if topology.stands_in and config.model.get("dtype") == "auto":
        config = config.copy_and_resolve_references()
        config.model.dtype = "bfloat16"  # as on the chips
    program = importlib.import_module(f"{config.paper}.run")
    config, task = program.prepare(config, mesh, read_data=False)
    spec = task.batch_spec(multiple)
    # Types and parts that depend on the kind of device follow the mesh that is set.
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
        words = str(error)
        missing = _missing(words, topology.chip.memory) if topology.chip else None
        if missing is None:
            first, *_ = words.splitlines() or [type(error).__name__]
            raise UserError(f"the compiler fails for {topology.name}: {first}") from error
        raise _too_large(missing, topology) from error
    compiled, flops = step.compiled[step.cache_key(batch, 0)]
    memory = compiled.memory_analysis()
    # What comes out in place of what went in is in there once.
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes
    total += memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
    total -= memory.alias_size_in_bytes
    held["padding and the program"] = max(0, total - sum(held.values()))
    if topology.stands_in and total > topology.chip.memory:
        raise _too_large(total - topology.chip.memory, topology)
    costs = compiled.cost_analysis()
    devices = len(topology.devices)
    program = compiled.as_text()
    sent = hlo.read_collectives(program, devices)
    moved = costs["bytes accessed"] * hlo.loop_factor(program)
    bound = None
    if topology.chip:
        # The compiler's count is the larger one where devices do the same work.
        share = max(flops / devices, costs["flops"])
        known = None if topology.stands_in else moved
        bound = roofline.bound(topology.chip, topology.peak(dtype), share, known, sent.received)
    return Estimate(
        config,
        spec,
        topology,
        mesh,
        step.abstract_model,
        held,
        flops,
        costs["flops"],
        moved,
        sent,
        dtype,
        bound,
    )


def _missing(words: str, room: int) -> int | None:
    """Bytes that a step takes beyond a chip's main memory, from the compiler's words; None where they are of other
    faults, such as too little of the memory within a core (vmem, smem)."""
    amount = r"([\d.]+)([KMGT]?)"
    if found := re.search(rf"Exceeded hbm capacity by {amount}", words):
        return _bytes(*found.groups())
    used = rf"Used {amount} of [\d.]+[KMGT]? hbm", rf"\({amount}\) exceeds available HBM"
    for form in used:
        if found := re.search(form, words):
            return _bytes(*found.groups()) - room
    return None


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])


def _too_large(missing: int, topology: Topology) -> TooLarge:
    room = topology.chip.memory
    by = " by the count of the CPU's compiler" if topology.stands_in else ""
    return TooLarge(
        f"the step does not fit: it needs {(room + missing) / 2**30:.2f} GiB{by} on each chip of {topology.name}, which"
        f" has {room / 2**30:.2f}; {missing / 2**30:.2f} GiB are missing",
        missing,
    )


def shardings(abstract_model: AbstractModel, mesh: Mesh) -> list[tuple[str, str, str, int]]:
    """Rows (arrays, shape, partition, how many are alike): those of all blocks in one."""
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
