"""python -m launch.plan: topologies, estimates of a run and the sweep over meshes; python -m launch.scaling."""

import csv
import dataclasses
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import pytest
from ml_collections import ConfigDict

from common.config import load
from common.errors import UserError
from common.model.transformer import compute_dtype
from common.report.table import text
from common.sharding import make_mesh
from common.track.progress import peak_flops
from common.train.task import BatchSpec
from configs import explicit
from launch import decoding, estimate, plan, scaling, sweep, topology
from launch.collectives import BETWEEN, Collectives, Row
from launch.estimate import Bound
from launch.topology import CHIPS, Topology, find
from tests.programs import finish, start

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler"
)

needs_cuda = pytest.mark.skipif(not topology.has_compiler("h100"), reason="needs the GPU compiler")

# JAX cannot read programs of the TPU compiler from the compilation cache. It compiles again, and warns.
pytestmark = pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")

GIB = 2**30


def small(**mesh: int) -> ConfigDict:
    config = explicit.mnist()
    config.mesh.update(mesh)
    return config


@pytest.fixture(scope="module")
def found() -> estimate.Estimate:
    return estimate.estimate(small(fsdp=2, tensor=2), find("cpu:8"))


@pytest.fixture
def without_compiler(monkeypatch) -> None:
    monkeypatch.setattr(topology, "has_compiler", lambda *_: False)


def test_plan_reports_device_memory_and_flops(found: estimate.Estimate) -> None:
    """fsdp and tensor shard 784 x 10 weights and Adam's moments; data and fsdp shard 64 rows.

    The optimizer also has two counters of 4 bytes.
    """
    assert found.mesh.shape == {"data": 2, "fsdp": 2, "tensor": 2}
    weights = 784 * 10 * 4 // 4
    rows = 64 // 4 * (784 + 1 + 1) * 4
    inputs = {"trained": weights, "frozen": 0}
    assert {name: found.held[f"parameters, {name}"] for name in inputs} == inputs
    assert found.held["optimizer"] == 2 * weights + 2 * 4
    assert found.held["batch"] == rows
    assert weights < found.held["activations, gradients and the like"] < 10 * rows
    assert 0 <= found.held["padding and the program"] < weights
    assert found.flops == 2 * 2 * 64 * 784 * 10  # the forward pass and the weight gradient
    lines = {name: (much, remark) for name, much, remark in plan.rows(found)}
    assert lines["parameters, trained"][0] == "7,840"
    total = sum(found.held.values()) / 2**20
    assert lines["MiB on each device: in all"] == (f"{total:,.1f}", "")
    assert lines["FLOPs of a token"][0] == f"{found.flops / 64:.4g}"
    assert "the speed of cpu:8 is unknown" in lines["time"][1]
    assert "7,840" in text(("what", "how much", ""), plan.rows(found))


