"""Devices that this machine does not have: a slice of TPUs by name, or as many CPU devices as are asked for."""

import importlib.util
import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from common.config import check
from common.errors import UserError
from common.sharding import make_mesh
from common.track.progress import peak_flops

LIBTPU = "libtpu==0.0.42.1"
GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One accelerator, as far as a plan needs it; its peak is in `common.track.progress`.

    Attributes:
      memory: bytes that a program may use.
      bandwidth: bytes per second from and to this memory.
      links: bytes per second that it receives from its neighbours, over all of its links.
      most: chips of the largest slice.
      host: of the largest host.
      options: what else the compiler has to be told.
    """

    memory: int
    bandwidth: float
    links: float
    most: int
    host: int
    options: tuple[tuple[str, Any], ...] = ()


# Bandwidths: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e}, where those of links are given for both directions
# together; of v4 those of Jouppi et al., 2023 (arXiv:2304.01433), table 4: six links of 50 GB/s. Memory: what libtpu
# says that there is when a program does not fit; of those pages' 32, 16, 95 and 32 GB it is most.
CHIPS = {
    "v4": Chip(int(30.75 * GIB), 1200e9, 300e9, 4096, 4, (("chip_config_name", "megacore"),)),
    "v5e": Chip(int(15.75 * GIB), 819e9, 200e9, 256, 8),
    "v5p": Chip(int(95.74 * GIB), 2765e9, 600e9, 6144, 4),
    "v6e": Chip(int(31.25 * GIB), 1638e9, 400e9, 256, 8),
}


@dataclass(frozen=True)
class Topology:
    """Devices to compile for.

    Attributes:
      chip: None of CPUs, of which no speed is known.
    """

    name: str
    devices: list[Any]
    chip: Chip | None

    @property
    def stands_in(self) -> bool:
        """Whether CPU devices stand for the chips, since their compiler is not here."""
        return self.chip is not None and self.devices[0].platform == "cpu"

    @property
    def host(self) -> int:
        """How many neighbours in `devices` one host has."""
        if self.chip is None:
            return len(self.devices)
        return math.prod(_host(self.chip, _read(self.name)[1]))

    def mesh(self, sizes: Mapping[str, int]) -> Mesh:
        """`make_mesh` of these devices, and its errors. CPU devices in place of chips have the chips' hosts."""
        mesh = make_mesh(sizes, self.devices)
        tensor = mesh.shape["tensor"]
        check(
            self.host % tensor == 0,
            f"mesh.tensor={tensor} spans several processes; it must divide the {self.host} chips of a host",
        )
        return mesh

    def peak(self, dtype: str) -> float | None:
        """FLOP/s of one device; float32 is multiplied no faster than 16-bit numbers."""
        kind = f"TPU {self.name.partition(':')[0]}"
        return peak_flops(kind, dtype) or peak_flops(kind, "bfloat16")


def find(name: str) -> Topology:
    """The devices of "v5e:4x4" or "cpu:8". Where the compiler for TPUs is not installed, CPU devices in their place.

    Raises:
      UserError: there is no such topology, or `prepare` was told of another one.
    """
    kind, sizes = _read(name)
    count = math.prod(sizes)
    if kind == "cpu":
        return Topology(name, _cpus(name, count), None)
    devices = _tpus(name, sizes, CHIPS[kind]) if has_compiler() else _cpus(name, count)
    return Topology(name, devices, CHIPS[kind])


_KNOWN = (
    f"there are slices of {', '.join(CHIPS)}, such as v5e:4x4 and v5p:2x2x2, and CPU devices, such as"
    " cpu:8"
)


def _read(name: str) -> tuple[str, tuple[int, ...]]:
    """("v5e", (4, 4)) or ("cpu", (8,))."""
    match = re.fullmatch(r"(\w+):([1-9]\d*(?:x[1-9]\d*)*)", name)
    check(match is not None, f"--topology={name!r}: {_KNOWN}")
    kind, sizes = match[1], tuple(map(int, match[2].split("x")))
    if kind == "cpu":
        check(len(sizes) == 1 and sizes[0] <= 4096, f"--topology={name!r}: {_KNOWN}")
        return kind, sizes
    check(kind in CHIPS, f"--topology={name!r}: {_KNOWN}")
    most, host = CHIPS[kind].most, _host(CHIPS[kind], sizes)
    check(
        math.prod(sizes) <= most,
        f"--topology={name!r}: a slice of {kind} has at most {most:,} chips",
    )
    check(
        len(sizes) in (2, 3)
        and all(n % of_host == 0 for n, of_host in zip(sizes, host, strict=False)),
        f"--topology={name!r} does not exist: its hosts have {'x'.join(map(str, host))} chips each; {_KNOWN}",
    )
    return kind, sizes


def _host(chip: Chip, sizes: tuple[int, ...]) -> tuple[int, int, int]:
    """The chips of each host of a slice, along its dimensions.

    2 x 2 of them; a single chip has a host of its own, and eight of v5e and v6e share one, as in v5litepod-8 and v6e-8
    (docs.cloud.google.com/tpu/docs/{v5e,v6e}), though machines of four could make up such a slice.
    """
    if math.prod(sizes) == 1:
        return 1, 1, 1
    if chip.host == 8 and sizes in ((2, 4), (4, 2)):
        return *sizes, 1
    return 2, 2, 1


def has_compiler() -> bool:
    """Whether the compiler for TPUs is installed."""
    return importlib.util.find_spec("libtpu") is not None


def _cpus(name: str, count: int) -> list[Any]:
    devices = jax.devices("cpu")
    check(
        len(devices) >= count,
        f"--topology={name}: this process has been given {len(devices)} CPU devices",
    )
    return devices[:count]


def prepare(name: str) -> None:
    """Before JAX looks for devices: there are to be CPUs alone, as many as the topology needs.

    Says on stderr where CPU devices are to stand for chips.

    Raises:
      UserError: there is no such topology.
    """
    kind, sizes = _read(name)
    count = math.prod(sizes)
    jax.config.update("jax_platforms", "cpu")
    if kind != "cpu" and has_compiler():
        # What is kept of programs for TPUs can be read by TPUs alone.
        jax.config.update("jax_enable_compilation_cache", False)
        return
    jax.config.update("jax_num_cpu_devices", count)
    if kind != "cpu":
        print(
            f"the TPU compiler is not installed: {count:,} CPU devices stand for the chips of {name}, and the CPU's"
            f" compiler for theirs; the real one is pip install {LIBTPU} (Linux; no TPU is needed)",
            file=sys.stderr,
        )


def _tpus(name: str, sizes: tuple[int, ...], chip: Chip) -> list[Any]:
    # It looks for TPUs, for a server that would know of them and for other programs that use them, and complains of
    # finding none.
    environment = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-16",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_MIN_LOG_LEVEL": "3",
        "TPU_STDERR_LOG_LEVEL": "3",
    }
    for variable, value in environment.items():
        os.environ.setdefault(variable, value)
    from jax.experimental import topologies

    options = dict(chip.options, chips_per_host_bounds=_host(chip, sizes))
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
        return list(found.devices)
    except Exception as error:  # whatever the compiler has against this shape
        reason = str(error).removeprefix("INVALID_ARGUMENT: ")
        raise UserError(f"--topology={name!r} does not exist ({reason}); {_KNOWN}") from error
