"""The head solved by logistic regression on cached features."""

import json
from argparse import Namespace

import numpy as np
import pytest

from common.errors import UserError
from common.report.runs import load_local
from common.train.command import fit
from common.train.evaluate import PerExample
from common.variables import Params
from perception import adapter_commands, datasets, head, loading
from perception.head import BIAS, INVERSE_PENALTIES, KERNEL, UNSEEN, solve
from perception.weighted_f1 import weighted_f1

SOLVED = {"finetune": "head", "train.steps": 0, "optimizer.learning_rate": 0.0}


def examples(count: int, classes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns features (E, M) and labels (E,) of overlapping classes.

    The features have very different scales, and one feature is constant.
    """
    generator = np.random.default_rng(seed)
    labels_E = generator.integers(classes, size=count)
    centres_CM = np.random.default_rng(0).normal(size=(classes, 5))
    features_EM = centres_CM[labels_E] + generator.normal(size=(count, 5))
    features_EM = features_EM * [1, 100, 0.01, 1, 1] + [0, 5, 0, 1000, 0]
    features_EM[:, 4] = 3
    return features_EM.astype(np.float32), labels_E


@pytest.mark.parametrize("classes", [2, 3])
def test_solved_head_is_stationary_point_of_penalised_loss(classes: int) -> None:
    """The loss is `inverse_penalty` times the summed cross-entropy, plus half the squared norm of the weights.

    The cross-entropy is summed over examples. The weights belong to standardised features.
    """
    train, valid = examples(300, classes, 1), examples(100, classes, 2)
    found = solve(train, valid, classes)
    features_EM, labels_E = train
    scale_M = np.where(features_EM.std(0) > 0, features_EM.std(0), 1)
    rows_EM = (features_EM - features_EM.mean(0, np.float64)) / scale_M
    logits_EC = features_EM @ found.kernel_MC.astype(np.float64) + found.bias_C
    chances_EC = np.exp(logits_EC - logits_EC.max(1, keepdims=True))
    chances_EC /= chances_EC.sum(1, keepdims=True)
    errors_EC = chances_EC - np.eye(classes)[labels_E]
    weights_MC = found.kernel_MC * scale_M[:, None]
    # For two classes, scikit-learn has one weight vector. It is the difference of our two vectors.
    share = 2 if classes == 2 else 1
    gradient_MC = found.inverse_penalty * rows_EM.T @ errors_EC + share * weights_MC
    np.testing.assert_allclose(gradient_MC, 0, atol=2e-3 * found.inverse_penalty * len(labels_E))
    np.testing.assert_allclose(errors_EC.sum(0), 0, atol=0.1)
    assert found.f1 == weighted_f1(valid[1], (valid[0] @ found.kernel_MC + found.bias_C).argmax(1))
    assert found.f1 > 50


def test_head_penalty_is_selected_on_validation() -> None:
    """No penalty has a better validation F1 than the selected penalty."""
    train, valid = examples(40, 3, 1), examples(2000, 3, 2)
    best = solve(train, valid, 3)
    every = [best.f1]
    for penalty in INVERSE_PENALTIES:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(head, "INVERSE_PENALTIES", (penalty,))
            every.append(solve(train, valid, 3).f1)
    assert best.f1 == pytest.approx(max(every), abs=0.2) and min(every) < best.f1 - 0.5


def test_unseen_class_is_never_predicted() -> None:
    features_EM, labels_E = examples(100, 2, 1)
    found = solve((features_EM, 2 * labels_E), (features_EM, 2 * labels_E), 3)
    assert found.bias_C[1] == UNSEEN and not found.kernel_MC[:, 1].any()
    assert set((features_EM @ found.kernel_MC + found.bias_C).argmax(1)) == {0, 2}
    with pytest.raises(UserError, match=r"all training examples \(\d+\) have the same label"):
        solve((features_EM, 0 * labels_E), (features_EM, labels_E), 2)
    same_EC = np.tile([1, 0], (len(labels_E), 1))
    with pytest.raises(UserError, match=r"all training examples \(\d+\) have the same label"):
        solve((features_EM, same_EC), (features_EM, same_EC), 2)


@pytest.fixture(scope="module")
def solved(make, mesh, tmp_path_factory):
    """Returns workdir and summary of a run with a solved head."""
    workdir = tmp_path_factory.mktemp("runs") / "head"
    return workdir, fit(make(**SOLVED), workdir, mesh)


def test_solved_head_run_has_no_seed(solved) -> None:
    workdir, summary = solved
    (found,) = load_local(workdir)
    assert summary["seed"] is None and found.seed is None
    assert summary["steps"] == 0 and summary["start_seconds"] > 0
    assert found.predictions.metrics() == pytest.approx(summary["test"])


def test_solved_head_is_loaded_and_exported(solved, mesh, tmp_path) -> None:
    workdir, summary = solved
    trained = loading.load(workdir, mesh)
    splits, _ = datasets.load(trained.config)
    found_EC = trained.probabilities([text for (text,) in splits["test"].texts])
    f1 = weighted_f1(splits["test"].labels_E, found_EC.argmax(1))
    assert f1 == pytest.approx(summary["test"]["weighted_f1"])
    adapter_commands.export(
        Namespace(run=workdir, pretrained=None, out=tmp_path / "out", mesh=mesh)
    )
    assert (tmp_path / "out" / "classifier" / "model.safetensors").is_file()


@pytest.mark.medium
def test_solved_head_beats_briefly_trained_head(solved, make, mesh, tmp_path) -> None:
    """After four gradient steps, the trained head is far from the optimum."""
    _, summary = solved
    trained = fit(make(finetune="head"), tmp_path / "trained", mesh)
    assert trained["seed"] == 1 and trained["steps"] == 4
    assert summary["best_valid"] > trained["best_valid"]


@pytest.mark.medium
def test_features_are_cached_across_runs(solved, make, mesh, tmp_path, monkeypatch) -> None:
    """A run with the same weights and examples reads the cached features. A run with another max_length does not."""
    monkeypatch.setattr(PerExample, "__call__", None)
    again = fit(make(**SOLVED, seed=2), tmp_path / "again", mesh)
    assert again["test"] == solved[1]["test"]
    with pytest.raises(TypeError):
        fit(make(**SOLVED, **{"data.max_length": 15, "data.buckets": (15,)}), tmp_path / "x", mesh)


@pytest.mark.medium
def test_solved_head_with_reinitialised_tables_has_a_seed(make, mesh, tmp_path) -> None:
    fields = SOLVED | {"reinitialize": "embed/positions/table"}
    found = [fit(make(**fields, seed=s), tmp_path / str(s), mesh) for s in (1, 2)]
    assert [summary["seed"] for summary in found] == [1, 2]
    heads: list[Params] = [loading.load(tmp_path / str(s), mesh).values.trainable for s in (1, 2)]
    assert all(np.any(heads[0][name] != heads[1][name]) for name in (KERNEL, BIAS))
    assert json.loads((tmp_path / "1" / "summary.json").read_text())["seed"] == 1
