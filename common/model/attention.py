"""Multi-head self-attention."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from common.model import initializers
from common.model.attend import attend, attend_cached, cache_layout
from common.model.block import Context, Sublayer
from common.model.dropout import Key
from common.model.linear import Linear

if TYPE_CHECKING:
    from common.model.decode_cache import CacheSpec


class Attention(Sublayer):
    """Multi-head self-attention, with dropout of the attention weights."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        rngs: nnx.Rngs,
        causal: bool = False,
        dropout_rate: float = 0.0,
    ):
        if width % heads:
            raise ValueError(f"width {width} is not divisible by {heads} heads: change one of them")
        # The gain 2^-0.5, as in fairseq, gives all three kernels the distribution of one Xavier-uniform matrix (D, 3D).
        options = {"rngs": rngs, "kernel_init": initializers.xavier_uniform(2**-0.5)}
        self.query, self.key, self.value = (
            Linear(width, width, ("embed", "heads"), **options) for _ in range(3)
        )
        self.out = Linear(width, width, ("heads", "embed"), rngs=rngs)
        self.heads, self.kv_heads, self.size = heads, heads, width // heads
        self.causal, self.dropout_rate = causal, dropout_rate

    def _split(self, x_BLD: jax.Array) -> jax.Array:
        return x_BLD.reshape(*x_BLD.shape[:2], -1, self.size)

    def _project(self, x_BLD: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self._split(self.key(x_BLD)), self._split(self.value(x_BLD))

    def _all(
        self, x_BLD: jax.Array, positions_L: jax.Array, key: Key = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries (B, L, H, K), and keys and values, each (B, L, G, K).

        Subclasses may rotate queries and keys by the positions `positions_L`, and use `key` for dropout of adapters.
        """
        del positions_L, key
        return self._split(self.query(x_BLD)), *self._project(x_BLD)

    def _merge(self, y_BTHK: jax.Array, key: Key = None) -> jax.Array:
        return self.out(y_BTHK.reshape(*y_BTHK.shape[:2], -1), key=key)

    def _seen(self, positions_L: jax.Array, index: jax.Array) -> jax.Array:
        """Returns the decoding mask (L,): True for the positions that the token at position `index` attends to."""
        return positions_L <= index

    def __call__(self, x_BTD: jax.Array, context: Context, key: Key = None) -> jax.Array:
        # Padding follows the tokens of a row, so the causal mask already hides the padding from the tokens.
        lengths_B = None if self.causal else context.lengths_B
        heads = self._all(x_BTD, jnp.arange(x_BTD.shape[1]))
        options = {"causal": self.causal, "dropout_rate": self.dropout_rate, "key": key}
        return self._merge(attend(*heads, key_lengths_B=lengths_B, **options))

    def cache(self, batch: int, spec: "CacheSpec", context: Context) -> Any:
        """Returns empty caches of keys, values and writers.

        At each decoding step, every hypothesis of a sentence writes a key and a value. A hypothesis may descend from
        other hypotheses: `writers` holds, for each hypothesis and position, the index of the hypothesis that wrote the
        key and value to attend to. Beam search reorders `writers` instead of the keys and values.
        """
        sentences = batch if context.encoded_BSD is None else context.encoded_BSD.shape[0]
        beams = batch // sentences
        return (
            spec.empty((sentences, self.kv_heads, self.size, beams), 3),
            spec.empty((sentences, self.kv_heads, beams, self.size), 2),
            spec.empty((batch, 1), 1, jnp.int32, -1),
        )

    def step(
        self, x_X1D: jax.Array, cache: Any, index: jax.Array, context: Context
    ) -> tuple[jax.Array, Any]:
        """Decodes one token of each row; returns the output (X, 1, D) and the new cache.

        The X = B * A rows are A hypotheses for each of B sentences. Attention is computed for each sentence: its
        queries come from the current tokens of its A hypotheses (T = A), and its keys are the cached keys of its A
        hypotheses at L positions (S = L * A).
        """
        keys, values, writers = cache
        x_BTD = x_X1D.reshape(-1, keys.each, x_X1D.shape[-1])
        slots_A = jnp.arange(keys.each)
        query_BTHK, *new = self._all(x_BTD, jnp.full(keys.each, index))
        key_BGKT, value_BGTK = cache_layout(*new)
        own_X1 = jnp.tile(slots_A, len(x_BTD))[:, None]
        keys, values = keys.write(key_BGKT, index), values.write(value_BGTK, index)
        writers = writers.write(own_X1.astype(jnp.int32), index)

        def mask(writers_XL: jax.Array, positions_L: jax.Array) -> jax.Array:
            writers_XL = jnp.where(self._seen(positions_L, index), writers_XL, -1)
            mask_XLA = writers_XL[..., None] == slots_A
            return mask_XLA.reshape(*x_BTD.shape[:2], -1)[:, None]

        y_BTHK = attend_cached(
            query_BTHK,
            [part for part, _ in keys.parts()],
            [part for part, _ in values.parts()],
            [mask(*part) for part in writers.parts()],
        )
        return self._merge(y_BTHK).reshape(x_X1D.shape), (keys, values, writers)

    def prefill(self, x_BLD: jax.Array, cache: Any, context: Context) -> Any:
        """Returns the cache filled with L tokens. Every sentence must have a single hypothesis."""
        keys, values, writers = cache
        _, *new = self._all(x_BLD, jnp.arange(x_BLD.shape[1]))
        key_BGKL, value_BGLK = cache_layout(*new)
        own_BL = jnp.zeros(x_BLD.shape[:2], jnp.int32)
        return keys.filled(key_BGKL), values.filled(value_BGLK), writers.filled(own_BL)
