"""The gMLP: a feed-forward layer whose hidden channels gate each other across positions (Liu et al., 2021).

B batch, L length, D width, F hidden, G = F / 2 gated channels, A width of the tiny attention.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from common.model.block import Context, Sublayer
from common.model.decode_cache import CacheSpec, DecodeCache
from common.model.feed_forward import ACTIVATIONS
from common.model.linear import Linear
from common.model.norm import LayerNorm
from common.model.spatial import Spatial
from common.model.tiny_attention import TinyAttention


class GatedMlp(Sublayer):
    """W2 (u * s(v)) with u, v the halves of activation(W1 x), s(v) = W norm(v) + b over positions (eq. 1 to 3).

    Args:
      spatial: the map over positions, causal or not.
      attention: width of a tiny attention that is added to the gate; 0 leaves it out.
      window, keys_as_values: of that attention.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        spatial: Spatial,
        *,
        rngs: nnx.Rngs,
        activation: str = "gelu",
        attention: int = 0,
        window: int = 0,
        keys_as_values: bool = False,
    ):
        if hidden % (2 * spatial.heads):
            raise ValueError(
                f"hidden {hidden} cannot be halved and shared by {spatial.heads} gate heads"
            )
        self.up = Linear(width, hidden, ("embed", "mlp"), rngs=rngs)
        self.norm = LayerNorm(hidden // 2, rngs=rngs)
        self.spatial = spatial
        self.down = Linear(hidden // 2, width, ("mlp", "embed"), rngs=rngs)
        options = {"causal": spatial.causal, "window": window, "keys_as_values": keys_as_values}
        self.attention = (
            TinyAttention(width, attention, hidden // 2, rngs=rngs, **options)
            if attention
            else None
        )
        self.activation = activation

    def _halves(self, x_BLD: jax.Array) -> tuple[jax.Array, jax.Array]:
        u_BLG, v_BLG = jnp.split(ACTIVATIONS[self.activation](self.up(x_BLD)), 2, axis=-1)
        return u_BLG, self.norm(v_BLG)

    def __call__(
        self, x_BLD: jax.Array, context: Context, key: jax.Array | None = None
    ) -> jax.Array:
        if x_BLD.shape[1] > self.spatial.length:
            raise ValueError(
                f"a sequence of {x_BLD.shape[1]} positions, the spatial map has {self.spatial.length}"
            )
        u_BLG, v_BLG = self._halves(x_BLD)
        if not self.spatial.causal and context.lengths_B is not None:
            valid_BL = jnp.arange(x_BLD.shape[1]) < context.lengths_B[:, None]
            v_BLG = jnp.where(valid_BL[..., None], v_BLG, 0)
        gate_BLG = self.spatial(v_BLG)
        if self.attention is not None:
            gate_BLG = gate_BLG + self.attention(x_BLD, context)
        return self.down(u_BLG * gate_BLG.astype(u_BLG.dtype))

    def cache(self, batch: int, room: CacheSpec, context: Context) -> Any:
        """The gated channels of every position, (B, H, N, G / H), and what the attention needs."""
        if not self.spatial.causal:
            raise ValueError("only a causal gMLP can be decoded step by step")
        heads = self.spatial.heads
        gated = DecodeCache.empty((batch, heads, 1, self.norm.scale.shape[0] // heads), 2, room)
        return gated, self.attention.cache(batch, room, context) if self.attention else ()

    def step(
        self, x_B1D: jax.Array, cache: Any, index: jax.Array, context: Context
    ) -> tuple[jax.Array, Any]:
        """One row of W over what is remembered: O(N G) instead of a pass over the whole sequence."""
        gated, attention = cache
        u_B1G, v_B1G = self._halves(x_B1D)
        gated = gated.write(v_B1G.reshape(len(v_B1G), self.spatial.heads, 1, -1), index)
        gate_B1G = self.spatial.step(gated, index)[:, None]
        if self.attention is not None:
            more_B1G, attention = self.attention.step(x_B1D, attention, index, context)
            gate_B1G = gate_B1G + more_B1G
        return self.down(u_B1G * gate_B1G.astype(u_B1G.dtype)), (gated, attention)

    def prefill(self, x_BLD: jax.Array, cache: Any, context: Context) -> Any:
        gated, attention = cache
        _, v_BLG = self._halves(x_BLD)
        v_BLHG = v_BLG.reshape(*v_BLG.shape[:2], self.spatial.heads, -1)
        gated = gated.filled(v_BLHG.transpose(0, 2, 1, 3))
        if self.attention is not None:
            attention = self.attention.prefill(x_BLD, attention, context)
        return gated, attention
