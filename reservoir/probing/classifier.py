"""SentEval's classifier (Conneau and Kiela, 2018) on every layer of a model at once.

One hidden layer of sigmoids, Adam, batches of 64, L2 on all parameters. The size of the hidden layer, dropout before
the sigmoids and L2 are chosen by the accuracy on validation. All layers of the model, and all members of the grid with
one hidden size, are trained together, as two batch dimensions of one compiled program.

K layers of the model, G members of the grid, N sentences, D width, S steps, B batch, H hidden, C classes.
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
"""Passes over the training set between two looks at validation."""

TENACITY = 5
"""Looks without a new best accuracy, in all, after which one more ends the training."""

LAST = 200
"""Passes after which no further epoch begins."""

_OPTIMIZER = optax.adam(1e-3)
_READ = 1024  # rows classified at once


@dataclass(frozen=True)
class Grid:
    """Values among which validation chooses, the first of those that are equally good. `hidden` 0: no hidden layer."""

    hidden: tuple[int, ...] = (50,)
    dropout: tuple[float, ...] = (0.0,)
    penalty: tuple[float, ...] = (1e-5, 1e-4, 1e-3, 1e-2)


GRIDS = {"quick": Grid(), "full": Grid(hidden=(50, 100, 200), dropout=(0.0, 0.1, 0.2))}


@dataclass(frozen=True)
class Probe:
    """The classifier that was chosen for one layer; accuracies from 0 to 1."""

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
    """Trains on "train", chooses on "valid", measures on "test".

    Args:
      features: of each split, (K, N, D) float32.
      classes: of each split, (N,) numbers below `count`.
      seed: of first values, order and dropout; they are the same for all layers and members of the grid.

    Returns:
      The best for each of the K layers.
    """
    best: list[Probe] = []
    on_device = {split: jnp.asarray(features_KND) for split, features_KND in features.items()}
    classes = {split: jnp.asarray(classes_N) for split, classes_N in classes.items()}
    for hidden in grid.hidden:
        members = list(itertools.product(grid.dropout, grid.penalty))
        valid_KG, test_KG = _train(on_device, classes, count, hidden, members, seed)
        chosen_K = valid_KG.argmax(axis=1)
        found = [
            Probe(hidden, *members[g], float(valid_KG[k, g]), float(test_KG[k, g]))
            for k, g in enumerate(chosen_K)
        ]
        best = [max(pair, key=lambda p: p.valid) for pair in zip(best or found, found, strict=True)]
    return best


def _train(
    features: Mapping[str, jax.Array],
    classes: Mapping[str, jax.Array],
    count: int,
    hidden: int,
    members: list[tuple[float, float]],
    seed: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Accuracies (K, G) on validation and test of each classifier where it was best on validation."""
    layers, rows, width = features["train"].shape
    rates_G, penalties_G = (jnp.asarray(values) for values in zip(*members, strict=True))
    shape = (layers, len(members))
    first = first_values(jax.random.key(seed), width, hidden, count)
    values = jax.tree.map(lambda x: jnp.broadcast_to(x, (*shape, *x.shape)), first)
    moments = jax.vmap(jax.vmap(_OPTIMIZER.init))(values)
    best, best_KG = values, np.full(shape, -1.0)
    misses_KG, passes = np.zeros(shape, int), 0
    while passes <= LAST and (misses_KG <= TENACITY).any():
        order_SB = np.concatenate([order(rows, seed, passes + i) for i in range(EPOCH)])
        values, moments = fit(
            values,
            moments,
            features["train"],
            classes["train"],
            order_SB,
            rates_G,
            penalties_G,
            jax.random.fold_in(jax.random.key(seed), 1 + passes),
        )
        passes += EPOCH
        accuracy_KG = accuracy(values, features["valid"], classes["valid"])
        going_KG = misses_KG <= TENACITY
        better_KG = going_KG & (accuracy_KG > best_KG)
        best = _select(better_KG, values, best)
        best_KG = np.where(better_KG, accuracy_KG, best_KG)
        misses_KG += going_KG & ~better_KG
    return best_KG, accuracy(best, features["test"], classes["test"])


