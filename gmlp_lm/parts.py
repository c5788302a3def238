"""The spatial gating unit and the gMLP block (Liu et al., 2021) for any Flax NNX model.

    from gmlp_lm import GatedMLP

    block = GatedMLP(width=256, hidden=1024, length=512, rngs=nnx.Rngs(0))
    y_BLD = block(x_BLD)  # causal: position m reads positions n <= m

Parameters are float32 `nnx.Param`. The output has the dtype of a floating-point input, otherwise float32.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike

from common.config import check_choice, check_int, check_number, check_rate
from common.errors import check
from common.flax_models import check_rngs, floating
from common.model.block import Context
from common.model.decode_cache import CacheSpec, DecodeCache
from common.model.feed_forward import ACTIVATIONS
from common.model.gated_mlp import GatedMlp, gate
from common.model.norm import LayerNorm
from common.model.spatial import Spatial

__all__ = ["GatedMLP", "SpatialGating"]


def _spatial(
    name: str,
    features: int,
    length: int,
    heads: int,
    epsilon: float,
    causal: bool,
    rngs: nnx.Rngs,
) -> Spatial:
    """Checks the arguments; returns the map over positions. Messages use `name`, the caller's name of `features`."""
    check_int("length", length)
    check_int("heads", heads)
    check_number("epsilon", epsilon)
    check_rngs(rngs, "params")
    check(
        features % (2 * heads) == 0,
        f"{name} must be a multiple of 2 * heads = {2 * heads}, got {features}",
    )
    return Spatial(length, rngs=rngs, heads=heads, epsilon=epsilon, causal=causal)


def _checked(x_BLD: ArrayLike, width: int) -> jax.Array:
    x_BLD = floating(x_BLD)
    check(
        x_BLD.ndim == 3 and x_BLD.shape[2] == width and 0 not in x_BLD.shape,
        f"the input must have the shape (batch, positions, {width}), without empty axes, got {x_BLD.shape}",
    )
    return x_BLD


def _checked_lengths(lengths_B: ArrayLike | None, batch: int) -> jax.Array | None:
    if lengths_B is None:
        return None
    check(
        jnp.shape(lengths_B) == (batch,),
        f"lengths_B must have the shape ({batch},), got {jnp.shape(lengths_B)}: give one length for each row of the"
        " input",
    )
    return jnp.asarray(lengths_B)


def _check_cache(cache: Any, batch: int) -> None:
    check(
        isinstance(cache, tuple) and len(cache) == 2 and isinstance(cache[0], DecodeCache),
        f"the cache must come from the block's method cache, prefill or step, got {cache!r:.80}: make a cache with"
        f" batch={batch}",
    )
    rows = len(cache[0].recent)
    check(
        rows == batch,
        f"the cache is for batch={rows}, but the input has the shape ({batch}, ...): make a cache with batch={batch}",
    )


