"""Devices to compile for, which this machine may lack: one or several TPU slices, GPUs of a host, or CPU devices."""

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

from common.errors import UserError, check
from common.sharding import make_mesh
from common.track.progress import peak_flops

LIBTPU = "libtpu==0.0.42.1"
CUDA = "jax[cuda12]==0.10.2"
GIB = 2**30

H100 = """
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_memory_size: 84978434048
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
}
"""
"""Description of an H100 SXM for XLA's compiler, a `GpuTargetConfigProto` as text (sources: NVIDIA's H100 data sheet,
and its CUDA programming guide for compute capability 9.0)."""


@dataclass(frozen=True)
class Chip:
    """Properties of a TPU chip or a GPU. Its peak FLOP/s is in `common.track.progress`.

    Attributes:
      memory: HBM bytes that a program may use.
      bandwidth: HBM bytes per second.
      links: bytes per second received over all interconnect links (ICI or NVLink).
      network: bytes per second that the largest host receives over the data-centre network (DCN); None if unknown.
      most: number of chips in the largest slice, or of GPUs in a host.
      host: number of chips in the largest host.
      options: options that libtpu needs for this kind of chip, as (name, value).
      gpu: description of a GPU for XLA's compiler; "" for a TPU chip.
    """

    memory: int
    bandwidth: float
    links: float
    network: float | None
    most: int
    host: int
    options: tuple[tuple[str, Any], ...] = ()
    gpu: str = ""


# Sources. Bandwidth and links: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e}. These pages add up both directions of a
# link, so `links` is half of their value. Links of v4: Jouppi et al., 2023 (arXiv:2304.01433), table 4, six links of
# 50 GB/s.
# Memory: the capacity that libtpu reports if a program does not fit, close to the nominal 32, 16, 95 and 32 GB.
# Network: the same pages, which give 200 Gbit/s for the 8 chips of a v5e host, 800 Gbit/s for the 8 chips of a v6e
# host, 50 Gbit/s for each of the 4 chips of a v5p host, and no value for v4.
# H100: data sheet of the SXM part. NVLink's 900 GB/s add up both directions. Memory: JAX allocates 75 % of a GPU's
# memory (`device_memory_size` in `H100`) by default.
CHIPS = {
    "v4": Chip(int(30.75 * GIB), 1200e9, 300e9, None, 4096, 4, (("chip_config_name", "megacore"),)),
    "v5e": Chip(int(15.75 * GIB), 819e9, 200e9, 25e9, 256, 8),
    "v5p": Chip(int(95.74 * GIB), 2765e9, 600e9, 25e9, 6144, 4),
    "v6e": Chip(int(31.25 * GIB), 1638e9, 400e9, 100e9, 256, 8),
    "h100": Chip(int(0.75 * 84_978_434_048), 3352e9, 450e9, None, 8, 8, gpu=H100),
}


@dataclass(frozen=True)
class Topology:
    """Devices to compile for.

    Attributes:
      name: name of the topology, such as "v5e:4x4", "2xv5e:16x16", "h100:8" or "cpu:8".
      devices: the JAX devices: TPU chips, GPUs or CPU devices. CPU devices replace TPU chips and GPUs if their compiler
        is not installed (`stands_in`).
      chip: properties of a TPU chip or GPU, also if CPU devices replace it; None for a topology of CPU devices, whose
        speed is unknown.
    """

    name: str
    devices: list[Any]
    chip: Chip | None

    @property
    def stands_in(self) -> bool:
        """Whether CPU devices replace the TPU chips or GPUs, because their compiler is not installed."""
        return self.chip is not None and self.devices[0].platform == "cpu"

    @property
    def slices(self) -> int:
        return _read(self.name)[0]

    @property
    def host(self) -> int:
        """Number of devices on one host. These devices are consecutive in `devices`."""
        if self.chip is None:
            return len(self.devices)
        return math.prod(_host(self.chip, _read(self.name)[2]))

    def mesh(self, sizes: Mapping[str, int]) -> Mesh:
        """Makes a mesh of these devices with `common.sharding.make_mesh`, and raises its errors.

        Also raises a UserError if the tensor axis spans several hosts.
        """
        mesh = make_mesh(sizes, self.devices)
        tensor = mesh.shape["tensor"]
        check(
            self.host % tensor == 0,
            f"--config.mesh.tensor={tensor} spans several processes: choose a divisor of {self.host}, the number of"
            " chips of a host, because each host runs one process",
        )
        return mesh

    def peak(self, dtype: str) -> float | None:
        """Returns the peak FLOP/s of a device in `dtype`, or in bfloat16 if unknown in `dtype`; None for CPUs."""
        kind = _read(self.name)[1]
        kind = f"NVIDIA {kind.upper()}" if self.chip and self.chip.gpu else f"TPU {kind}"
        return peak_flops(kind, dtype) or peak_flops(kind, "bfloat16")


