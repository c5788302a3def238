"""The kinds of reservoir (section 2.1 and appendix A): layers that stay at their random initialization."""

from collections.abc import Callable

from flax import nnx
from ml_collections import ConfigDict

from common.model import transformer
from common.model.block import Block
from common.model.gated_mlp import GatedMlp
from common.model.spatial import Spatial
from reservoir.convolution import DynamicConvolution
from reservoir.recurrent import BiGru

# A layer that is trained: (model, rngs=) -> Block.
Layer = Callable[..., Block]


def _transformer_reservoir(
    model: ConfigDict, layer: Layer, causal: bool, *, rngs: nnx.Rngs
) -> Block:
    """A whole layer of the stack, attention included."""
    return layer(model, rngs=rngs)


def _ffn_reservoir(model: ConfigDict, layer: Layer, causal: bool, *, rngs: nnx.Rngs) -> Block:
    """FFN(LN(x)) + x, with no attention at all."""
    feed_forward = transformer.feed_forward(model, rngs=rngs)
    return transformer.make_block(model, [feed_forward], rngs=rngs)


def _bigru_reservoir(model: ConfigDict, layer: Layer, causal: bool, *, rngs: nnx.Rngs) -> Block:
    """A bidirectional GRU and a projection; both directions together have `reservoir_hidden` features, or the width."""
    mixer = BiGru(model.width, rngs=rngs, hidden=model.reservoir_hidden)
    return transformer.make_block(model, [mixer], rngs=rngs)


def _cnn_reservoir(model: ConfigDict, layer: Layer, causal: bool, *, rngs: nnx.Rngs) -> Block:
    """A layer of Wu et al. (2019): a dynamic convolution in the place of attention."""
    convolution = DynamicConvolution(
        model.width, model.heads, model.kernel, rngs=rngs, causal=causal
    )
    feed_forward = transformer.feed_forward(model, rngs=rngs)
    return transformer.make_block(model, [convolution, feed_forward], rngs=rngs)


def _gmlp_reservoir(model: ConfigDict, layer: Layer, causal: bool, *, rngs: nnx.Rngs) -> Block:
    """Not in the paper: positions are mixed by a random matrix that is never trained (see `Spatial`)."""
    longest = model.length if "length" in model else model.max_length
    spatial = Spatial(longest, rngs=rngs, causal=causal)
    gated = GatedMlp(model.width, model.hidden, spatial, rngs=rngs, activation=model.activation)
    return transformer.make_block(model, [gated], rngs=rngs)


RESERVOIRS = {
    "transformer": _transformer_reservoir,
    "ffn": _ffn_reservoir,
    "bigru": _bigru_reservoir,
    "cnn": _cnn_reservoir,
    "gmlp": _gmlp_reservoir,
}

BOTH_WAYS = ("bigru",)
"""Kinds that see what follows, so that no decoder can have them."""
