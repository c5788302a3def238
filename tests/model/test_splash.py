"""Fused attention on TPUs against attention without a fused kernel. On CPUs, Pallas interprets the kernel."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from common import sharding
from common.model import attend as attend_module
from common.model import splash
from common.model.fused import on_each_device
from launch import topology

ROOT = Path(__file__).parents[2]
KEY = jax.random.key(0)

CASES = {
    "padding, groups": {"heads": (4, 2, 64), "lengths": [90, 128]},
    "causal, no multiple of a block": {"length": 131, "heads": (2, 2, 32), "causal": True},
    "no multiple of a block": {"length": 130, "heads": (1, 1, 32)},
    "window": {"heads": (1, 1, 128), "window": 9},
    "causal, window, groups": {"heads": (2, 1, 64), "causal": True, "window": 9},
}


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = partial(splash.make_splash_mha, interpret=True)
    monkeypatch.setattr(splash, "make_splash_mha", kernel)


def arrays(rows: int, length: int, heads: int, groups: int, size: int) -> list[jax.Array]:
    """Returns queries, keys, values, and weights of the outputs."""
    random = np.random.default_rng(3)
    shapes = [(rows, length, n, size) for n in (heads, groups, groups, heads)]
    return [jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes]


def value_and_gradients(function, *values: jax.Array) -> tuple:
    def weighted(query, key, value, weight):
        y = function(query, key, value)
        return (y * weight).sum(), y

    return jax.jit(jax.grad(weighted, argnums=(0, 1, 2), has_aux=True))(*values)


def assert_close(found: tuple, expected: tuple) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected
    )


@pytest.mark.parametrize("case", CASES)
def test_splash_equals_attention(case: str, interpreted: None) -> None:
    """Values and gradients are equal, with padding, groups of heads, causal attention and windows."""
    options = {"length": 128, "causal": False, "lengths": None, "window": None, **CASES[case]}
    lengths_B = None if options["lengths"] is None else jnp.asarray(options["lengths"])
    mask = {"causal": options["causal"], "key_lengths_B": lengths_B, "window": options["window"]}
    values = arrays(2, options["length"], *options["heads"])
    found = value_and_gradients(partial(splash.attend, **mask), *values)
    assert_close(found, value_and_gradients(partial(attend_module.attend, **mask), *values))


@pytest.mark.parametrize("manual", [set(), {"data"}])
def test_each_device_computes_its_rows_and_heads(manual: set, interpreted: None) -> None:
    """The mesh splits rows over data and fsdp, and heads over tensor.

    `manual` has the mesh axes of an enclosing `jax.shard_map`. The training step calls the kernel inside a `shard_map`.
    """
    mesh = sharding.make_mesh({"data": 2, "fsdp": 2, "tensor": 2}, jax.devices()[:8])
    lengths_B = jnp.asarray([128, 100, 5, 128])
    *values, _ = arrays(4, 128, 4, 2, 16)

    def fused(*arrays):
        kernel = partial(splash.attend, causal=False, window=None)
        return on_each_device(kernel, *arrays)

    if manual:
        rows = (P("data"),) * 4
        fused = jax.shard_map(
            fused, in_specs=rows, out_specs=P("data"), axis_names=manual, check_vma=False
        )
    with jax.set_mesh(mesh):
        found = jax.jit(fused)(*values, lengths_B)
    expected = attend_module.attend(*values, key_lengths_B=lengths_B)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "options", "fused"),
    [
        ((256, 2, 64), {}, True),
        ((256, 2, 64), {"key": KEY}, True),
        ((256, 2, 64), {"dropout_rate": 0.1}, True),  # no dropout without a key
        ((256, 2, 64), {"dropout_rate": 0.1, "key": KEY}, False),
        ((256, 2, 64), {"bias_BHTS": jnp.zeros((1, 2, 256, 256))}, False),
        ((256, 2, 64), {"dtype": jnp.float32}, False),
        ((127, 2, 64), {}, False),
        ((256, 3, 64), {}, False),  # The tensor axis does not divide three heads.
    ],
)
def test_tpus_use_the_kernel_where_possible(monkeypatch, shape: tuple, options: dict, fused: bool):
    asked = []
    monkeypatch.setattr(attend_module, "backend", lambda: "tpu")
    monkeypatch.setattr(splash, "attend", lambda query, *_, **__: asked.append(1) or query)
    length, heads, size = shape
    x = jax.ShapeDtypeStruct((1, length, heads, size), options.pop("dtype", jnp.bfloat16))
    mesh = sharding.make_mesh({"tensor": 2}, jax.devices()[:2])
    with jax.set_mesh(mesh):
        jax.eval_shape(partial(attend_module.attend, **options), x, x, x)
    assert bool(asked) == fused


COMPILED = """
import sys
import jax, jax.numpy as jnp
from common import sharding
from common.model.attend import attend
from launch import topology

name, kernel = sys.argv[1:]
topology.prepare(name)
devices = topology.find(name).devices
cases = (({"data": 8}, 32), ({"fsdp": 8}, 64), ({"data": 2, "fsdp": 2, "tensor": 2}, 128))
for sizes, size in cases:
    mesh = sharding.make_mesh(sizes, devices)
    rows = sharding.batch_sharding(mesh)
    query, other = (
        jax.ShapeDtypeStruct((16, 300, heads, size), jnp.bfloat16, sharding=rows) for heads in (4, 2)
    )
    lengths = jax.ShapeDtypeStruct((16,), jnp.int32, sharding=rows)

    def loss(query, key, value, lengths):
        return attend(query, key, value, key_lengths_B=lengths).astype(jnp.float32).sum()

    with jax.set_mesh(mesh):
        gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
        compiled = gradient.lower(query, other, other, lengths).compile()
    program = compiled.as_text()
    assert kernel in program, sizes
    assert "300,300" not in program and "384,384" not in program, sizes
print("compiled")
"""


@pytest.mark.parametrize(
    ("name", "kernel"), [("v5e:2x4", "tpu_custom_call"), ("h100:8", "__cudnn$fmhaSoftmaxBackward")]
)
def test_compiler_accepts_the_kernel_on_every_mesh(name: str, kernel: str) -> None:
    """The compiled programs have the fused kernel, and no array of attention logits.

    The test compiles in a new process, because the compilers need settings that differ from the settings of the tests.
    """
    if not topology.has_compiler(name.partition(":")[0]):
        pytest.skip(f"needs the compiler for {name}")
    command = [sys.executable, "-c", COMPILED, name, kernel]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.stdout == "compiled\n", run.stderr
