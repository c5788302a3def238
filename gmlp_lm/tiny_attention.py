"""The tiny attention whose output is added to the gate of a gMLP: "GPT_base + gMLP + attn" in section 4.3 of the paper.

Liu et al. (2021) call a gMLP with this attention "aMLP".
"""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from common.model.attend import attend, attend_cached, cache_layout
from common.model.block import Context, Sublayer
from common.model.dropout import Key
from common.model.linear import Linear
from common.model.stored import stored

if TYPE_CHECKING:
    from common.model.decode_cache import CacheSpec


class TinyAttention(Sublayer):
    """One causal attention head, whose output has the width of the gate.

    Args:
      width: width of the input.
      inner: width of the head.
      outputs: width of the gate.
      window: window length W in positions. A position attends to the previous window, and to its own window up to
        itself. As in the authors' program, W keys and values of zero precede the first window. With 0, a position
        attends to all positions up to itself.
      keys_as_values: use the keys as values and ignore the value projection. No effect if `window` is 0. The authors'
        program inherited this bug from g-mlp-gpt.
    """

    def __init__(
        self,
        width: int,
        inner: int,
        outputs: int,
        *,
        rngs: nnx.Rngs,
        window: int = 0,
        keys_as_values: bool = False,
    ):
        def project() -> Linear:
            return Linear(width, inner, ("embed", None), rngs=rngs, bias_init=None)

        self.query, self.key, self.value = project(), project(), project()
        self.out = Linear(inner, outputs, (None, "mlp"), rngs=rngs)
        self.window = window
        self.keys_as_values = keys_as_values and bool(window)

    def _project(self, x_BLD: jax.Array) -> tuple[jax.Array, jax.Array]:
        key_BLK = self.key(x_BLD)
        return key_BLK, key_BLK if self.keys_as_values else self.value(x_BLD)

    def __call__(self, x_BLD: jax.Array, context: Context, key: Key = None) -> jax.Array:
        projected = self.query(x_BLD), *self._project(x_BLD)
        if self.window:
            return self.out(self._in_windows(*projected))
        one_head = (x_BLK[:, :, None] for x_BLK in projected)
        return self.out(attend(*one_head, causal=True)[:, :, 0])

    def _in_windows(self, query_BLK, key_BLK, value_BLK) -> jax.Array:
        from gmlp_lm import maps

        batch, length, inner = query_BLK.shape
        key, value = (maps.with_previous(x_BLK, self.window) for x_BLK in (key_BLK, value_BLK))
        query, mask = maps.windows(query_BLK, self.window), maps.window_mask(self.window)
        y = _softmax_attention(query, key, value, mask)
        return y.reshape(batch, -1, inner)[:, :length]

    def cache(self, batch: int, spec: "CacheSpec", context: Context) -> Any:
        """Returns empty caches of keys (B, 1, K, L) and values (B, 1, L, K)."""
        inner = self.out.kernel.shape[0]
        return (
            spec.empty((batch, 1, inner, 1), 3),
            spec.empty((batch, 1, 1, inner), 2),
        )

    def step(
        self, x_B1D: jax.Array, cache: Any, index: jax.Array, context: Context
    ) -> tuple[jax.Array, Any]:
        new = cache_layout(*(x_B1K[:, :, None] for x_B1K in self._project(x_B1D)))
        keys, values = (old.write(part, index) for old, part in zip(cache, new, strict=True))
        begin = None
        if self.window:
            begin = index - index % self.window - self.window  # start of the previous window
        reach = (None if begin is None else jnp.maximum(begin, 0), 2 * self.window)
        key_parts, positions = zip(*keys.parts(*reach), strict=True)
        value_parts = [part for part, _ in values.parts(*reach)]
        if self.window:
            # W keys and values of zero precede the first window.
            shape = (len(x_B1D), 1, self.window, self.out.kernel.shape[0])
            zeros = jnp.zeros(shape, x_B1D.dtype)
            key_parts = (zeros.swapaxes(2, 3), *key_parts)
            value_parts = [zeros, *value_parts]
            positions = (jnp.arange(-self.window, 0), *positions)
        masks = [(p <= index) if begin is None else (p <= index) & (p >= begin) for p in positions]
        y_B11K = attend_cached(
            self.query(x_B1D)[:, :, None],
            list(key_parts),
            value_parts,
            [mask[None, None, None] for mask in masks],
        )
        return self.out(y_B11K[:, :, 0]), (keys, values)

    def prefill(self, x_BLD: jax.Array, cache: Any, context: Context) -> Any:
        new = cache_layout(*(x_BLK[:, :, None] for x_BLK in self._project(x_BLD)))
        return tuple(old.filled(part) for old, part in zip(cache, new, strict=True))


class AttentionAlone(Sublayer):
    """The layer of the authors' "GPT_base" (gpt_sa.py): tiny attention and a projection, no feed-forward sublayer."""

    def __init__(self, attention: TinyAttention, inputs: int, width: int, *, rngs: nnx.Rngs):
        self.attention = attention
        self.down = Linear(inputs, width, ("mlp", "embed"), rngs=rngs)

    def __call__(self, x_BLD: jax.Array, context: Context, key: Key = None) -> jax.Array:
        return self.down(self.attention(x_BLD, context))

    def cache(self, batch: int, spec: "CacheSpec", context: Context) -> Any:
        return self.attention.cache(batch, spec, context)

    def step(
        self, x_B1D: jax.Array, cache: Any, index: jax.Array, context: Context
    ) -> tuple[jax.Array, Any]:
        y_B1F, cache = self.attention.step(x_B1D, cache, index, context)
        return self.down(y_B1F), cache

    def prefill(self, x_BLD: jax.Array, cache: Any, context: Context) -> Any:
        return self.attention.prefill(x_BLD, cache, context)


def _softmax_attention(query_BTK, key_BSK, value_BSK, mask_TS) -> jax.Array:
    """Returns the attention output (B, T, K) of one head. `mask_TS` is True for keys that a query may read."""
    query_BTK = query_BTK * query_BTK.shape[-1] ** -0.5
    logits_BTS = jnp.matmul(query_BTK, key_BSK.swapaxes(1, 2), preferred_element_type=jnp.float32)
    weights_BTS = jax.nn.softmax(stored(logits_BTS), axis=-1, where=mask_TS)
    return stored(jnp.matmul(weights_BTS.astype(value_BSK.dtype), value_BSK))
