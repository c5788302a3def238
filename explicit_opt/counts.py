"""Co-occurrences of tokens without a matrix of inputs: integer counts, and the noise as a rank-one part (3.1.1).

M tokens, N vocabulary, K lags, D = N rows of a table (the token before).
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
"""Logical axes of every (K, N, N) table: one rule for counts, weights and moments."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["keep_N", "spill_N", "uniform_N"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Noise:
    """The noisy embedding E_n = q_n e_n + (1 - q_n) p of section 3.1.1, whose rows sum to 1.

    q_n = f_n / (f_n + 1) and p_n = (1 - f_n / M) / (N - 1), f the counts of the targets. E is never built:
    E A = q * A + (1 - q) (p^T A).

    Attributes:
      keep_N: q.
      spill_N: 1 - q, kept apart because a frequent token's q is 1 in float32.
      uniform_N: p.
    """

    keep_N: jax.Array
    spill_N: jax.Array
    uniform_N: jax.Array

    @classmethod
    def of(cls, targets_N: np.ndarray) -> "Noise":
        """From how often each token is a target; `<pad>` never is, and becomes p."""
        counts = np.asarray(targets_N, np.float64)
        uniform = (1 - counts / counts.sum()) / (len(counts) - 1)
        parts = counts / (counts + 1), 1 / (counts + 1), uniform
        return cls(*(jnp.asarray(part, jnp.float32) for part in parts))


def count_pairs(
    contexts_KM: jax.Array, targets_M: jax.Array, vocabulary: int, mesh: Mesh
) -> jax.Array:
    """How often token j stood k places before token i: (K, N, N) int32, exact.

    Rows and columns of the tables lie where a parameter's would (fsdp, tensor); every device counts those pairs of
    its share of the text that fall into its block, and the shares are added over the data axis.

    Args:
      contexts_KM: the token at each lag, sharded as `text_sharding` says.
      targets_M: -1 where there is no target (the filling up of a last share).
    """
    with jax.enable_x64(True):
        return _count_pairs(contexts_KM, targets_M, vocabulary, mesh)


def text_sharding(mesh: Mesh) -> tuple[NamedSharding, NamedSharding]:
    """Where contexts (K, M) and targets (M,) lie: cut over the data axis only."""
    return (
        NamedSharding(mesh, PartitionSpec(None, "data")),
        NamedSharding(mesh, PartitionSpec("data")),
    )


def language_solution(
    counts_KNN: jax.Array,
    noise: Noise,
    targets_N: np.ndarray,
    *,
    concatenate: bool,
    exponent: float | None = None,
    sign: int = -1,
    floor: float = FLOOR,
) -> jax.Array:
    """Eq. (3) for inputs that are sums (`concatenate` False) or concatenations of K noisy embeddings.

    F = E^T C = q * C + p (1 - q)^T C per lag. Every row of E sums to 1, so the norm is K and the sums over the
    features are K times the counts of the targets, exactly.

    Returns:
      (K, N, N) float32 tables for concatenations, (1, N, N) for sums, lying as the counts do.
    """
    lags = counts_KNN.shape[0]
    share = sign * prior_exponent(lags, exponent)
    totals_N = np.maximum(lags * np.asarray(targets_N, np.float64), floor)
    prior_N = (share * np.log(totals_N)).astype(np.float32)
    with jax.enable_x64(True):
        return _tables(counts_KNN, noise, prior_N, floor, concatenate)


@partial(jax.jit, static_argnames=("vocabulary", "mesh"))
def _count_pairs(contexts_KM, targets_M, vocabulary, mesh):
    lags = contexts_KM.shape[0]
    place = sharding.spec(TABLE_AXES, (lags, vocabulary, vocabulary), mesh)
    ways = [1 if axis is None else mesh.shape[axis] for axis in place[1:]]
    rows, columns = (vocabulary // n for n in ways)

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(PartitionSpec(None, "data"), PartitionSpec("data")),
        out_specs=place,
        check_vma=False,
    )
    def count(contexts_KM, targets_M):
        first = [0 if axis is None else jax.lax.axis_index(axis) for axis in place[1:]]
        j, i = contexts_KM - first[0] * rows, targets_M - first[1] * columns
        inside = (j >= 0) & (j < rows) & (i >= 0) & (i < columns)
        # One index per pair; a table of 65,536 tokens has more than 2^31 places.
        index = jnp.int32 if rows * columns < 2**31 else jnp.int64
        places = jnp.where(inside, j.astype(index) * columns + i, rows * columns)

        def of_lag(places_M):
            return jnp.zeros(rows * columns, jnp.int32).at[places_M].add(1, mode="drop")

        counts = jax.lax.map(of_lag, places)
        return jax.lax.psum(counts.reshape(lags, rows, columns), "data")

    return count(contexts_KM, targets_M)


@partial(jax.jit, static_argnames="concatenate")
def _tables(counts_KNN, noise, prior_N, floor, concatenate):
    if not concatenate:
        counts_KNN = counts_KNN.sum(0, keepdims=True, dtype=counts_KNN.dtype)
    spill_N = noise.spill_N.astype(jnp.float64)

    def of_lag(counts_NN):
        spilled_N = (spill_N @ counts_NN.astype(jnp.float64)).astype(jnp.float32)
        found_NN = noise.keep_N[:, None] * counts_NN.astype(jnp.float32)
        found_NN += noise.uniform_N[:, None] * spilled_N
        return jnp.log(jnp.maximum(found_NN, jnp.float32(floor))) + prior_N

    # Lag by lag: no more than one table in float64 at a time.
    return jax.lax.map(of_lag, counts_KNN)
