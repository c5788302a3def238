"""The TF-IDF baseline, and weighted F1 of constant predictions."""

import os

import numpy as np
import pytest

from common.data.labelled import LabelledText
from common.errors import UserError
from common.report.runs import load_local
from configs.perception import get_config
from perception import baseline, datasets, richness, tf_idf
from perception.weighted_f1 import weighted_f1


@pytest.mark.parametrize(
    ("counts", "printed"),
    [
        ((12_500, 12_500), 33.3),  # imdb
        ((444, 428), 34.4),  # sst2's validation split
        ((3368, 3237, 3219), 17.5),  # snli's test split
        ((695, 581, 275, 224, 159, 66), 17.9),  # emotion
        ((9023, 977), 85.6),  # w-tox, where the majority class has a share of 0.902
    ],
)
def test_weighted_f1_of_majority_class_prediction(counts: tuple[int, ...], printed: float) -> None:
    """Predicting one class for all texts gives the weighted F1 2 p^2 / (1 + p), where p is the share of the class.

    `printed` is this value in Table 1, in percent.
    """
    labels = np.repeat(np.arange(len(counts)), counts)
    share = counts[0] / sum(counts)
    found = weighted_f1(labels, np.zeros_like(labels))
    assert found == pytest.approx(100 * 2 * share**2 / (1 + share))
    assert round(found, 1) == printed


def texts(count: int, seed: int) -> LabelledText:
    """Returns texts of two classes. The order of two words determines the class; the other words are random."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(2, size=count).astype(np.int32)
    noise = [" ".join(generator.choice(list("abcdefgh"), 4)) for _ in labels]
    pairs = ("not good", "good not")
    return LabelledText([(f"{pairs[k]} {n}",) for k, n in zip(labels, noise, strict=True)], labels)


CLASSES = ("first", "second")


def f1_of(found: baseline.Baseline) -> float:
    return found.predictions.metrics()["weighted_f1"]


def test_bigrams_are_features() -> None:
    splits = {"train": texts(200, 0), "valid": texts(50, 1), "test": texts(50, 2)}
    found = baseline.fit(splits, CLASSES)
    assert f1_of(found) == found.chosen_f1 == 100 and found.seconds > 0
    assert found.inverse_penalty in baseline.INVERSE_PENALTIES


def test_features_match_sklearn_tfidf(monkeypatch) -> None:
    """The features equal scikit-learn's up to the order of columns, also if texts are counted in several batches."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    monkeypatch.setattr(tf_idf, "ROWS", 7)
    train = [f"{text} a a a !" for (text,) in texts(60, 0).texts]
    others = ["good not seen b", "!"]
    theirs = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"\w+|[^\w\s]+")
    wanted, known = theirs.fit_transform(train), theirs.transform(others)
    features, rows = tf_idf.fit_features(train)
    assert rows.shape == wanted.shape and rows.dtype == np.float32
    found = rows @ rows.T, features(others) @ rows.T
    for ours, reference in zip(found, (wanted @ wanted.T, known @ wanted.T), strict=True):
        np.testing.assert_allclose(ours.toarray(), reference.toarray(), atol=1e-6)


def test_number_of_features_is_bounded(monkeypatch) -> None:
    """The features are the 50 words and pairs of words that occur in the most texts.

    They include "common", "word" and "common word", which every text has. Other words and pairs are in one text each.
    """
    monkeypatch.setattr(tf_idf, "FEATURES", 50)
    many = [f"common word x{i} y{i} z{i}" for i in range(400)]
    features, rows = tf_idf.fit_features(many)
    assert rows.shape == (400, 50)
    (shared,) = features(["common word"]).toarray()
    assert np.count_nonzero(shared) == 3


def test_baseline_penalty_is_selected_on_validation() -> None:
    """Inverted validation labels select a stronger penalty, which lowers the test F1."""
    splits = {"train": texts(60, 0), "valid": texts(50, 1), "test": texts(50, 2)}
    turned = LabelledText(splits["valid"].texts, 1 - splits["valid"].labels_E)
    strict, free = (
        baseline.fit({**splits, "valid": v}, CLASSES) for v in (turned, splits["valid"])
    )
    assert strict.inverse_penalty < free.inverse_penalty and f1_of(strict) < f1_of(free)


def test_baseline_selects_on_test_without_validation_split() -> None:
    """If no validation split exists, the test split replaces it. The authors always validate on the test split."""
    train, test = texts(60, 0), texts(50, 2)
    turned = LabelledText(test.texts, 1 - test.labels_E)
    found = baseline.fit({"train": train, "test": turned}, CLASSES)
    assert f1_of(found) == found.chosen_f1
    again = baseline.fit({"train": train, "test": turned, "valid": turned}, CLASSES)
    assert found[:2] == again[:2] and f1_of(found) == f1_of(again)


@pytest.mark.parametrize("names", [CLASSES, ("first", "second", "third")])
@pytest.mark.parametrize("solve", [True, False])
def test_saved_model_reproduces_sklearn(tmp_path, names, solve) -> None:
    """The saved model gives the probabilities of predict_proba, for both solvers, with two and with three classes."""
    train = texts(60, 0)
    labels_E = np.arange(60) % 3 if len(names) == 3 else train.labels_E
    lines = [text for (text,) in train.texts]
    features, rows = tf_idf.fit_features(lines)
    fitted = baseline.regression(rows, labels_E, 10.0, solve, np.ones(60))
    baseline.Model.of(features, fitted, names).save(tmp_path / "model.npz")
    found = baseline.Model.load(tmp_path / "model.npz")
    assert found.names == names
    wanted_EC = fitted.predict_proba(features(lines))
    np.testing.assert_allclose(found.probabilities(lines), wanted_EC, atol=1e-5)