def find(name: str) -> Topology:
    """Returns the topology `name`, such as "v5e:4x4", "2xv5e:16x16", "h100:8" or "cpu:8".

    CPU devices replace the chips of one slice, or the GPUs, if their compiler is not installed.

    Raises:
      UserError: the topology does not exist, the compiler cannot compile for it, it has several slices but the TPU
        compiler is missing, or it needs more CPU devices than `prepare` has configured.
    """
    slices, kind, sizes = _read(name)
    count = math.prod(sizes)
    if kind == "cpu":
        return Topology(name, _cpus(name, count), None)
    if has_compiler(kind):
        devices = _gpus(name, kind, count) if CHIPS[kind].gpu else _tpus(name, slices, kind, sizes)
        return Topology(name, devices, CHIPS[kind])
    _check_one_slice(name, slices)
    return Topology(name, _cpus(name, count), CHIPS[kind])


_KNOWN = (
    f"use a TPU slice ({', '.join(n for n, chip in CHIPS.items() if not chip.gpu)}) such as v5e:4x4 or v5p:2x2x2,"
    " several slices such as 2xv5e:16x16, the GPUs of a host, h100:1 to h100:8, or CPU devices, cpu:1 to cpu:4096"
)


def _read(name: str) -> tuple[int, str, tuple[int, ...]]:
    """Parses "2xv5e:4x4" to (2, "v5e", (4, 4)), and "cpu:8" to (1, "cpu", (8,)). Unknown names raise a UserError."""
    match = re.fullmatch(r"(?:([1-9]\d{0,2})x)?([a-z]\w*):([1-9]\d*(?:x[1-9]\d*)*)", name)
    unknown = f"--topology={name!r} is unknown: {_KNOWN}"
    check(match is not None and match[2] in ("cpu", *CHIPS), unknown)
    slices, kind, sizes = int(match[1] or 1), match[2], tuple(map(int, match[3].split("x")))
    most = 4096 if kind == "cpu" else CHIPS[kind].most
    if kind == "cpu" or CHIPS[kind].gpu:
        check(match[1] is None and len(sizes) == 1 and sizes[0] <= most, unknown)
        return slices, kind, sizes
    host = _host(CHIPS[kind], sizes)
    check(
        math.prod(sizes) <= most,
        f"--topology={name!r}: a slice of {kind} has at most {most:,} chips, not {math.prod(sizes):,}; choose a smaller"
        f" slice, or several slices such as 2x{kind}:SHAPE",
    )
    check(
        len(sizes) in (2, 3),
        f"--topology={name!r} does not exist: a slice has 2 or 3 dimensions, not {len(sizes)}; {_KNOWN}",
    )
    check(
        all(n % of_host == 0 for n, of_host in zip(sizes, host, strict=False)),
        f"--topology={name!r} does not exist: hosts of {'x'.join(map(str, host))} chips do not fill it; {_KNOWN}",
    )
    return slices, kind, sizes


def _host(chip: Chip, sizes: tuple[int, ...]) -> tuple[int, int, int]:
    """Returns the number of chips of a host along each dimension of a slice. All GPUs are on one host.

    A slice of one chip is one host, and so is a slice of eight v5e or v6e chips (v5litepod-8, v6e-8). All other hosts
    have 2 x 2 chips. Source: docs.cloud.google.com/tpu/docs/{v5e,v6e}.
    """
    if chip.gpu:
        return *sizes, 1, 1
    if math.prod(sizes) == 1:
        return 1, 1, 1
    if chip.host == 8 and sizes in ((2, 4), (4, 2)):
        return *sizes, 1
    return 2, 2, 1


