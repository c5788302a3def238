"""Dynamic convolution (Wu et al., 2019): a depthwise convolution whose kernel at a position is computed from
the input at this position."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from common.model.block import Context, Sublayer
from common.model.decode_cache import CacheSpec
from common.model.dropout import Key
from common.model.linear import Linear


class DynamicConvolution(Sublayer):
    """Maps x to W2 y + b2. y[t, h] = sum over w of softmax(Wk v)[t, h, w] v[t + w - before, h], v = GLU(W1 x + b1).

    t is a position, h a head and w a tap; the softmax is over the taps. Before and after the positions of x, and
    at padding unless the layer is causal, v is 0. If W is odd or the layer is causal, the layer equals fairseq's
    dynamic convolution.

    Args:
      taps: number of taps W.
      causal: True: position t reads positions t - W + 1 to t (before = W - 1). False: position t reads W positions
        around t (before = W // 2).
    """

    def __init__(self, width: int, heads: int, taps: int, *, rngs: nnx.Rngs, causal: bool = False):
        if width % heads:
            raise ValueError(
                f"DynamicConvolution: width {width} is not divisible by {heads} heads: change one of them"
            )
        self.enter = Linear(width, 2 * width, ("embed", "mlp"), rngs=rngs)
        self.kernel = Linear(width, heads * taps, ("embed", None), rngs=rngs, bias_init=None)
        self.leave = Linear(width, width, ("mlp", "embed"), rngs=rngs)
        self.heads, self.taps, self.causal = heads, taps, causal

    def _values(self, x_BLD: jax.Array) -> jax.Array:
        value_BLD, gate_BLD = jnp.split(self.enter(x_BLD), 2, axis=-1)
        return value_BLD * jax.nn.sigmoid(gate_BLD)

    def _kernels(self, v_BLD: jax.Array) -> jax.Array:
        kernel_BLHW = self.kernel(v_BLD, jnp.float32).reshape(*v_BLD.shape[:2], self.heads, -1)
        return jax.nn.softmax(kernel_BLHW, axis=-1)

    def _per_head(self, v_BLD: jax.Array) -> jax.Array:
        return v_BLD.reshape(*v_BLD.shape[:2], self.heads, -1)

    def __call__(self, x_BLD: jax.Array, context: Context, key: Key = None) -> jax.Array:
        v_BLD = self._values(x_BLD)
        length = v_BLD.shape[1]
        if not self.causal and context.lengths_B is not None:
            valid_BL = jnp.arange(length) < context.lengths_B[:, None]
            v_BLD = jnp.where(valid_BL[..., None], v_BLD, 0)
        kernel_BLHW = self._kernels(v_BLD).astype(v_BLD.dtype)
        before = self.taps - 1 if self.causal else self.taps // 2
        around = ((0, 0), (before, self.taps - 1 - before), (0, 0), (0, 0))
        padded_BLHK = jnp.pad(self._per_head(v_BLD), around)
        # Sum one product for each tap. XLA fuses the sum into one loop, without W shifted copies of the sequence.
        y_BLHK = sum(
            kernel_BLHW[..., k : k + 1] * padded_BLHK[:, k : k + length] for k in range(self.taps)
        )
        return self.leave(y_BLHK.reshape(x_BLD.shape))

    def cache(self, batch: int, spec: CacheSpec, context: Context) -> Any:
        """Returns an empty cache of v = GLU(W1 x + b1) at every position."""
        if not self.causal:
            raise ValueError(
                "decoding needs a causal convolution: make the DynamicConvolution with causal=True"
            )
        return spec.empty((batch, 1, self.leave.kernel.shape[0]), 1)

    def step(
        self, x_B1D: jax.Array, cache: Any, index: jax.Array, context: Context
    ) -> tuple[jax.Array, Any]:
        v_B1D = self._values(x_B1D)
        cache = cache.write(v_B1D, index)
        kernel_BHW = self._kernels(v_B1D)[:, 0]
        y_BHK = 0
        for part_BSD, positions_S in cache.parts(jnp.maximum(index - self.taps + 1, 0), self.taps):
            tap_S = positions_S - index + self.taps - 1
            used_S = (tap_S >= 0) & (positions_S <= index)
            kernel_BHS = jnp.where(
                used_S, kernel_BHW[:, :, jnp.clip(tap_S, 0, self.taps - 1)], 0
            ).astype(part_BSD.dtype)
            y_BHK += jnp.einsum(
                "bhs,bshc->bhc",
                kernel_BHS,
                self._per_head(part_BSD),
                preferred_element_type=jnp.float32,
            )
        return self.leave(y_BHK.reshape(x_B1D.shape).astype(x_B1D.dtype)), cache

    def prefill(self, x_BLD: jax.Array, cache: Any, context: Context) -> Any:
        return cache.filled(self._values(x_BLD))