def test_damaged_baseline_model_raises_error(tmp_path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*model.npz"):
        baseline.Model.load(tmp_path / "model.npz")
    (tmp_path / "model.npz").write_bytes(b"PK\x03\x04")
    with pytest.raises(UserError, match=r"model.npz is damaged"):
        baseline.Model.load(tmp_path / "model.npz")
    np.savez(tmp_path / "model.npz", kernel_MN=np.zeros((2, 2)))
    with pytest.raises(
        UserError, match=r"model.npz is damaged: missing or unknown entry 'names'; correct or"
    ):
        baseline.Model.load(tmp_path / "model.npz")


def test_large_data_use_stochastic_gradients(monkeypatch) -> None:
    """To select the penalty, models are fitted on a sample of the training texts. The final model is fitted on all.

    Fitting again gives the same predictions.
    """
    splits = {"train": texts(400, 0), "valid": texts(50, 1), "test": texts(50, 2)}
    monkeypatch.setattr(baseline, "SOLVED", 0)
    monkeypatch.setattr(baseline, "SAMPLE", 100)
    seen, fitted = [], baseline.regression

    def regression(rows, labels_E, penalty, solve, weights_E):
        seen.append((rows.shape[0], solve))
        return fitted(rows, labels_E, penalty, solve, weights_E)

    monkeypatch.setattr(baseline, "regression", regression)
    found = baseline.fit(splits, CLASSES)
    assert seen == [(100, False)] * len(baseline.INVERSE_PENALTIES) + [(400, False)]
    assert "chosen with 100 of the 400 training texts" in found.notes[1]
    assert f1_of(found) == 100
    again = baseline.fit(splits, CLASSES)
    np.testing.assert_array_equal(again.predictions.nats_E, found.predictions.nats_E)


def test_penalty_of_large_sorted_data_is_chosen_on_all_classes(monkeypatch) -> None:
    """The training texts are sorted by class. A sample of the first texts would have a single class."""
    train = texts(400, 0)
    order = np.argsort(train.labels_E, kind="stable")
    train = LabelledText([train.texts[i] for i in order], train.labels_E[order])
    monkeypatch.setattr(baseline, "SOLVED", 0)
    monkeypatch.setattr(baseline, "SAMPLE", 100)
    splits = {"train": train, "valid": texts(50, 1), "test": texts(50, 2)}
    assert f1_of(baseline.fit(splits, CLASSES)) == 100


def test_single_class_training_data_raises_error() -> None:
    alone = LabelledText([("a b",), ("c d",)], np.int32([1, 1]))
    with pytest.raises(UserError, match=r"all training examples \(\d+\) have the same label"):
        baseline.fit({"train": alone, "test": alone}, CLASSES)


def test_unseen_class_gets_minimum_probability() -> None:
    train, test = texts(60, 0), LabelledText([("not good a",), ("b",)], np.int32([0, 2]))
    predictions = baseline.fit({"train": train, "test": test}, (*CLASSES, "third")).predictions
    assert predictions.nats_E[1] == pytest.approx(-np.log(baseline.LEAST_CHANCE), rel=1e-3)
    assert 2 not in predictions.guesses_E


def test_baseline_run_has_no_seed(tmp_path) -> None:
    config = get_config("tiny")
    splits, classes = datasets.load(config)
    summary = baseline.run(config, splits, classes, tmp_path / "run")
    (found,) = load_local(tmp_path / "run")
    assert found.seed is None and found.test == summary["test"]["weighted_f1"]
    assert found.predictions.metrics() == pytest.approx(summary["test"])
    assert summary["params"]["trainable"] > 5000 and 0 < found.test < 100


def test_baseline_is_refitted_only_if_examples_changed(tmp_path, monkeypatch) -> None:
    config, train, test = get_config("tiny"), texts(60, 0), texts(50, 2)
    given = {"train": train, "test": test}
    first = baseline.run(config, given, CLASSES, tmp_path / "run")
    other = {"train": texts(70, 3), "test": test}
    second = baseline.run(config, other, CLASSES, tmp_path / "run")
    assert second["examples"]["train"] != first["examples"]["train"]
    monkeypatch.setattr(baseline, "fit", None)
    assert baseline.run(config, other, CLASSES, tmp_path / "run") == second


@pytest.mark.skipif("TRAINLESS_DATA" not in os.environ, reason="TRAINLESS_DATA is not set")
def test_tfidf_f1_on_rotten_tomatoes() -> None:
    """TF-IDF has the weighted F1 79.7 on rotten_tomatoes. Full training has 63.8 to 76.7 in the paper's Table 1."""
    config = get_config()
    config.dataset = "rotten_tomatoes"
    config.data.source = f"files:{os.environ['TRAINLESS_DATA']}/rotten_tomatoes"
    splits, classes = datasets.load(config)
    assert [len(splits[name]) for name in ("train", "valid", "test")] == [8530, 1066, 1066]
    assert f1_of(baseline.fit(splits, classes)) == pytest.approx(79.7, abs=0.5)
    # `tokens` estimates the number of tokens from the number of words. The estimate agrees with the measured number.
    size = richness.SIZES["rotten"]
    assert richness.tokens(splits["train"].texts) == pytest.approx(size.tokens, rel=0.02)


def test_baseline_joins_text_pairs() -> None:
    pairs = LabelledText([("a b", "?"), ("c d", "!")] * 9, np.tile(np.int32([0, 1]), 9))
    found = baseline.fit(dict.fromkeys(("train", "valid", "test"), pairs), CLASSES)
    assert f1_of(found) == 100
