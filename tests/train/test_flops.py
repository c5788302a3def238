"""Our count of FLOPs against XLA's count for one block of each kind.

XLA also counts additions and other elementwise operations, except transcendental functions. The blocks are wide, so
that matrix products make up almost all operations. In the blocks of a translation model, a missing product of queries
and keys would exceed the tolerance. XLA counts the optimized program. On CPUs all matrix products of this program are
`dot` operations, which XLA counts. XLA would not count calls of library functions.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax._src.cudnn import fused_attention_stablehlo

from common import freezing, variables
from common.model import attend as attend_module
from common.model import transformer
from common.model.attend import attend
from common.model.block import Block, Context
from common.model.low_rank import Lora, LoraLinear, adapt
from common.model.norm import LayerNorm
from common.model.stack import Stack
from common.sharding import make_mesh
from common.train import flops
from common.train.exchange import local_sums
from configs import language, translation
from gmlp_lm import model as gmlp_lm
from perception import model as perception
from perception.backbones import BACKBONES
from reservoir.attention_blocks import decoder_block, encoder_block
from reservoir.kinds import RESERVOIRS

ROWS, LENGTH, WIDTH = 1, 256, 512
SHORT = {"bigru reservoir": (32, 8)}
"""{kind of block: (rows, length)} for a block whose loop the test unrolls.

The compiler omits the products with the state before the first position, which is 0. Our count has these products."""


def recipe():
    model = translation.wmt("ffn").model
    model.update({"dropout": 0.0, "max_length": LENGTH, "kernel": 15})
    return model


def plain(rngs) -> Block:
    return encoder_block(recipe(), rngs=rngs)


def decoder(rngs) -> Block:
    """Returns a decoder block: self-attention, cross-attention and feed-forward."""
    return decoder_block(recipe(), rngs=rngs)


def reservoir(kind: str) -> Callable[..., Block]:
    def make(rngs) -> Block:
        made = RESERVOIRS[kind].build(recipe(), encoder_block, False, rngs=rngs)
        freezing.freeze(made)
        return made

    return make


def of_a_gmlp(attention: bool) -> Callable[..., Block]:
    def make(rngs) -> Block:
        model = language.paper("gmlp_attn" if attention else "gmlp", "enwik8").model
        model.update({"width": WIDTH, "length": LENGTH, "dropout": 0.0})
        return transformer.make_block(model, gmlp_lm.sublayers(model, 0, rngs=rngs), rngs=rngs)

    return make


def of_qwen2(rngs) -> Block:
    """Returns a block as in Qwen2: fewer key heads than query heads, and a gated feed-forward layer."""
    shape = replace(BACKBONES["qwen2_0.5b"], dropout=(0.0,) * 3)
    return perception.block(shape, 0, rngs=rngs)


def adapted(rngs) -> Block:
    made = of_qwen2(rngs)
    adapt(made, ("query", "value"), Lora(rank=16, rate=0.0), rngs=rngs)
    assert sum(isinstance(part, LoraLinear) for _, part in nnx.iter_modules(made)) == 2
    return made


BLOCKS = {
    "transformer": plain,
    "transformer decoder": decoder,
    **{f"{kind} reservoir": reservoir(kind) for kind in RESERVOIRS},
    "gMLP": of_a_gmlp(False),
    "gMLP with attention": of_a_gmlp(True),
    "Qwen2": of_qwen2,
    "Qwen2 with LoRA": adapted,
}


@pytest.fixture
def unrolled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unrolls the loop of the GRU, because the compiler counts the body of a loop only once."""
    scan = jax.lax.scan
    monkeypatch.setattr(jax.lax, "scan", lambda *given, **o: scan(*given, **{**o, "unroll": True}))


