"""Golden files with the shardings and collectives of experiments of every paper; the memory traffic of attention.

The tests fail if a change of sharding rules or layers changes the communication. pytest skips all tests that compile
unless the compilers have the pinned versions.
"""

import importlib.metadata
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from common import config as configuration
from common import sharding
from common.model.attend import attend
from common.report.table import text
from launch import decoding, estimate
from launch.topology import CUDA, LIBTPU, find

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden_plans"
UPDATE = "TRAINLESS_UPDATE_GOLDEN"
JAX = "0.10.2"

# (configuration, size, mark). An experiment that compiles for minutes has the size "laptop", the mark "slow", or both.
PLANS = [
    ("babylm_sum", "", ""),
    ("mnist_explicit", "", ""),
    ("perception", "", "slow"),
    ("enwik8_gmlp", "", "slow"),
    ("wmt_ffn_res", "laptop", "slow"),
    ("roberta_t_res", "laptop", "slow"),
]

# (configuration, mark) of experiments that generate text, in the size "tiny".
DECODING_PLANS = [("wmt_ffn_res", ""), ("enwik8_gmlp", "slow")]
SLICES = ("babylm_sum", "mnist_explicit")
TOPOLOGIES = ("cpu:8", "v5e:2x4", "h100:8")


def cases() -> list:
    """Returns cases of PLANS on TOPOLOGIES, and of the experiments in SLICES on two TPU slices."""
    return [
        pytest.param(name, size, topology, marks=[pytest.mark.slow] if mark else [])
        for name, size, mark in PLANS
        for topology in (*TOPOLOGIES, *["2xv5e:2x2"] * (name in SLICES))
    ]


@pytest.fixture
def quick_optimizations() -> Iterator[None]:
    """Enables the compiler optimizations of `launch.plan --quick`, which tests/conftest.py disables."""
    optimizations, effort = "jax_disable_most_optimizations", "jax_exec_time_optimization_effort"
    before = jax.config.read(optimizations), jax.config.jax_exec_time_optimization_effort
    jax.config.update(optimizations, False)
    jax.config.update(effort, -1.0)
    yield
    jax.config.update(optimizations, before[0])
    jax.config.update(effort, before[1])


def need(topology: str) -> None:
    if jax.__version__ != JAX:
        pytest.skip(f"the golden files need jax {JAX}")
    if topology.startswith("cpu"):
        return
    gpu = topology.startswith("h100")
    package, source = ("jax-cuda12-pjrt", CUDA) if gpu else ("libtpu", LIBTPU)
    wanted = source.partition("==")[2]
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f'needs the compiler for {topology}: pip install "{source}"')
    if found != wanted:
        pytest.skip(f"the golden files need {package} {wanted}")


@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")
@pytest.mark.parametrize(("name", "size", "topology"), cases())
def test_plan_matches_golden_file(name, size, topology, quick_optimizations):
    need(topology)
    config = configuration.load(f"{ROOT}/configs/{name}.py" + (f":{size}" if size else ""))
    config.mesh.update({"data": 2, "fsdp": 2, "tensor": 2})
    found = estimate.estimate(config, find(topology))
    splits = text(
        ("parameters", "shape", "split over", "alike"),
        estimate.shardings(found.abstract_model, found.mesh),
    )
    sent = text(("each device, each step", "times", "bytes received"), found.collectives.rows)
    compare(f"{splits}\n{sent}", f"{name}{size and '_'}{size}_{topology.replace(':', '_')}.txt")


@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")
@pytest.mark.parametrize(
    ("name", "topology"),
    [
        pytest.param(name, topology, marks=[pytest.mark.slow] if mark else [])
        for name, mark in DECODING_PLANS
        for topology in TOPOLOGIES
    ],
)
def test_decoding_plan_matches_golden_file(name, topology, quick_optimizations):
    need(topology)
    config = configuration.load(f"{ROOT}/configs/{name}.py:tiny")
    config.mesh.update({"data": 2, "fsdp": 2, "tensor": 2})
    config.model.dtype = "bfloat16"
    found = decoding.traffic(config, find(topology))
    sent = [
        (f"{part}: {row.kind}", row.count, row.received)
        for part, collectives in (("weights", found.weights), ("decoding", found.program))
        for row in collectives.rows
    ]
    total = ("for a token", "", round(found.per_token))
    now = text(("each device", "times", "bytes received"), [*sent, total])
    compare(now, f"{name}_decoding_{topology.replace(':', '_')}.txt")


@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")
def test_attention_with_dropout_keeps_weights_in_bfloat16(quick_optimizations):
    """Forward and backward pass access less than 13 times the bytes of the attention weights in bfloat16.

    The accesses are to the weights, the gradient of the weights, and the dropout masks. With weights in float32, the
    factor would be 18.6.
    """
    need("v5e:2x4")
    mesh = sharding.make_mesh({"data": 1}, find("v5e:2x4").devices[:1])
    batch, length, heads = 16, 512, 12
    rows = sharding.batch_sharding(mesh)
    x = jax.ShapeDtypeStruct((batch, length, heads, 64), jnp.bfloat16, sharding=rows)

    def loss(query, key, value, seed):
        y = attend(query, key, value, dropout_rate=0.1, key=jax.random.key(seed))
        return jnp.square(y.astype(jnp.float32)).sum()

    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x, 0).compile()
    weights = 2 * batch * heads * length**2
    assert compiled.cost_analysis()["bytes accessed"] < 13 * weights


def compare(now: str, file: str) -> None:
    """Compares a plan with its golden file. If TRAINLESS_UPDATE_GOLDEN is set, writes the file first."""
    path = GOLDEN / file
    if os.environ.get(UPDATE):
        path.write_text(now)
    golden = path.read_text() if path.exists() else ""
    changes = sorted(set(now.splitlines()) ^ set(golden.splitlines()))
    assert now == golden, (
        f"the plan differs from {path.relative_to(ROOT)}: {'; '.join(changes)}. To accept the change:"
        f" {UPDATE}=1 python -m pytest tests/launch/test_golden_plans.py -m 'slow or not slow'"
    )


def test_every_golden_file_belongs_to_a_plan():
    topologies = [topology.replace(":", "_") for topology in TOPOLOGIES]
    known = {
        f"{name}{size and '_'}{size}_{topology}.txt"
        for name, size, _ in PLANS
        for topology in (*topologies, *["2xv5e_2x2"] * (name in SLICES))
    } | {f"{name}_decoding_{topology}.txt" for name, _ in DECODING_PLANS for topology in topologies}
    assert {path.name for path in GOLDEN.iterdir()} == known
