"""The small attention that a gMLP may have beside its spatial map ("aMLP", Liu et al., 2021, section 4.3).

B batch, L length, T queries, S keys, D width, A width of the attention.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from common.model.attend import attend, attend_stored, store
from common.model.block import Context, Sublayer
from common.model.decode_cache import CacheSpec, DecodeCache
from common.model.linear import Linear


class TinyAttention(Sublayer):
    """One head of attention, A wide, whose output is as wide as the gate ("aMLP").

    Args:
      window: 0, or the length of windows: each position then sees its own window and the one before. As in the
        paper's code, what lies before the first window counts as keys and values of zero.
      keys_as_values: in windows, weigh the keys and not the values. A slip in g-mlp-gpt (k where t is meant) that the
        paper's code inherited; its value projections are never used there.
    """

    def __init__(
        self,
        width: int,
        inner: int,
        outputs: int,
        *,
        rngs: nnx.Rngs,
        causal: bool = True,
        window: int = 0,
        keys_as_values: bool = False,
    ):
        def project() -> Linear:
            return Linear(width, inner, ("embed", None), rngs=rngs, bias_init=None)

        self.query, self.key, self.value = project(), project(), project()
        self.out = Linear(inner, outputs, (None, "mlp"), rngs=rngs)
        self.causal, self.window = causal, window
        self.keys_as_values = keys_as_values and bool(window)

    def _project(self, x_BLD: jax.Array) -> tuple[jax.Array, jax.Array]:
        key_BLA = self.key(x_BLD)
        return key_BLA, key_BLA if self.keys_as_values else self.value(x_BLD)

    def __call__(
        self, x_BLD: jax.Array, context: Context, key: jax.Array | None = None
    ) -> jax.Array:
        projected = self.query(x_BLD), *self._project(x_BLD)
        if self.window:
            return self.out(self._in_windows(*projected))
        one_head = (x_BLA[:, :, None] for x_BLA in projected)
        lengths_B = None if self.causal else context.lengths_B
        y_BLA = attend(*one_head, causal=self.causal, key_lengths_B=lengths_B)[:, :, 0]
        return self.out(y_BLA)

    def _in_windows(self, query_BLA, key_BLA, value_BLA) -> jax.Array:
        batch, length, inner = query_BLA.shape
        size = self.window
        windows = -(-length // size)

        def cut(x_BLA, before: int) -> jax.Array:
            padded = jnp.pad(x_BLA, ((0, 0), (before, windows * size - length), (0, 0)))
            return padded[:, : windows * size].reshape(batch * windows, size, inner)

        def with_before(x_BLA) -> jax.Array:
            return jnp.concatenate([cut(x_BLA, size), cut(x_BLA, 0)], axis=1)

        query, key, value = cut(query_BLA, 0), with_before(key_BLA), with_before(value_BLA)
        seen = jnp.arange(2 * size) <= jnp.arange(size)[:, None] + size
        y = _weigh(query, key, value, seen)
        return y.reshape(batch, -1, inner)[:, :length]

    def cache(self, batch: int, room: CacheSpec, context: Context) -> Any:
        """Keys and values, of one head."""
        inner = self.out.kernel.shape[0]
        return (
            DecodeCache.empty((batch, 1, inner, 1), 3, room),
            DecodeCache.empty((batch, 1, 1, inner), 2, room),
        )

    def step(
        self, x_B1D: jax.Array, cache: Any, index: jax.Array, context: Context
    ) -> tuple[jax.Array, Any]:
        new = store(*(x_B1A[:, :, None] for x_B1A in self._project(x_B1D)))
        keys, values = (old.write(part, index) for old, part in zip(cache, new, strict=True))
        begin = None
        if self.window:
            begin = index - index % self.window - self.window  # of the window before
        reach = (None if begin is None else jnp.maximum(begin, 0), 2 * self.window)
        key_parts, positions = zip(*keys.parts(*reach), strict=True)
        value_parts = [part for part, _ in values.parts(*reach)]
        if self.window:
            # What lies before the first window are keys and values of zero.
            shape = (len(x_B1D), 1, self.window, self.out.kernel.shape[0])
            nothing = jnp.zeros(shape, x_B1D.dtype)
            key_parts = (nothing.swapaxes(2, 3), *key_parts)
            value_parts = [nothing, *value_parts]
            positions = (jnp.arange(-self.window, 0), *positions)
        seen = [(p <= index) if begin is None else (p <= index) & (p >= begin) for p in positions]
        y_B11A = attend_stored(
            self.query(x_B1D)[:, :, None],
            list(key_parts),
            value_parts,
            [s[None, None, None] for s in seen],
        )
        return self.out(y_B11A[:, :, 0]), (keys, values)

    def prefill(self, x_BLD: jax.Array, cache: Any, context: Context) -> Any:
        new = store(*(x_BLA[:, :, None] for x_BLA in self._project(x_BLD)))
        return tuple(old.filled(part) for old, part in zip(cache, new, strict=True))


def _weigh(query_BTA, key_BSA, value_BSA, seen_TS) -> jax.Array:
    """Softmax attention of one head over what each query sees."""
    query_BTA = query_BTA * query_BTA.shape[-1] ** -0.5
    logits_BTS = jnp.matmul(query_BTA, key_BSA.swapaxes(1, 2), preferred_element_type=jnp.float32)
    weights_BTS = jax.nn.softmax(logits_BTS, axis=-1, where=seen_TS)
    return jnp.matmul(weights_BTS.astype(value_BSA.dtype), value_BSA)
