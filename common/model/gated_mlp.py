"""A feed-forward layer with a spatial gating unit: half of its channels gate the other half (Liu et al., 2021)."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from common.model.block import Context, Sublayer
from common.model.dropout import Key
from common.model.feed_forward import ACTIVATIONS
from common.model.linear import Linear
from common.model.norm import LayerNorm
from common.model.spatial import Spatial

if TYPE_CHECKING:
    from common.model.decode_cache import CacheSpec


def gate(spatial: Spatial, v_BLF: jax.Array, lengths_B: jax.Array | None) -> jax.Array:
    """Returns the gate W v + b, (B, L, F) in float32. Zeroes v at padding if the map is not causal.

    Args:
      lengths_B: number of tokens of each row; None for rows without padding.

    Raises:
      ValueError: the sequence is longer than the map's maximum length.
    """
    length = v_BLF.shape[1]
    if length > spatial.length:
        raise ValueError(
            f"the sequence has {length} positions, but the spatial map has only {spatial.length}:"
            " shorten the sequence, or increase the length of the spatial map"
        )
    if not spatial.causal and lengths_B is not None:
        valid_BL = jnp.arange(length) < lengths_B[:, None]
        v_BLF = jnp.where(valid_BL[..., None], v_BLF, 0)
    return spatial(v_BLF)


class GatedMlp(Sublayer):
    """Computes W2 (u * f(v)) + b2, equations 1, 2 and 4 of Liu et al. (2021), with biases.

    u and v are the two halves of activation(W1 x + b1), (B, L, F) each with F = hidden / 2. f(v) = W norm(v) + b is an
    affine map over positions.

    Args:
      spatial: the map over positions with the weights W and the bias b.
      attention: function that makes an attention layer, whose output (B, L, F) is added to f(v); None for no attention.
        The constructor calls this function last, so that the other parameters of this layer have the same initial
        values with and without attention.

    Raises:
      ValueError: `hidden` is not a multiple of twice the number of heads of `spatial`.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        spatial: Spatial,
        *,
        rngs: nnx.Rngs,
        activation: str = "gelu",
        attention: Callable[[], Sublayer] | None = None,
    ):
        if hidden % (2 * spatial.heads):
            raise ValueError(
                f"hidden={hidden} must be a multiple of {2 * spatial.heads}, which is twice the number of heads of the"
                " spatial map"
            )
        self.up = Linear(width, hidden, ("embed", "mlp"), rngs=rngs)
        self.norm = LayerNorm(hidden // 2, rngs=rngs)
        self.spatial = spatial
        self.down = Linear(hidden // 2, width, ("mlp", "embed"), rngs=rngs)
        self.attention = attention() if attention else None
        self.activation = activation

    def _halves(self, x_BLD: jax.Array) -> tuple[jax.Array, jax.Array]:
        u_BLF, v_BLF = jnp.split(ACTIVATIONS[self.activation](self.up(x_BLD)), 2, axis=-1)
        return u_BLF, self.norm(v_BLF)

    def __call__(self, x_BLD: jax.Array, context: Context, key: Key = None) -> jax.Array:
        u_BLF, v_BLF = self._halves(x_BLD)
        gate_BLF = gate(self.spatial, v_BLF, context.lengths_B)
        if self.attention is not None:
            gate_BLF = gate_BLF + self.attention(x_BLD, context)
        return self.down(u_BLF * gate_BLF.astype(u_BLF.dtype))

    def cache(self, batch: int, spec: "CacheSpec", context: Context) -> Any:
        """Returns a pair of empty caches: of norm(v), and of the attention, which is () without attention.

        Raises a ValueError if the spatial map is not causal.
        """
        if not self.spatial.causal:
            raise ValueError("decoding needs a causal spatial map: set causal=True")
        heads = self.spatial.heads
        gated = spec.empty((batch, heads, 1, self.norm.scale.shape[0] // heads), 2)
        return gated, self.attention.cache(batch, spec, context) if self.attention else ()

    def step(
        self, x_B1D: jax.Array, cache: Any, index: jax.Array, context: Context
    ) -> tuple[jax.Array, Any]:
        """Decodes one token of each row. Applies only row `index` of the spatial map, to the cached norm(v)."""
        gated, attention = cache
        u_B1F, v_B1F = self._halves(x_B1D)
        gated = gated.write(v_B1F.reshape(len(v_B1F), self.spatial.heads, 1, -1), index)
        gate_B1F = self.spatial.step(gated, index)[:, None]
        if self.attention is not None:
            more_B1F, attention = self.attention.step(x_B1D, attention, index, context)
            gate_B1F = gate_B1F + more_B1F
        return self.down(u_B1F * gate_B1F.astype(u_B1F.dtype)), (gated, attention)

    def prefill(self, x_BLD: jax.Array, cache: Any, context: Context) -> Any:
        gated, attention = cache
        _, v_BLF = self._halves(x_BLD)
        v_BLHF = v_BLF.reshape(*v_BLF.shape[:2], self.spatial.heads, -1)
        gated = gated.filled(v_BLHF.transpose(0, 2, 1, 3))
        if self.attention is not None:
            attention = self.attention.prefill(x_BLD, attention, context)
        return gated, attention
