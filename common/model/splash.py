"""Fused softmax attention on TPUs: JAX's splash attention, a Pallas kernel.

The kernel keeps logits and attention weights of a block of queries on the chip. The backward pass recomputes both.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    BlockSizes,
    CausalMask,
    FullMask,
    LocalMask,
    MultiHeadMask,
    SegmentIds,
    make_splash_mha,
)

from common.model.stored import OTHER

LANES = 128
"""The numbers of queries and keys of the kernel must be multiples of this number. `attend` pads with zeros."""

BLOCKS = (512, 256, 128)
"""Possible numbers of queries or keys in a block. `attend` uses the largest that divides the padded number."""


def attend(
    query_BTHK: jax.Array,
    key_BSGK: jax.Array,
    value_BSGK: jax.Array,
    key_lengths_B: jax.Array | None = None,
    *,
    causal: bool,
    window: int | None,
) -> jax.Array:
    """Returns the output of softmax attention for the rows and heads of one device; see `common.model.attend`."""
    queries, keys = query_BTHK.shape[1], key_BSGK.shape[1]
    query_BHTK, key_BGSK, value_BGSK = (
        _padded(x.transpose(0, 2, 1, 3))
        for x in (query_BTHK * query_BTHK.shape[-1] ** -0.5, key_BSGK, value_BSGK)
    )
    rows, heads, length, _ = query_BHTK.shape
    size = length, key_BGSK.shape[2]
    if window is not None:
        mask = LocalMask(size, (window - 1, 0 if causal else window - 1), 0)
    else:
        mask = CausalMask(size) if causal else FullMask(size)
    # Queries attend to keys of the same segment. All queries have segment 1, padding keys 0, other keys 1.
    segments = None
    if key_lengths_B is not None or (size[1] > keys and not causal):
        lengths_B = jnp.full(rows, keys) if key_lengths_B is None else key_lengths_B
        seen_BS = jnp.arange(size[1]) < lengths_B[:, None]
        segments = SegmentIds(jnp.ones((rows, length), jnp.int32), seen_BS.astype(jnp.int32))
    of_queries, of_keys = (next(b for b in BLOCKS if n % b == 0) for n in size)
    blocks = BlockSizes(
        block_q=of_queries,
        block_kv=of_keys,
        block_q_dkv=of_queries,
        block_kv_dkv=of_keys,
        block_q_dq=of_queries,
        block_kv_dq=of_keys,
        block_kv_dkv_compute=of_keys,
    )
    kernel = make_splash_mha(
        MultiHeadMask([mask] * heads),
        block_sizes=blocks,
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=OTHER,
    )
    # `common.train.flops` recognizes causal attention by this name.
    with jax.named_scope("causal_attention" if causal else "attention"):
        y_BHTK = jax.vmap(kernel)(query_BHTK, key_BGSK, value_BGSK, segments)
    return y_BHTK[:, :, :queries].transpose(0, 2, 1, 3)


def _padded(x_BHLK: jax.Array) -> jax.Array:
    return jnp.pad(x_BHLK, ((0, 0), (0, 0), (0, -x_BHLK.shape[2] % LANES), (0, 0)))
