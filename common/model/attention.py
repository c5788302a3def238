"""Multi-head attention: over the sequence itself (causal or not) and over a memory.

B batch, T queries, S keys, D width, H heads, K head size; N = B T tokens and L positions when decoding.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from common.model import initializers
from common.model.block import Context, Function
from common.model.linear import Linear

BLOCK = 256
"""Queries that are worked on together: what lies ahead of a whole block is skipped where attention is causal."""


def attend(
    query_BTHK: jax.Array,
    key_BSHK: jax.Array,
    value_BSHK: jax.Array,
    *,
    causal: bool = False,
    key_lengths_B: jax.Array | None = None,
) -> jax.Array:
    """Softmax attention over the first `key_lengths_B` keys; (B, T, H, K).

    The backend's fused kernel is used where it has one for this type (cuDNN on GPUs: bfloat16 and float16).
    """
    fused = jax.default_backend() == "gpu" and query_BTHK.dtype in (jnp.bfloat16, jnp.float16)
    if not fused:
        return _attend(query_BTHK, key_BSHK, value_BSHK, causal, key_lengths_B)
    query_lengths_B = None
    if key_lengths_B is not None:
        query_lengths_B = jnp.full(query_BTHK.shape[:1], query_BTHK.shape[1], jnp.int32)
    return jax.nn.dot_product_attention(
        query_BTHK,
        key_BSHK,
        value_BSHK,
        is_causal=causal,
        query_seq_lengths=query_lengths_B,
        key_value_seq_lengths=key_lengths_B,
        implementation="cudnn",
    )


def _attend(query_BTHK, key_BSHK, value_BSHK, causal, key_lengths_B) -> jax.Array:
    """The same as plain products, heads before positions, a block of queries at a time where it is causal."""
    queries, keys = query_BTHK.shape[1], key_BSHK.shape[1]
    query_BHTK = query_BTHK.transpose(0, 2, 1, 3) * query_BTHK.shape[-1] ** -0.5
    key_BHKS, value_BHSK = store(key_BSHK, value_BSHK)
    blocks = []
    for start in range(0, queries, BLOCK if causal else queries):
        end = min(start + BLOCK, queries) if causal else queries
        seen = end if causal else keys
        logits_BHTS = jnp.matmul(
            query_BHTK[:, :, start:end], key_BHKS[..., :seen], preferred_element_type=jnp.float32
        )
        visible_BHTS = True
        if causal:
            visible_BHTS = jnp.arange(seen) <= jnp.arange(start, end)[:, None]
        if key_lengths_B is not None:
            visible_BHTS &= jnp.arange(seen) < key_lengths_B[:, None, None, None]
        # Not minus infinity: a sequence of padding alone must not become NaN.
        logits_BHTS = jnp.where(visible_BHTS, logits_BHTS, jnp.finfo(jnp.float32).min)
        weights_BHTS = jax.nn.softmax(logits_BHTS, axis=-1).astype(value_BHSK.dtype)
        blocks.append(jnp.matmul(weights_BHTS, value_BHSK[:, :, :seen]))
    return jnp.concatenate(blocks, axis=2).transpose(0, 2, 1, 3)


def store(key_BSHK: jax.Array, value_BSHK: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys (B, H, K, S) and values (B, H, S, K): as `attend_stored` reads them, with nothing to transpose."""
    return key_BSHK.transpose(0, 2, 3, 1), value_BSHK.transpose(0, 2, 1, 3)


def attend_stored(
    query_BTHK: jax.Array, key_BHKS: jax.Array, value_BHSK: jax.Array, visible_B1TS: jax.Array
) -> jax.Array:
    """`attend` for the few queries of a decoding step: two batched products in the form that is fast everywhere."""
    query_BHTK = query_BTHK.transpose(0, 2, 1, 3) * query_BTHK.shape[-1] ** -0.5
    logits_BHTS = jnp.matmul(query_BHTK, key_BHKS, preferred_element_type=jnp.float32)
    weights_BHTS = jax.nn.softmax(logits_BHTS, axis=-1, where=visible_B1TS)
    y_BHTK = jnp.matmul(weights_BHTS.astype(value_BHSK.dtype), value_BHSK)
    return y_BHTK.transpose(0, 2, 1, 3)


