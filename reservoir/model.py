"""What the paper invents: layers that stay at their random initialization, and where they stand (sections 2.1, 2.2)."""

from flax import nnx
from ml_collections import ConfigDict

from common.config import choose, require
from common.errors import UserError
from common.model import transformer
from common.model.block import Block
from common.model.encoder_decoder import EncoderDecoder
from common.model.gated_mlp import GatedMlp
from common.model.spatial import Spatial
from common.variables import freeze


def placement(layers: int, reservoirs: int) -> tuple[int, ...]:
    """Alternate placement: every second layer of the middle of the stack, 0-based.

    Of `layers` layers, R = `reservoirs` are frozen. They take b = 2R - 1 places from s = floor((layers - b) /
    2) on, every other one; Table 4 (12 layers, frozen 3, 5, 7, 9 counted from 1) shows that the paper rounds down.

    Raises:
      ValueError: they do not fit.
    """
    span = max(2 * reservoirs - 1, 0)
    if reservoirs < 0 or span > layers:
        raise ValueError(
            f"{reservoirs} alternating reservoirs need {span} layers, there are {layers}"
        )
    start = (layers - span) // 2
    return tuple(range(start, start + span, 2))


def _transformer_reservoir(model: ConfigDict, *, rngs: nnx.Rngs, rate: float) -> Block:
    """A whole layer, attention included."""
    return transformer.encoder_block(model, rngs=rngs, rate=rate)


def _ffn_reservoir(model: ConfigDict, *, rngs: nnx.Rngs, rate: float) -> Block:
    """FFN(LN(x)) + x, with no attention at all."""
    return transformer.make_block(
        model, [transformer.feed_forward(model, rngs=rngs)], rngs=rngs, rate=rate
    )


def _gmlp_reservoir(model: ConfigDict, *, rngs: nnx.Rngs, rate: float) -> Block:
    """Not in the paper: positions are mixed by a random matrix that is never trained (see `Spatial`)."""
    spatial = Spatial(model.max_length, rngs=rngs, causal=False)
    gated = GatedMlp(model.width, model.hidden, spatial, rngs=rngs, activation=model.activation)
    return transformer.make_block(model, [gated], rngs=rngs, rate=rate)


RESERVOIRS = {"transformer": _transformer_reservoir, "ffn": _ffn_reservoir, "gmlp": _gmlp_reservoir}


def encoder_blocks(model: ConfigDict, *, rngs: nnx.Rngs) -> list[Block]:
    """The encoder's layers, `model.reservoirs` of them frozen."""
    frozen = placement(model.encoder_layers, model.reservoirs) if model.reservoir != "none" else ()
    blocks = []
    for layer in range(model.encoder_layers):
        if layer in frozen:
            # Dropout regularizes a frozen layer's neighbours; the paper does not say, so it is an option.
            rate = model.dropout if model.reservoir_dropout else 0.0
            block = RESERVOIRS[model.reservoir](model, rngs=rngs, rate=rate)
            freeze(block)
        else:
            block = transformer.encoder_block(model, rngs=rngs)
        blocks.append(block)
    return blocks


def translator(
    model: ConfigDict, source_vocabulary: int, target_vocabulary: int, *, rngs: nnx.Rngs
) -> EncoderDecoder:
    """The encoder-decoder of section 3.1; encoder and decoder have tables of their own."""
    decoder_blocks = [
        transformer.decoder_block(model, rngs=rngs) for _ in range(model.decoder_layers)
    ]
    return EncoderDecoder(
        transformer.embed(model, source_vocabulary, rngs=rngs),
        transformer.embed(model, target_vocabulary, rngs=rngs),
        transformer.stack(model, encoder_blocks(model, rngs=rngs), rngs=rngs),
        transformer.stack(model, decoder_blocks, rngs=rngs),
        dtype=transformer.compute_dtype(model.dtype),
    )


def validate(model: ConfigDict) -> None:
    """The fields of this paper.

    Raises:
      UserError: an unknown reservoir, or more of them than fit.
    """
    choose("--config.model.reservoir", model.reservoir, ("none", *RESERVOIRS))
    if model.reservoir != "none":
        require(
            model.reservoirs >= 1,
            f"--config.model.reservoirs must be at least 1, got {model.reservoirs}",
        )
        try:
            placement(model.encoder_layers, model.reservoirs)
        except ValueError as error:
            raise UserError(f"--config.model.reservoirs: {error}") from error
