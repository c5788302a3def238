"""Softmax attention over whole sequences, and over a decoding cache."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from common.model.dropout import Key, dropout, fold
from common.sharding import backend, num_shards, spec

AXES = ("batch", None, "heads", None)
"""Logical axes of queries, keys, values and outputs. `key_lengths_B` has only the first axis."""

BLOCK = 256
"""Number of queries in a block of causal attention. A block skips the keys after its last query."""


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

    Uses a fused kernel only without dropout and bias, and only if the mesh axis tensor divides the number of key-value
    heads:
    - on GPUs, cuDNN's kernel for bfloat16 and float16, if JAX supports the head size, both lengths are even, and the
      attention is causal or has no window;
    - on TPUs, `common.model.splash` for bfloat16, if both lengths are at least `splash.LANES`.

    With dropout, no fused kernel is used: the TPU kernel has no dropout, and cuDNN takes the seed of its dropout at
    compilation, so dropout masks would not depend on step and row.

    Args:
      key_lengths_B: number of keys to attend to in each row; later keys are padding. None for all keys.
      window: a query attends to keys at a distance less than `window`; None for all keys.
      bias_BHTS: bias that is added to the logits; None for no bias.
      dropout_rate, key: rate and random key of the dropout of attention weights. key=None turns dropout off.
    """
    heads = query_BTHK, key_BSGK, value_BSGK
    rate = 0.0 if key is None else dropout_rate
    kernel = None
    if not rate and bias_BHTS is None:
        kernel = _fused_kernel(*heads, causal=causal, window=window)
    if kernel is None:
        return _attend(*heads, causal, key_lengths_B, window, bias_BHTS, rate, key)
    lengths = () if key_lengths_B is None else (key_lengths_B,)
    kernel = partial(kernel, causal=causal, window=window)
    return on_each_device(kernel, *heads, *lengths)


def _fused_kernel(
    query_BTHK: jax.Array,
    key_BSGK: jax.Array,
    value_BSGK: jax.Array,
    *,
    causal: bool,
    window: int | None,
) -> Callable[..., jax.Array] | None:
    """Returns the fused kernel for these arguments, or None if attention must be computed without a kernel.

    The tensor axis must divide the key-value heads, because the compiler cannot partition a kernel.
    """
    heads, dtype = (query_BTHK, key_BSGK, value_BSGK), query_BTHK.dtype
    if key_BSGK.shape[2] % num_shards("heads"):
        return None
    match backend():
        case "gpu" if dtype in (jnp.bfloat16, jnp.float16) and (causal or window is None):
            return _cudnn if _cudnn_supports(*heads) else None
        case "tpu" if dtype == jnp.bfloat16:
            from common.model import splash

            return splash.attend if splash.supports(*heads) else None
    return None


