"""Stacks with reservoirs, and the models made of them: a translator and a language model."""

from flax import nnx
from ml_collections import ConfigDict

from common.config import check, check_choice, check_rate
from common.errors import UserError
from common.model import initializers, transformer
from common.model.block import Block
from common.model.embed import Embed
from common.model.encoder_decoder import EncoderDecoder, Stack
from common.model.language_model import LanguageModel
from common.variables import freeze
from configs.reservoirs import fields
from reservoir import backskip
from reservoir.backskip import backskipped
from reservoir.kinds import BOTH_WAYS, RESERVOIRS, Layer
from reservoir.placement import STRATEGIES, placement

STACKS = {
    "encoder": ("encoder_layers", "reservoirs", "placement"),
    "decoder": ("decoder_layers", "decoder_reservoirs", "decoder_placement"),
    "language model": ("layers", "reservoirs", "placement"),
}
"""The fields of each kind of stack: its layers, how many are reservoirs, and where. A model has some of these."""


RESERVOIR_INITS = {"orthogonal": "orthogonal", "xavier": "xavier", "normal": "fan_in"}
"""By `model.reservoir_init`, how matrices of reservoirs are drawn, see `common.variables.draw`; `reservoir_gain` is
their gain."""

INITS = {"recipe": None, "orthogonal": ("orthogonal", 1.0), "normal": ("fan_in", 1.0)}
"""By `model.init`, how trained layers start: as the recipe says (fairseq's Xavier; N(0, 0.02) in RoBERTa), or as
reservoirs of that kind and gain 1 are drawn, biases included."""


def with_defaults(model: ConfigDict) -> ConfigDict:
    """A copy with the values that fields have which a run of an earlier version lacks."""
    filled = ConfigDict({**fields(), **model.to_dict()})
    if filled.backskip.reward == "norm":
        filled.backskip.reward = "own_rms"
    return filled


def reservoir_layers(model: ConfigDict, stack: str = "encoder") -> tuple[int, ...]:
    """The places of reservoirs in a stack, whose layers `model.reservoir_trained` may train.

    Raises:
      ValueError: they do not fit.
    """
    layers, reservoirs, strategy = (model[field] for field in STACKS[stack])
    return () if model.reservoir == "none" else placement(layers, reservoirs, strategy)


def blocks(model: ConfigDict, stack: str, layer: Layer, *, rngs: nnx.Rngs) -> list[Block]:
    """The layers of a stack, its reservoirs frozen and as they are to be trained through."""
    places = reservoir_layers(model, stack)
    matrix = RESERVOIR_INITS[model.reservoir_init], model.reservoir_gain
    still = ConfigDict({**model.to_dict(), "hidden": model.reservoir_hidden or model.hidden})
    if not model.reservoir_dropout:
        # Dropout regularizes a frozen layer's neighbours; the paper does not say, so it is an option.
        still.update({"dropout": 0.0, "attention_dropout": 0.0})
    made = []
    for index in range(model[STACKS[stack][0]]):
        if index in places:
            make = RESERVOIRS[model.reservoir]
            block = make(still, layer, stack != "encoder", rngs=rngs)
            if model.reservoir_trained:
                initializers.redraw(block, matrix, rngs=rngs)
            else:
                freeze(block, matrix)
        else:
            block = layer(model, rngs=rngs)
            if own := INITS[model.init]:
                initializers.redraw(block, own, rngs=rngs)
        made.append(block)
    if model.backskip.estimator == "none":
        return made
    return backskipped(made, places, model, rngs=rngs)


def encoder_blocks(model: ConfigDict, *, rngs: nnx.Rngs) -> list[Block]:
    """The encoder's layers, some of them frozen."""
    return blocks(model, "encoder", transformer.encoder_block, rngs=rngs)


def encoder_stack(model: ConfigDict, *, rngs: nnx.Rngs) -> Stack:
    """The encoder; LayerDrop, the baseline, leaves its layers out at random."""
    layers = encoder_blocks(model, rngs=rngs)
    return transformer.stack(model, layers, rngs=rngs, skip_rate=model.layerdrop)


