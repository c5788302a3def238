"""A block is a list of residual functions: mixers (attention, later spatial gates, convolutions) and feed-forwards.

B batch, L length, S length of the memory, D width.
"""

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
    data_fields=["lengths_B", "memory_BSD", "memory_lengths_B"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Context:
    """What a function may need besides x: valid lengths, and for a decoder the encoder's output."""

    lengths_B: jax.Array | None = None
    memory_BSD: jax.Array | None = None
    memory_lengths_B: jax.Array | None = None


class Sublayer(nnx.Module):
    """What a block is made of. A new mixer implements these four and fits everywhere."""

    def __call__(
        self, x_BLD: jax.Array, context: Context, key: jax.Array | None = None
    ) -> jax.Array:
        """The whole sequence at once."""
        raise NotImplementedError

    def cache(self, batch: int, room: CacheSpec, context: Context) -> Any:
        """What `step` needs to remember.

        Leaves with `batch` rows belong to one hypothesis each and are reordered by beam search; others are shared.
        """
        raise NotImplementedError

    def step(
        self, x_B1D: jax.Array, cache: Any, index: jax.Array, context: Context
    ) -> tuple[jax.Array, Any]:
        """The next token, at position `index`."""
        raise NotImplementedError

    def prefill(self, x_BLD: jax.Array, cache: Any, context: Context) -> Any:
        """An empty cache as it is after `step` has seen these first tokens."""
        raise NotImplementedError


class Stateless(Sublayer):
    """A function of each position alone: nothing to remember."""

    def cache(self, batch: int, room: CacheSpec, context: Context) -> Any:
        return ()

    def step(
        self, x_B1D: jax.Array, cache: Any, index: jax.Array, context: Context
    ) -> tuple[jax.Array, Any]:
        return self(x_B1D, context), cache

    def prefill(self, x_BLD: jax.Array, cache: Any, context: Context) -> Any:
        return cache


class Residual(nnx.Module):
    """x + f(norm(x)) (placement "pre") or norm(x + f(x)) (placement "post"); `norm` is LayerNorm where not given."""

    def __init__(
        self,
        function: Sublayer,
        width: int,
        *,
        rngs: nnx.Rngs,
        placement: str = "pre",
        rate: float = 0.0,
        norm: nnx.Module | None = None,
    ):
        self.function = function
        self.norm = LayerNorm(width, rngs=rngs) if norm is None else norm
        self.placement = placement
        self.rate = rate

    def _join(self, x, y, key):
        y = x + dropout(y, self.rate, key)
        return self.norm(y) if self.placement == "post" else y

    def _enter(self, x):
        return self.norm(x) if self.placement == "pre" else x

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
    """One layer of a stack. Frozen or not, of any kind: the stack does not care."""

    def __init__(self, residuals: list[Residual]):
        self.residuals = nnx.List(residuals)

    def __call__(
        self, x_BLD: jax.Array, context: Context, key: jax.Array | None = None
    ) -> jax.Array:
        for number, residual in enumerate(self.residuals):
            x_BLD = residual(x_BLD, context, fold(key, number))
        return constrain(x_BLD, "batch", "length", "width")

    def cache(self, batch: int, room: CacheSpec, context: Context) -> list:
        return [r.function.cache(batch, room, context) for r in self.residuals]

    def step(
        self, x_B1D: jax.Array, cache: list, index: jax.Array, context: Context
    ) -> tuple[jax.Array, list]:
        new = []
        for residual, part in zip(self.residuals, cache, strict=True):
            x_B1D, part = residual.step(x_B1D, part, index, context)
            new.append(part)
        return x_B1D, new

    def prefill(self, x_BLD: jax.Array, cache: list, context: Context) -> tuple[jax.Array, list]:
        """`step` for all the first tokens at once."""
        new = []
        for residual, part in zip(self.residuals, cache, strict=True):
            x_BLD, part = residual.prefill(x_BLD, part, context)
            new.append(part)
        return x_BLD, new
