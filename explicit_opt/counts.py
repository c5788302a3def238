"""Counts co-occurrences of tokens and computes eq. (3) for the noisy embedding of section 3.1.1.

The input vectors of the examples are not stored. A table (W, V, V) has the axes lag, context token and target token.

Shape letters of this module: L tokens of a text, V vocabulary, W lags (the paper's K).
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from common import sharding
from explicit_opt.solution import FLOOR, prior_exponent

TABLE_AXES = (None, "embed", "vocab")
"""Logical axes of a (W, V, V) table. Counts, weights and optimizer moments have the same sharding."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Noise:
    """The noisy embedding E_v = q_v e_v + (1 - q_v) p of section 3.1.1, for one-hot e_v. The rows of E sum to 1.

    q_v = f_v / (f_v + 1) and p_v = (1 - f_v / L) / (V - 1), where f_v is the number of times that token v is a target.
    The matrix E is not stored. Products use E A = q * A + (1 - q) (p^T A), for any matrix A.

    Attributes:
      keep_V: q, (V,).
      spill_V: 1 - q, (V,). Stored separately because, for frequent tokens, q is near 1 and 1 - q would lose digits.
      uniform_V: p, (V,).
    """

    keep_V: jax.Array
    spill_V: jax.Array
    uniform_V: jax.Array

    @classmethod
    def of(cls, targets_V: np.ndarray) -> "Noise":
        """Computes the noise. `targets_V` holds the number of times that each token is a target.

        `<pad>` is never a target, so its `keep_V` is 0 and its noisy embedding is `uniform_V`.
        """
        counts = np.asarray(targets_V, np.float64)
        uniform = (1 - counts / counts.sum()) / (len(counts) - 1)
        parts = counts / (counts + 1), 1 / (counts + 1), uniform
        return cls(*(jnp.asarray(part, jnp.float32) for part in parts))


def count_pairs(
    contexts_WL: jax.Array, targets_L: jax.Array, vocabulary: int, mesh: Mesh
) -> jax.Array:
    """Returns the number of times that each token precedes each target at each lag, (W, V, V) int32.

    The table is sharded like parameters (fsdp, tensor). Each device counts the pairs of its text shard that belong to
    its block of the table. A psum over the data axis adds the counts of all text shards.

    Args:
      contexts_WL: the token at each lag before each target, sharded by `text_sharding`.
      targets_L: target tokens. Targets of -1 are padding and are not counted.
    """
    with jax.enable_x64(True):
        return _count_pairs(contexts_WL, targets_L, vocabulary, mesh)


def text_sharding(mesh: Mesh) -> tuple[NamedSharding, NamedSharding]:
    """Returns the shardings of contexts (W, L) and targets (L,): split over the data axis only."""
    return (
        NamedSharding(mesh, PartitionSpec(None, "data")),
        NamedSharding(mesh, PartitionSpec("data")),
    )


def language_solution(
    counts_WVV: jax.Array,
    noise: Noise,
    targets_V: np.ndarray,
    *,
    concatenate: bool,
    exponent: float | None = None,
    sign: int = -1,
) -> jax.Array:
    """Computes eq. (3) for inputs that are W noisy embeddings, concatenated or (`concatenate=False`) summed.

    At each lag, the counts C of `count_pairs` give the co-occurrences F = E^T C = q * C + p (1 - q)^T C. Every row of E
    sums to 1. So K, the L1 norm of every input, is W, and F summed over all features is W times the target counts.

    Args:
      counts_WVV: result of `count_pairs`.
      targets_V: number of times that each token is a target.
      exponent, sign: as in `explicit_solution`.

    Returns:
      float32 tables with the sharding of the counts: (W, V, V) for concatenations, (1, V, V) for sums.
    """
    lags = counts_WVV.shape[0]
    totals_V = np.maximum(lags * np.asarray(targets_V, np.float64), FLOOR)
    prior_V = (sign * prior_exponent(lags, exponent) * np.log(totals_V)).astype(np.float32)
    with jax.enable_x64(True):
        return _tables(counts_WVV, noise, prior_V, concatenate)


@partial(jax.jit, static_argnames=("vocabulary", "mesh"))
def _count_pairs(contexts_WL, targets_L, vocabulary, mesh):
    lags = contexts_WL.shape[0]
    spec = sharding.spec(TABLE_AXES, (lags, vocabulary, vocabulary), mesh)
    shards = [1 if axis is None else mesh.shape[axis] for axis in spec[1:]]
    rows, columns = (vocabulary // n for n in shards)

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(PartitionSpec(None, "data"), PartitionSpec("data")),
        out_specs=spec,
        check_vma=False,
    )
    def count(contexts_WL, targets_L):
        first = [0 if axis is None else jax.lax.axis_index(axis) for axis in spec[1:]]
        j, i = contexts_WL - first[0] * rows, targets_L - first[1] * columns
        inside = (j >= 0) & (j < rows) & (i >= 0) & (i < columns)
        # Index of each pair in the flattened block of the table. Blocks of 2^31 entries or more need int64 indices.
        dtype = jnp.int32 if rows * columns < 2**31 else jnp.int64
        index_WL = jnp.where(inside, j.astype(dtype) * columns + i, rows * columns)

        def count_lag(index_L):
            return jnp.zeros(rows * columns, jnp.int32).at[index_L].add(1, mode="drop")

        counts = jax.lax.map(count_lag, index_WL)
        return jax.lax.psum(counts.reshape(lags, rows, columns), "data")

    return count(contexts_WL, targets_L)


@partial(jax.jit, static_argnames="concatenate")
def _tables(counts_WVV, noise, prior_V, concatenate):
    if not concatenate:
        counts_WVV = counts_WVV.sum(0, keepdims=True, dtype=counts_WVV.dtype)
    spill_V = noise.spill_V.astype(jnp.float64)

    def of_lag(counts_VV):
        spilled_V = (spill_V @ counts_VV.astype(jnp.float64)).astype(jnp.float32)
        found_VV = noise.keep_V[:, None] * counts_VV.astype(jnp.float32)
        found_VV += noise.uniform_V[:, None] * spilled_V
        return jnp.log(jnp.maximum(found_VV, FLOOR)) + prior_V

    # `lax.map` computes one lag at a time, so only one lag's table is in float64.
    return jax.lax.map(of_lag, counts_WVV)