def translator(
    model: ConfigDict, source_vocabulary: int, target_vocabulary: int, *, rngs: nnx.Rngs
) -> EncoderDecoder:
    """The encoder-decoder of section 3.1; encoder and decoder have tables of their own."""
    decoder_blocks = blocks(model, "decoder", transformer.decoder_block, rngs=rngs)
    return EncoderDecoder(
        transformer.embed(model, source_vocabulary, rngs=rngs),
        transformer.embed(model, target_vocabulary, rngs=rngs),
        encoder_stack(model, rngs=rngs),
        transformer.stack(model, decoder_blocks, rngs=rngs),
        dtype=transformer.compute_dtype(model.dtype),
    )


def language_model(model: ConfigDict, vocabulary: int, *, rngs: nnx.Rngs) -> LanguageModel:
    """The language model of section 3.2, with its embeddings tied."""
    embed = Embed(
        vocabulary,
        model.width,
        rngs=rngs,
        positions=model.positions,
        maximum=model.length,
        dropout_rate=model.dropout,
        pad=None,
    )
    layers = blocks(model, "language model", transformer.causal_block, rngs=rngs)
    stack = transformer.stack(model, layers, rngs=rngs, skip_rate=model.layerdrop)
    return LanguageModel(embed, stack, dtype=transformer.compute_dtype(model.dtype))


def validate(model: ConfigDict) -> None:
    """The fields of this paper.

    Raises:
      UserError: an unknown reservoir, more of them than fit, or options without a reservoir.
    """
    check_choice("--config.model.reservoir", model.reservoir, ("none", *RESERVOIRS))
    check_choice("--config.model.reservoir_init", model.reservoir_init, RESERVOIR_INITS)
    check_choice("--config.model.init", model.init, INITS)
    check(
        model.reservoir_hidden >= 0,
        f"--config.model.reservoir_hidden must be at least 0, got {model.reservoir_hidden}",
    )
    check(
        model.reservoir_gain > 0,
        f"--config.model.reservoir_gain must be above 0, got {model.reservoir_gain}",
    )
    check(
        not model.reservoir_trained or model.reservoir != "none",
        "--config.model.reservoir_trained=true with no reservoir: --config.model.reservoir is none",
    )
    check(
        not model.reservoir_trained or model.backskip.estimator == "none",
        f"--config.model.backskip.estimator={model.backskip.estimator} skips layers that"
        " --config.model.reservoir_trained=true trains",
    )
    check_rate("--config.model.layerdrop", model.layerdrop)
    if model.reservoir != "none":
        frozen = {stack: _places(model, stack) for stack in STACKS if STACKS[stack][0] in model}
        check(
            any(frozen.values()),
            f"--config.model.reservoir={model.reservoir} but there is none:"
            f" --config.model.reservoirs={model.reservoirs}, --config.model.placement={model.placement}",
        )
        causal = any(places for stack, places in frozen.items() if stack != "encoder")
        check(
            model.reservoir not in BOTH_WAYS or not causal,
            f"--config.model.reservoir: a {model.reservoir} sees what follows, so no decoder and no language model"
            " can have it",
        )
        hidden = "reservoir_hidden" if model.reservoir_hidden else "hidden"
        shared = {"bigru": "the two directions", "gmlp": "the two halves"}.get(model.reservoir, "")
        if model.reservoir == "bigru" and not model.reservoir_hidden:
            hidden = "width"
        check(
            not shared or model[hidden] % 2 == 0,
            f"--config.model.{hidden}={model[hidden]}: {shared} of a {model.reservoir} share it",
        )
    check(model.kernel >= 1, f"--config.model.kernel must be at least 1, got {model.kernel}")
    backskip.validate(model)


def _places(model: ConfigDict, stack: str) -> tuple[int, ...]:
    _, reservoirs, strategy = STACKS[stack]
    number = model[reservoirs]
    check(number >= 0, f"--config.model.{reservoirs} must be at least 0, got {number}")
    try:
        return reservoir_layers(model, stack)
    except ValueError as error:
        field = reservoirs if model[strategy] in STRATEGIES else strategy
        raise UserError(f"--config.model.{field}: {error}") from error
