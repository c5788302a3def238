"""The table of reservoir kinds (section 2.1, appendix A): layers that keep their random initialization.

A new kind is one entry of `RESERVOIRS`, or a `Kind` in a module outside this project, named by
--config.model.reservoir=my_package.kinds:my_kind. Configurations and reports read this table, so the module imports no
JAX: each `build` function imports the layers that it needs.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ml_collections import ConfigDict

from common.config import check, check_choice
from common.errors import UserError

if TYPE_CHECKING:
    from flax import nnx

    from common.model.block import Block

Layer = Callable[..., "Block"]
"""(model, rngs=) -> a trained layer."""


class Option(NamedTuple):
    """A field of `config.model` that only one kind reads."""

    default: Any
    minimum: float | None = None


@dataclass(frozen=True)
class Kind:
    """A kind of reservoir.

    Attributes:
      build: (model, layer, causal, rngs=) -> Block. `model` has the hidden size and dropout of reservoirs, `layer`
        makes a trained layer of the same stack, and `causal` is true in decoders and language models.
      label: name in tables and figures.
      options: fields of `config.model` that this kind adds, by name.
      check: raises a UserError where the fields of `config.model` do not fit this kind.
      bidirectional_only: whether the layer always reads later positions, so that no decoder can have it.
      fixed_length: whether the layer has parameters for each position, so that `model.max_length` limits the text.
    """

    build: Callable[..., "Block"]
    label: str
    options: Mapping[str, Option] = field(default_factory=dict)
    check: Callable[[ConfigDict], None] = lambda model: None
    bidirectional_only: bool = False
    fixed_length: bool = False


def _transformer(model: ConfigDict, layer: Layer, causal: bool, *, rngs: "nnx.Rngs") -> "Block":
    """A whole layer of the stack, attention included."""
    return layer(model, rngs=rngs)


def _ffn(model: ConfigDict, layer: Layer, causal: bool, *, rngs: "nnx.Rngs") -> "Block":
    """FFN(LN(x)) + x, without attention."""
    from common.model import transformer

    feed_forward = transformer.feed_forward(model, rngs=rngs)
    return transformer.make_block(model, [feed_forward], rngs=rngs)


def _bigru(model: ConfigDict, layer: Layer, causal: bool, *, rngs: "nnx.Rngs") -> "Block":
    """A bidirectional GRU and a projection; both directions together have `reservoir_hidden` features, or the width."""
    from common.model import transformer
    from reservoir.recurrent import BiGru

    mixer = BiGru(model.width, rngs=rngs, hidden=model.reservoir_hidden)
    return transformer.make_block(model, [mixer], rngs=rngs)


def _cnn(model: ConfigDict, layer: Layer, causal: bool, *, rngs: "nnx.Rngs") -> "Block":
    """A dynamic convolution in place of attention, then a feed-forward layer (Wu et al., 2019)."""
    from common.model import transformer
    from reservoir.convolution import DynamicConvolution

    convolution = DynamicConvolution(
        model.width, model.heads, model.kernel, rngs=rngs, causal=causal
    )
    feed_forward = transformer.feed_forward(model, rngs=rngs)
    return transformer.make_block(model, [convolution, feed_forward], rngs=rngs)


def _gmlp(model: ConfigDict, layer: Layer, causal: bool, *, rngs: "nnx.Rngs") -> "Block":
    """A gMLP layer with a random matrix over positions, see `Spatial`. Not in the paper."""
    from common.model import transformer
    from common.model.gated_mlp import GatedMlp
    from common.model.spatial import Spatial

    longest = model.length if "length" in model else model.max_length
    spatial = Spatial(longest, rngs=rngs, causal=causal)
    gated = GatedMlp(model.width, model.hidden, spatial, rngs=rngs, activation=model.activation)
    return transformer.make_block(model, [gated], rngs=rngs)


def _check_bigru(model: ConfigDict) -> None:
    name = "reservoir_hidden" if model.reservoir_hidden else "width"
    check(
        model[name] % 2 == 0,
        f"--config.model.{name}={model[name]}: the two directions of a bigru need an even number",
    )


def _check_gmlp(model: ConfigDict) -> None:
    name = "reservoir_hidden" if model.reservoir_hidden else "hidden"
    check(
        model[name] % 2 == 0,
        f"--config.model.{name}={model[name]}: the two halves of a gmlp need an even number",
    )


RESERVOIRS = {
    "transformer": Kind(_transformer, "T"),
    "ffn": Kind(_ffn, "FFN"),
    "bigru": Kind(_bigru, "BiGRU", check=_check_bigru, bidirectional_only=True),
    "cnn": Kind(_cnn, "CNN", options={"kernel": Option(7, minimum=1)}),
    "gmlp": Kind(_gmlp, "gMLP", check=_check_gmlp, fixed_length=True),
}


def find(name: str) -> Kind:
    """Returns the kind that `model.reservoir` names: an entry of `RESERVOIRS` or a "module:attribute".

    Raises:
      UserError: no such kind exists, or its module cannot be imported.
    """
    option = "--config.model.reservoir"
    if ":" not in name:
        check_choice(option, name, ("none", *RESERVOIRS))
        return RESERVOIRS[name]
    kind = imported(option, name)
    check(
        isinstance(kind, Kind),
        f"{option}={name} is a {type(kind).__name__}; it must be a reservoir.kinds.Kind",
    )
    return kind


def imported(option: str, name: str) -> Any:
    """Returns the object "module:attribute" that a user's option names.

    Raises:
      UserError: importing the module fails, or the module has no such attribute.
    """
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a user's module may raise anything
        raise UserError(f"{option}={name}: {type(error).__name__}: {error}") from error


def fixed_length(config: ConfigDict) -> bool:
    """Whether the reservoirs of a configuration have parameters for each position."""
    name = config.model.reservoir
    return name != "none" and find(name).fixed_length


def label(name: str) -> str:
    """Returns the label of a kind.

    Does not import a user's own kind, because reports read configurations of any origin. A kind that is not imported
    already is labelled by its attribute name.
    """
    module, _, attribute = name.rpartition(":")
    kind = RESERVOIRS.get(name) or getattr(sys.modules.get(module), attribute, None)
    return kind.label if isinstance(kind, Kind) else attribute


def default_options() -> dict[str, Any]:
    """Returns the fields that the kinds of `RESERVOIRS` add to `config.model`, with their defaults."""
    return {
        name: option.default
        for kind in RESERVOIRS.values()
        for name, option in kind.options.items()
    }


def check_options(model: ConfigDict, kind: Kind) -> None:
    """Adds the options of `kind` that the configuration lacks, with their defaults, and checks their minima.

    Raises:
      UserError: an option is below its minimum.
    """
    for name, option in kind.options.items():
        if name not in model:
            model[name] = option.default
        check(
            option.minimum is None or model[name] >= option.minimum,
            f"--config.model.{name} must be at least {option.minimum}, got {model[name]}",
        )