class SpatialGating(nnx.Module):
    """The spatial gating unit: u * (W norm(v) + b), for the halves u and v of the features.

    W is a trained matrix over positions. Initially b is 1 and, for a small `epsilon`, W is near 0, so the unit returns
    nearly u.

    A causal unit multiplies some later positions by 0. So NaN or infinity at a later position can make earlier outputs
    NaN, as in masked attention. A causal unit has no forward-mode derivative (`jax.jvp`).

    Args:
      features: number of features of the input, 2F.
      length: maximum number of positions.
      heads: number of matrices W. Each mixes the positions of an equal share of the features of v.
      epsilon: W is drawn from U(-epsilon / length, epsilon / length).
      causal: whether position m reads positions n <= m only.
      rngs: source of the parameters (stream "params").

    Raises:
      ValueError: a numeric argument is out of range or of the wrong type, `rngs` lacks the stream, or 2 * `heads` does
        not divide `features`.
    """

    def __init__(
        self,
        features: int,
        length: int,
        *,
        heads: int = 1,
        epsilon: float = 1e-3,
        causal: bool = True,
        rngs: nnx.Rngs,
    ):
        check_int("features", features)
        self.spatial = _spatial("features", features, length, heads, epsilon, causal, rngs)
        self.features = features
        self.norm = LayerNorm(features // 2, rngs=rngs)

    def __call__(self, x_BLF: jax.Array, lengths_B: jax.Array | None = None) -> jax.Array:
        """Maps (B, L, 2F) to (B, L, F), for any L up to `length`.

        Args:
          lengths_B: number of positions of each row, (B,). Later positions are padding. None means no padding. A causal
            unit only checks the shape of `lengths_B`.

        Raises:
          ValueError: L exceeds `length`, the input is not an array of real numbers, or the input or `lengths_B` has the
            wrong shape.
        """
        x_BLF = _checked(x_BLF, self.features)
        lengths_B = _checked_lengths(lengths_B, len(x_BLF))
        u_BLF, v_BLF = jnp.split(x_BLF, 2, axis=-1)
        return u_BLF * gate(self.spatial, self.norm(v_BLF), lengths_B).astype(u_BLF.dtype)


class GatedMLP(nnx.Module):
    """The gMLP block: x + W2 SpatialGating(activation(W1 norm(x))), with biases.

    The block replaces an attention layer together with its feed-forward layer.

    Args:
      width: number of features of input and output, D.
      hidden: number of features before the gating, 2F.
      length: maximum number of positions.
      heads, epsilon, causal: as in `SpatialGating`.
      activation: "gelu", "gelu_tanh", "relu" or "silu".
      dropout: dropout rate of the branch that is added to x. As in `nnx.Dropout`, `model.eval()` turns it off.
      rngs: source of the parameters (stream "params") and of the dropout (stream "dropout").

    Raises:
      ValueError: a numeric argument is out of range or of the wrong type, `activation` is unknown, `rngs` lacks a
        stream, or 2 * `heads` does not divide `hidden`.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        length: int,
        *,
        heads: int = 1,
        epsilon: float = 1e-3,
        causal: bool = True,
        activation: Literal["gelu", "gelu_tanh", "relu", "silu"] = "gelu",
        dropout: float = 0.0,
        rngs: nnx.Rngs,
    ):
        check_int("width", width)
        check_int("hidden", hidden)
        check_choice("activation", activation, ACTIVATIONS)
        check_rate("dropout", dropout)
        check_rngs(rngs, *["dropout"] * bool(dropout))
        spatial = _spatial("hidden", hidden, length, heads, epsilon, causal, rngs)
        self.width = width
        self.norm = LayerNorm(width, rngs=rngs)
        self.gated = GatedMlp(width, hidden, spatial, rngs=rngs, activation=activation)
        self.dropout = nnx.Dropout(dropout, rngs=rngs if dropout else None)

    def __call__(self, x_BLD: jax.Array, lengths_B: jax.Array | None = None) -> jax.Array:
        """Maps (B, L, D) to (B, L, D). `SpatialGating.__call__` documents `lengths_B` and the errors."""
        x_BLD = _checked(x_BLD, self.width)
        lengths_B = _checked_lengths(lengths_B, len(x_BLD))
        y_BLD = self.gated(self.norm(x_BLD), Context(lengths_B=lengths_B))
        return x_BLD + self.dropout(y_BLD)

    def cache(self, batch: int, dtype: Any = jnp.float32) -> Any:
        """Returns an empty cache for `batch` rows of up to `length` positions. `dtype` is the dtype of the inputs.

        Raises a ValueError if the block is not causal, or `batch` is not an integer of at least 1.
        """
        check_int("batch", batch)
        return self.gated.cache(batch, CacheSpec(self.gated.spatial.length, dtype), Context())

    def prefill(self, x_BLD: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        """Returns the output (B, L, D) of the first L positions without dropout, and the filled cache.

        Raises:
          ValueError: L exceeds `length`, the input has the wrong type or shape, or `cache` is not a cache of this class
            or has a different number of rows.
        """
        x_BLD = _checked(x_BLD, self.width)
        _check_cache(cache, len(x_BLD))
        normed_BLD = self.norm(x_BLD)
        y_BLD = self.gated(normed_BLD, Context())
        return x_BLD + y_BLD, self.gated.prefill(normed_BLD, cache, Context())

    def step(self, x_B1D: jax.Array, cache: Any, index: jax.Array) -> tuple[jax.Array, Any]:
        """Returns the output (B, 1, D) of position `index` without dropout, and the new cache.

        The time of a step is linear in `length`.

        Raises:
          ValueError: `index` is not a scalar of an integer dtype, `index` is known (not traced) and not from 0 to
            `length` - 1, the input has the wrong type or shape, or `cache` is not a cache of this class or has a
            different number of rows.
        """
        x_B1D = _checked(x_B1D, self.width)
        check(
            x_B1D.shape[1] == 1,
            f"a decoding step takes one position, got {x_B1D.shape[1]}: use prefill for several positions",
        )
        _check_cache(cache, len(x_B1D))
        last = self.gated.spatial.length - 1
        is_index = jnp.shape(index) == () and jnp.issubdtype(jnp.result_type(index), jnp.integer)
        is_known = not isinstance(index, jax.core.Tracer)
        check(
            is_index and not (is_known and not 0 <= index <= last),
            f"index must be a scalar of an integer dtype, from 0 to {last}, got {index!r:.80}",
        )
        y_B1D, cache = self.gated.step(self.norm(x_B1D), cache, index, Context())
        return x_B1D + y_B1D, cache