def has_compiler(kind: str = "v5e") -> bool:
    """Returns whether the compiler for a kind of chip in `CHIPS` is installed: libtpu or JAX's plugin for CUDA."""
    if not CHIPS[kind].gpu:
        return importlib.util.find_spec("libtpu") is not None
    plugins = importlib.util.find_spec("jax_plugins") is not None
    return plugins and any(
        importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") for version in (12, 13)
    )


def missing_compiler(name: str) -> str:
    """Returns the pip package of the compiler that the topology `name` needs; "" if no compiler is missing."""
    kind = _read(name)[1]
    if kind == "cpu" or has_compiler(kind):
        return ""
    return f'"{CUDA}"' if CHIPS[kind].gpu else LIBTPU


def _check_one_slice(name: str, slices: int) -> None:
    """Raises a UserError for several slices. The TPU compiler, which shows their traffic, is missing."""
    check(
        slices == 1,
        f"--topology={name}: several slices need the TPU compiler (Linux, needs no TPU): pip install {LIBTPU}",
    )


def _cpus(name: str, count: int) -> list[Any]:
    devices = jax.devices("cpu")
    check(
        len(devices) >= count,
        f"--topology={name} needs {count} CPU devices, but this process has only {len(devices)}: call"
        f" launch.topology.prepare({name!r}) before JAX starts",
    )
    return devices[:count]


def prepare(name: str, quick: bool = False) -> None:
    """Configures JAX to run on the CPU, with as many CPU devices as `find` needs for the topology.

    Must be called before JAX initialises its devices. Prints a line to stderr if CPU devices replace TPU chips or GPUs.
    `quick` compiles with less optimization: faster, but memory and traffic differ from a real run.

    Raises a UserError if the topology does not exist, or has several slices but the TPU compiler is missing.
    """
    slices, kind, sizes = _read(name)
    count, missing = math.prod(sizes), missing_compiler(name)
    jax.config.update("jax_platforms", "cpu")
    if quick:
        jax.config.update("jax_exec_time_optimization_effort", -1.0)
    if kind != "cpu" and not missing:
        # Disable the compilation cache: JAX can load a cached program only if this machine has the program's devices.
        jax.config.update("jax_enable_compilation_cache", False)
        if CHIPS[kind].gpu:
            # Without a GPU, XLA gives Triton's matrix products fixed tiles, which do not fit all shapes: use cuBLAS.
            flags = os.environ.get("XLA_FLAGS", "")
            os.environ["XLA_FLAGS"] = f"--xla_gpu_enable_triton_gemm=false {flags}"
        return
    _check_one_slice(name, slices)
    jax.config.update("jax_num_cpu_devices", count)
    if missing:
        device = "GPU" if CHIPS[kind].gpu else "TPU"
        print(
            f"the {device} compiler is not installed: compiling for {count:,} CPU devices in place of the chips of"
            f" {name}; to install it (Linux, needs no {device}): pip install {missing}",
            file=sys.stderr,
        )


def _gpus(name: str, kind: str, count: int) -> list[Any]:
    from jax.experimental import topologies

    # The text of a topology: number of partitions x hosts of a partition x GPUs of a host.
    options = {"topology": f"1x1x{count}", "target_config": CHIPS[kind].gpu}
    try:
        return list(topologies.get_topology_desc(platform="cuda", **options).devices)
    except (NotImplementedError, jax.errors.JaxRuntimeError) as error:
        raise UserError(
            f"--topology={name}: JAX's plugin for CUDA cannot compile ({error}): install the plugin for this version of"
            f' JAX, pip install "{CUDA}"'
        ) from error


def _tpus(name: str, slices: int, kind: str, sizes: tuple[int, ...]) -> list[Any]:
    # Without these settings, libtpu searches for TPUs, a metadata server and TPU processes, and prints warnings.
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

    chip, shape = CHIPS[kind], "x".join(map(str, sizes))
    options = dict(chip.options, chips_per_host_bounds=_host(chip, sizes), num_slices=slices)
    try:
        topology = topologies.get_topology_desc(
            platform="tpu", topology_name=f"{kind}:{shape}", **options
        )
        return list(topology.devices)
    except Exception as error:  # libtpu raises several types of exceptions for invalid shapes.
        reason = str(error).removeprefix("INVALID_ARGUMENT: ")
        raise UserError(
            f"--topology={name!r}: the TPU compiler (libtpu) rejects this topology ({reason}); {_KNOWN}"
        ) from error
