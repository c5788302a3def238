"""Residual blocks. A block has sublayers (attention, feed-forward, ...), each with a norm and a residual connection."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from common.model.dropout import Key, dropout, fold
from common.sharding import constrain

if TYPE_CHECKING:
    from common.model.decode_cache import CacheSpec


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
    """Inputs of a sublayer in addition to the hidden states x.

    Attributes:
      lengths_B: number of tokens of each row; later positions are padding. None for rows without padding. May
        also be None in a causal stack, because padding follows the tokens.
      encoded_BSD: the encoder's output, in the decoder of an encoder-decoder model; otherwise None.
      encoded_lengths_B: number of tokens of each row of `encoded_BSD`; None if `encoded_BSD` is None.
      relative: biases or embeddings of relative positions, shared by all attention layers. None if no layer has
        relative positions.
    """

    lengths_B: jax.Array | None = None
    encoded_BSD: jax.Array | None = None
    encoded_lengths_B: jax.Array | None = None
    relative: jax.Array | None = None


class Sublayer(nnx.Module):
    """Base class of the sublayers of a block, such as attention and feed-forward.

    Subclasses implement `__call__`, and for decoding also `cache`, `step` and `prefill`.
    """

    def __call__(self, x_BLD: jax.Array, context: Context, key: Key = None) -> jax.Array:
        """Maps whole sequences (B, L, D) to (B, L, D). `key` is for dropout."""
        raise NotImplementedError

    def cache(self, batch: int, spec: "CacheSpec", context: Context) -> Any:
        """Returns an empty decoding cache for `batch` rows.

        With beam search, each row is a hypothesis. Beam search reorders the rows of every array that has `batch` rows.
        The remaining arrays have one row per sentence, which all hypotheses of the sentence share.
        """
        raise NotImplementedError

    def step(
        self, x_B1D: jax.Array, cache: Any, index: jax.Array, context: Context
    ) -> tuple[jax.Array, Any]:
        """Decodes the token at position `index`. Returns the output (B, 1, D) and the new cache."""
        raise NotImplementedError

    def prefill(self, x_BLD: jax.Array, cache: Any, context: Context) -> Any:
        """Returns the empty `cache` filled with the first L tokens.

        Decoding continues from this cache as it would after L calls of `step`.
        """
        raise NotImplementedError


class Stateless(Sublayer):
    """A position-wise sublayer, which needs no decoding cache."""

    def cache(self, batch: int, spec: "CacheSpec", context: Context) -> Any:
        return ()

    def step(
        self, x_B1D: jax.Array, cache: Any, index: jax.Array, context: Context
    ) -> tuple[jax.Array, Any]:
        return self(x_B1D, context), cache

    def prefill(self, x_BLD: jax.Array, cache: Any, context: Context) -> Any:
        return cache


def call_in_order(
    layers: Sequence[Callable], x: jax.Array, caches: Sequence[Any]
) -> tuple[jax.Array, list]:
    """Calls layers (x, cache) -> (x, cache) in order. Returns the output of the last layer and all new caches."""
    new = []
    for layer, cache in zip(layers, caches, strict=True):
        x, cache = layer(x, cache)
        new.append(cache)
    return x, new


class Residual(nnx.Module):
    """Computes x + f(norm(x)) for `norm_position` "pre", norm(x + f(x)) for "post". f is `function` with dropout."""

    def __init__(
        self,
        function: Sublayer,
        norm: Callable[[jax.Array], jax.Array],
        *,
        norm_position: str,
        dropout_rate: float,
    ):
        self.function, self.norm = function, norm
        self.norm_position, self.dropout_rate = norm_position, dropout_rate

    def _join(self, x, y, key):
        y = x + dropout(y, self.dropout_rate, key)
        return self.norm(y) if self.norm_position == "post" else y

    def _enter(self, x):
        return self.norm(x) if self.norm_position == "pre" else x

    def __call__(self, x_BLD: jax.Array, context: Context, key: Key = None) -> jax.Array:
        with jax.named_scope(type(self.function).__name__):
            y_BLD = self.function(self._enter(x_BLD), context, fold(key, 0))
            return self._join(x_BLD, y_BLD, fold(key, 1))

    def step(
        self, x_B1D: jax.Array, cache: Any, index: jax.Array, context: Context
    ) -> tuple[jax.Array, Any]:
        y_B1D, cache = self.function.step(self._enter(x_B1D), cache, index, context)
        return self._join(x_B1D, y_B1D, None), cache

    def prefill(self, x_BLD: jax.Array, cache: Any, context: Context) -> tuple[jax.Array, Any]:
        cache = self.function.prefill(self._enter(x_BLD), cache, context)
        return self(x_BLD, context), cache


class Block(nnx.Module):
    """A sequence of residual sublayers, such as attention and feed-forward."""

    def __init__(self, residuals: list[Residual]):
        self.residuals = nnx.List(residuals)

    def __call__(self, x_BLD: jax.Array, context: Context, key: Key = None) -> jax.Array:
        for number, residual in enumerate(self.residuals):
            x_BLD = residual(x_BLD, context, fold(key, number))
        return constrain(x_BLD, "batch", "length", "width")

    def cache(self, batch: int, spec: "CacheSpec", context: Context) -> list:
        return [r.function.cache(batch, spec, context) for r in self.residuals]

    def step(
        self, x_B1D: jax.Array, cache: list, index: jax.Array, context: Context
    ) -> tuple[jax.Array, list]:
        steps = [partial(r.step, index=index, context=context) for r in self.residuals]
        return call_in_order(steps, x_B1D, cache)

    def prefill(self, x_BLD: jax.Array, cache: list, context: Context) -> tuple[jax.Array, list]:
        """Returns the output (B, L, D) for the first L tokens, and the filled cache."""
        prefills = [partial(r.prefill, context=context) for r in self.residuals]
        return call_in_order(prefills, x_BLD, cache)
