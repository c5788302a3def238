"""SentEval's classifier (Conneau and Kiela, 2018) of sentence vectors: one for each layer, all trained at once.

The classifier has one hidden layer of sigmoid units, or none if the hidden size is 0. Training: Adam, batches of 64, an
L2 penalty on all parameters. Validation accuracy selects the hidden size, the dropout rate before the sigmoid, and the
L2 penalty. One compiled program trains the classifiers of all layers and all grid points with the same hidden size
(two nested `vmap`).

Shape letters of this module: J grid points with the same hidden size, U updates of `fit`.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from common.model.loss import cross_entropy

BATCH = 64
EPOCH = 4
"""Number of epochs between two evaluations."""

PATIENCE = 5
"""Early stopping: a classifier stops once more evaluations than this number have brought no new best accuracy. A new
best accuracy does not reset the count."""

LAST = 200
"""All classifiers stop at the first evaluation after more than this number of epochs."""

_OPTIMIZER = optax.adam(1e-3)
_EVAL_BATCH = 1024


@dataclass(frozen=True)
class Grid:
    """Grid of hyperparameters. The first grid point with the best validation accuracy is selected.

    Attributes:
      hidden: hidden sizes; 0 means no hidden layer.
      dropout: dropout rates before the sigmoid.
      penalty: L2 penalties.
    """

    hidden: tuple[int, ...] = (50,)
    dropout: tuple[float, ...] = (0.0,)
    penalty: tuple[float, ...] = (1e-5, 1e-4, 1e-3, 1e-2)


GRIDS = {"quick": Grid(), "full": Grid(hidden=(50, 100, 200), dropout=(0.0, 0.1, 0.2))}


@dataclass(frozen=True)
class Probe:
    """The hyperparameters selected for one layer, and the classifier's validation and test accuracy, from 0 to 1."""

    hidden: int
    dropout: float
    penalty: float
    valid: float
    test: float


def probe(
    features: Mapping[str, np.ndarray],
    classes: Mapping[str, np.ndarray],
    count: int,
    *,
    grid: Grid = GRIDS["quick"],
    seed: int = 1,
) -> list[Probe]:
    """Trains classifiers on "train", selects hyperparameters on "valid", and measures accuracy on "test".

    Args:
      features: split -> sentence vectors of every layer, (P, E, D) float32.
      classes: split -> class numbers below `count`, (E,).
      seed: seed of initial parameters, order of examples and dropout. All layers and grid points share the seed.

    Returns:
      The selected hyperparameters and the accuracies for each of the P layers.
    """
    best: list[Probe] = []
    on_device = {split: jnp.asarray(features_PED) for split, features_PED in features.items()}
    classes = {split: jnp.asarray(classes_E) for split, classes_E in classes.items()}
    for hidden in grid.hidden:
        members = list(itertools.product(grid.dropout, grid.penalty))
        valid_PJ, test_PJ = _train(on_device, classes, count, hidden, members, seed)
        chosen_P = valid_PJ.argmax(axis=1)
        probes = [
            Probe(hidden, *members[j], float(valid_PJ[p, j]), float(test_PJ[p, j]))
            for p, j in enumerate(chosen_P)
        ]
        best = [
            max(pair, key=lambda p: p.valid) for pair in zip(best or probes, probes, strict=True)
        ]
    return best