def first_values(key: jax.Array, width: int, hidden: int, count: int) -> list[tuple]:
    """Kernel and bias of each layer, both uniform up to 1/sqrt(fan-in), as PyTorch draws them."""
    sizes = [width, hidden, count] if hidden else [width, count]
    layers = []
    for number, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
        bound = fan_in**-0.5
        keys = jax.random.split(jax.random.fold_in(key, number))
        draw = partial(jax.random.uniform, minval=-bound, maxval=bound)
        layers.append((draw(keys[0], (fan_in, fan_out)), draw(keys[1], (fan_out,))))
    return layers


def order(rows: int, seed: int, number: int, batch: int = BATCH) -> np.ndarray:
    """The batches (S, B) of pass `number`: indices in random order, -1 after the last one."""
    shuffled = np.random.default_rng((seed, number)).permutation(rows)
    return _rows(shuffled, batch)


def _rows(numbers: np.ndarray, batch: int) -> np.ndarray:
    filled = np.full(-(-len(numbers) // batch) * batch, -1, np.int32)
    filled[: len(numbers)] = numbers
    return filled.reshape(-1, batch)


def _logits(layers: list[tuple], x_BD: jax.Array, scale_BH: jax.Array | float = 1.0) -> jax.Array:
    """Classes (B, C). What the hidden layer adds up is multiplied by `scale_BH` before the sigmoid."""
    *below, (kernel, bias) = layers
    for lower, shift in below:
        x_BD = jax.nn.sigmoid((x_BD @ lower + shift) * scale_BH)
    return x_BD @ kernel + bias


@jax.jit
def fit(
    values: list[tuple],
    moments: Any,
    features_KND: jax.Array,
    classes_N: jax.Array,
    order_SB: jax.Array,
    rates_G: jax.Array,
    penalties_G: jax.Array,
    key: jax.Array,
) -> tuple[list[tuple], Any]:
    """Values and moments, (K, G, ...), after a step on each batch of `order_SB`."""
    hidden = values[0][1].shape[-1]

    def loss(layers, x_BD, classes_B, weights_B, rate, penalty, noise_BH):
        scale_BH = (noise_BH >= rate) / (1 - rate)
        loss_B = cross_entropy(_logits(layers, x_BD, scale_BH), classes_B)
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
        noise_BH = jax.random.uniform(jax.random.fold_in(key, number), (len(ids_B), hidden))
        batch = features_KND[:, at_B], classes_N[at_B], (ids_B >= 0).astype(jnp.float32)
        return update_all(*state, *batch, rates_G, penalties_G, noise_BH), None

    state, _ = jax.lax.scan(step, (values, moments), (jnp.arange(len(order_SB)), order_SB))
    return state


def accuracy(values: list[tuple], features_KND: jax.Array, classes_N: jax.Array) -> np.ndarray:
    """Of each classifier, (K, G), from 0 to 1."""
    rows = len(classes_N)
    right_KG = _right(values, features_KND, classes_N, _rows(np.arange(rows), min(rows, _READ)))
    return np.asarray(right_KG, np.float64) / rows


@jax.jit
def _right(values, features_KND, classes_N, order_SB):
    classify = jax.vmap(jax.vmap(_logits, in_axes=(0, None)))

    def add(right_KG, ids_B):
        at_B = jnp.maximum(ids_B, 0)
        logits_KGBC = classify(values, features_KND[:, at_B])
        hits_KGB = (logits_KGBC.argmax(-1) == classes_N[at_B]) & (ids_B >= 0)
        return right_KG + hits_KGB.sum(-1), None

    shape = values[0][1].shape[:2]
    return jax.lax.scan(add, jnp.zeros(shape, jnp.int32), order_SB)[0]


@jax.jit
def _select(condition_KG: jax.Array, new: Any, old: Any) -> Any:
    """`new` where the condition holds."""

    def select(new, old):
        wide = condition_KG.reshape(*condition_KG.shape, *(1,) * (new.ndim - 2))
        return jnp.where(wide, new, old)

    return jax.tree.map(select, new, old)
