"""Softmax attention as functions: over whole sequences, and over what is stored when decoding.

B batch, T queries, S keys, H heads, K head size.
"""

import jax
import jax.numpy as jnp
import numpy as np

from common.model.backend import backend
from common.model.dropout import dropout, fold

BLOCK = 256
"""Queries that are worked on together: what lies ahead of a whole block is skipped where attention is causal."""


def attend(
    query_BTHK: jax.Array,
    key_BSHK: jax.Array,
    value_BSHK: jax.Array,
    *,
    causal: bool = False,
    key_lengths_B: jax.Array | None = None,
    window: int | None = None,
    rate: float = 0.0,
    key: jax.Array | None = None,
) -> jax.Array:
    """Softmax attention over the first `key_lengths_B` keys; (B, T, H, K).

    Args:
      window: where it is causal, a query sees this many keys, its own the last one; None for all.
      rate, key: of dropout of the weights.

    The backend's fused kernel is used where it has one for this type and this size of heads (cuDNN on GPUs: bfloat16
    and float16, multiples of 8).
    """
    fused = backend() == "gpu" and query_BTHK.dtype in (jnp.bfloat16, jnp.float16)
    fused &= query_BTHK.shape[-1] % 8 == 0
    rate = 0.0 if key is None else rate
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
    """(start, end, seen): queries that are worked on together, and how many of the keys they are multiplied with."""
    if not causal:
        return [(0, queries, keys)]
    ends = [min(start + BLOCK, queries) for start in range(0, queries, BLOCK)]
    return [(start, end, end) for start, end in zip([0, *ends], ends, strict=False)]


def _attend(
    query_BTHK, key_BSHK, value_BSHK, causal, key_lengths_B, window, rate, key
) -> jax.Array:
    """The same as plain products, heads before positions, a block of queries at a time where it is causal."""
    queries, keys = query_BTHK.shape[1], key_BSHK.shape[1]
    query_BHTK = query_BTHK.transpose(0, 2, 1, 3) * query_BTHK.shape[-1] ** -0.5
    key_BHKS, value_BHSK = store(key_BSHK, value_BSHK)
    blocks = []
    for start, end, seen in spans(queries, keys, causal):
        logits_BHTS = jnp.matmul(
            query_BHTK[:, :, start:end], key_BHKS[..., :seen], preferred_element_type=jnp.float32
        )
        visible_BHTS = True
        if causal:
            ahead_TS = jnp.arange(seen) - jnp.arange(start, end)[:, None]
            visible_BHTS = ahead_TS <= 0
            if window is not None and window < end:
                visible_BHTS &= ahead_TS > -window
        if key_lengths_B is not None:
            visible_BHTS &= jnp.arange(seen) < key_lengths_B[:, None, None, None]
        # Not minus infinity: a sequence of padding alone must not become NaN.
        logits_BHTS = jnp.where(visible_BHTS, logits_BHTS, jnp.finfo(jnp.float32).min)
        weights_BHTS = jax.nn.softmax(logits_BHTS, axis=-1).astype(value_BHSK.dtype)
        weights_BHTS = dropout(weights_BHTS, rate, fold(key, start))
        blocks.append(jnp.matmul(weights_BHTS, value_BHSK[:, :, :seen]))
    return jnp.concatenate(blocks, axis=2).transpose(0, 2, 1, 3)


def store(key_BSHK: jax.Array, value_BSHK: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys (B, H, K, S) and values (B, H, S, K): as `attend_stored` reads them, with nothing to transpose."""
    return key_BSHK.transpose(0, 2, 3, 1), value_BSHK.transpose(0, 2, 1, 3)


def attend_stored(
    query_BTHK: jax.Array,
    keys_BHKS: list[jax.Array],
    values_BHSK: list[jax.Array],
    visible_B1TS: list[jax.Array],
) -> jax.Array:
    """`attend` for the few queries of a decoding step, over keys that lie in one array or in several."""
    query_BHTK = query_BTHK.transpose(0, 2, 1, 3) * query_BTHK.shape[-1] ** -0.5
    logits_BHTS = [
        jnp.matmul(query_BHTK, key_BHKS, preferred_element_type=jnp.float32)
        for key_BHKS in keys_BHKS
    ]
    weights_BHTS = jax.nn.softmax(
        jnp.concatenate(logits_BHTS, axis=-1),
        axis=-1,
        where=jnp.concatenate(visible_B1TS, axis=-1),
    ).astype(values_BHSK[0].dtype)
    ends = np.cumsum([value.shape[2] for value in values_BHSK])
    shares = jnp.split(weights_BHTS, ends[:-1], axis=-1)
    y_BHTK = sum(
        jnp.matmul(share, value, preferred_element_type=jnp.float32)
        for share, value in zip(shares, values_BHSK, strict=True)
    )
    return y_BHTK.astype(query_BTHK.dtype).transpose(0, 2, 1, 3)
