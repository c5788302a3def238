"""Multi-head self-attention, causal or not, and cross-attention."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from common.model import initializers
from common.model.attend import attend, attend_cached, cache_layout
from common.model.block import Context, Sublayer
from common.model.decode_cache import CacheSpec, DecodeCache
from common.model.linear import Linear


class Attention(Sublayer):
    """Self-attention: projections around `attend`.

    Args:
      dropout_rate: dropout of the attention weights.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        rngs: nnx.Rngs,
        causal: bool = False,
        dropout_rate: float = 0.0,
    ):
        if width % heads:
            raise ValueError(f"width {width} is not divisible by {heads} heads")
        # fairseq initialises query, key and value as one matrix (width, 3 width).
        gain = 2**-0.5

        def inner():
            init = initializers.xavier_uniform(gain)
            return Linear(width, width, ("embed", "heads"), rngs=rngs, kernel_init=init)

        self.query, self.key, self.value = inner(), inner(), inner()
        self.out = Linear(width, width, ("heads", "embed"), rngs=rngs)
        self.heads, self.size = heads, width // heads
        self.causal, self.dropout_rate = causal, dropout_rate

    def _split(self, x_BLD: jax.Array) -> jax.Array:
        return x_BLD.reshape(*x_BLD.shape[:2], self.heads, -1)

    def _project(self, x_BLD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns keys and values, (B, L, H, K) each."""
        return self._split(self.key(x_BLD)), self._split(self.value(x_BLD))

    def _all(
        self, x_BLD: jax.Array, positions_L: jax.Array, key: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries, keys and values, (B, L, H, K) each; subclasses with rotary positions use `positions_L`."""
        del positions_L, key
        return self._split(self.query(x_BLD)), *self._project(x_BLD)

    def _merge(self, y_BTHK: jax.Array, key: jax.Array | None = None) -> jax.Array:
        return self.out(y_BTHK.reshape(*y_BTHK.shape[:2], -1), key=key)

    def _seen(self, positions_L: jax.Array, index: jax.Array) -> jax.Array:
        """Returns the decoding mask: which positions the token at `index` attends to."""
        return positions_L <= index

    def __call__(
        self, x_BTD: jax.Array, context: Context, key: jax.Array | None = None
    ) -> jax.Array:
        # The causal mask already hides the padding, which follows the tokens.
        lengths_B = None if self.causal else context.lengths_B
        heads = self._all(x_BTD, jnp.arange(x_BTD.shape[1]))
        options = {"causal": self.causal, "dropout_rate": self.dropout_rate, "key": key}
        return self._merge(attend(*heads, key_lengths_B=lengths_B, **options))

    def cache(self, batch: int, spec: CacheSpec, context: Context) -> Any:
        """Returns caches of keys, values and writers.

        Keys and values of all hypotheses of a sentence lie side by side; `writers` says which hypothesis wrote the
        entry that a hypothesis sees at each position. Beam search reorders these integers and moves no keys or values.
        """
        sentences = batch if context.encoded_BSD is None else context.encoded_BSD.shape[0]
        beams = batch // sentences
        return (
            DecodeCache.empty((sentences, self.heads, self.size, beams), 3, spec),
            DecodeCache.empty((sentences, self.heads, beams, self.size), 2, spec),
            DecodeCache.empty((batch, 1), 1, spec, jnp.int32, -1),
        )

    def step(
        self, x_X1D: jax.Array, cache: Any, index: jax.Array, context: Context
    ) -> tuple[jax.Array, Any]:
        """Decodes one token of X = B A rows, A hypotheses for each of B sentences.

        The hypotheses of a sentence are its queries (T = A). Each position has A cache entries, so S = L A.
        """
        keys, values, writers = cache
        x_BTD = x_X1D.reshape(-1, keys.each, x_X1D.shape[-1])
        slots_A = jnp.arange(keys.each)
        query_BTHK, *new = self._all(x_BTD, jnp.full(keys.each, index))
        key_BHKT, value_BHTK = cache_layout(*new)
        own_X1 = jnp.tile(slots_A, len(x_BTD))[:, None]
        keys, values = keys.write(key_BHKT, index), values.write(value_BHTK, index)
        writers = writers.write(own_X1.astype(jnp.int32), index)

        def mask(writers_XL: jax.Array, positions_L: jax.Array) -> jax.Array:
            """Returns (B, 1, T, S)."""
            writers_XL = jnp.where(self._seen(positions_L, index), writers_XL, -1)
            mask_XLA = writers_XL[..., None] == slots_A
            return mask_XLA.reshape(*x_BTD.shape[:2], -1)[:, None]

        y_BTHK = attend_cached(
            query_BTHK,
            [part for part, _ in keys.parts()],
            [part for part, _ in values.parts()],
            [mask(*part) for part in writers.parts()],
        )
        return self._merge(y_BTHK).reshape(x_X1D.shape), (keys, values, writers)

    def prefill(self, x_BLD: jax.Array, cache: Any, context: Context) -> Any:
        """Prefills the cache of sequences with one hypothesis each."""
        keys, values, writers = cache
        _, *new = self._all(x_BLD, jnp.arange(x_BLD.shape[1]))
        key_BHKL, value_BHLK = cache_layout(*new)
        own_BL = jnp.zeros(x_BLD.shape[:2], jnp.int32)
        return keys.filled(key_BHKL), values.filled(value_BHLK), writers.filled(own_BL)


class CrossAttention(Attention):
    """Attention over the encoder's output `context.encoded_BSD`; decoding projects its keys and values once."""

    def __call__(
        self, x_BTD: jax.Array, context: Context, key: jax.Array | None = None
    ) -> jax.Array:
        heads = self._split(self.query(x_BTD)), *self._project(context.encoded_BSD)
        options = {"dropout_rate": self.dropout_rate, "key": key}
        return self._merge(attend(*heads, key_lengths_B=context.encoded_lengths_B, **options))

    def cache(self, batch: int, spec: CacheSpec, context: Context) -> Any:
        return cache_layout(*self._project(context.encoded_BSD))

    def step(
        self, x_X1D: jax.Array, cache: Any, index: jax.Array, context: Context
    ) -> tuple[jax.Array, Any]:
        # The hypotheses of a sentence are queries over the same keys, so the cache needs no copy per hypothesis.
        x_BTD = x_X1D.reshape(cache[0].shape[0], -1, x_X1D.shape[-1])
        mask_BS = jnp.arange(cache[0].shape[-1]) < context.encoded_lengths_B[:, None]
        query_BTHK = self._split(self.query(x_BTD))
        y_BTHK = attend_cached(query_BTHK, [cache[0]], [cache[1]], [mask_BS[:, None, None]])
        return self._merge(y_BTHK).reshape(x_X1D.shape), cache

    def prefill(self, x_BLD: jax.Array, cache: Any, context: Context) -> Any:
        return cache  # It depends on the encoder's output alone.
