"""Class weights: in the loss of a network, of the head, and of the TF-IDF baseline."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression
from sklearn.utils.class_weight import compute_class_weight

from common.data.labelled import LabelledText
from configs.perception import get_config
from perception import baseline, run
from perception.head import solve
from perception.objective import balanced_weights

RARE_E = np.array([0] * 16 + [1] * 3 + [2])


def test_balanced_weights_match_sklearn() -> None:
    weights_E = balanced_weights(RARE_E)
    wanted_C = compute_class_weight("balanced", classes=np.arange(3), y=RARE_E)
    np.testing.assert_allclose(weights_E, wanted_C[RARE_E], rtol=1e-6)
    assert weights_E.mean() == pytest.approx(1)


class Fixed:
    """A classifier that returns given logits for any input."""

    def __init__(self, logits_BC: jax.Array):
        self._logits_BC = logits_BC

    def __call__(self, tokens_BL, lengths_B, key, firsts_B) -> jax.Array:
        return self._logits_BC


@pytest.fixture(scope="module")
def tasks(make, mesh):
    """Returns two tasks on the same data, without and with class weights."""
    return [run.prepare(make(**{"data.balance": x}), mesh)[1] for x in (False, True)]


def test_balanced_loss_weighs_each_example_by_its_class(tasks) -> None:
    """The reference is -sum w_y log p_y and its gradient."""
    plain, balanced = tasks
    (batch, _), (bare, _) = next(balanced.batches(None)), next(plain.batches(None))
    assert "weights" not in bare and batch.keys() == bare.keys() | {"weights"}
    labels_B, classes = batch["labels"], len(balanced.classes)
    logits_BC = np.random.default_rng(0).normal(size=(len(labels_B), classes)).astype(np.float32)
    labels_E = balanced.splits["train"].labels_E
    weight_C = len(labels_E) / (classes * np.bincount(labels_E))
    assert weight_C.std() > 0.01

    def wanted(logits_BC):
        chance_BC = jnp.exp(logits_BC) / jnp.exp(logits_BC).sum(1, keepdims=True)
        return -(weight_C[labels_B] * jnp.log(chance_BC[jnp.arange(len(labels_B)), labels_B])).sum()

    def found(logits_BC):
        return balanced.loss(Fixed(logits_BC), batch, None)[0]

    for ours, reference in zip(
        jax.value_and_grad(found)(logits_BC), jax.value_and_grad(wanted)(logits_BC), strict=True
    ):
        np.testing.assert_allclose(ours, reference, rtol=1e-4, atol=1e-6)
    assert balanced.loss(Fixed(logits_BC), batch, None)[1] == (batch["ids"] >= 0).sum()


def test_batch_spec_matches_batches_with_and_without_class_weights(tasks) -> None:
    for task in tasks:
        spec = task.batch_spec(1).arrays
        batch, _ = next(task.batches(None))
        (sample,) = task.batch_samples()
        assert (
            {n: (x.shape, x.dtype) for n, x in batch.items()}
            == {n: (x.shape, x.dtype) for n, x in spec.items()}
            == {n: (x.shape, x.dtype) for n, x in sample.items()}
        )


def test_balanced_head_matches_balanced_sklearn_regression() -> None:
    generator = np.random.default_rng(0)
    rows_EM = generator.normal(size=(len(RARE_E), 2)) + RARE_E[:, None]
    rows_EM = (rows_EM - rows_EM.mean(0)) / rows_EM.std(0)
    data = rows_EM, RARE_E
    found = solve(data, data, 3, balanced_weights(RARE_E))
    reference = LogisticRegression(C=found.inverse_penalty, class_weight="balanced", tol=1e-8)
    reference.fit(rows_EM, RARE_E)
    np.testing.assert_allclose(found.kernel_MC, reference.coef_.T, atol=1e-3)
    assert abs(found.kernel_MC - solve(data, data, 3).kernel_MC).max() > 0.05


@pytest.mark.parametrize("solved", [True, False])
def test_balanced_baseline_minimises_the_weighted_loss(solved: bool) -> None:
    """The one-against-rest loss is C times the sum of w log(1 + exp(-y z)), plus half the squared norm of the kernel.

    Here C = 1, w is the weight of an example, y is its label (1 or -1) and z its logit.
    """
    from scipy import sparse

    rows_EM = np.random.default_rng(0).normal(size=(len(RARE_E), 2)) + RARE_E[:, None]
    weights_E = balanced_weights(RARE_E).astype(float)
    fitted = baseline.regression(sparse.csr_matrix(rows_EM), RARE_E, 1.0, solved, weights_E)
    found = baseline.Model.of(None, fitted, ("a", "b", "c"))

    def loss(values, sign_E) -> float:
        z_E = rows_EM @ values[:2] + values[2]
        # liblinear also adds the bias to the squared norm.
        return weights_E @ np.logaddexp(0, -sign_E * z_E) + 0.5 * (values**2).sum()

    for number in range(3):
        wanted = minimize(loss, np.zeros(3), args=(np.where(number == RARE_E, 1, -1),)).x
        ours = [*found.kernel_MN[:, number], found.bias_N[number]]
        if solved:
            np.testing.assert_allclose(ours, wanted, atol=0.02)
        else:  # after five epochs on few examples, SGD is far from the optimum but moves towards it
            assert np.dot(ours[:2], wanted[:2]) > 0


@pytest.mark.medium
def test_balance_finds_the_rare_class(tmp_path) -> None:
    """A word marks the rare class, but not reliably. Without class weights, the baseline seldom predicts this class."""
    generator = np.random.default_rng(0)

    def split(count: int) -> LabelledText:
        labels = (np.arange(count) % 20 == 0).astype(np.int32)
        words = [" ".join(generator.choice(list("abcdef"), 6)) for _ in labels]
        marked = generator.random(count) < np.where(labels == 1, 0.9, 0.1)
        texts = [(f"{w} signal" if m else w,) for w, m in zip(words, marked, strict=True)]
        return LabelledText(texts, labels)

    splits, config = {name: split(400) for name in ("train", "valid", "test")}, get_config("tiny")

    def guesses(balance: bool) -> np.ndarray:
        config.data.balance = balance
        return baseline.fit(splits, ("no", "yes"), balance).predictions.guesses_E

    truth = splits["test"].labels_E
    assert guesses(True)[truth == 1].mean() > 0.6 > 0.3 > guesses(False)[truth == 1].mean()
    for balance in (True, False):
        config.data.balance = balance
        summary = baseline.run(config, splits, ("no", "yes"), tmp_path)
        assert summary["config"]["data"]["balance"] is balance