def _train(
    features: Mapping[str, jax.Array],
    classes: Mapping[str, jax.Array],
    count: int,
    hidden: int,
    members: list[tuple[float, float]],
    seed: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns validation and test accuracies, (P, J) each, at the evaluation with the best validation accuracy.

    `members` are the J grid points, each (dropout rate, L2 penalty).
    """
    layers, rows, width = features["train"].shape
    dropout_J, penalty_J = (jnp.asarray(values) for values in zip(*members, strict=True))
    shape = (layers, len(members))
    first = initial_parameters(jax.random.key(seed), width, hidden, count)
    values = jax.tree.map(lambda x: jnp.broadcast_to(x, (*shape, *x.shape)), first)
    moments = jax.vmap(jax.vmap(_OPTIMIZER.init))(values)
    best, best_PJ = values, np.full(shape, -1.0)
    stale_PJ, passes = np.zeros(shape, int), 0
    while passes <= LAST and (stale_PJ <= PATIENCE).any():
        order_UB = np.concatenate([order(rows, seed, passes + i) for i in range(EPOCH)])
        values, moments = fit(
            values,
            moments,
            features["train"],
            classes["train"],
            order_UB,
            dropout_J,
            penalty_J,
            jax.random.fold_in(jax.random.key(seed), 1 + passes),
        )
        passes += EPOCH
        accuracy_PJ = accuracy(values, features["valid"], classes["valid"])
        active_PJ = stale_PJ <= PATIENCE
        better_PJ = active_PJ & (accuracy_PJ > best_PJ)
        best = _select(better_PJ, values, best)
        best_PJ = np.where(better_PJ, accuracy_PJ, best_PJ)
        stale_PJ += active_PJ & ~better_PJ
    return best_PJ, accuracy(best, features["test"], classes["test"])


def initial_parameters(key: jax.Array, width: int, hidden: int, count: int) -> list[tuple]:
    """Draws the kernels and biases of a classifier from U(-1/sqrt(fan-in), 1/sqrt(fan-in)), as in PyTorch."""
    sizes = [width, hidden, count] if hidden else [width, count]
    layers = []
    for number, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
        bound = fan_in**-0.5
        keys = jax.random.split(jax.random.fold_in(key, number))
        draw = partial(jax.random.uniform, minval=-bound, maxval=bound)
        layers.append((draw(keys[0], (fan_in, fan_out)), draw(keys[1], (fan_out,))))
    return layers


def order(rows: int, seed: int, number: int, batch: int = BATCH) -> np.ndarray:
    """Returns the batches of epoch `number` over `rows` examples, (U, B): shuffled indices, padded with -1."""
    shuffled = np.random.default_rng((seed, number)).permutation(rows)
    return _rows(shuffled, batch)


def _rows(numbers: np.ndarray, batch: int) -> np.ndarray:
    filled = np.full(-(-len(numbers) // batch) * batch, -1, np.int32)
    filled[: len(numbers)] = numbers
    return filled.reshape(-1, batch)


def _logits(layers: list[tuple], x_BD: jax.Array, scale_BF: jax.Array | float = 1.0) -> jax.Array:
    """Returns logits (B, C). The dropout mask `scale_BF` multiplies the hidden layer before the sigmoid."""
    *below, (kernel, bias) = layers
    for lower, shift in below:
        x_BD = jax.nn.sigmoid((x_BD @ lower + shift) * scale_BF)
    return x_BD @ kernel + bias


@jax.jit
def fit(
    values: list[tuple],
    moments: Any,
    features_PED: jax.Array,
    classes_E: jax.Array,
    order_UB: jax.Array,
    dropout_J: jax.Array,
    penalty_J: jax.Array,
    key: jax.Array,
) -> tuple[list[tuple], Any]:
    """Returns parameters and Adam moments, (P, J, ...), after one update for each batch in `order_UB`."""
    hidden = values[0][1].shape[-1]

    def loss(layers, x_BD, classes_B, weights_B, rate, penalty, noise_BF):
        scale_BF = (noise_BF >= rate) / (1 - rate)
        loss_B = cross_entropy(_logits(layers, x_BD, scale_BF), classes_B)
        mean = jnp.sum(loss_B * weights_B) / jnp.sum(weights_B)
        return mean + penalty / 2 * sum(jnp.sum(x**2) for x in jax.tree.leaves(layers))

    def update(layers, moments, *rest):
        updates, moments = _OPTIMIZER.update(jax.grad(loss)(layers, *rest), moments)
        return optax.apply_updates(layers, updates), moments

    shared = (None, None)
    members = jax.vmap(update, in_axes=(0, 0, None, *shared, 0, 0, None))
    update_all = jax.vmap(members, in_axes=(0, 0, 0, *shared, None, None, None))

    def step(state, now):
        number, ids_B = now
        at_B = jnp.maximum(ids_B, 0)
        noise_BF = jax.random.uniform(jax.random.fold_in(key, number), (len(ids_B), hidden))
        batch = features_PED[:, at_B], classes_E[at_B], (ids_B >= 0).astype(jnp.float32)
        return update_all(*state, *batch, dropout_J, penalty_J, noise_BF), None

    state, _ = jax.lax.scan(step, (values, moments), (jnp.arange(len(order_UB)), order_UB))
    return state


def accuracy(values: list[tuple], features_PED: jax.Array, classes_E: jax.Array) -> np.ndarray:
    """Returns the accuracy of each classifier, (P, J), from 0 to 1."""
    rows = len(classes_E)
    right_PJ = _right(
        values, features_PED, classes_E, _rows(np.arange(rows), min(rows, _EVAL_BATCH))
    )
    return np.asarray(right_PJ, np.float64) / rows


@jax.jit
def _right(values, features_PED, classes_E, order_UB):
    classify = jax.vmap(jax.vmap(_logits, in_axes=(0, None)))

    def add(right_PJ, ids_B):
        at_B = jnp.maximum(ids_B, 0)
        logits_PJBC = classify(values, features_PED[:, at_B])
        hits_PJB = (logits_PJBC.argmax(-1) == classes_E[at_B]) & (ids_B >= 0)
        return right_PJ + hits_PJB.sum(-1), None

    shape = values[0][1].shape[:2]
    return jax.lax.scan(add, jnp.zeros(shape, jnp.int32), order_UB)[0]


@jax.jit
def _select(condition_PJ: jax.Array, new: Any, old: Any) -> Any:
    def select(new, old):
        wide = condition_PJ.reshape(*condition_PJ.shape, *(1,) * (new.ndim - 2))
        return jnp.where(wide, new, old)

    return jax.tree.map(select, new, old)
