"""The TF-IDF baseline: logistic regression on hashed word unigrams and bigrams.

Shape letters of this module: E examples, M features, N outputs, C classes.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from common.atomic import write_atomic, write_whole
from common.cached import read_json_if
from common.config import from_json, to_json
from common.data.labelled import LabelledText
from common.errors import check, file_error
from common.metrics.classes import Classes
from common.metrics.curve import Curve, Point
from common.metrics.label_sets import LabelSets
from common.metrics.predictions import PREDICTIONS, Predictions
from common.storage.addresses import shown
from common.track.tracker import SUMMARY
from common.train.workdir import commit
from perception.objective import balanced_weights
from perception.tf_idf import TfIdf, fit_features
from perception.weighted_f1 import choose_thresholds, score, weighted_f1

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

INVERSE_PENALTIES = (1.0, 3.0, 10.0, 30.0, 100.0)
"""Candidate inverse penalties (scikit-learn's C). `fit` chooses the one with the best weighted F1."""

SOLVED = 20_000_000
"""If the TF-IDF matrix of the training texts has at most this number of nonzero values, liblinear fits the regression.
For more values, stochastic gradient descent (SGD) approximates it."""

SAMPLE = 50_000
"""Maximum number of training texts on which SGD compares INVERSE_PENALTIES."""

DATA = (
    "source",
    "splits",
    "fields",
    "label",
    "premise_only",
    "tfds_dir",
    "balance",
    "multi_label",
    "pair",
    "shots",
)
"""Fields of `config.data` that the summary stores."""

LEAST_CHANCE = 1e-9
"""Lower bound of class probabilities if a text has one class. A class without training examples has this
probability."""

UNSEEN = -100.0
"""Logit of a class without training texts, if a text may have several classes: the probability is almost 0. A class
that all training texts have gets the logit -UNSEEN."""

MODEL = "model.npz"
"""File in a run's directory that stores the fitted `Model`."""


def _binary(fitted: Any) -> Sequence[Any]:
    """Returns the estimators that hold the coefficients of `fitted`, a `OneVsRestClassifier` or an `SGDClassifier`."""
    return getattr(fitted, "estimators_", [fitted])


@dataclass(frozen=True)
class Model:
    """A fitted TF-IDF classifier.

    Attributes:
      kernel_MN, bias_N: parameters of the regression, float32, with one output for each class in `seen`. If a text has
        one class and `seen` has two classes, the only output is the logit of the second of these classes.
      seen: indices of the classes with training examples, or of all classes if a text may have several classes;
        one-dimensional.
      names: names of all C classes.
      thresholds: if a text may have several classes, the smallest probability at which each class is predicted;
        otherwise ().
    """

    features: TfIdf
    kernel_MN: np.ndarray
    bias_N: np.ndarray
    seen: np.ndarray
    names: tuple[str, ...]
    thresholds: tuple[float, ...] = ()

    @classmethod
    def of(cls, features: TfIdf, fitted: Any, names: Sequence[str]) -> "Model":
        """Makes a model for one class per text from a result of `regression`."""
        parts = _binary(fitted)
        kernel_MN = np.concatenate([part.coef_ for part in parts]).T.astype(np.float32)
        bias_N = np.concatenate([part.intercept_ for part in parts]).astype(np.float32)
        return cls(features, kernel_MN, bias_N, fitted.classes_, tuple(names))

    @classmethod
    def of_each(
        cls,
        features: TfIdf,
        rows: "csr_matrix",
        labels_EC: np.ndarray,
        fit: Callable,
        names: Sequence[str],
    ) -> "Model":
        """Makes a model for texts that may have several classes. All thresholds are 0.5.

        `fit` maps TF-IDF rows, the labels (E,) of one class, and the index of the class to a result of `regression`. No
        regression is fitted for a class that none or all of the texts have: its probability is almost 0 or 1.
        """
        kernel_MC = np.zeros((rows.shape[1], len(names)), np.float32)
        bias_C = np.where(labels_EC.all(0), -UNSEEN, UNSEEN).astype(np.float32)
        for c in np.flatnonzero(labels_EC.any(0) & ~labels_EC.all(0)):
            (fitted,) = _binary(fit(rows, labels_EC[:, c], c))
            kernel_MC[:, c], bias_C[c] = fitted.coef_[0], fitted.intercept_[0]
        thresholds = (0.5,) * len(names)
        return cls(features, kernel_MC, bias_C, np.arange(len(names)), tuple(names), thresholds)

    def logits(self, rows: "csr_matrix") -> np.ndarray:
        """Returns the logits (E, N) of TF-IDF rows."""
        return rows @ self.kernel_MN + self.bias_N

    def log_probabilities(self, rows: "csr_matrix") -> np.ndarray:
        """Returns log-probabilities (E, C) of TF-IDF rows if a text has one class.

        The probabilities are the one-against-rest probabilities, divided by their sum, and at least LEAST_CHANCE.
        """
        from scipy.special import expit

        chances_EN = expit(self.logits(rows))
        if len(self.seen) == 2:
            chances_EN = np.concatenate([1 - chances_EN, chances_EN], axis=1)
        chances_EN /= np.maximum(chances_EN.sum(1, keepdims=True), LEAST_CHANCE)
        chances_EC = np.full((rows.shape[0], len(self.names)), LEAST_CHANCE)
        chances_EC[:, self.seen] = np.maximum(chances_EN, LEAST_CHANCE)
        return np.log(chances_EC)

    def probabilities(self, texts: Sequence[str]) -> np.ndarray:
        """Returns the class probabilities (E, C) of texts."""
        from scipy.special import expit

        rows = self.features(texts)
        return expit(self.logits(rows)) if self.thresholds else np.exp(self.log_probabilities(rows))

    def save(self, path: Path) -> None:
        """Writes the model to a NumPy archive without pickles."""
        arrays = {
            "columns_M": self.features.columns_M,
            "weights_M": self.features.weights_M,
            "kernel_MN": self.kernel_MN,
            "bias_N": self.bias_N,
            "seen": self.seen,
            "names": np.frombuffer(json.dumps(self.names).encode(), np.uint8),
            "thresholds": np.asarray(self.thresholds),
        }
        write_atomic(path, lambda file: np.savez(file, **arrays))

    @classmethod
    def load(cls, path: Path) -> "Model":
        """Reads a model that `save` has written. Raises a UserError if the file cannot be read or is damaged."""
        try:
            with np.load(path, allow_pickle=False) as archive:
                found = dict(archive)
            names = tuple(json.loads(found.pop("names").tobytes()))
            features = TfIdf(found.pop("columns_M"), found.pop("weights_M"))
            thresholds = tuple(found.pop("thresholds", np.empty(0)).tolist())
            return cls(features, names=names, thresholds=thresholds, **found)
        except Exception as error:  # A damaged archive may raise any type of exception.
            raise file_error(shown(path), error) from error


class Baseline(NamedTuple):
    """A fitted baseline.

    Attributes:
      chosen_f1: weighted F1 in percent on the split on which the inverse penalty was chosen ("valid", or "test"
        without "valid").
      seconds: wall time of `fit`.
      predictions: predictions for the test examples.
      notes: sentences about approximations for large data; empty without approximations.
    """

    chosen_f1: float
    inverse_penalty: float
    seconds: float
    predictions: Predictions
    model: Model
    notes: Sequence[str] = ()


def fit(
    splits: Mapping[str, LabelledText], classes: Sequence[str], balance: bool = False
) -> Baseline:
    """Trains on "train", chooses the inverse penalty on "valid" (or on "test" without "valid"), and predicts "test".

    The texts of an example are joined with a space. If a text may have several classes, the thresholds are chosen on
    the same split as the inverse penalty.

    Args:
      balance: whether all classes have equal total weight in the loss (`objective.balanced_weights`).

    Raises:
      UserError: all training examples have the same label, or the same set of classes.
    """
    from scipy.special import expit

    begun = time.perf_counter()
    labels = {name: split.labels_E for name, split in splits.items()}
    check(
        len(np.unique(labels["train"], axis=0)) > 1,
        f"all training examples ({len(labels['train']):,}) have the same label or set of labels: add examples"
        " with another label, or set --config.data.label to another field",
    )
    several = labels["train"].ndim == 2
    texts = {name: [" ".join(parts) for parts in split.texts] for name, split in splits.items()}
    tf_idf, train = fit_features(texts["train"])
    select = "valid" if "valid" in splits else "test"
    rows = {name: tf_idf(texts[name]) for name in dict.fromkeys((select, "test"))}
    solve = train.nnz <= SOLVED
    weights = np.ones(labels["train"].shape)
    if balance:
        weights = balanced_weights(labels["train"])

    def fitted(penalty: float, kept: np.ndarray | slice) -> tuple[float, Model]:
        # Do not index with the slice of all rows, because indexing always copies a sparse matrix.
        given = train if kept is everything else train[kept]
        wanted, weight = labels["train"][kept], weights[kept]
        if several:
            made = Model.of_each(
                tf_idf,
                given,
                wanted,
                lambda rows, column_E, c: regression(rows, column_E, penalty, solve, weight[:, c]),
                classes,
            )
            return score(labels[select], made.logits(rows[select])), made
        model = regression(given, wanted, penalty, solve, weight)
        f1 = weighted_f1(labels[select], model.predict(rows[select]))
        return f1, Model.of(tf_idf, model, classes)

    everything, sampled = slice(None), not solve and train.shape[0] > SAMPLE
    some = everything
    if sampled:  # draw at random, because the texts may be sorted by class
        some = np.sort(np.random.default_rng(0).permutation(train.shape[0])[:SAMPLE])
    chosen = None
    for candidate in INVERSE_PENALTIES:
        f1, found = fitted(candidate, some)
        if chosen is None or f1 > chosen[0]:
            chosen = f1, found, candidate
    f1, found, penalty = chosen
    if sampled:
        f1, found = fitted(penalty, everything)
    examples, truth = splits["test"].fingerprint, labels["test"]
    if several:
        chances_EC = expit(found.logits(rows[select]))
        found = replace(found, thresholds=choose_thresholds(labels[select], chances_EC))
        given = found.logits(rows["test"]), found.thresholds, found.names
        predictions = LabelSets.of_logits(examples, truth, *given)
    else:
        logs_EC = found.log_probabilities(rows["test"])
        predictions = Classes.of_log_probabilities(examples, truth, logs_EC, found.names)
    seconds = time.perf_counter() - begun
    notes = []
    if not solve:
        notes.append(
            f"The training texts have {train.nnz:,} nonzero TF-IDF values, more than {SOLVED:,}: the regression is"
            " approximated by stochastic gradient descent."
        )
    if sampled:
        notes.append(
            f"The inverse penalty of TF-IDF was chosen with {SAMPLE:,} of the {train.shape[0]:,} training texts. The"
            " model was then fitted to all training texts."
        )
    return Baseline(f1, penalty, seconds, predictions, found, notes)


def regression(
    rows: "csr_matrix", labels_E: np.ndarray, penalty: float, solve: bool, weights_E: np.ndarray
) -> Any:
    """Fits one-against-rest logistic regression. Returns the scikit-learn estimator.

    Args:
      labels_E: class indices if a text has one class. If a text may have several classes, labels of one class: 1 for
        texts with the class, 0 for other texts.
      solve: True solves the dual problem with liblinear. False runs five epochs of averaged SGD.
      penalty: the inverse penalty, scikit-learn's C.
      weights_E: weights of the examples in the loss.
    """
    from sklearn import config_context
    from sklearn.linear_model import LogisticRegression, SGDClassifier
    from sklearn.multiclass import OneVsRestClassifier

    if solve:
        # The dual problem is usually smaller: it has one variable per text, and texts are usually fewer than features.
        solver = LogisticRegression(
            C=penalty, solver="liblinear", dual=True, tol=0.01, max_iter=1000, random_state=0
        )
        with config_context(enable_metadata_routing=True):
            every = OneVsRestClassifier(solver.set_fit_request(sample_weight=True))
            return every.fit(rows, labels_E, sample_weight=weights_E)
    # SGDClassifier averages the loss over examples and LogisticRegression sums it. This `alpha` makes the penalties
    # equal.
    alpha = 1 / (penalty * len(labels_E))
    approximation = SGDClassifier(
        loss="log_loss", alpha=alpha, average=True, max_iter=5, tol=None, random_state=0
    )
    return approximation.fit(rows, labels_E, sample_weight=weights_E)


def read_config(workdir: Path) -> ConfigDict | None:
    """Returns the configuration of the TF-IDF baseline in `workdir`; None if `workdir` holds no baseline."""
    summary = read_json_if(workdir / SUMMARY, lambda found: "baseline" in found["config"])
    return from_json(summary["config"]) if summary else None


def run(
    config: ConfigDict,
    splits: Mapping[str, LabelledText],
    classes: Sequence[str],
    workdir: Path,
) -> dict:
    """Fits the baseline, and writes its summary, predictions and model to `workdir`. Returns the summary.

    If `workdir` already holds a baseline for the same splits and the same `config.data.balance`, returns its summary
    without fitting.

    Args:
      config: configuration of the runs with which the baseline is compared. The seed in the summary is `config.seed` if
        `config.data.shots` selects random examples, otherwise None.
      splits: {"train", "test" and optionally "valid": examples}.
      classes: names of the classes, by class index.

    Raises:
      UserError: `fit` fails.
      UserError: a file cannot be written to `workdir`.
    """
    examples = {name: split.fingerprint for name, split in splits.items()}
    existing = read_json_if(
        workdir / SUMMARY,
        lambda found: (
            found["examples"] == examples
            and found["config"]["data"].get("balance", False) == config.data.balance
            and (workdir / PREDICTIONS).exists()
            and (workdir / MODEL).exists()
        ),
    )
    if existing is not None:
        return existing
    found = fit(splits, classes, config.data.balance)
    test = found.predictions.metrics()
    trained = found.model.kernel_MN.size + found.model.bias_N.size
    curve = Curve("weighted_f1", "max", [Point(0, found.seconds, 0.0, found.chosen_f1)])
    data = {name: config.data[name] for name in DATA}
    kept = {"paper": config.paper, "baseline": "tf-idf", "dataset": config.dataset, "data": data}
    summary = {
        "objective": curve.name,
        "steps": 0,
        "best_valid": found.chosen_f1,
        "best_step": 0,
        "test": test,
        "test_last": test,
        "inverse_penalty": found.inverse_penalty,
        "notes": list(found.notes),
        "start_seconds": found.seconds,
        "train_seconds": 0.0,
        "flops": 0.0,
        "params": {"trainable": trained, "frozen": 0, "total": trained},
        "seed": config.seed if config.data.shots else None,
        "commit": commit(),
        "device": "CPU",
        "config": to_json(ConfigDict(kept)),
        "examples": examples,
        "curve": curve.to_json(),
    }
    workdir.mkdir(parents=True, exist_ok=True)
    # Delete the old summary first, so that an interruption cannot leave it with the predictions of a new fit.
    (workdir / SUMMARY).unlink(missing_ok=True)
    found.predictions.save(workdir / PREDICTIONS)
    found.model.save(workdir / MODEL)
    write_whole(workdir / SUMMARY, json.dumps(summary, indent=2) + "\n")
    return summary
