"""Residual blocks: a block is a list of sublayers (attention, feed-forward, ...), each with a norm and a residual."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from flax import nnx

from common.model.decode_cache import CacheSpec
from common.model.dropout import dropout, fold
from common.model.norm import LayerNorm
from common.sharding import constrain


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["lengths_B", "encoded_BSD", "encoded_lengths_B"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Context:
    """Inputs of a sublayer besides x.

    Attributes:
      lengths_B: tokens of each row; later positions are padding. None for rows without padding.
      encoded_BSD, encoded_lengths_B: the encoder's output and its lengths, for a decoder.
    """

    lengths_B: jax.Array | None = None
    encoded_BSD: jax.Array | None = None
    encoded_lengths_B: jax.Array | None = None


class Sublayer(nnx.Module):
    """A part of a block. A new kind of layer implements these four methods."""

    def __call__(
        self, x_BLD: jax.Array, context: Context, key: jax.Array | None = None
    ) -> jax.Array:
        """Maps a whole sequence (B, L, D) to (B, L, D)."""
        raise NotImplementedError

    def cache(self, batch: int, spec: CacheSpec, context: Context) -> Any:
        """Returns an empty decoding cache.

        Beam search reorders the leaves with `batch` rows, one per hypothesis; other leaves are shared.
        """
        raise NotImplementedError

    def step(
        self, x_B1D: jax.Array, cache: Any, index: jax.Array, context: Context
    ) -> tuple[jax.Array, Any]:
        """Decodes the token at position `index`; returns its output (B, 1, D) and the new cache."""
        raise NotImplementedError

    def prefill(self, x_BLD: jax.Array, cache: Any, context: Context) -> Any:
        """Returns an empty cache filled with the first L tokens, as L calls of `step` would."""
        raise NotImplementedError


class Stateless(Sublayer):
    """A sublayer that treats every position alone: its cache is empty."""

    def cache(self, batch: int, spec: CacheSpec, context: Context) -> Any:
        return ()

    def step(
        self, x_B1D: jax.Array, cache: Any, index: jax.Array, context: Context
    ) -> tuple[jax.Array, Any]:
        return self(x_B1D, context), cache

    def prefill(self, x_BLD: jax.Array, cache: Any, context: Context) -> Any:
        return cache


class Residual(nnx.Module):
    """x + f(norm(x)) (pre-norm) or norm(x + f(x)) (post-norm), with dropout of f's output.

    Args:
      norm_position: "pre" or "post".
      norm: None for a LayerNorm.
    """

    def __init__(
        self,
        function: Sublayer,
        width: int,
        *,
        rngs: nnx.Rngs,
        norm_position: str = "pre",
        dropout_rate: float = 0.0,
        norm: nnx.Module | None = None,
    ):
        self.function = function
        self.norm = LayerNorm(width, rngs=rngs) if norm is None else norm
        self.norm_position = norm_position
        self.dropout_rate = dropout_rate

    def _join(self, x, y, key):
        y = x + dropout(y, self.dropout_rate, key)
        return self.norm(y) if self.norm_position == "post" else y

    def _enter(self, x):
        return self.norm(x) if self.norm_position == "pre" else x

    def __call__(
        self, x_BLD: jax.Array, context: Context, key: jax.Array | None = None
    ) -> jax.Array:
        return self._join(
            x_BLD, self.function(self._enter(x_BLD), context, fold(key, 0)), fold(key, 1)
        )

    def step(
        self, x_B1D: jax.Array, cache: Any, index: jax.Array, context: Context
    ) -> tuple[jax.Array, Any]:
        y_B1D, cache = self.function.step(self._enter(x_B1D), cache, index, context)
        return self._join(x_B1D, y_B1D, None), cache

    def prefill(self, x_BLD: jax.Array, cache: Any, context: Context) -> tuple[jax.Array, Any]:
        cache = self.function.prefill(self._enter(x_BLD), cache, context)
        return self(x_BLD, context), cache


class Block(nnx.Module):
    """One layer of a stack."""

    def __init__(self, residuals: list[Residual]):
        self.residuals = nnx.List(residuals)

    def __call__(
        self, x_BLD: jax.Array, context: Context, key: jax.Array | None = None
    ) -> jax.Array:
        for number, residual in enumerate(self.residuals):
            x_BLD = residual(x_BLD, context, fold(key, number))
        return constrain(x_BLD, "batch", "length", "width")

    def cache(self, batch: int, spec: CacheSpec, context: Context) -> list:
        return [r.function.cache(batch, spec, context) for r in self.residuals]

    def step(
        self, x_B1D: jax.Array, cache: list, index: jax.Array, context: Context
    ) -> tuple[jax.Array, list]:
        new = []
        for residual, part in zip(self.residuals, cache, strict=True):
            x_B1D, part = residual.step(x_B1D, part, index, context)
            new.append(part)
        return x_B1D, new

    def prefill(self, x_BLD: jax.Array, cache: list, context: Context) -> tuple[jax.Array, list]:
        """Returns the output (B, L, D) of the first L tokens and the filled cache."""
        new = []
        for residual, part in zip(self.residuals, cache, strict=True):
            x_BLD, part = residual.prefill(x_BLD, part, context)
            new.append(part)
        return x_BLD, new
