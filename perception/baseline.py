"""TF-IDF of words and pairs of words with logistic regression: what a classifier without a network reaches.

Memory is bounded by the number of words in the training texts, not by the number of different pairs of words: pairs are
hashed, and only the most frequent ones are kept.

M examples, F features, N classes.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from common import heap
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
"""C of the regression, one of which is chosen."""

BUCKETS = 2**22
"""Of the hash of words and pairs of words."""

FEATURES = 2**19
"""The most that are kept, those in the most training texts."""

SOLVED = 20_000_000
"""Nonzero features of the training texts up to which the regression is solved; above, stochastic gradients approximate
it."""

SAMPLE = 50_000
"""Training texts that C is chosen on where the regression is approximated."""

ROWS = 10_000
"""Texts that are counted at once."""

DATA = ("source", "splits", "fields", "label", "premise_only", "tfds_dir")
"""Fields of `config.data` that say which examples there are."""

LEAST_CHANCE = 1e-9
"""The probability of a class that the training examples lack."""


@dataclass(frozen=True)
class TfIdf:
    """Rows of unit length: (1 + ln count) times the inverse document frequency.

    Attributes:
      columns_F: the buckets that are kept, ascending.
      weights_F: ln((1 + M) / (1 + texts that have the feature)) + 1.
    """

    columns_F: np.ndarray
    weights_F: np.ndarray

    def weigh(self, counts: "csr_matrix") -> "csr_matrix":
        """(rows, F) float32 from (rows, BUCKETS)."""
        from sklearn.preprocessing import normalize

        kept = counts[:, self.columns_F].astype(np.float32)
        kept.data = (1 + np.log(kept.data)) * self.weights_F[kept.indices]
        return normalize(kept, copy=False)

    def __call__(self, texts: Sequence[str]) -> "csr_matrix":
        """(M, F) float32."""
        from scipy import sparse

        return sparse.vstack([self.weigh(part) for part in counts(texts)], format="csr")


def counts(texts: Sequence[str]) -> Iterator["csr_matrix"]:
    """How often each bucket is in each text, at most 255 times: (at most ROWS, BUCKETS) uint8 at a time."""
    from sklearn.feature_extraction.text import HashingVectorizer

    # Signs between words count as words, so no text is without a feature.
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
    """The features of training texts, and their rows (M, F). Beside the counts no second copy of the rows is made."""
    from scipy import sparse

    parts, frequency = [], np.zeros(BUCKETS, np.int32)
    for part in counts(texts):
        parts.append(part)
        frequency += np.bincount(part.indices, minlength=BUCKETS).astype(np.int32)
    order = np.argsort(-frequency, kind="stable")[:FEATURES]
    columns_F = np.sort(order[frequency[order] > 0])
    weights_F = np.log((1 + len(texts)) / (1 + frequency[columns_F])) + 1
    found = TfIdf(columns_F, weights_F.astype(np.float32))
    size = int(frequency[columns_F].sum())
    values, columns = np.empty(size, np.float32), np.empty(size, np.int32)
    ends_M, end = [0], 0
    while parts:
        part = found.weigh(parts.pop(0))
        start, end = end, end + part.nnz
        values[start:end], columns[start:end] = part.data, part.indices
        ends_M.extend(start + part.indptr[1:])
        heap.release_free_memory()
    shape = len(texts), len(columns_F)
    return found, sparse.csr_matrix((values, columns, np.asarray(ends_M)), shape)


class Baseline(NamedTuple):
    """Attributes:
    chosen_f1: weighted, in percent, on the examples that C was chosen on.
    features: F.
    seconds: counting the words and all regressions.
    """

    chosen_f1: float
    inverse_penalty: float
    features: int
    seconds: float
    predictions: Classes


def fit(splits: Mapping[str, LabelledText], classes: Sequence[str]) -> Baseline:
    """Learns from "train", chooses C by "valid", predicts "test"; where there is no "valid" it chooses by the test, as
    runs do. Two texts of an example are one after the other.

    Raises:
      UserError: the training examples are all of one class.
    """
    begun = time.perf_counter()
    heap.release_free_memory()  # reading the examples leaves as much as they take
    labels = {name: split.labels_M for name, split in splits.items()}
    check(len(np.unique(labels["train"])) > 1, "the training examples are all of one class")
    texts = {name: [" ".join(parts) for parts in split.texts] for name, split in splits.items()}
    tf_idf, train = fit_features(texts["train"])
    select = "valid" if "valid" in splits else "test"
    rows = {name: tf_idf(texts[name]) for name in dict.fromkeys((select, "test"))}
    solve = train.nnz <= SOLVED
    chosen = None
    for penalty in INVERSE_PENALTIES:
        some = slice(None if solve else SAMPLE)
        model = regression(train[some], labels["train"][some], penalty, solve)
        f1 = weighted_f1(labels[select], model.predict(rows[select]))
        if chosen is None or f1 > chosen[0]:
            chosen = f1, penalty, model
    _, penalty, model = chosen
    if not solve:
        model = regression(train, labels["train"], penalty, solve)
    logs_MN = np.full((len(labels["test"]), len(classes)), np.log(LEAST_CHANCE))
    logs_MN[:, model.classes_] = np.log(np.maximum(model.predict_proba(rows["test"]), LEAST_CHANCE))
    predictions = Classes.of_log_probabilities(
        splits["test"].fingerprint, labels["test"], logs_MN, tuple(classes)
    )
    f1 = weighted_f1(labels[select], model.predict(rows[select]))
    return Baseline(f1, penalty, train.shape[1], time.perf_counter() - begun, predictions)


def regression(rows: "csr_matrix", labels_M: np.ndarray, penalty: float, solve: bool) -> Any:
    """Logistic regression with the inverse penalty C, of each class against the others: solved, or approximated by five
    epochs of averaged stochastic gradients."""
    from sklearn.linear_model import LogisticRegression, SGDClassifier
    from sklearn.multiclass import OneVsRestClassifier

    if solve:
        # The dual has a variable for each text, of which there are fewer than features.
        solver = LogisticRegression(
            C=penalty, solver="liblinear", dual=True, tol=0.01, max_iter=1000, random_state=0
        )
        return OneVsRestClassifier(solver).fit(rows, labels_M)
    alpha = 1 / (penalty * len(labels_M))  # its loss is a mean over examples
    approximation = SGDClassifier(
        loss="log_loss", alpha=alpha, average=True, max_iter=5, tol=None, random_state=0
    )
    return approximation.fit(rows, labels_M)


def run(
    config: ConfigDict,
    splits: Mapping[str, LabelledText],
    classes: Sequence[str],
    workdir: Path,
) -> dict:
    """Leaves the summary and the predictions of a run in `workdir`, unless it has those of the same examples already;
    returns the summary, which has no seed.

    Args:
      config: of a run on these examples; what the baseline has of it is kept.

    Raises:
      UserError: the data are at fault.
    """
    examples = {name: split.fingerprint for name, split in splits.items()}
    with suppress(OSError, ValueError, KeyError):  # missing, or damaged
        there = json.loads((workdir / SUMMARY).read_text())
        if there["examples"] == examples and (workdir / PREDICTIONS).exists():
            return there
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
    (workdir / SUMMARY).unlink(missing_ok=True)  # until the predictions are there too
    found.predictions.save(workdir / PREDICTIONS)
    write_whole(workdir / SUMMARY, json.dumps(summary, indent=2) + "\n")
    return summary
