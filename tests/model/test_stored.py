"""A scan over layers stores only arrays that are costly to compute."""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr
from ml_collections import ConfigDict

from common.model import transformer
from common.model.block import Block, Context
from common.model.low_rank import Lora, adapt
from common.model.stored import POLICIES
from configs import language
from gmlp_lm.model import language_model
from reservoir.attention_blocks import decoder_block, encoder_block
from reservoir.backskip import BackskipBlock
from reservoir.recurrent import BiGru

B, L, D, F = 2, 8, 16, 32
MODEL = ConfigDict(
    {"width": D, "hidden": F, "heads": 2, "norm": "pre", "activation": "gelu", "dropout": 0.3}
)


def attention(rngs: nnx.Rngs) -> Block:
    return encoder_block(MODEL, rngs=rngs)


def cross_attention(rngs: nnx.Rngs) -> Block:
    return decoder_block(MODEL, rngs=rngs)


def adapters(rngs: nnx.Rngs) -> Block:
    block = encoder_block(MODEL, rngs=rngs)
    adapt(block, ("query", "value", "down"), Lora(rank=2, rate=0.3), rngs=rngs)
    return block


def gru(rngs: nnx.Rngs) -> Block:
    return transformer.make_block(MODEL, [BiGru(D, rngs=rngs)], rngs=rngs)


def backskip(rngs: nnx.Rngs) -> Block:
    settings = {"estimator": "policy", "reward": "own_rms", "sigma": 0.5, "scale": 1.0}
    model = ConfigDict({**MODEL, "backskip": settings})
    return BackskipBlock([encoder_block(model, rngs=rngs)], model, rngs=rngs)


def gates(kind: str) -> Callable[[nnx.Rngs], Block]:
    model = language.choose(kind, "enwik8", "fixed,tiny").model
    model.update({"width": D, "hidden": F, "length": L, "dropout": 0.3})
    return lambda rngs: language_model(model, 256, rngs=rngs).stack.blocks[0]


def equations(jaxpr: Jaxpr) -> Iterator:
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            if isinstance(value, ClosedJaxpr | Jaxpr):
                yield from equations(getattr(value, "jaxpr", value))


def count(block: Block, policy: Callable) -> dict[str, int]:
    """Returns {primitive: number of its calls} for products and random bits in forward and backward pass of a block.

    The encoder's output and the relative positions of the context depend on x, so that they have gradients.

    Args:
      block: block of width D. Only its Params have gradients.
      policy: rematerialization policy.
    """
    graphdef, trained, frozen = nnx.split(block, nnx.Param, ...)

    def loss(trained, x_BLD, key):
        def call(trained, x_BLD):
            encoded = {"encoded_BSD": x_BLD, "encoded_lengths_B": jnp.full(B, L)}
            context = Context(**encoded, relative=x_BLD.reshape(-1, D))
            return nnx.merge(graphdef, trained, frozen)(x_BLD, context, key)

        return jnp.sum(jax.checkpoint(call, policy=policy)(trained, x_BLD).astype(jnp.float32))

    x_BLD = jnp.ones((B, L, D), jnp.bfloat16)
    gradient = jax.make_jaxpr(jax.grad(loss, (0, 1)))(trained, x_BLD, jax.random.key(0))
    names = [equation.primitive.name for equation in equations(gradient.jaxpr)]
    return {name: names.count(name) for name in ("dot_general", "threefry2x32", "random_bits")}


def assert_no_recomputation(block: Block) -> None:
    """Checks that, with the policy of scans, the backward pass computes no product and no random bits again."""
    everything, nothing = (
        count(block, policy)
        for policy in (
            jax.checkpoint_policies.everything_saveable,
            jax.checkpoint_policies.nothing_saveable,
        )
    )
    assert count(block, POLICIES["none"]) == everything
    assert all(everything[name] < nothing[name] for name in ("dot_general", "random_bits"))


@pytest.mark.parametrize(
    "make",
    [attention, cross_attention, adapters, gru, backskip, gates("gmlp"), gates("gmlp_attn")],
    ids=["attention", "cross_attention", "adapters", "gru", "backskip", "gmlp", "gmlp_attn"],
)
def test_backward_pass_recomputes_no_products_or_random_bits(make: Callable) -> None:
    assert_no_recomputation(make(nnx.Rngs(0)))


def test_stored_bytes_of_a_layer() -> None:
    """A layer stores at most seven arrays of its width or hidden size in its dtype, the softmax, and random bits.

    Without a policy, JAX would store more than three times as much.
    """
    graphdef, values = nnx.split(attention(nnx.Rngs(0)))

    def stored(policy: Callable) -> int:
        def call(values, x_BLD, key):
            run = jax.checkpoint(
                lambda x_BLD: nnx.merge(graphdef, values)(x_BLD, Context(), key), policy=policy
            )
            return run(x_BLD)

        key, x_BLD = jax.random.key(0), jnp.ones((B, L, D), jnp.bfloat16)
        _, backward = jax.vjp(lambda x_BLD, values: call(values, x_BLD, key), x_BLD, values)
        inputs = {id(leaf) for leaf in jax.tree.leaves((x_BLD, values))}
        leaves = [leaf for leaf in jax.tree.leaves(backward) if id(leaf) not in inputs]
        return sum(leaf.nbytes for leaf in leaves if leaf.ndim > 1)

    products = B * L * (6 * D + F) * 2  # query, key, value, heads, output; up, down
    bits = B * (2 * L * L + 2 * L * D)  # one byte for an element
    assert stored(POLICIES["full"]) == 0 < stored(POLICIES["dots"]) < stored(POLICIES["none"])
    assert stored(POLICIES["none"]) <= products + B * 2 * L * L * 2 + bits
    assert stored(jax.checkpoint_policies.everything_saveable) > 3 * stored(POLICIES["none"])
