"""Number of values that a stack keeps for the backward pass, and names of operations in profiles."""

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from common.model.block import Context
from common.model.embed import Embed
from common.model.loss import cross_entropy
from common.model.norm import LayerNorm
from common.model.stack import REMAT, Stack
from reservoir.attention_blocks import decoder_block, encoder_block
from reservoir.encoder_decoder import EncoderDecoder

MODEL = ConfigDict(
    {"width": 8, "hidden": 32, "heads": 2, "norm": "pre", "activation": "relu", "dropout": 0.0}
)


def stack(remat: str = "none") -> Stack:
    rngs = nnx.Rngs(0)
    blocks = [encoder_block(MODEL, rngs=rngs) for _ in range(2)]
    return Stack(blocks, LayerNorm(MODEL.width, rngs=rngs), remat=remat)


def kept(remat: str) -> int:
    """Returns the number of values that the backward pass of a stack keeps."""
    model, x_BLD = stack(remat), jnp.ones((4, 16, MODEL.width))
    graph, params = nnx.split(model)

    def loss(params: nnx.State) -> jax.Array:
        return jnp.sum(nnx.merge(graph, params)(x_BLD, Context()) ** 2)

    backward = jax.eval_shape(lambda params: jax.vjp(loss, params)[1], params)
    return sum(x.size for x in jax.tree.leaves(backward))


def test_remat_policies_store_decreasing_numbers_of_values():
    everything, products, nothing = (kept(remat) for remat in REMAT)
    assert everything > 1.5 * products and products > 1.5 * nothing


def test_profiles_name_blocks_and_sublayers():
    """xprof shows the name stack of each operation. The stack names the block and the sublayer."""
    model, x_BLD = stack(), jnp.ones((1, 2, MODEL.width))
    text = jax.jit(lambda x: model(x, Context())).lower(x_BLD).as_text(debug_info=True)
    for name in ("block0/Attention", "block1/Attention", "block1/FeedForward"):
        assert name in text


def test_profiles_name_the_parts_of_a_translator():
    """Blocks of encoder and decoder differ by the scope around them. The backward pass has the same names."""
    rngs = nnx.Rngs(0)
    parts = [Embed(11, MODEL.width, rngs=rngs), Embed(13, MODEL.width, rngs=rngs), stack()]
    norm = LayerNorm(MODEL.width, rngs=rngs)
    decoder = Stack([decoder_block(MODEL, rngs=rngs)], norm)
    graph, params = nnx.split(EncoderDecoder(*parts, decoder))
    source_BS, target_BT = jnp.ones((2, 3), jnp.int32), jnp.ones((2, 4), jnp.int32)

    def loss(params: nnx.State) -> jax.Array:
        return cross_entropy(nnx.merge(graph, params)(source_BS, target_BT), target_BT).sum()

    text = jax.jit(jax.grad(loss)).lower(params).as_text(debug_info=True)
    names = ("encoder", "block1", "Attention"), ("decoder", "block0", "CrossAttention")
    for name in (*names, ("embed",), ("logits",), ("loss",)):
        first, *rest = name
        for scope in (f"jvp({first})", f"transpose(jvp({first}))"):
            assert "/".join([scope, *rest]) in text
