"""Multi-head attention: over the sequence itself (causal or not) and over a memory.

B batch, T queries, S keys, D width, H heads, K head size; N = B T tokens and L positions when decoding.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from common.model import initializers
from common.model.attend import attend, attend_stored, store
from common.model.block import Context, Sublayer
from common.model.decode_cache import CacheSpec, DecodeCache
from common.model.linear import Linear


class Attention(Sublayer):
    """Projections around `attend`. `causal` and padding decide what a position sees.

    Args:
      rate: of dropout of the attention weights.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        rngs: nnx.Rngs,
        causal: bool = False,
        rate: float = 0.0,
    ):
        if width % heads:
            raise ValueError(f"width {width} is not divisible by {heads} heads")
        gain = (
            2**-0.5
        )  # fairseq starts query, key and value as one matrix of three times the width would

        def inner():
            init = initializers.xavier_uniform(gain)
            return Linear(width, width, ("embed", "heads"), rngs=rngs, kernel_init=init)

        self.query, self.key, self.value = inner(), inner(), inner()
        self.out = Linear(width, width, ("heads", "embed"), rngs=rngs)
        self.heads, self.size = heads, width // heads
        self.causal, self.rate = causal, rate

    def _split(self, x_BLD: jax.Array) -> jax.Array:
        return x_BLD.reshape(*x_BLD.shape[:2], self.heads, -1)

    def _project(self, x_BLD: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self._split(self.key(x_BLD)), self._split(self.value(x_BLD))

    def _all(
        self, x_BLD: jax.Array, positions_L: jax.Array, key: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values of a sequence whose tokens stand at these positions, (B, L, H, K) each."""
        del positions_L, key
        return self._split(self.query(x_BLD)), *self._project(x_BLD)

    def _merge(self, y_BTHK: jax.Array, key: jax.Array | None = None) -> jax.Array:
        return self.out(y_BTHK.reshape(*y_BTHK.shape[:2], -1), key=key)

    def _seen(self, positions_L: jax.Array, index: jax.Array) -> jax.Array:
        """Which positions the token at `index` sees when decoding."""
        return positions_L <= index

    def __call__(
        self, x_BTD: jax.Array, context: Context, key: jax.Array | None = None
    ) -> jax.Array:
        # A causal query never sees the padding behind it.
        lengths = None if self.causal else context.lengths_B
        heads = self._all(x_BTD, jnp.arange(x_BTD.shape[1]))
        y_BTHK = attend(*heads, causal=self.causal, key_lengths_B=lengths, rate=self.rate, key=key)
        return self._merge(y_BTHK)

    def cache(self, batch: int, room: CacheSpec, context: Context) -> Any:
        """Keys and values of all hypotheses of a sentence side by side, and who of them wrote what each one sees.

        Beam search then reorders small integers, `writers`, and no key is ever moved.
        """
        sentences = batch if context.memory_BSD is None else context.memory_BSD.shape[0]
        each = batch // sentences
        return (
            DecodeCache.empty((sentences, self.heads, self.size, each), 3, room),
            DecodeCache.empty((sentences, self.heads, each, self.size), 2, room),
            DecodeCache.empty((batch, 1), 1, room, jnp.int32, -1),
        )

    def step(
        self, x_N1D: jax.Array, cache: Any, index: jax.Array, context: Context
    ) -> tuple[jax.Array, Any]:
        keys, values, writers = cache
        # The T hypotheses of a sentence are its queries; at each position they write T keys, S = L T in all.
        x_BTD = x_N1D.reshape(-1, keys.each, x_N1D.shape[-1])
        slots_T = jnp.arange(keys.each)
        query_BTHK, *new = self._all(x_BTD, jnp.full(keys.each, index))
        key_BHKT, value_BHTK = store(*new)
        own_N1 = jnp.tile(slots_T, len(x_BTD))[:, None]
        keys, values = keys.write(key_BHKT, index), values.write(value_BHTK, index)
        writers = writers.write(own_N1.astype(jnp.int32), index)

        def visible(writers_NL: jax.Array, positions_L: jax.Array) -> jax.Array:
            """(B, 1, T, S)."""
            writers_NL = jnp.where(self._seen(positions_L, index), writers_NL, -1)
            visible_NLT = writers_NL[..., None] == slots_T
            return visible_NLT.reshape(*x_BTD.shape[:2], -1)[:, None]

        y_BTHK = attend_stored(
            query_BTHK,
            [part for part, _ in keys.parts()],
            [part for part, _ in values.parts()],
            [visible(*part) for part in writers.parts()],
        )
        return self._merge(y_BTHK).reshape(x_N1D.shape), (keys, values, writers)

    def prefill(self, x_BLD: jax.Array, cache: Any, context: Context) -> Any:
        """Of sequences that have one hypothesis each."""
        keys, values, writers = cache
        _, *new = self._all(x_BLD, jnp.arange(x_BLD.shape[1]))
        key_BHKL, value_BHLK = store(*new)
        own_BL = jnp.zeros(x_BLD.shape[:2], jnp.int32)
        return keys.filled(key_BHKL), values.filled(value_BHLK), writers.filled(own_BL)


class CrossAttention(Attention):
    """Attention over `context.memory_BSD`, whose keys and values are projected once when decoding."""

    def __call__(
        self, x_BTD: jax.Array, context: Context, key: jax.Array | None = None
    ) -> jax.Array:
        query = self._split(self.query(x_BTD))
        keys_values = self._project(context.memory_BSD)
        lengths = context.memory_lengths_B
        return self._merge(
            attend(query, *keys_values, key_lengths_B=lengths, rate=self.rate, key=key)
        )

    def cache(self, batch: int, room: CacheSpec, context: Context) -> Any:
        return store(*self._project(context.memory_BSD))

    def step(
        self, x_N1D: jax.Array, cache: Any, index: jax.Array, context: Context
    ) -> tuple[jax.Array, Any]:
        # N = B * hypotheses: those of one sentence are queries over the same memory, which is never copied.
        x_BTD = x_N1D.reshape(cache[0].shape[0], -1, x_N1D.shape[-1])
        visible_BS = jnp.arange(cache[0].shape[-1]) < context.memory_lengths_B[:, None]
        query = self._split(self.query(x_BTD))
        y_BTHK = attend_stored(query, [cache[0]], [cache[1]], [visible_BS[:, None, None]])
        return self._merge(y_BTHK).reshape(x_N1D.shape), cache

    def prefill(self, x_BLD: jax.Array, cache: Any, context: Context) -> Any:
        return cache  # of the memory alone