def test_data_parallel_step_receives_only_the_gradient() -> None:
    """Data parallelism needs one all-reduce of 784 x 10 gradients, the loss and its weight."""
    found = estimate.estimate(small(), find("cpu:8"))
    once = (784 * 10 + 2) * 4
    assert found.collectives.rows == [Row("all-reduce", 1, 2 * 7 * once // 8)]
    lines = {name: (much, remark) for name, much, remark in plan.rows(found)}
    mib = f"{2 * 7 * once / 8 / 2**20:,.3f} MiB received"
    assert lines["all-reduce, each device"] == ("1 x", mib)


@needs_libtpu
def test_bound_divides_flops_and_bytes_by_the_speed_of_one_chip() -> None:
    """A v5e has 197 TFLOP/s, memory of 819 GB/s and links of 1,600 Gbit/s, as published. A batch has 64 images."""
    found = estimate.estimate(small(), find("v5e:2x4"))
    least = 2 * 2 * 64 * 784 * 10 / 8
    assert found.compiled_flops == pytest.approx(least, rel=0.6) and found.compiled_flops > least
    assert found.bound.compute == pytest.approx(found.compiled_flops / 197e12)
    assert found.bound.links == pytest.approx(2 * 7 / 8 * (784 * 10 + 2) * 4 / 200e9)
    read_and_written = (
        64 // 8 * 786 * 4 + 2 * 3 * 784 * 10 * 4
    )  # bytes of the batch, then of weights and moments
    assert found.bound.memory == pytest.approx(found.traffic / 819e9)
    assert found.traffic > read_and_written


def test_bound_includes_products_in_loops(without_compiler: None) -> None:
    """The compiler counts only one of four microbatches, so the bound uses our count of FLOPs."""
    config = small()
    config.train.batch, config.train.accumulate = 4096, 4
    found = estimate.estimate(config, find("v5e:2x4"))
    assert found.flops == 2 * 2 * 4096 * 784 * 10
    assert found.compiled_flops < found.flops / 8 / 3
    assert found.bound.compute == pytest.approx(found.flops / 8 / 197e12)


def test_chip_hours_and_cost_of_a_run(found: estimate.Estimate) -> None:
    config = found.config.copy_and_resolve_references()
    config.train.steps = 1000
    slice_ = Topology("v5e:2x4", found.topology.devices, CHIPS["v5e"])
    known = dataclasses.replace(
        found,
        topology=slice_,
        config=config,
        bound=Bound(compute=1.8, memory=3.6, links=0.9),
    )
    assert known.chip_hours == pytest.approx(1000 * 3.6 * 8 / 3600)
    assert known.tokens_per_second == pytest.approx(64 / 3.6)
    lines = {name: (much, remark) for name, much, remark in plan.rows(known, price=1.5)}
    assert lines["ms of a step, memory"] == ("3,600", "binds")
    assert lines["ms of a step, compute"][1] == ""
    much, remark = lines["chip-hours of the run, estimated"]
    assert much == "8.00" and remark.startswith("1,000 steps, 1.00 hours, if every batch")
    assert lines["cost of the run, estimated"][0] == "12.00"
    assert "cost of the run, estimated" not in {name for name, *_ in plan.rows(known)}


def test_bound_is_the_slowest_part() -> None:
    chip = CHIPS["v5e"]
    one = estimate.time_bound(chip, 197e12, flops=197e12, traffic=819e9 / 2, received=200e9 * 3)
    assert (one.compute, one.memory, one.links) == (1, 0.5, 3)
    assert one.seconds == 3 and one.binds == "links"


def test_network_between_slices_bounds_a_step() -> None:
    """The eight chips of a v5e host share 200 Gbit/s, as published."""
    chip = CHIPS["v5e"]
    one = estimate.time_bound(chip, 197e12, flops=197e12, traffic=0, received=0, between=25e9)
    assert one.network == 8 and one.seconds == 8 and one.binds == "network"
    assert "network" not in estimate.time_bound(chip, 197e12, 1, 1, 1).parts


def test_unknown_network_speed_is_reported(found: estimate.Estimate) -> None:
    """Google publishes no network speed for v4."""
    between = estimate.time_bound(CHIPS["v4"], 1.0, 1, 1, 1, between=1)
    slices = Topology("2xv4:2x2x1", found.topology.devices, CHIPS["v4"])
    several = dataclasses.replace(found, topology=slices, bound=between)
    lines = {name: (much, remark) for name, much, remark in plan.rows(several)}
    assert lines["ms of a step, network"] == ("", "the speed between these slices is unknown")


@pytest.mark.parametrize("read", [find, topology.prepare])
@pytest.mark.parametrize(
    "name",
    [
        *("v9:2x2", "v5e", "v5litepod-16", "cpu:0", "cpu:2x2", "", "v5e:x"),
        *("0xv5e:2x4", "2xcpu:4", "1xcpu:4", "2x:4x4", "2v5e:4x4", "1000xv5e:2x4", "x2v5e:4x4"),
        *("h100", "h100:0", "h100:9", "h100:2x4", "2xh100:4", "1xh100:8"),
    ],
)
def test_unknown_topology_raises_error(name: str, read: Callable) -> None:
    with pytest.raises(UserError, match=r"a TPU slice \(v4, v5e, v5p, v6e\) such as"):
        read(name)


@pytest.mark.parametrize("name", ["v5e:16x32", "2xv5e:16x32"])
def test_slice_larger_than_maximum_raises_error(name: str) -> None:
    with pytest.raises(UserError, match="a slice of v5e has at most 256 chips, not 512"):
        find(name)


@pytest.mark.parametrize("read", [find, topology.prepare])
def test_several_slices_need_the_tpu_compiler(
    without_compiler: None, monkeypatch, read: Callable
) -> None:
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    with pytest.raises(
        UserError, match=r"several slices need the TPU compiler.*pip install libtpu"
    ):
        read("2xv5e:2x2")


def test_cpu_devices_replace_chips_without_tpu_compiler(
    without_compiler: None, monkeypatch, capsys
) -> None:
    given = {}
    monkeypatch.setattr(jax.config, "update", given.__setitem__)
    topology.prepare("v5p:2x2x2")
    assert given == {"jax_platforms": "cpu", "jax_num_cpu_devices": 8}
    said = capsys.readouterr()
    assert not said.out and len(said.err.splitlines()) == 1
    assert "8 CPU devices in place of the chips of v5p:2x2x2" in said.err
    assert f"pip install {topology.LIBTPU}" in said.err


def test_cpu_devices_replace_gpus_without_their_compiler(
    without_compiler: None, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    topology.prepare("h100:8")
    said = capsys.readouterr().err
    assert "8 CPU devices in place of the chips of h100:8" in said
    assert f'needs no GPU): pip install "{topology.CUDA}"' in said
    found = estimate.estimate(small(fsdp=2), find("h100:8"))
    assert found.topology.host == 8
    assert found.bound.compute == pytest.approx(found.compiled_flops / 989e12)
    assert found.bound.links == pytest.approx(found.collectives.received / 450e9)
    lines = {name: (much, remark) for name, much, remark in plan.rows(found)}
    remark = "no compiler counts the memory traffic of GPUs: time steps on a GPU, --profile=10:20"
    assert lines["ms of a step, memory"] == ("", remark)


def test_gpu_compiler_has_the_version_of_jax() -> None:
    assert (
        f"jax=={topology.CUDA.partition('==')[2]}" in Path("requirements.txt").read_text().split()
    )


@needs_cuda
@pytest.mark.parametrize("mesh", [{}, {"fsdp": 4}])
def test_plan_compiles_for_gpus(mesh: dict[str, int]) -> None:
    """With data parallelism, the gradient is exchanged once. The plan leaves out compiled FLOPs and memory traffic,
    because the GPU compiler does not count them.
    """
    found = estimate.estimate(small(**mesh), find("h100:8"))
    assert found.topology.devices[0].platform == "gpu" and not found.topology.stands_in
    assert found.compiled_flops is None and found.bound.memory is None
    assert found.bound.compute == pytest.approx(found.flops / 8 / 989e12)
    if not mesh:
        assert [(row.kind, row.count) for row in found.collectives.rows] == [("all-reduce", 1)]
    lines = {name: (much, remark) for name, much, remark in plan.rows(found)}
    assert lines["MiB on each device: in all"][1] == "of 60,781: 0%"
    assert "FLOPs of a step, compiled" not in lines
    assert lines["ms of a step, memory"][0] == ""


@needs_cuda
@pytest.mark.slow
@pytest.mark.parametrize("buckets", ["(16,32)", "(15,33)"])
def test_translator_compiles_for_gpus(buckets: str) -> None:
    """Even and odd lengths compile, although JAX refuses odd lengths in training with cuDNN's fused attention."""
    command = [sys.executable, "-m", "launch.plan", "--config=configs/iwslt_transformer.py:tiny"]
    fields = [f"--config.data.buckets={buckets}", "--config.model.dtype=bfloat16"]
    assert "MiB on each device: in all" in finish(start([*command, "--topology=h100:1", *fields]))


def test_cpu_replacement_has_no_memory_bound(without_compiler: None) -> None:
    """Memory traffic is not known without the TPU compiler."""
    config = small(fsdp=2)
    with config.unlocked():
        config.model.dtype = "auto"
    found = estimate.estimate(config, find("v5p:2x2x2"))
    assert found.dtype == "bfloat16"  # the dtype on the chips
    assert found.bound.compute == pytest.approx(found.compiled_flops / 459e12)
    assert found.bound.links == pytest.approx(found.collectives.received / 600e9)
    assert found.bound.memory is None and found.bound.seconds > 0
    lines = {name: (much, remark) for name, much, remark in plan.rows(found)}
    assert "the CPU compiler" in lines["compiler"][1]
    assert lines["MiB on each device: in all"][1] == "of 98,038: 0%"
    assert lines["ms of a step, memory"] == ("", "unknown without the TPU compiler")


def test_step_above_device_memory_in_the_cpu_compiler_raises_error(without_compiler: None) -> None:
    config = small()
    config.train.batch = 2**26
    with pytest.raises(estimate.TooLarge, match=r"by the CPU compiler's count") as error:
        estimate.estimate(config, find("v5e:2x4"))
    assert error.value.missing > 2**26 / 8 * 784 * 4 - 16 * GIB


def test_weak_scaling_needs_tpu_compiler(without_compiler: None, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["scaling"])
    with pytest.raises(UserError, match="or use --kind=cpu"):
        scaling.main()


@pytest.mark.parametrize(
    ("program", "option"), [(scaling, "--kind=cpu"), (decoding, "--topology=cpu:8")]
)
def test_file_as_folder_raises_error_before_compilation(program, option, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", ["program", option, f"--out={tmp_path}/file"])
    monkeypatch.setattr(topology, "prepare", None)
    with pytest.raises(UserError, match="file is not a folder; choose another folder"):
        program.main()


def test_exchange_and_attention_together_write_both_tables(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(scaling, "_compare", lambda path, *_: written.append(path))
    monkeypatch.setattr(sys, "argv", ["scaling", "--exchange", "--attention", f"--out={tmp_path}"])
    scaling.main()
    assert written == [tmp_path / "exchange", tmp_path / "attention"]


@pytest.mark.parametrize("name", ["v5e:3x3", "v5e:1x2", "v5p:2x1x2", "v5e:4"])
def test_slice_shape_without_whole_hosts_raises_error(name: str) -> None:
    with pytest.raises(
        UserError, match=f"'{name}' does not exist: .*(hosts|dimensions).*a TPU slice"
    ):
        find(name)


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "count"),
    [("v5e:1x1", 1), ("v5e:4x4", 16), ("v4:2x2x2", 8), ("v5p:2x2x2", 8), ("v6e:2x4", 8)],
)
def test_slice_devices_have_known_peak_flops(name: str, count: int) -> None:
    slice_ = find(name)
    assert len(slice_.devices) == count
    assert slice_.peak("bfloat16") == slice_.peak("float32") > 1e14
    assert peak_flops(slice_.devices[0].device_kind, "bfloat16") == slice_.peak("bfloat16")


@needs_libtpu
@pytest.mark.parametrize("name", ["2xv5e:2x4", "3xv5e:4x4", "2xv5p:2x2x2", "2xv4:2x2x2"])
def test_each_slice_has_its_own_index_and_hosts(name: str) -> None:
    several, (count, _, one) = find(name), name.partition("x")
    assert several.slices == int(count)
    assert len(several.devices) == several.slices * len(find(one).devices)
    assert {device.slice_index for device in several.devices} == set(range(several.slices))
    hosts = {(device.slice_index, device.process_index) for device in several.devices}
    assert several.host * len(hosts) == len(several.devices)
    assert several.peak("bfloat16") == find(one).peak("bfloat16")


@needs_libtpu
def test_only_gradients_cross_the_network_between_slices() -> None:
    """A slice sums its gradients first, so a chip exchanges a part of its fsdp shard. Weights stay within a slice."""
    found = estimate.estimate(small(fsdp=2), find("2xv5e:2x4"))
    between = [row for row in found.collectives.rows if row.kind.endswith(BETWEEN)]
    assert {row.kind for row in between} == {"all-reduce between slices"}
    shard = 784 * 10 * 4 / 2
    assert shard / 4 <= found.collectives.received_between < shard
    assert found.bound.network == pytest.approx(found.collectives.received_between / (25e9 / 8))
    assert found.bound.links == pytest.approx(found.collectives.received / 200e9)
    lines = {name: (much, remark) for name, much, remark in plan.rows(found)}
    assert lines["devices"][1].startswith("2xv5e:2x4, data=8 x fsdp=2 x tensor=1")
    assert "all-reduce, each device" in lines and "ms of a step, network" in lines
    assert "received" in lines["all-reduce between slices, each device"][1]


@needs_libtpu
def test_plan_needs_a_data_axis_divisible_by_the_number_of_slices() -> None:
    with pytest.raises(UserError, match="data=1 must be a multiple of 2, the number of TPU slices"):
        estimate.estimate(small(data=1, fsdp=8), find("2xv5e:2x2"))


@needs_libtpu
def test_auto_dtype_follows_the_target_devices() -> None:
    mesh = make_mesh({"data": -1}, find("v5e:2x4").devices)
    with jax.set_mesh(mesh):
        assert compute_dtype("auto") == "bfloat16"
    assert compute_dtype("auto") == "float32"


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "hosts"),
    [
        ("v5e:1x1", 1),
        ("v5e:2x2", 1),
        ("v5e:2x4", 1),
        ("v6e:4x2", 1),
        ("v5e:4x4", 4),
        ("v5p:2x2x2", 2),
    ],
)
def test_number_of_hosts_of_a_slice(name: str, hosts: int) -> None:
    slice_ = find(name)
    assert len({device.process_index for device in slice_.devices}) == hosts
    assert slice_.host * hosts == len(slice_.devices)


@pytest.mark.parametrize("compiler", [pytest.param(True, marks=needs_libtpu), False])
def test_tensor_axis_must_lie_within_a_host(monkeypatch, compiler: bool) -> None:
    monkeypatch.setattr(topology, "has_compiler", lambda *_: compiler)
    config = small(data=1, tensor=8)
    assert estimate.estimate(config, find("v5e:2x4")).mesh.shape["tensor"] == 8
    with pytest.raises(UserError, match=r"mesh.tensor=8 spans several processes"):
        estimate.estimate(config, find("v5p:2x2x2"))


@needs_libtpu
def test_too_large_step_reports_missing_bytes() -> None:
    config = small()
    config.train.batch = 2**26
    with pytest.raises(
        estimate.TooLarge, match=r"of v5e:2x4, but a program may use 15\.75 GiB of a chip"
    ) as error:
        estimate.estimate(config, find("v5e:2x4"))
    needed = 2**26 / 8 * (784 + 2) * 4
    assert 0 < error.value.missing - (needed - 15.75 * GIB) < 4 * GIB


@pytest.fixture
def eight() -> Topology:
    return Topology("v5e:2x4", jax.devices()[:8], CHIPS["v5e"])


def failing(monkeypatch, words: str) -> None:
    """Replaces the compiler by a function that fails with the message `words`."""

    def compile_for(*_):
        raise jax.errors.JaxRuntimeError(words)

    monkeypatch.setattr(estimate.dry_run, "compile_for", compile_for)


@pytest.mark.parametrize(
    "words",
    [
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (20.25G)"
        " exceeds available HBM (15.75G).",
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.25G of 15.75G hbm. Exceeded by 4.5G.",
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 20.2G of"
        " 15.7G hbm. Exceeded hbm capacity by 4.50G.\n\nTotal hbm usage >= 20.5G:\n    reserved  258.00M",
        "Used 20.25G of 15.75G hbm. Exceeded hbm capacity by 4608.0M.",
    ],
)
def test_out_of_memory_messages_are_parsed(monkeypatch, eight, words: str) -> None:
    failing(monkeypatch, words)
    with pytest.raises(estimate.TooLarge, match=r"4\.50 GiB are missing") as error:
        estimate.estimate(small(), eight)
    assert error.value.missing == int(4.5 * GIB)


OTHER_FAULTS = [
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 20.25M of 16.00M vmem. Exceeded vmem capacity by"
    " 4.25M.",
    "INTERNAL: Mosaic failed to compile",
]


@pytest.mark.parametrize("words", OTHER_FAULTS)
def test_other_compiler_errors_are_reported_in_one_line(monkeypatch, eight, words) -> None:
    failing(monkeypatch, f"{words}\n\nmany\nlines")
    with pytest.raises(UserError) as error:
        estimate.estimate(small(), eight)
    assert not isinstance(error.value, estimate.TooLarge)
    assert str(error.value) == (
        f"the training step cannot be compiled for --topology=v5e:2x4 ({words}): correct the cause, or choose another"
        " --topology"
    )


def test_sweep_continues_after_compiler_errors(monkeypatch, capsys, eight: Topology) -> None:
    failing(monkeypatch, OTHER_FAULTS[0])
    with pytest.raises(UserError, match="--sweep found no mesh and batch size that can run on"):
        sweep.best(small(), eight)
    shown = capsys.readouterr().out.splitlines()
    tried = [line.split()[:4] for line in shown if "Ran out of memory in memory space vmem" in line]
    assert [*map(str, (8, 1, 1, 64))] in tried and [*map(str, (1, 1, 8, 256))] in tried


def test_indivisible_batch_raises_error() -> None:
    with pytest.raises(UserError, match="64"):
        estimate.estimate(small(data=3), Topology("cpu:3", jax.devices()[:3], None))


class Fake:
    """Stand-in for an estimate: at most `room` rows of a microbatch fit on a device.

    The speed is batch * tensor^2 / accumulate^3.
    """

    bound = Bound(1.0, 0.5, 0.25)

    def __init__(self, config: ConfigDict, room: int):
        rows, parts = config.train.batch, config.train.accumulate
        self.config, self.batch = config, BatchSpec({}, rows)
        sizes = {axis: config.mesh[axis] for axis in ("data", "fsdp", "tensor")}
        self.mesh = dataclasses.make_dataclass("M", ["shape"])(sizes)
        self.held = {"all": rows}
        held = rows // (sizes["data"] * sizes["fsdp"] * parts)
        if held > room:
            raise estimate.TooLarge(f"{held - room} are missing", held - room)
        self.tokens_per_second = rows * sizes["tensor"] ** 2 / parts**3


def swept(monkeypatch, capsys, topology: Topology, room: int) -> tuple[str, list[list[str]]]:
    """Returns the options of the fastest estimate, and (data, fsdp, tensor, batch, accumulate) of each attempt."""
    monkeypatch.setattr(sweep, "estimate", lambda config, _: Fake(config, room))
    sweep.best(small(), topology)
    shown = capsys.readouterr().out.splitlines()
    (winner,) = (line for line in shown if line.startswith("fastest that fits: "))
    return winner.partition(": ")[2], [line.split()[:5] for line in shown]


def test_sweep_reports_fastest_that_fits(monkeypatch, capsys, eight: Topology) -> None:
    winner, tried = swept(monkeypatch, capsys, eight, room=16)
    # With tensor=2, the 64 rows are split into 4 parts of 16 rows, which fit on a device. Larger tensor axes need
    # microbatches, which make them slower.
    assert winner.endswith("--config.mesh.tensor=2 --config.train.batch=64")
    assert [line[3:] for line in tried if line[:3] == ["8", "1", "1"]] == [
        ["64", "1"],
        ["128", "1"],
        ["256", "1"],  # too large for the device
    ]


def test_sweep_accumulates_if_batch_does_not_fit(monkeypatch, capsys, eight: Topology) -> None:
    winner, tried = swept(monkeypatch, capsys, eight, room=2)
    assert [line[3:] for line in tried if line[:3] == ["8", "1", "1"]] == [
        ["64", "1"],
        ["64", "2"],
        ["64", "4"],  # fits on the device
    ]
    assert [line[4] for line in tried if line[:3] == ["1", "1", "8"]] == ["1", "2", "4", "8"]
    assert winner == (
        "--config.mesh.data=8 --config.mesh.fsdp=1 --config.mesh.tensor=1 --config.train.batch=64"
        " --config.train.accumulate=4"
    )


def test_sweep_reports_the_attempt_closest_to_fitting(monkeypatch, eight: Topology) -> None:
    monkeypatch.setattr(sweep, "estimate", lambda config, _: Fake(config, room=0))
    message = (
        r"no mesh and batch size that can run .* \(data=.*train.accumulate=\d\), 1 are missing"
    )
    with pytest.raises(UserError, match=message):
        sweep.best(small(), eight)


def test_meshes_are_all_factorizations() -> None:
    found = list(sweep.meshes(12))
    assert (
        len(set(found)) == len(found) == 18
    )  # ordered factorizations of 12 = 2 x 2 x 3 into three factors
    assert all(data * fsdp * tensor == 12 for data, fsdp, tensor in found)


def test_decoding_plan_reports_received_bytes_per_token() -> None:
    """A device receives 20 MiB of weights for every ten tokens, and 1 MiB in a program that generates four tokens.

    For one token, it receives 20 / 10 + 1 / 4 = 2.25 MiB.
    """
    gathered = Collectives([Row("all-gather", 3, 20 * 2**20)], 0)
    sent = Collectives([Row("all-gather", 1, 2**20)], 0)
    found = decoding.Traffic(gathered, sent, steps=4, tokens=10)
    lines = {name.strip(): (much, remark) for name, much, remark in decoding.table_rows(found)}
    assert lines["MiB received for a token"][0] == "2.250"
    assert lines["collectives for a token"][0] == "0.250"
    assert lines["weights"][1] == "gathered for 10 tokens of each row"


def test_sweep_on_cpu_raises_error() -> None:
    with pytest.raises(
        UserError, match="cannot use --topology=cpu:8, because the speed of its devices"
    ):
        sweep.best(small(), find("cpu:8"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--topology=cpu:8", "--price=-1"], "--price must be at least 0, got -1"),
        (
            ["--topology=cpu:8", "--decode", "--sweep"],
            "--decode cannot be combined with --sweep: leave",
        ),
        (["--topology=cpu:8", "--decode"], "the task of --config does not generate text"),
        (["--topology=cpu:8", "--config.mesh.tensr=2"], "mesh.tensor"),
        (["--topology=cpu:8", "--config.mesh.tensor=3"], "needs 6 devices|needs 3 devices"),
        ([], "--topology"),
    ],
)
def test_invalid_options_raise_errors(monkeypatch, options: list[str], words: str) -> None:
    given = ["plan", "--config=configs/mnist_explicit.py", *options]
    monkeypatch.setattr(sys, "argv", given)
    monkeypatch.setattr(topology, "prepare", lambda name, quick: None)
    with pytest.raises(UserError, match=words):
        plan.main()


def test_config_without_paper_raises_error() -> None:
    with pytest.raises(UserError, match="the field paper of the configuration is ''"):
        estimate.estimate(ConfigDict({"mesh": {}}), find("cpu:8"))


def test_config_without_mesh_raises_error() -> None:
    with pytest.raises(UserError, match="the field mesh is missing; add the field"):
        estimate.estimate(ConfigDict({"paper": "gmlp_lm"}), find("cpu:8"))


def test_weak_scaling_rows_have_the_columns_of_the_kept_table(found: estimate.Estimate) -> None:
    with (Path(__file__).parents[2] / "results" / "launch" / "weak_scaling.csv").open() as file:
        assert tuple(next(csv.reader(file))) == scaling.COLUMNS
    row = dict(zip(scaling.COLUMNS, ("a run", *scaling._row(found)), strict=True))
    assert row["chips"] == 8 and row["binds"] is None
    assert not [cell for item in row.items() for cell in item if "--" in str(cell)]


@pytest.mark.parametrize("name", scaling.RUNS)
def test_weak_scaling_keeps_work_and_divides_memory(name: str) -> None:
    """In the committed table, the bytes per device are a / fsdp + b, where b are the replicated norms and biases."""
    with (Path(__file__).parents[2] / "results" / "launch" / "weak_scaling.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["run"] == name]
    chips = [int(row["chips"]) for row in rows]
    assert chips == list(scaling.SHAPES)
    work = [float(row["GFLOPs of a chip"]) for row in rows]
    assert max(work) <= 1.02 * min(work)
    for what in ("parameters", "optimizer"):
        held = [float(row[f"{what}, MiB on a chip"]) for row in rows]
        split = (held[0] - held[-1]) / (1 / chips[0] - 1 / chips[-1])
        whole = held[0] - split / chips[0]
        assert whole < 0.01 * split
        assert held == pytest.approx([split / count + whole for count in chips], rel=0.01)
    assert all(float(row["received, MiB by a chip"]) > 0 for row in rows)


def test_weak_scaling_batches_match_configs() -> None:
    for path, field, each in scaling.RUNS.values():
        group, name = field.split(".")
        assert load(path)[group][name] / each in scaling.SHAPES
