"""Softmax attention over whole sequences, and over a decoding cache."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from common.model.dropout import Key, dropout, fold
from common.model.stored import stored
from common.sharding import backend

BLOCK = 256
"""Maximum number of queries in a block of causal attention. A block skips the keys after its last query."""


def spans(queries: int, keys: int, causal: bool) -> list[tuple[int, int, int]]:
    """Returns (start, end, seen) for each block: the queries start to end - 1 need only the first `seen` keys."""
    if not causal:
        return [(0, queries, keys)]
    ends = [min(start + BLOCK, queries) for start in range(0, queries, BLOCK)]
    return [(start, end, end) for start, end in zip([0, *ends], ends, strict=False)]


def attend(
    query_BTHK: jax.Array,
    key_BSGK: jax.Array,
    value_BSGK: jax.Array,
    *,
    causal: bool = False,
    key_lengths_B: jax.Array | None = None,
    window: int | None = None,
    bias_BHTS: jax.Array | None = None,
    dropout_rate: float = 0.0,
    key: Key = None,
) -> jax.Array:
    """Returns the output of softmax attention, (B, T, H, K).

    Each key-value head serves H / G consecutive query heads. Keys and values are not repeated.

    On GPUs and TPUs, uses a fused kernel if `common.model.fused` supports the arrays, and there is no bias and no
    dropout. The TPU kernel has no dropout. cuDNN takes the seed of its dropout at compilation, so every step would drop
    the same weights.

    Args:
      key_lengths_B: number of keys to attend to in each row; later keys are padding. None for all keys.
      window: a query attends to keys at a distance less than `window`; None for all keys.
      bias_BHTS: bias that is added to the logits; None for no bias.
      dropout_rate, key: rate and random key of the dropout of attention weights. key=None turns dropout off.
    """
    rate = 0.0 if key is None else dropout_rate
    if not rate and bias_BHTS is None and (platform := backend()) != "cpu":
        # Import here, because CPUs have no fused kernel.
        from common.model import fused

        heads = query_BTHK, key_BSGK, value_BSGK
        y_BTHK = fused.attend(platform, *heads, key_lengths_B, causal=causal, window=window)
        if y_BTHK is not None:
            return y_BTHK
    queries, keys = query_BTHK.shape[1], key_BSGK.shape[1]
    query_BHTK = query_BTHK.transpose(0, 2, 1, 3) * query_BTHK.shape[-1] ** -0.5
    key_BGKS, value_BGSK = cache_layout(key_BSGK, value_BSGK)
    outputs = []  # one (B, H, queries of the block, K) for each block
    for start, end, seen in spans(queries, keys, causal):
        logits_BHTS = _by_groups(query_BHTK[:, :, start:end], key_BGKS[..., :seen], jnp.float32)
        if bias_BHTS is not None:
            logits_BHTS += bias_BHTS[:, :, start:end, :seen]
        mask_BHTS = True
        offset_TS = jnp.arange(seen) - jnp.arange(start, end)[:, None]
        if causal:
            mask_BHTS = offset_TS <= 0
        if window is not None and window < max(end, seen):
            mask_BHTS &= abs(offset_TS) < window
        if key_lengths_B is not None:
            mask_BHTS &= jnp.arange(seen) < key_lengths_B[:, None, None, None]
        # Mask with a finite number: with -inf, the softmax of a query whose keys are all masked would be NaN.
        logits_BHTS = jnp.where(mask_BHTS, logits_BHTS, jnp.finfo(jnp.float32).min)
        weights_BHTS = softmax(logits_BHTS, value_BGSK.dtype)
        weights_BHTS = dropout(weights_BHTS, rate, fold(key, start))
        outputs.append(_by_groups(weights_BHTS, value_BGSK[:, :, :seen]))
    return stored(jnp.concatenate(outputs, axis=2).transpose(0, 2, 1, 3))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def softmax(logits_BHTS: jax.Array, dtype: Any) -> jax.Array:
    """Returns the softmax of float32 logits over the last axis, rounded to `dtype`.

    The backward pass computes the gradient in float32 from the rounded softmax, so a training step stores no other
    copy of the softmax.
    """
    return jax.nn.softmax(logits_BHTS, axis=-1).astype(dtype)


def _softmax_forward(logits_BHTS, dtype):
    weights_BHTS = stored(softmax(logits_BHTS, dtype))
    return weights_BHTS, weights_BHTS


def _softmax_backward(dtype, weights_BHTS, g_BHTS):
    weights_BHTS = weights_BHTS.astype(jnp.float32)
    change_BHTS = weights_BHTS * g_BHTS.astype(jnp.float32)
    return (change_BHTS - weights_BHTS * change_BHTS.sum(-1, keepdims=True),)


softmax.defvjp(_softmax_forward, _softmax_backward)


def _by_groups(x_BHTM: jax.Array, y_BGMN: jax.Array, dtype: Any = None) -> jax.Array:
    """Multiplies the matrix (T, M) of each head with the matrix (M, N) of the head's group. Returns (B, H, T, N).

    The matrices of a group's heads are concatenated to one matrix (H / G * T, M), so a group needs a single product.
    """
    batch, groups, _, columns = y_BGMN.shape
    x_BGXM = x_BHTM.reshape(batch, groups, -1, x_BHTM.shape[-1])
    y_BGXN = jnp.matmul(x_BGXM, y_BGMN, preferred_element_type=dtype)
    return y_BGXN.reshape(*x_BHTM.shape[:3], columns)


def cache_layout(key_BSGK: jax.Array, value_BSGK: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Transposes keys to (B, G, K, S) and values to (B, G, S, K), so that products with a cache need no transpose."""
    return key_BSGK.transpose(0, 2, 3, 1), value_BSGK.transpose(0, 2, 1, 3)


def attend_cached(
    query_BTHK: jax.Array,
    keys_BGKS: list[jax.Array],
    values_BGSK: list[jax.Array],
    masks_B1TS: list[jax.Array],
) -> jax.Array:
    """Returns the output of attention, (B, T, H, K), for the queries of a decoding step.

    Args:
      keys_BGKS, values_BGSK, masks_B1TS: one array for each part of the cache (`DecodeCache.parts`). A mask is True
        where a query attends to a key.
    """
    query_BHTK = query_BTHK.transpose(0, 2, 1, 3) * query_BTHK.shape[-1] ** -0.5
    logits_BHTS = [_by_groups(query_BHTK, key_BGKS, jnp.float32) for key_BGKS in keys_BGKS]
    weights_BHTS = jax.nn.softmax(
        jnp.concatenate(logits_BHTS, axis=-1),
        axis=-1,
        where=jnp.concatenate(masks_B1TS, axis=-1),
    ).astype(values_BGSK[0].dtype)
    ends = np.cumsum([value.shape[2] for value in values_BGSK])
    parts = jnp.split(weights_BHTS, ends[:-1], axis=-1)
    y_BHTK = sum(
        _by_groups(part, value, jnp.float32) for part, value in zip(parts, values_BGSK, strict=True)
    )
    return y_BHTK.astype(query_BTHK.dtype).transpose(0, 2, 1, 3)
