"""Softmax attention with a fused kernel: cuDNN's kernel on GPUs, `common.model.splash` on TPUs."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from common.sharding import num_shards, spec

AXES = ("batch", None, "heads", None)
"""Logical axes of queries, keys, values and outputs. `key_lengths_B` has only the first axis."""


def attend(
    platform: str,
    query_BTHK: jax.Array,
    key_BSGK: jax.Array,
    value_BSGK: jax.Array,
    key_lengths_B: jax.Array | None,
    *,
    causal: bool,
    window: int | None,
) -> jax.Array | None:
    """Returns the output of attention, (B, T, H, K), or None if no kernel supports the arrays.

    - `platform` "gpu": cuDNN, for bfloat16 and float16, if `_cudnn_supports` returns True for the shapes, and the
      attention is causal or has no window.
    - `platform` "tpu": `common.model.splash`, for bfloat16, if T and S are at least `splash.LANES`.

    The mesh axis "tensor" must divide the number of key-value heads: the compiler cannot partition a kernel.
    """
    heads, dtype = (query_BTHK, key_BSGK, value_BSGK), query_BTHK.dtype
    if key_BSGK.shape[2] % num_shards("heads"):
        return None
    if platform == "tpu":
        from common.model import splash

        # `splash.attend` pads queries and keys to a multiple of LANES, which would waste work on shorter sequences.
        shortest = min(query_BTHK.shape[1], key_BSGK.shape[1])
        kernel, supported = splash.attend, dtype == jnp.bfloat16 and shortest >= splash.LANES
    else:
        kernel = _cudnn
        supported = dtype in (jnp.bfloat16, jnp.float16) and (causal or window is None)
        supported = supported and _cudnn_supports(query_BTHK, key_BSGK)
    if not supported:
        return None
    lengths = () if key_lengths_B is None else (key_lengths_B,)
    return on_each_device(partial(kernel, causal=causal, window=window), *heads, *lengths)


def on_each_device(kernel: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """Calls a kernel that the compiler cannot partition: each device calls it for its own rows and heads.

    If the batch axes of the mesh do not divide the number of rows, every device computes all rows.
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
        # The check would fail, because a kernel does not declare over which mesh axes its results vary.
        check_vma=False,
    )(*arrays)


def _cudnn_supports(query_BTHK: jax.Array, key_BSGK: jax.Array) -> bool:
    """Returns whether JAX's cuDNN attention supports these shapes, also in training.

    Head sizes must be multiples of 8, at most 256 on Hopper and later GPUs, else at most 128. In training, JAX refuses
    odd numbers of queries or keys: JAX passes an empty bias to the kernel, and cuDNN's gradient of a bias needs
    even numbers.
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