@pytest.mark.parametrize("name", BLOCKS)
def test_flops_equal_the_compilers_count(name: str, unrolled: None) -> None:
    abstract_model = variables.abstract(BLOCKS[name])
    width = {"Qwen2": 896}.get(name.split()[0], WIDTH)
    rows, length = SHORT.get(name, (ROWS, LENGTH))
    x_BLD = jax.ShapeDtypeStruct((rows, length, width), jnp.float32)
    values = [
        {n: jax.ShapeDtypeStruct(v.shape, v.dtype) for n, v in some.items()}
        for some in (abstract_model.trainable, abstract_model.frozen)
    ]

    def loss(trainable, x_BLD, frozen):
        context = Context(encoded_BSD=x_BLD[:, : length // 2])  # only a decoder reads `encoded_BSD`
        y_BLD = abstract_model.build(trainable, frozen)(x_BLD, context)
        return jnp.sum(y_BLD.astype(jnp.float32) ** 2)

    gradient = jax.grad(loss, argnums=(0, 1))
    arguments = (values[0], x_BLD, values[1])
    ours = flops.count(jax.make_jaxpr(gradient)(*arguments))
    compilers = jax.jit(gradient).lower(*arguments).compile().cost_analysis()["flops"]
    assert ours == pytest.approx(compilers, rel=0.03)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 9}])
@pytest.mark.parametrize("gradient", [False, True])
def test_fused_attention_counts_as_the_products_it_replaces(
    monkeypatch: pytest.MonkeyPatch, options: dict, gradient: bool
) -> None:
    """Traces attention for GPUs, which needs no GPU. Causal attention splits the 300 queries into two blocks."""
    query, other = (
        jax.ShapeDtypeStruct((2, length, 3, 16), jnp.bfloat16)
        for length in (300, 300 if options else 200)
    )

    def program() -> Callable:
        """Returns a new function at each call, because JAX caches traces by function."""

        def function(query, key, value):
            return attend(query, key, value, **options).astype(jnp.float32).sum()

        return jax.value_and_grad(function, (0, 1, 2)) if gradient else function

    plain = flops.count(jax.make_jaxpr(program())(query, other, other))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    assert "dot_general" not in str(jax.make_jaxpr(program())(query, other, other))
    assert flops.count(jax.make_jaxpr(program())(query, other, other)) == plain
    if not options:
        assert plain == (6 if gradient else 2) * 2 * 2 * 300 * 200 * 3 * 16


