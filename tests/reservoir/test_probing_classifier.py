"""SentEval's classifier equals a slow reference, and solves problems with a known answer.

Shape letters of this module: J grid points, U updates, as in `reservoir.probing.classifier`.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reservoir.probing import classifier
from reservoir.probing.classifier import BATCH, EPOCH, GRIDS, LAST, Grid, probe

SIZES = {"train": 300, "valid": 200, "test": 200}


def problem(label, layers: int = 1, width: int = 4, sizes=SIZES, seed: int = 0) -> tuple:
    """Returns normally distributed features (P, E, D) and classes (E,) of each split.

    `label` maps the last layer's features (E, D) to classes.
    """
    generator = np.random.default_rng(seed)
    features = {
        split: generator.standard_normal((layers, rows, width)).astype(np.float32)
        for split, rows in sizes.items()
    }
    classes = {
        split: label(features_PED[-1]).astype(np.int32) for split, features_PED in features.items()
    }
    return features, classes


def noise(x_ED: np.ndarray) -> np.ndarray:
    return np.random.default_rng(len(x_ED)).integers(0, 2, len(x_ED))


def test_linear_problem_is_learned_from_the_informative_layer_only():
    """The accuracy of the uninformative layer stays at chance."""
    features, classes = problem(lambda x_ED: x_ED[:, 0] + x_ED[:, 1] > 0, layers=2)
    blind, seeing = probe(features, classes, 2)
    assert seeing.test > 0.93
    assert abs(blind.test - 0.5) < 0.1


@pytest.mark.medium
def test_exclusive_or_needs_the_hidden_layer():
    features, classes = problem(
        lambda x_ED: (x_ED[:, 0] > 0) ^ (x_ED[:, 1] > 0),
        width=2,
        sizes=SIZES | {"train": 2000},
        seed=1,
    )
    # Larger inputs make the problem easier, because Adam at 0.001 takes small steps.
    features = {split: 4 * features_PED for split, features_PED in features.items()}
    one = {"penalty": (1e-5,)}
    assert probe(features, classes, 2, grid=Grid(**one))[0].test > 0.9
    assert probe(features, classes, 2, grid=Grid(hidden=(0,), **one))[0].test < 0.7
    assert probe(features, classes, 2, grid=Grid(hidden=(0, 50), **one))[0].hidden == 50


@pytest.mark.medium
def test_accuracy_on_random_labels_is_chance():
    sizes = {"train": 400, "valid": 1000, "test": 1000}
    (found,) = probe(*problem(noise, sizes=sizes), 2)
    assert abs(found.test - 0.5) < 4 * math.sqrt(0.25 / 1000)


def test_parameters_of_the_best_validation_accuracy_are_tested(monkeypatch):
    """The test split is the validation split, so test accuracy must be the best validation accuracy, not the last."""
    features, classes = problem(noise)
    features["test"], classes["test"] = features["valid"], classes["valid"]
    seen = []
    measure = classifier.accuracy

    def watch(*arguments):
        seen.append(measure(*arguments))
        return seen[-1]

    monkeypatch.setattr(classifier, "accuracy", watch)
    (found,) = probe(features, classes, 2, grid=Grid(penalty=(1e-5,)))
    looks = [float(accuracy_PJ[0, 0]) for accuracy_PJ in seen[:-1]]
    assert found.test == found.valid == max(looks) > looks[-1]


def epochs(monkeypatch, accuracies: list[list[float]]) -> tuple[int, classifier.Probe]:
    """Returns how often two classifiers with made-up accuracies are evaluated, and the selected `Probe`.

    An entry of `accuracies` has the accuracies of both classifiers at one evaluation. After the last entry, both
    accuracies are 0.
    """
    trained, looks = [], iter(accuracies)
    fit = classifier.fit
    monkeypatch.setattr(classifier, "fit", lambda *a: trained.append(len(a[4])) or fit(*a))
    monkeypatch.setattr(classifier, "accuracy", lambda *a: np.array([next(looks, [0.0, 0.0])]))
    (found,) = probe(*problem(noise), 2, grid=Grid(penalty=(1e-5, 1e-4)))
    assert set(trained) == {EPOCH * -(-SIZES["train"] // BATCH)}
    return len(trained), found


def test_early_stopping_after_six_evaluations_without_improvement(monkeypatch):
    """As in SentEval, the six evaluations need not be consecutive. An improvement after the stop has no effect."""
    first = [0.5, 0.4, 0.6, 0.4, 0.7, 0.1, 0.1, 0.1, 0.1, 0.99, 0.99]
    # The second classifier keeps improving, so training continues after the first classifier stopped at evaluation 9.
    steps = [[accuracy, look / 100] for look, accuracy in enumerate(first)]
    number, found = epochs(monkeypatch, steps)
    assert (number, found.valid, found.penalty) == (len(first) + 6, 0.7, 1e-5)


@pytest.mark.medium
def test_training_ends_after_two_hundred_epochs(monkeypatch):
    number, _ = epochs(monkeypatch, [[n / 100, n / 100] for n in range(80)])
    assert number == LAST // EPOCH + 1


@pytest.mark.medium
def test_validation_chooses_the_l2_penalty():
    """A destructive penalty is never selected. Of equally good hidden sizes, the first is selected."""
    features, classes = problem(lambda x_ED: x_ED[:, 0] > 0)
    for penalty in ((100.0, 1e-5), (1e-5, 100.0)):
        (found,) = probe(features, classes, 2, grid=Grid(penalty=penalty))
        assert found.penalty == 1e-5 and found.test > 0.9
    (useless,) = probe(features, classes, 2, grid=Grid(penalty=(100.0,)))
    assert abs(useless.test - 0.5) < 0.1
    constant = {split: np.zeros_like(features_PED) for split, features_PED in features.items()}
    assert probe(constant, classes, 2, grid=Grid(hidden=(2, 3)))[0].hidden == 2


@pytest.mark.medium
def test_results_depend_on_the_seed_not_on_other_layers():
    features, classes = problem(lambda x_ED: x_ED[:, 0] * x_ED[:, 1] > 0, layers=2)
    both = probe(features, classes, 2, seed=3)
    assert both == probe(features, classes, 2, seed=3)
    last = {split: features_PED[1:] for split, features_PED in features.items()}
    (alone,) = probe(last, classes, 2, seed=3)
    assert alone.test == pytest.approx(both[1].test, abs=0.02)
    assert [p.test for p in both] != [p.test for p in probe(features, classes, 2, seed=4)]


def test_each_epoch_shuffles_every_sentence_once():
    one, other = (classifier.order(150, 1, number) for number in (0, 1))
    assert one.shape == (3, 64)
    for order_UB in (one, other):
        assert sorted(order_UB.ravel().tolist()) == [-1] * 42 + list(range(150))
    assert one[0].tolist() != other[0].tolist()
    assert (one == classifier.order(150, 1, 0)).all()


def test_initial_parameters_match_pytorch():
    (kernel, bias), (top, _) = classifier.initial_parameters(jax.random.key(0), 400, 100, 3)
    for values in (kernel, bias):
        assert float(jnp.abs(values).max()) == pytest.approx(0.05, rel=0.05)
        assert float(values.std()) == pytest.approx(0.05 / math.sqrt(3), rel=0.2)
    assert (top.shape, float(jnp.abs(top).max()) <= 0.1) == ((100, 3), True)


def slow_training(layers, x_ED, y_E, order_UB, rate, penalty, noises):
    """Trains one classifier by Adam (Kingma and Ba, 2015) in float64 and returns its parameters.

    Gradients are computed sentence by sentence.
    """
    values = [np.asarray(array, np.float64) for layer in layers for array in layer]
    first, second = ([np.zeros_like(v) for v in values] for _ in range(2))
    for number, ids in enumerate(order_UB, start=1):
        kernel, bias, top, shift = values
        grads = [penalty * v for v in values]
        ids = [(row, n) for row, n in enumerate(ids) if n >= 0]
        for row, n in ids:
            x = x_ED[n].astype(np.float64)
            scale = (np.asarray(noises[number - 1])[row] >= rate) / (1 - rate)
            hidden = 1 / (1 + np.exp(-(x @ kernel + bias) * scale))
            logits = hidden @ top + shift
            d_logits = np.exp(logits) / np.exp(logits).sum()
            d_logits[y_E[n]] -= 1
            d_logits /= len(ids)
            d_hidden = top @ d_logits * hidden * (1 - hidden) * scale
            parts = np.outer(x, d_hidden), d_hidden, np.outer(hidden, d_logits), d_logits
            grads = [g + part for g, part in zip(grads, parts, strict=True)]
        first = [0.9 * m + 0.1 * g for m, g in zip(first, grads, strict=True)]
        second = [0.999 * v + 0.001 * g * g for v, g in zip(second, grads, strict=True)]
        values = [
            w - 0.001 * (m / (1 - 0.9**number)) / (np.sqrt(v / (1 - 0.999**number)) + 1e-8)
            for w, m, v in zip(values, first, second, strict=True)
        ]
    return values


def test_training_is_adam_with_l2_and_dropout_before_the_sigmoid():
    """Parameters for two layers and three grid points equal the reference. The last batch of an epoch is partial."""
    layers, rows, width, hidden, count = 2, 150, 5, 7, 3
    generator = np.random.default_rng(0)
    features_PED = generator.standard_normal((layers, rows, width)).astype(np.float32)
    y_E = generator.integers(0, count, rows).astype(np.int32)
    members = [(0.0, 0.0), (0.0, 0.3), (0.4, 0.01)]
    rates_J, penalties_J = (jnp.array(part) for part in zip(*members, strict=True))
    start = classifier.initial_parameters(jax.random.key(1), width, hidden, count)
    values = jax.tree.map(lambda x: jnp.broadcast_to(x, (layers, 3, *x.shape)), start)
    moments = jax.vmap(jax.vmap(classifier._OPTIMIZER.init))(values)
    order_UB = np.concatenate([classifier.order(rows, 1, number) for number in range(2)])
    key = jax.random.key(5)
    arguments = (jnp.asarray(features_PED), jnp.asarray(y_E), order_UB, rates_J, penalties_J, key)
    found, _ = classifier.fit(values, moments, *arguments)
    noises = [
        jax.random.uniform(jax.random.fold_in(key, n), (BATCH, hidden))
        for n in range(len(order_UB))
    ]
    for k in range(layers):
        for g, (rate, penalty) in enumerate(members):
            expected = slow_training(start, features_PED[k], y_E, order_UB, rate, penalty, noises)
            leaves = [np.asarray(array[k, g]) for layer in found for array in layer]
            for one, other in zip(leaves, expected, strict=True):
                np.testing.assert_allclose(one, other, atol=2e-5)


def test_accuracy_counts_every_sentence_once(monkeypatch):
    """The batches have 64 sentences. The last batch has fewer."""
    monkeypatch.setattr(classifier, "_EVAL_BATCH", 64)
    features, classes = problem(lambda x_ED: x_ED[:, 0] > 0.3)
    kernel = jnp.zeros((1, 1, 4, 2)).at[..., 0, 1].set(1.0)
    bias = jnp.zeros((1, 1, 2)).at[..., 0].set(0.3)
    for split in SIZES:
        found = classifier.accuracy(
            [(kernel, bias)], jnp.asarray(features[split]), jnp.asarray(classes[split])
        )
        assert found.tolist() == [[1.0]]
        wrong = jnp.asarray(1 - classes[split]).at[:7].set(classes[split][:7])
        found = classifier.accuracy([(kernel, bias)], jnp.asarray(features[split]), wrong)
        assert found[0, 0] == pytest.approx(7 / SIZES[split])


def test_grids_match_senteval():
    assert GRIDS["quick"] == Grid((50,), (0.0,), (1e-5, 1e-4, 1e-3, 1e-2))
    assert GRIDS["full"] == Grid((50, 100, 200), (0.0, 0.1, 0.2), (1e-5, 1e-4, 1e-3, 1e-2))
