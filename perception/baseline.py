"""What costs nothing: TF-IDF of words and pairs of words, and logistic regression on it."""

import time
from collections.abc import Mapping
from typing import NamedTuple

from common.data.labelled import LabelledText
from common.metrics.classes import weighted_f1

INVERSE_PENALTIES = (1.0, 10.0, 100.0, 1000.0)
"""C of the regression, one of which is chosen."""


class Baseline(NamedTuple):
    """Attributes:
    f1: weighted, on the test examples, in percent; `chosen_f1` that on the examples that it was chosen on.
    features: words and pairs of words.
    seconds: for all of it: counting, and a regression for every C.
    """

    f1: float
    chosen_f1: float
    inverse_penalty: float
    features: int
    seconds: float


def fit(splits: Mapping[str, LabelledText]) -> Baseline:
    """Learns from "train", chooses by "valid", measures on "test"; where there is no "valid" it chooses by the test, as
    runs do. Two texts of an example are one after the other."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    begun = time.perf_counter()
    # Signs between words count as words, so no text is without one.
    counter = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"\w+|[^\w\s]+")
    texts = {name: [" ".join(parts) for parts in split.texts] for name, split in splits.items()}
    train = counter.fit_transform(texts["train"])
    select = "valid" if "valid" in splits else "test"
    others = {name: counter.transform(texts[name]) for name in (select, "test")}
    found = []
    for penalty in INVERSE_PENALTIES:
        model = LogisticRegression(C=penalty, max_iter=1000)
        model.fit(train, splits["train"].labels_M)
        scores = {n: weighted_f1(splits[n].labels_M, model.predict(x)) for n, x in others.items()}
        found.append((scores[select], scores["test"], penalty))
    chosen_f1, f1, penalty = max(found, key=lambda row: row[0])
    return Baseline(f1, chosen_f1, penalty, train.shape[1], time.perf_counter() - begun)
