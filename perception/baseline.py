"""What costs nothing: TF-IDF of words and pairs of words, and logistic regression on it."""

import time
from collections.abc import Mapping
from typing import NamedTuple

from common.data.labelled import LabelledText
from common.metrics.classes import weighted_f1

INVERSE_PENALTIES = (1.0, 10.0, 100.0, 1000.0)
"""C of the regression, chosen on the validation examples."""


class Baseline(NamedTuple):
    """Attributes:
    f1: weighted, on the test examples, in percent; `valid_f1` that on the validation examples.
    features: words and pairs of words.
    seconds: for all of it: counting, and a regression for every C.
    """

    f1: float
    valid_f1: float
    inverse_penalty: float
    features: int
    seconds: float


def fit(splits: Mapping[str, LabelledText]) -> Baseline:
    """Learns from "train", chooses by "valid", measures on "test". Two texts of an example are one after the other."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    begun = time.perf_counter()
    # Signs between words count as words, so no text is without one.
    counter = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"\w+|[^\w\s]+")
    texts = {name: [" ".join(parts) for parts in split.texts] for name, split in splits.items()}
    train = counter.fit_transform(texts["train"])
    others = {name: counter.transform(texts[name]) for name in ("valid", "test")}
    found = []
    for penalty in INVERSE_PENALTIES:
        model = LogisticRegression(C=penalty, max_iter=1000)
        model.fit(train, splits["train"].labels_M)
        scores = [
            weighted_f1(splits[name].labels_M, model.predict(x)) for name, x in others.items()
        ]
        found.append((*scores, penalty))
    valid_f1, f1, penalty = max(found, key=lambda row: row[0])
    return Baseline(f1, valid_f1, penalty, train.shape[1], time.perf_counter() - begun)
