"""Stacks with reservoirs, and the translator built from them."""

from functools import partial
from typing import NamedTuple

from flax import nnx
from ml_collections import ConfigDict

from common import freezing
from common.config import check_choice, check_rate
from common.errors import UserError, check
from common.model import transformer
from common.model.block import Block
from common.model.embed import Embed
from common.model.stack import Stack
from common.user_parts import check_minimum, user_code
from configs.reservoirs import fields
from reservoir import options
from reservoir.attention_blocks import causal_block, decoder_block, encoder_block
from reservoir.encoder_decoder import EncoderDecoder
from reservoir.kinds import RESERVOIRS, Kind, Layer, find
from reservoir.placement import PLACEMENTS, placement


class StackFields(NamedTuple):
    """Names of the fields of a stack in `config.model`, and the function that builds a trained layer of the stack."""

    layers: str
    reservoirs: str
    placement: str
    layer: Layer


STACKS = {
    "encoder": StackFields("encoder_layers", "reservoirs", "placement", encoder_block),
    "decoder": StackFields(
        "decoder_layers", "decoder_reservoirs", "decoder_placement", decoder_block
    ),
    "language model": StackFields("layers", "reservoirs", "placement", causal_block),
}
"""Name of a stack -> its `StackFields`. All stacks except the encoder are causal."""


RESERVOIR_INITS = {"orthogonal": "orthogonal", "xavier": "xavier", "normal": "fan_in"}
"""Value of `model.reservoir_init` -> name of the initializer of reservoir matrices, as in the argument `spec` of
`common.freezing.draw`."""

INITS = {"recipe": None, "orthogonal": ("orthogonal", 1.0), "normal": ("fan_in", 1.0)}
"""Value of `model.init` -> initializer of the matrices of trained layers. "recipe" keeps the recipe's initialization:
Xavier or, for RoBERTa, normal with standard deviation 0.02. All other values initialise trained layers like reservoirs
with gain 1."""


def reservoir_layers(model: ConfigDict, stack: str = "encoder") -> tuple[int, ...]:
    """Returns the indices of a stack's reservoirs, from 0. Includes trained reservoirs (`model.reservoir_trained`).

    Raises:
      ValueError: `reservoir.placement.placement` fails.
    """
    names = STACKS[stack]
    if model.reservoir == "none":
        return ()
    return placement(model[names.layers], model[names.reservoirs], model[names.placement], model)


def blocks(model: ConfigDict, stack: str, *, rngs: nnx.Rngs) -> list[Block]:
    """Returns the layers of a stack, with reservoirs. With backskipping, `BackskipBlock`s contain the reservoirs."""
    reservoirs = reservoir_layers(model, stack)
    made = []
    for index in range(model[STACKS[stack].layers]):
        if index in reservoirs:
            made.append(reservoir_block(model, stack, rngs=rngs))
            continue
        block = STACKS[stack].layer(model, rngs=rngs)
        if init := INITS[model.init]:
            from reservoir.redraw import redraw

            redraw(block, init, rngs=rngs)
        made.append(block)
    if model.backskip.estimator == "none":
        return made
    from reservoir.backskip import backskipped

    return backskipped(made, reservoirs, model, rngs=rngs)


def reservoir_block(model: ConfigDict, stack: str, *, rngs: nnx.Rngs) -> Block:
    """Returns a new reservoir of a stack, frozen unless `model.reservoir_trained`.

    Raises:
      ValueError: a layer has no initializer for one of its parameters (`common.freezing.draws`).
    """
    own = ConfigDict({**model.to_dict(), "hidden": model.reservoir_hidden or model.hidden})
    if not model.reservoir_dropout:
        own.update({"dropout": 0.0, "attention_dropout": 0.0})
    block = find(model.reservoir).build(own, STACKS[stack].layer, stack != "encoder", rngs=rngs)
    matrix = RESERVOIR_INITS[model.reservoir_init], model.reservoir_gain
    if model.reservoir_trained:
        from reservoir.redraw import redraw

        redraw(block, matrix, rngs=rngs)
    else:
        freezing.freeze(block, matrix)
    return block


def encoder_stack(model: ConfigDict, *, rngs: nnx.Rngs) -> Stack:
    """Returns the encoder's stack. Training drops each layer with probability `model.layerdrop` (LayerDrop)."""
    layers = blocks(model, "encoder", rngs=rngs)
    return transformer.stack(model, layers, rngs=rngs, skip_rate=model.layerdrop)


