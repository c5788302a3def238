"""Softmax attention as functions: over whole sequences, and over a decoding cache."""

import jax
import jax.numpy as jnp
import numpy as np

from common.model.dropout import dropout, fold
from common.sharding import backend

BLOCK = 256
"""Queries per block of causal attention; the keys after a block are skipped."""


def attend(
    query_BTHK: jax.Array,
    key_BSHK: jax.Array,
    value_BSHK: jax.Array,
    *,
    causal: bool = False,
    key_lengths_B: jax.Array | None = None,
    window: int | None = None,
    dropout_rate: float = 0.0,
    key: jax.Array | None = None,
) -> jax.Array:
    """Returns softmax attention (B, T, H, K) over the first `key_lengths_B` keys.

    Uses cuDNN's fused kernel on GPUs for bfloat16 and float16 with a head size that is a multiple of 8, except with
    dropout.

    Args:
      window: causal attention only: a query sees this many keys, its own the last; None for all.
      dropout_rate, key: dropout of the attention weights.
    """
    fused = backend() == "gpu" and query_BTHK.dtype in (jnp.bfloat16, jnp.float16)
    fused &= query_BTHK.shape[-1] % 8 == 0
    rate = 0.0 if key is None else dropout_rate
    if not fused or rate:
        return _attend(query_BTHK, key_BSHK, value_BSHK, causal, key_lengths_B, window, rate, key)
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
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )


def spans(queries: int, keys: int, causal: bool) -> list[tuple[int, int, int]]:
    """Returns (start, end, keys) of each block of queries: queries start to end - 1 attend to the first `keys` keys."""
    if not causal:
        return [(0, queries, keys)]
    ends = [min(start + BLOCK, queries) for start in range(0, queries, BLOCK)]
    return [(start, end, end) for start, end in zip([0, *ends], ends, strict=False)]


def _attend(
    query_BTHK, key_BSHK, value_BSHK, causal, key_lengths_B, window, rate, key
) -> jax.Array:
    """`attend` without a fused kernel: heads before positions, causal attention in blocks of queries."""
    queries, keys = query_BTHK.shape[1], key_BSHK.shape[1]
    query_BHTK = query_BTHK.transpose(0, 2, 1, 3) * query_BTHK.shape[-1] ** -0.5
    key_BHKS, value_BHSK = cache_layout(key_BSHK, value_BSHK)
    blocks = []
    for start, end, seen in spans(queries, keys, causal):
        logits_BHTS = jnp.matmul(
            query_BHTK[:, :, start:end], key_BHKS[..., :seen], preferred_element_type=jnp.float32
        )
        mask_BHTS = True
        if causal:
            offset_TS = jnp.arange(seen) - jnp.arange(start, end)[:, None]
            mask_BHTS = offset_TS <= 0
            if window is not None and window < end:
                mask_BHTS &= offset_TS > -window
        if key_lengths_B is not None:
            mask_BHTS &= jnp.arange(seen) < key_lengths_B[:, None, None, None]
        # Finite instead of -inf: a row of padding alone would become NaN.
        logits_BHTS = jnp.where(mask_BHTS, logits_BHTS, jnp.finfo(jnp.float32).min)
        weights_BHTS = jax.nn.softmax(logits_BHTS, axis=-1).astype(value_BHSK.dtype)
        weights_BHTS = dropout(weights_BHTS, rate, fold(key, start))
        blocks.append(jnp.matmul(weights_BHTS, value_BHSK[:, :, :seen]))
    return jnp.concatenate(blocks, axis=2).transpose(0, 2, 1, 3)


def cache_layout(key_BSHK: jax.Array, value_BSHK: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns keys (B, H, K, S) and values (B, H, S, K): the layout of caches, ready for the products."""
    return key_BSHK.transpose(0, 2, 3, 1), value_BSHK.transpose(0, 2, 1, 3)


def attend_cached(
    query_BTHK: jax.Array,
    keys_BHKS: list[jax.Array],
    values_BHSK: list[jax.Array],
    masks_B1TS: list[jax.Array],
) -> jax.Array:
    """`attend` for the few queries of a decoding step; keys, values and masks are lists of the parts of a cache."""
    query_BHTK = query_BTHK.transpose(0, 2, 1, 3) * query_BTHK.shape[-1] ** -0.5
    logits_BHTS = [
        jnp.matmul(query_BHTK, key_BHKS, preferred_element_type=jnp.float32)
        for key_BHKS in keys_BHKS
    ]
    weights_BHTS = jax.nn.softmax(
        jnp.concatenate(logits_BHTS, axis=-1),
        axis=-1,
        where=jnp.concatenate(masks_B1TS, axis=-1),
    ).astype(values_BHSK[0].dtype)
    ends = np.cumsum([value.shape[2] for value in values_BHSK])
    parts = jnp.split(weights_BHTS, ends[:-1], axis=-1)
    y_BHTK = sum(
        jnp.matmul(part, value, preferred_element_type=jnp.float32)
        for part, value in zip(parts, values_BHSK, strict=True)
    )
    return y_BHTK.astype(query_BTHK.dtype).transpose(0, 2, 1, 3)
