"""How parameters are split and what devices send each other, of experiments of every paper: kept as text.

A change of a sharding rule, or of a layer that makes the compiler move more, shows here and in review. The text is of
the pinned compilers; where they are not installed the tests are skipped.
"""

import importlib.metadata
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from common import config as configuration
from common.report.table import text
from launch import estimate
from launch.topology import LIBTPU, find

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden_plans"
UPDATE = "TRAINLESS_UPDATE_GOLDEN"
JAX = "0.10.2"

# Those that take more than seconds to compile are of the laptop's size, or slow.
PLANS = [
    ("babylm_sum", "", ""),
    ("mnist_explicit", "", ""),
    ("perception", "", "slow"),
    ("enwik8_gmlp", "", "slow"),
    ("wmt_ffn_res", "laptop", "slow"),
    ("roberta_t_res", "laptop", "slow"),
]


def cases() -> list:
    """Every experiment for a slice of TPUs and for CPUs, the quick ones without a mark."""
    return [
        pytest.param(name, size, topology, marks=[pytest.mark.slow] if mark else [])
        for name, size, mark in PLANS
        for topology in ("cpu:8", "v5e:2x4")
    ]


@pytest.fixture
def as_planned() -> Iterator[None]:
    """The optimizations of `launch.plan --quick`, which the tests otherwise leave out."""
    optimizations, effort = "jax_disable_most_optimizations", "jax_exec_time_optimization_effort"
    before = jax.config.read(optimizations), jax.config.jax_exec_time_optimization_effort
    jax.config.update(optimizations, False)
    jax.config.update(effort, -1.0)
    yield
    jax.config.update(optimizations, before[0])
    jax.config.update(effort, before[1])


def need(topology: str) -> None:
    if jax.__version__ != JAX:
        pytest.skip(f"the text is of jax {JAX}")
    if topology.startswith("cpu"):
        return
    wanted = LIBTPU.partition("==")[2]
    try:
        found = importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"needs the TPU compiler: pip install {LIBTPU}")
    if found != wanted:
        pytest.skip(f"the text is of libtpu {wanted}")


@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")
@pytest.mark.parametrize(("name", "size", "topology"), cases())
def test_a_plan_is_the_golden_one(name, size, topology, as_planned):
    need(topology)
    config = configuration.load(f"{ROOT}/configs/{name}.py" + (f":{size}" if size else ""))
    config.mesh.update({"data": 2, "fsdp": 2, "tensor": 2})
    found = estimate.estimate(config, find(topology))
    splits = text(
        ("parameters", "shape", "split over", "alike"),
        estimate.shardings(found.abstract_model, found.mesh),
    )
    sent = text(("each device, each step", "times", "bytes received"), found.collectives.rows)
    now = f"{splits}\n{sent}"
    path = GOLDEN / f"{name}{size and '_'}{size}_{topology.replace(':', '_')}.txt"
    if os.environ.get(UPDATE):
        path.write_text(now)
    golden = path.read_text() if path.exists() else ""
    changes = sorted(set(now.splitlines()) ^ set(golden.splitlines()))
    assert now == golden, (
        f"the plan is not what {path.relative_to(ROOT)} says: {'; '.join(changes)}. If this is wanted:"
        f" {UPDATE}=1 python -m pytest tests/launch/test_golden_plans.py -m 'slow or not slow'"
    )


def test_no_golden_plan_is_left_over():
    known = {
        f"{name}{size and '_'}{size}_{topology}.txt"
        for name, size, _ in PLANS
        for topology in ("cpu_8", "v5e_2x4")
    }
    assert {path.name for path in GOLDEN.iterdir()} == known
