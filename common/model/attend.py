"""Softmax attention over whole sequences, and over a decoding cache."""

import jax
import jax.numpy as jnp
import numpy as np

from common.model.dropout import Key, dropout, fold
from common.sharding import backend

BLOCK = 256
"""Number of queries in a block of causal attention. A block skips the keys after its last query."""


def attend(
    query_BTHK: jax.Array,
    key_BSHK: jax.Array,
    value_BSHK: jax.Array,
    *,
    causal: bool = False,
    key_lengths_B: jax.Array | None = None,
    window: int | None = None,
    bias_BHTS: jax.Array | None = None,
    dropout_rate: float = 0.0,
    key: Key = None,
) -> jax.Array:
    """Returns the output of softmax attention, (B, T, H, K).

    Uses cuDNN's fused kernel on GPUs for bfloat16 and float16 with a head size that is a multiple of 8, except with
    dropout, with a bias, or with a window in attention that is not causal.

    Args:
      key_lengths_B: number of keys to attend to in each row; later keys are padding. None for all keys.
      window: a query attends to keys at a distance less than `window`; None for all keys.
      bias_BHTS: bias that is added to the logits; None for no bias.
      dropout_rate, key: rate and random key of the dropout of attention weights. key=None turns dropout off.
    """
    fused = backend() == "gpu" and query_BTHK.dtype in (jnp.bfloat16, jnp.float16)
    fused &= query_BTHK.shape[-1] % 8 == 0 and bias_BHTS is None and (causal or window is None)
    rate = 0.0 if key is None else dropout_rate
    if not fused or rate:
        heads = query_BTHK, key_BSHK, value_BSHK
        return _attend(*heads, causal, key_lengths_B, window, bias_BHTS, rate, key)
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
    """Returns (start, end, seen) for each block of queries: queries from start to end - 1 see the first `seen` keys."""
    if not causal:
        return [(0, queries, keys)]
    ends = [min(start + BLOCK, queries) for start in range(0, queries, BLOCK)]
    return [(start, end, end) for start, end in zip([0, *ends], ends, strict=False)]


def _attend(
    query_BTHK, key_BSHK, value_BSHK, causal, key_lengths_B, window, bias_BHTS, rate, key
) -> jax.Array:
    """Computes attention without a fused kernel; splits the queries of causal attention into blocks."""
    queries, keys = query_BTHK.shape[1], key_BSHK.shape[1]
    query_BHTK = query_BTHK.transpose(0, 2, 1, 3) * query_BTHK.shape[-1] ** -0.5
    key_BHKS, value_BHSK = cache_layout(key_BSHK, value_BSHK)
    blocks = []
    for start, end, seen in spans(queries, keys, causal):
        logits_BHTS = jnp.matmul(
            query_BHTK[:, :, start:end], key_BHKS[..., :seen], preferred_element_type=jnp.float32
        )
        if bias_BHTS is not None:
            logits_BHTS += bias_BHTS[:, :, start:end, :seen]
        mask_BHTS = True
        offset_TS = jnp.arange(seen) - jnp.arange(start, end)[:, None]
        if causal:
            mask_BHTS = offset_TS <= 0
        if window is not None and window < end:
            mask_BHTS &= abs(offset_TS) < window
        if key_lengths_B is not None:
            mask_BHTS &= jnp.arange(seen) < key_lengths_B[:, None, None, None]
        # Mask with a finite number: with -inf, the softmax of a row whose keys are all masked would be NaN.
        logits_BHTS = jnp.where(mask_BHTS, logits_BHTS, jnp.finfo(jnp.float32).min)
        weights_BHTS = jax.nn.softmax(logits_BHTS, axis=-1).astype(value_BHSK.dtype)
        weights_BHTS = dropout(weights_BHTS, rate, fold(key, start))
        blocks.append(jnp.matmul(weights_BHTS, value_BHSK[:, :, :seen]))
    return jnp.concatenate(blocks, axis=2).transpose(0, 2, 1, 3)


def cache_layout(key_BSHK: jax.Array, value_BSHK: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Transposes keys to (B, H, K, S) and values to (B, H, S, K), the layout of decoding caches.

    In this layout the matrix products of attention need no transpose.
    """
    return key_BSHK.transpose(0, 2, 3, 1), value_BSHK.transpose(0, 2, 1, 3)


def attend_cached(
    query_BTHK: jax.Array,
    keys_BHKS: list[jax.Array],
    values_BHSK: list[jax.Array],
    masks_B1TS: list[jax.Array],
) -> jax.Array:
    """Returns the output of attention, (B, T, H, K), for the queries of a decoding step.

    Args:
      keys_BHKS, values_BHSK, masks_B1TS: one array for each part of the cache (`DecodeCache.parts`).
    """
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