def on_each_device(kernel: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """Calls a kernel that the compiler cannot partition: each device calls it for its own rows and heads.

    If the mesh does not divide the rows, every device computes all rows.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or mesh.are_all_axes_manual:
        return kernel(*arrays)
    specs = tuple(spec(AXES[: x.ndim], x.shape, mesh) for x in arrays)
    return jax.shard_map(
        kernel,
        in_specs=specs,
        out_specs=specs[0],
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
        check_vma=False,  # a kernel does not declare over which mesh axes its results vary
    )(*arrays)


def _cudnn_supports(query_BTHK, key_BSGK, value_BSGK) -> bool:
    """Returns whether JAX's cuDNN attention supports these shapes, also in training.

    GPUs before Hopper support head sizes up to 128. JAX refuses odd lengths in training: it passes an empty bias to the
    kernel, and cuDNN's gradient of a bias needs even lengths.
    """
    length, other, size = query_BTHK.shape[1], key_BSGK.shape[1], query_BTHK.shape[-1]
    if length % 2 or other % 2 or size % 8 or size > 256:
        return False
    if size <= 128:
        return True
    # `launch.plan` compiles for GPUs also on a machine without a GPU. There, JAX refuses sizes above 128.
    devices = jax.local_devices(backend="gpu") if jax.default_backend() == "gpu" else ()
    return any(float(device.compute_capability) >= 9 for device in devices)


def _cudnn(query_BTHK, key_BSGK, value_BSGK, key_lengths_B=None, *, causal, window) -> jax.Array:
    query_lengths_B = None
    if key_lengths_B is not None:
        query_lengths_B = jnp.full(query_BTHK.shape[:1], query_BTHK.shape[1], jnp.int32)
    return jax.nn.dot_product_attention(
        query_BTHK,
        key_BSGK,
        value_BSGK,
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
    query_BTHK, key_BSGK, value_BSGK, causal, key_lengths_B, window, bias_BHTS, rate, key
) -> jax.Array:
    """Computes attention without a fused kernel; splits the queries of causal attention into blocks."""
    queries, keys = query_BTHK.shape[1], key_BSGK.shape[1]
    query_BHTK = query_BTHK.transpose(0, 2, 1, 3) * query_BTHK.shape[-1] ** -0.5
    key_BGKS, value_BGSK = cache_layout(key_BSGK, value_BSGK)
    blocks = []
    for start, end, seen in spans(queries, keys, causal):
        logits_BHTS = _by_groups(query_BHTK[:, :, start:end], key_BGKS[..., :seen], jnp.float32)
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
        # Mask with a finite number: with -inf, the softmax of a query whose keys are all masked would be NaN.
        logits_BHTS = jnp.where(mask_BHTS, logits_BHTS, jnp.finfo(jnp.float32).min)
        weights_BHTS = softmax(logits_BHTS, value_BGSK.dtype)
        weights_BHTS = dropout(weights_BHTS, rate, fold(key, start))
        blocks.append(_by_groups(weights_BHTS, value_BGSK[:, :, :seen]))
    return jnp.concatenate(blocks, axis=2).transpose(0, 2, 1, 3)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def softmax(logits_BHTS: jax.Array, dtype: Any) -> jax.Array:
    """Returns the softmax over the last axis, computed in float32 and rounded to `dtype`.

    The backward pass computes the gradient in float32 from the rounded softmax, so a training step keeps the weights of
    attention only in `dtype`.
    """
    return jax.nn.softmax(logits_BHTS, axis=-1).astype(dtype)


def _softmax_forward(logits_BHTS, dtype):
    weights_BHTS = softmax(logits_BHTS, dtype)
    return weights_BHTS, weights_BHTS


def _softmax_backward(dtype, weights_BHTS, g_BHTS):
    weights_BHTS = weights_BHTS.astype(jnp.float32)
    change_BHTS = weights_BHTS * g_BHTS.astype(jnp.float32)
    return (change_BHTS - weights_BHTS * change_BHTS.sum(-1, keepdims=True),)


softmax.defvjp(_softmax_forward, _softmax_backward)


def _by_groups(x_BHTM: jax.Array, y_BGMN: jax.Array, dtype: Any = None) -> jax.Array:
    """Returns the matrix products (B, H, T, N) of every head of x with the matrix of its group in y.

    All heads of a group are multiplied in one matrix product, as additional rows of x.

    Args:
      dtype: dtype of the result; None for the dtype of x and y.
    """
    batch, groups, _, columns = y_BGMN.shape
    x_BGXM = x_BHTM.reshape(batch, groups, -1, x_BHTM.shape[-1])
    y_BGXN = jnp.matmul(x_BGXM, y_BGMN, preferred_element_type=dtype)
    return y_BGXN.reshape(*x_BHTM.shape[:3], columns)


def cache_layout(key_BSGK: jax.Array, value_BSGK: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Transposes keys to (B, G, K, S) and values to (B, G, S, K), the layout of decoding caches.

    In this layout the matrix products of attention need no transpose.
    """
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