class Attention(Function):
    """Projections around `attend`. `causal` and padding decide what a position sees."""

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs, causal: bool = False):
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
        self.heads = heads
        self.causal = causal

    def _split(self, x_BLD: jax.Array) -> jax.Array:
        return x_BLD.reshape(*x_BLD.shape[:2], self.heads, -1)

    def _project(self, x_BLD: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self._split(self.key(x_BLD)), self._split(self.value(x_BLD))

    def _merge(self, y_BTHK: jax.Array) -> jax.Array:
        return self.out(y_BTHK.reshape(*y_BTHK.shape[:2], -1))

    def __call__(
        self, x_BTD: jax.Array, context: Context, key: jax.Array | None = None
    ) -> jax.Array:
        query = self._split(self.query(x_BTD))
        # A causal query never sees the padding behind it.
        lengths = None if self.causal else context.lengths_B
        y = attend(query, *self._project(x_BTD), causal=self.causal, key_lengths_B=lengths)
        return self._merge(y)

    def cache(self, batch: int, length: int, context: Context, dtype: Any) -> Any:
        """Keys and values of all hypotheses of a sentence side by side, and who of them wrote what each one sees.

        Beam search then reorders small integers, `writers_NL`, and no key is ever moved.
        """
        sentences = batch if context.memory_BSD is None else context.memory_BSD.shape[0]
        keys = length * (batch // sentences)
        empty = jnp.zeros(
            (sentences, keys, self.heads, self.key.kernel.shape[1] // self.heads), dtype
        )
        return *store(empty, empty), jnp.full((batch, length), -1, jnp.int32)

    def step(
        self, x_N1D: jax.Array, cache: Any, index: jax.Array, context: Context
    ) -> tuple[jax.Array, Any]:
        keys_BHKS, values_BHSK, writers_NL = cache
        # The T hypotheses of a sentence are its queries; at each position they write T keys, S = L T in all.
        x_BTD = x_N1D.reshape(keys_BHKS.shape[0], -1, x_N1D.shape[-1])
        slots_T = jnp.arange(x_BTD.shape[1])
        key_BHKT, value_BHTK = store(*self._project(x_BTD))
        update = jax.lax.dynamic_update_slice_in_dim
        start = index * len(slots_T)
        keys_BHKS = update(keys_BHKS, key_BHKT, start, 3)
        values_BHSK = update(values_BHSK, value_BHTK, start, 2)
        own_N1 = jnp.tile(slots_T, len(x_BTD))[:, None]
        writers_NL = update(writers_NL, own_N1.astype(jnp.int32), index, 1)

        writers_BTL = writers_NL.reshape(*x_BTD.shape[:2], -1)
        visible_BTS = (writers_BTL[..., None] == slots_T).reshape(*x_BTD.shape[:2], -1)
        query = self._split(self.query(x_BTD))
        y_BTHK = attend_stored(query, keys_BHKS, values_BHSK, visible_BTS[:, None])
        return self._merge(y_BTHK).reshape(x_N1D.shape), (keys_BHKS, values_BHSK, writers_NL)


class CrossAttention(Attention):
    """Attention over `context.memory_BSD`, whose keys and values are projected once when decoding."""

    def __call__(
        self, x_BTD: jax.Array, context: Context, key: jax.Array | None = None
    ) -> jax.Array:
        query = self._split(self.query(x_BTD))
        keys_values = self._project(context.memory_BSD)
        return self._merge(attend(query, *keys_values, key_lengths_B=context.memory_lengths_B))

    def cache(self, batch: int, length: int, context: Context, dtype: Any) -> Any:
        return store(*self._project(context.memory_BSD))

    def step(
        self, x_N1D: jax.Array, cache: Any, index: jax.Array, context: Context
    ) -> tuple[jax.Array, Any]:
        # N = B * hypotheses: those of one sentence are queries over the same memory, which is never copied.
        x_BTD = x_N1D.reshape(cache[0].shape[0], -1, x_N1D.shape[-1])
        visible_BS = jnp.arange(cache[0].shape[-1]) < context.memory_lengths_B[:, None]
        query = self._split(self.query(x_BTD))
        y_BTHK = attend_stored(query, *cache, visible_BS[:, None, None])
        return self._merge(y_BTHK).reshape(x_N1D.shape), cache