def test_fused_attention_of_several_gpus_counts_all_rows_and_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each device calls the kernel for its rows and heads (`on_each_device`)."""
    query, other = (jax.ShapeDtypeStruct((4, 30, n, 16), jnp.bfloat16) for n in (4, 2))

    def program() -> Callable:
        def function(query, key, value):
            return attend(query, key, value).astype(jnp.float32).sum()

        return jax.value_and_grad(function, (0, 1, 2))

    plain = flops.count(jax.make_jaxpr(program())(query, other, other))
    monkeypatch.setattr(attend_module, "backend", lambda: "gpu")
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    with jax.set_mesh(make_mesh({"data": 2, "tensor": 2}, jax.devices()[:4])):
        split = jax.make_jaxpr(program())(query, other, other)
    assert "shard_map" in str(split) and "dot_general" not in str(split)
    assert flops.count(split) == plain


def test_products_that_all_shards_repeat_count_once() -> None:
    """The count must not depend on the number of devices, so that runs of different machines can be compared."""
    rows_BM, table_MN = jax.ShapeDtypeStruct((8, 16), float), jax.ShapeDtypeStruct((16, 32), float)

    def loss(table_MN, rows_BM):
        constant_N = jnp.ones(16) @ jax.lax.stop_gradient(table_MN)  # independent of the rows
        return jnp.square(rows_BM @ table_MN + constant_N).sum()

    def step(mesh, rows_BM, table_MN):
        return local_sums(lambda rows, table: jax.grad(loss)(table, rows), mesh, rows_BM, table_MN)

    counts = set()
    for devices in (1, 2, 4):
        mesh = make_mesh({"data": devices}, jax.devices()[:devices])
        counts.add(flops.count(jax.make_jaxpr(partial(step, mesh))(rows_BM, table_MN)))
    # Two products with the rows and one with the constant.
    assert counts == {2 * 16 * 32 * (8 + 8 + 1)}


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 9}])
@pytest.mark.parametrize("gradient", [False, True])
def test_splash_attention_counts_as_the_products_it_replaces(
    monkeypatch: pytest.MonkeyPatch, options: dict, gradient: bool
) -> None:
    """Traces the kernel of TPUs with two query heads for each key-value head."""
    query = jax.ShapeDtypeStruct((2, 384, 4, 16), jnp.bfloat16)
    other = jax.ShapeDtypeStruct((2, 384 if options else 256, 2, 16), jnp.bfloat16)

    def program() -> Callable:
        """Returns a new function at each call, because JAX caches traces by function."""

        def function(query, key, value):
            return attend(query, key, value, **options).astype(jnp.float32).sum()

        return jax.value_and_grad(function, (0, 1, 2)) if gradient else function

    plain = flops.count(jax.make_jaxpr(program())(query, other, other))
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert "splash" in str(jax.make_jaxpr(program())(query, other, other))
    # The kernel's backward pass also contracts the outputs with their gradients. This adds few FLOPs, because it
    # needs no product for each pair of positions.
    assert flops.count(jax.make_jaxpr(program())(query, other, other)) == pytest.approx(
        plain, rel=1e-3
    )


def counted(layers: int, drop: float, remat: str, parts: int = 1) -> int:
    """Returns the FLOPs of the gradient of a stack, for a batch that is split into `parts` microbatches."""

    def make(rngs) -> Stack:
        blocks = [plain(rngs) for _ in range(layers)]
        return Stack(blocks, LayerNorm(WIDTH, rngs=rngs), skip_rate=drop, remat=remat)

    abstract_model = variables.abstract(make)
    trainable = {
        n: jax.ShapeDtypeStruct(v.shape, v.dtype) for n, v in abstract_model.trainable.items()
    }

    def gradient(trainable, x_BLD):
        def loss(trainable, x_BLD):
            y_BLD = abstract_model.build(trainable, {})(x_BLD, Context(), jax.random.key(0))
            return jnp.sum(y_BLD**2)

        def add(total, x_BLD):
            grads = jax.grad(loss, argnums=(0, 1))(trainable, x_BLD)[0]
            return jax.tree.map(jnp.add, total, grads), None

        zero = jax.tree.map(jnp.zeros_like, trainable)
        return jax.lax.scan(add, zero, x_BLD.reshape(parts, -1, *x_BLD.shape[1:]))[0]

    return flops.count(
        jax.make_jaxpr(gradient)(trainable, jax.ShapeDtypeStruct((2, 8, WIDTH), jnp.float32))
    )


@pytest.mark.parametrize("remat", ["dots", pytest.param("full", marks=pytest.mark.medium)])
@pytest.mark.parametrize("parts", [pytest.param(1, marks=pytest.mark.medium), 2])
def test_recomputation_is_not_counted(remat: str, parts: int) -> None:
    """The count includes the FLOPs of the model, but not the FLOPs of recomputation in the backward pass."""
    assert counted(2, 0.0, remat, parts) == counted(2, 0.0, "none", parts) > 0


@pytest.mark.parametrize("remat", ["none", pytest.param("full", marks=pytest.mark.medium)])
@pytest.mark.parametrize("parts", [pytest.param(1, marks=pytest.mark.medium), 2])
def test_branch_of_known_probability_counts_with_its_expectation(remat: str, parts: int) -> None:
    """With LayerDrop of 0.25, three quarters of a layer's FLOPs count, forward and backward."""
    of_a_layer = counted(3, 0.0, remat, parts) - counted(2, 0.0, remat, parts)
    whole, dropped = (counted(2, drop, remat, parts) for drop in (0.0, 0.25))
    assert dropped == pytest.approx(whole - 0.25 * 2 * of_a_layer, rel=0.01)


def test_branch_of_unknown_probability_counts_its_most_expensive_arm() -> None:
    def function(x, flag):
        return jax.lax.cond(flag, lambda x: x @ x, lambda x: x, x)

    x, flag = jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((), bool)
    assert flops.count(jax.make_jaxpr(function)(x, flag)) == 2 * 8**3
