"""Grouped-query attention with the options of pretrained language models: rotary positions, head norms, biases."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from common.model import initializers
from common.model.attend import attend
from common.model.attention import Attention
from common.model.block import Context
from common.model.dropout import Key, fold
from common.model.linear import Linear

if TYPE_CHECKING:
    from perception.layers import Rotary


class GroupedAttention(Attention):
    """Grouped-query attention: heads / kv_heads query heads share one key-value head (Ainslie et al., 2023).

    Args:
      size: head size; heads * size need not equal the width.
      fused: whether one linear layer computes queries, keys and values.
      biases: two flags: whether queries, keys and values have biases; whether the output has a bias.
      head_norm: epsilon of an RMSNorm of each query and key before the rotary positions; None for no norm.
      window: a query attends to positions at a distance below `window`; None for full attention.
      dropout_rate: dropout rate of the attention weights.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        size: int,
        *,
        rngs: nnx.Rngs,
        causal: bool = True,
        fused: bool = False,
        biases: tuple[bool, bool] = (False, False),
        rotary: "Rotary | None" = None,
        head_norm: float | None = None,
        window: int | None = None,
        dropout_rate: float = 0.0,
    ):
        if heads % kv_heads:
            raise ValueError(
                f"heads={heads} is not divisible by kv_heads={kv_heads}: change one of them"
            )
        inner, out = (initializers.zeros if bias else None for bias in biases)

        def project(count: int) -> Linear:
            return Linear(width, count * size, ("embed", "heads"), rngs=rngs, bias_init=inner)

        if fused:
            self.qkv = project(heads + 2 * kv_heads)
        else:
            self.query, self.key, self.value = map(project, (heads, kv_heads, kv_heads))
        self.out = Linear(heads * size, width, ("heads", "embed"), rngs=rngs, bias_init=out)
        if head_norm is not None:
            from perception.layers import RMSNorm

            self.query_norm = RMSNorm(size, rngs=rngs, epsilon=head_norm)
            self.key_norm = RMSNorm(size, rngs=rngs, epsilon=head_norm)
        self.heads, self.kv_heads, self.size = heads, kv_heads, size
        self.causal, self.fused, self.head_norm = causal, fused, head_norm is not None
        self.rotary, self.window, self.dropout_rate = rotary, window, dropout_rate

    def _all(
        self, x_BLD: jax.Array, positions_L: jax.Array, key: Key = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        if self.fused:
            ends = (self.heads, self.heads + self.kv_heads)
            query, keys, values = jnp.split(self._split(self.qkv(x_BLD, key=key)), ends, axis=2)
        else:
            parts = (self.query, self.key, self.value)
            query, keys, values = (
                self._split(part(x_BLD, key=fold(key, number))) for number, part in enumerate(parts)
            )
        if self.head_norm:
            query, keys = self.query_norm(query), self.key_norm(keys)
        if self.rotary is not None:
            query, keys = self.rotary(query, positions_L), self.rotary(keys, positions_L)
        return query, keys, values

    def _seen(self, positions_L: jax.Array, index: jax.Array) -> jax.Array:
        seen_L = positions_L <= index
        return seen_L if self.window is None else seen_L & (positions_L > index - self.window)

    def _bias(
        self, query_BLHK: jax.Array, key_BLGK: jax.Array, context: Context, key: Key
    ) -> jax.Array | None:
        """Returns a bias of the logits, (B or 1, H, T, S), in subclasses with relative positions; here None."""
        del query_BLHK, key_BLGK, context, key
        return None

    def __call__(self, x_BLD: jax.Array, context: Context, key: Key = None) -> jax.Array:
        """Returns the outputs (B, L, D). No query attends to padding, the positions from `context.lengths_B` on."""
        query, keys, values = self._all(x_BLD, jnp.arange(x_BLD.shape[1]), fold(key, 0))
        y_BLHK = attend(
            query,
            keys,
            values,
            bias_BHTS=self._bias(query, keys, context, key),
            causal=self.causal,
            key_lengths_B=context.lengths_B,
            window=self.window,
            dropout_rate=self.dropout_rate,
            key=fold(key, 1),
        )
        return self._merge(y_BLHK, fold(key, 2))