def translator(
    model: ConfigDict, source_vocabulary: int, target_vocabulary: int, *, rngs: nnx.Rngs
) -> EncoderDecoder:
    """Returns the encoder-decoder of section 4.1, with separate embedding tables for source and target."""
    decoder_blocks = blocks(model, "decoder", rngs=rngs)
    source, target = (
        Embed(
            vocabulary,
            model.width,
            rngs=rngs,
            positions=model.positions,
            maximum=model.max_length,
            dropout_rate=model.dropout,
        )
        for vocabulary in (source_vocabulary, target_vocabulary)
    )
    return EncoderDecoder(
        source,
        target,
        encoder_stack(model, rngs=rngs),
        transformer.stack(model, decoder_blocks, rngs=rngs),
        dtype=transformer.compute_dtype(model.dtype),
    )


def validate(model: ConfigDict) -> None:
    """Checks `layerdrop`, `init`, and all fields of `config.model` that concern reservoirs.

    Adds missing options of kinds and placements.

    Raises:
      UserError: a field has an invalid value, the reservoirs do not fit into the layers, or a user's kind or placement
        is invalid.
    """
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
        "--config.model.reservoir_trained=true needs reservoirs, but --config.model.reservoir is none: set a kind, such"
        " as --config.model.reservoir=ffn, or --config.model.reservoir_trained=false",
    )
    check(
        not model.reservoir_trained or model.backskip.estimator == "none",
        f"--config.model.backskip.estimator={model.backskip.estimator} needs frozen reservoirs,"
        " but --config.model.reservoir_trained=true trains them: set --config.model.backskip.estimator=none or"
        " --config.model.reservoir_trained=false",
    )
    check_rate("--config.model.layerdrop", model.layerdrop)
    options.add(model)
    check_minimum("--config.model.", model, options.declared(model))
    if kind := find(model.reservoir):
        _validate_reservoirs(model, kind)
    # The default fields are valid. Without this condition, every run would import `reservoir.backskip`.
    if model.backskip.to_dict() != fields()["backskip"]:
        from reservoir import backskip

        backskip.validate(model)


def _validate_reservoirs(model: ConfigDict, kind: Kind) -> None:
    name = model.reservoir
    there = [stack for stack, names in STACKS.items() if names.layers in model]
    stacks = [stack for stack in there if _checked_placement(model, stack)]
    is_pattern = set(model.placement) <= {"L", "R"}
    advice = (
        "write an R in --config.model.placement"
        if is_pattern
        else "raise --config.model.reservoirs"
    )
    if "decoder" in there:
        advice += " or raise --config.model.decoder_reservoirs"
    check(
        bool(stacks),
        f"--config.model.reservoir={name}, but no layer is a reservoir:"
        f" --config.model.reservoirs={model.reservoirs}, --config.model.placement={model.placement}; {advice}, or set"
        " --config.model.reservoir=none",
    )
    causal = [stack for stack in stacks if stack != "encoder"]
    other = ""
    if "encoder" in stacks and causal:
        other = ", or set --config.model.decoder_reservoirs=0"
        if set(model.decoder_placement) <= {"L", "R"}:
            other = ", or write no R in --config.model.decoder_placement"
    check(
        not kind.bidirectional_only or not causal,
        f"--config.model.reservoir={name} reads later positions, so the {' and '.join(causal)} cannot use it: choose"
        f" another kind of reservoir{other}",
    )
    if name in RESERVOIRS:
        kind.check(model)
        return
    from reservoir.user_kind import check_complete

    with user_code(f"--config.model.reservoir={name}", Kind, "model"):
        kind.check(model)
    for stack in stacks:
        check_complete(partial(reservoir_block, model, stack), model, stack)


def _checked_placement(model: ConfigDict, stack: str) -> tuple[int, ...]:
    """Returns `reservoir_layers(model, stack)`. The message of its UserError names the option to change."""
    names = STACKS[stack]
    number = model[names.reservoirs]
    check(number >= 0, f"--config.model.{names.reservoirs} must be at least 0, got {number}")
    try:
        return reservoir_layers(model, stack)
    except ValueError as error:
        known = model[names.placement] in PLACEMENTS
        option = names.reservoirs if known else names.placement
        advice = ""
        if known:
            advice = (
                f"; lower --config.model.{names.reservoirs} or raise --config.model.{names.layers}"
            )
        elif model[option] and set(model[option]) <= {"L", "R"}:
            advice = f" (--config.model.{names.layers}); write one letter for each layer"
        raise UserError(f"--config.model.{option}={model[option]}: {error}{advice}") from error
