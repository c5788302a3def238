"""The kinds of reservoirs (section 2.2, appendix A): layers that keep their random initialization.

A new kind is an entry of `RESERVOIRS`, or a `Kind` in a module outside this project, selected by
--config.model.reservoir=my_package.kinds:my_kind. Configurations and reports import this module, so it must not import
JAX: each `build` function imports its layers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ml_collections import ConfigDict

from common import user_parts
from common.errors import check
from common.user_parts import Option

if TYPE_CHECKING:
    from flax import nnx

    from common.model.block import Block

Layer = Callable[..., "Block"]
"""A function (model configuration, rngs=) -> new transformer layer of a stack. The layer is not frozen."""


@dataclass(frozen=True)
class Kind:
    """A kind of reservoir.

    Attributes:
      build: function (model, layer, causal, rngs=) -> Block. `model` is `config.model` with the hidden size and dropout
        of reservoirs. `layer` (`Layer`) makes a transformer layer of the same stack. `causal` is true in decoders and
        language models. The caller freezes the block, unless `model.reservoir_trained`.
      label: name in tables and figures.
      options: name -> additional field of `config.model` for this kind. `build` reads it as `model.NAME`.
      check: function (`config.model`) that raises a UserError if a field does not fit this kind.
      bidirectional_only: whether the layer always reads later positions, which excludes the kind from causal stacks.
      fixed_length: whether the layer has parameters for each position, so translators limit the length of sentences to
        `model.max_length`.
    """

    build: Callable[..., "Block"]
    label: str
    options: Mapping[str, Option] = field(default_factory=dict)
    check: Callable[[ConfigDict], None] = lambda model: None
    bidirectional_only: bool = False
    fixed_length: bool = False


def _transformer(model: ConfigDict, layer: Layer, causal: bool, *, rngs: "nnx.Rngs") -> "Block":
    return layer(model, rngs=rngs)


def _ffn(model: ConfigDict, layer: Layer, causal: bool, *, rngs: "nnx.Rngs") -> "Block":
    from common.model import transformer

    feed_forward = transformer.feed_forward(model, rngs=rngs)
    return transformer.make_block(model, [feed_forward], rngs=rngs)


def _bigru(model: ConfigDict, layer: Layer, causal: bool, *, rngs: "nnx.Rngs") -> "Block":
    from common.model import transformer
    from reservoir.recurrent import BiGru

    mixer = BiGru(model.width, rngs=rngs, hidden=model.reservoir_hidden)
    return transformer.make_block(model, [mixer], rngs=rngs)


def _cnn(model: ConfigDict, layer: Layer, causal: bool, *, rngs: "nnx.Rngs") -> "Block":
    """Builds a dynamic convolution in place of attention, then a feed-forward layer (Wu et al., 2019)."""
    from common.model import transformer
    from reservoir.convolution import DynamicConvolution

    convolution = DynamicConvolution(
        model.width, model.heads, model.kernel, rngs=rngs, causal=causal
    )
    feed_forward = transformer.feed_forward(model, rngs=rngs)
    return transformer.make_block(model, [convolution, feed_forward], rngs=rngs)


def _gmlp(model: ConfigDict, layer: Layer, causal: bool, *, rngs: "nnx.Rngs") -> "Block":
    """Builds a gMLP layer with a random matrix over positions (`common.model.spatial.Spatial`). Not in the paper."""
    from common.model import transformer
    from common.model.gated_mlp import GatedMlp
    from common.model.spatial import Spatial

    longest = model.length if "length" in model else model.max_length
    spatial = Spatial(longest, rngs=rngs, causal=causal)
    gated = GatedMlp(model.width, model.hidden, spatial, rngs=rngs, activation=model.activation)
    return transformer.make_block(model, [gated], rngs=rngs)


def _check_even(model: ConfigDict, default: str, parts: str) -> None:
    """Checks that the hidden size is even: the field `reservoir_hidden` or, if 0, the field whose name is `default`."""
    name = "reservoir_hidden" if model.reservoir_hidden else default
    check(
        model[name] % 2 == 0,
        f"--config.model.{name}={model[name]} must be even, because {parts} have equal numbers of features",
    )


_check_bigru = partial(_check_even, default="width", parts="the two directions of a bigru")
_check_gmlp = partial(_check_even, default="hidden", parts="the two halves of a gmlp")

RESERVOIRS = {
    "transformer": Kind(_transformer, "T"),
    "ffn": Kind(_ffn, "FFN"),
    "bigru": Kind(_bigru, "BiGRU", check=_check_bigru, bidirectional_only=True),
    "cnn": Kind(_cnn, "CNN", options={"kernel": Option(7, minimum=1)}),
    "gmlp": Kind(_gmlp, "gMLP", check=_check_gmlp, fixed_length=True),
}


def find(name: str) -> Kind | None:
    """Returns the kind of reservoir `name`: a key of `RESERVOIRS`, or "module:attribute" for a user's kind.

    Returns None for the name "none".

    Raises:
      UserError: the kind is unknown, cannot be imported, or is not a valid `Kind`.
    """
    option = "--config.model.reservoir"
    if name == "none":
        return None
    kind = user_parts.find(option, name, Kind, {"none": None, **RESERVOIRS})
    check(
        callable(kind.build),
        f"{option}={name}: the field 'build' of the Kind must be a function, got {kind.build!r}",
    )
    return kind
