"""The TF-IDF baseline: logistic regression on hashed word unigrams and bigrams.

Memory grows with the number of words in the training texts, not with the number of distinct bigrams: n-grams are hashed
and only the most frequent buckets are kept.

E examples, M features, C classes.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from common import heap
from common.cached import cached_json
from common.config import check, to_json
from common.data.labelled import LabelledText
from common.metrics.classes import weighted_f1
from common.metrics.curve import Curve, Point
from common.metrics.predictions import PREDICTIONS, Classes
from common.track.tracker import SUMMARY, write_whole
from common.train.workdir import commit

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

INVERSE_PENALTIES = (1.0, 3.0, 10.0, 30.0, 100.0)
"""Candidate values of C, the inverse penalty."""

BUCKETS = 2**22
"""Hash buckets of unigrams and bigrams."""

FEATURES = 2**19
"""Maximum number of features: the buckets that occur in the most training texts."""

SOLVED = 20_000_000
"""Up to this many nonzero training features the regression is solved exactly; above, by stochastic gradients."""

SAMPLE = 50_000
"""Training texts on which C is chosen if the regression uses stochastic gradients."""

ROWS = 10_000
"""Texts that are vectorized at once."""

DATA = ("source", "splits", "fields", "label", "premise_only", "tfds_dir")
"""Fields of `config.data` that determine the examples."""

LEAST_CHANCE = 1e-9
"""Lower bound of class probabilities; classes without training examples get it."""


@dataclass(frozen=True)
class TfIdf:
    """Computes TF-IDF rows of unit norm: (1 + ln count) times the inverse document frequency.

    Attributes:
      columns_M: indices of the kept buckets, ascending.
      weights_M: inverse document frequency, ln((1 + texts) / (1 + texts with the feature)) + 1.
    """

    columns_M: np.ndarray
    weights_M: np.ndarray

    def weigh(self, counts: "csr_matrix") -> "csr_matrix":
        """Maps counts (rows, BUCKETS) to TF-IDF (rows, M) float32."""
        from sklearn.preprocessing import normalize

        kept = counts[:, self.columns_M].astype(np.float32)
        kept.data = (1 + np.log(kept.data)) * self.weights_M[kept.indices]
        return normalize(kept, copy=False)

    def __call__(self, texts: Sequence[str]) -> "csr_matrix":
        """Returns TF-IDF rows (E, M) float32."""
        from scipy import sparse

        return sparse.vstack([self.weigh(part) for part in counts(texts)], format="csr")


def counts(texts: Sequence[str]) -> Iterator["csr_matrix"]:
    """Yields bucket counts of successive texts, (at most ROWS, BUCKETS) uint8, clipped at 255."""
    from sklearn.feature_extraction.text import HashingVectorizer

    # Punctuation marks count as words, so that every text has a feature.
    hashed = HashingVectorizer(
        n_features=BUCKETS,
        ngram_range=(1, 2),
        token_pattern=r"\w+|[^\w\s]+",
        alternate_sign=False,
        norm=None,
    )
    for start in range(0, len(texts), ROWS):
        found = hashed.transform(texts[start : start + ROWS])
        found.data = np.minimum(found.data, 255).astype(np.uint8)
        yield found


def fit_features(texts: Sequence[str]) -> tuple[TfIdf, "csr_matrix"]:
    """Returns the fitted features and the rows (E, M) of the training texts. Frees counts while filling the rows."""
    from scipy import sparse

    parts, frequency = [], np.zeros(BUCKETS, np.int32)
    for part in counts(texts):
        parts.append(part)
        frequency += np.bincount(part.indices, minlength=BUCKETS).astype(np.int32)
    order = np.argsort(-frequency, kind="stable")[:FEATURES]
    columns_M = np.sort(order[frequency[order] > 0])
    weights_M = np.log((1 + len(texts)) / (1 + frequency[columns_M])) + 1
    found = TfIdf(columns_M, weights_M.astype(np.float32))
    size = int(frequency[columns_M].sum())
    values, columns = np.empty(size, np.float32), np.empty(size, np.int32)
    row_ends, end = [0], 0
    while parts:
        part = found.weigh(parts.pop(0))
        start, end = end, end + part.nnz
        values[start:end], columns[start:end] = part.data, part.indices
        row_ends.extend(start + part.indptr[1:])
        heap.release_free_memory()
    shape = len(texts), len(columns_M)
    return found, sparse.csr_matrix((values, columns, np.asarray(row_ends)), shape)


class Baseline(NamedTuple):
    """A fitted baseline.

    Attributes:
      chosen_f1: weighted F1 in percent on the examples that chose C.
      inverse_penalty: the chosen C.
      features: number of features.
      seconds: time for features and all regressions.
      predictions: class probabilities of the test examples.
    """

    chosen_f1: float
    inverse_penalty: float
    features: int
    seconds: float
    predictions: Classes


def fit(splits: Mapping[str, LabelledText], classes: Sequence[str]) -> Baseline:
    """Trains on "train", chooses C on "valid" (on "test" if there is no "valid") and predicts "test".

    Joins the texts of an example with a space.

    Raises:
      UserError: the training examples are all of one class.
    """
    begun = time.perf_counter()
    heap.release_free_memory()  # reading the examples frees as many bytes as they occupy
    labels = {name: split.labels_M for name, split in splits.items()}
    check(
        len(np.unique(labels["train"])) > 1,
        "all training examples have the same class: check --config.data.label",
    )
    texts = {name: [" ".join(parts) for parts in split.texts] for name, split in splits.items()}
    tf_idf, train = fit_features(texts["train"])
    select = "valid" if "valid" in splits else "test"
    rows = {name: tf_idf(texts[name]) for name in dict.fromkeys((select, "test"))}
    solve = train.nnz <= SOLVED
    chosen = None
    for penalty in INVERSE_PENALTIES:
        sample = slice(None if solve else SAMPLE)
        model = regression(train[sample], labels["train"][sample], penalty, solve)
        f1 = weighted_f1(labels[select], model.predict(rows[select]))
        if chosen is None or f1 > chosen[0]:
            chosen = f1, penalty, model
    _, penalty, model = chosen
    if not solve:
        model = regression(train, labels["train"], penalty, solve)
    logs_EC = np.full((len(labels["test"]), len(classes)), np.log(LEAST_CHANCE))
    logs_EC[:, model.classes_] = np.log(np.maximum(model.predict_proba(rows["test"]), LEAST_CHANCE))
    predictions = Classes.of_log_probabilities(
        splits["test"].fingerprint, labels["test"], logs_EC, tuple(classes)
    )
    f1 = weighted_f1(labels[select], model.predict(rows[select]))
    return Baseline(f1, penalty, train.shape[1], time.perf_counter() - begun, predictions)


def regression(rows: "csr_matrix", labels_E: np.ndarray, penalty: float, solve: bool) -> Any:
    """Fits one-against-rest logistic regression, exactly (`solve`) or by five epochs of averaged SGD.

    Args:
      penalty: C, the inverse penalty.
    """
    from sklearn.linear_model import LogisticRegression, SGDClassifier
    from sklearn.multiclass import OneVsRestClassifier

    if solve:
        # The dual has one variable for each text, and there are fewer texts than features.
        solver = LogisticRegression(
            C=penalty, solver="liblinear", dual=True, tol=0.01, max_iter=1000, random_state=0
        )
        return OneVsRestClassifier(solver).fit(rows, labels_E)
    alpha = 1 / (penalty * len(labels_E))  # SGDClassifier averages the loss over examples
    approximation = SGDClassifier(
        loss="log_loss", alpha=alpha, average=True, max_iter=5, tol=None, random_state=0
    )
    return approximation.fit(rows, labels_E)


def run(
    config: ConfigDict,
    splits: Mapping[str, LabelledText],
    classes: Sequence[str],
    workdir: Path,
) -> dict:
    """Fits the baseline and writes summary and predictions to `workdir`; returns the summary, whose seed is None.

    Reuses existing results for the same examples.

    Args:
      config: configuration of a run on these examples. The summary records its data fields.

    Raises:
      UserError: the training examples are all of one class.
    """
    examples = {name: split.fingerprint for name, split in splits.items()}
    existing = cached_json(
        workdir / SUMMARY,
        lambda found: found["examples"] == examples and (workdir / PREDICTIONS).exists(),
    )
    if existing is not None:
        return existing
    found = fit(splits, classes)
    test = found.predictions.metrics()
    trained = (found.features + 1) * (len(classes) if len(classes) > 2 else 1)
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
        "start_seconds": found.seconds,
        "train_seconds": 0.0,
        "flops": 0.0,
        "params": {"trainable": trained, "frozen": 0, "total": trained},
        "seed": None,
        "commit": commit(),
        "device": "CPU",
        "config": to_json(ConfigDict(kept)),
        "examples": examples,
        "curve": curve.to_json(),
    }
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / SUMMARY).unlink(missing_ok=True)  # a summary exists only beside its predictions
    found.predictions.save(workdir / PREDICTIONS)
    write_whole(workdir / SUMMARY, json.dumps(summary, indent=2) + "\n")
    return summary
