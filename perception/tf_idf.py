"""TF-IDF features of hashed word unigrams and bigrams.

Memory grows with the number of words in the training texts, not with the number of distinct bigrams: n-grams are hashed
and only the most frequent buckets are kept.

Shape letters of this module: E examples, M features.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

BUCKETS = 2**22
"""Number of hash buckets for unigrams and bigrams."""

FEATURES = 2**19
"""Maximum number of features. If the texts fill more buckets, the buckets that are in the most texts are kept."""

ROWS = 10_000
"""Maximum number of texts that are vectorized at once."""


@dataclass(frozen=True)
class TfIdf:
    """Computes TF-IDF rows of unit norm: (1 + ln count) times the inverse document frequency.

    Attributes:
      columns_M: indices of the kept buckets, ascending.
      weights_M: inverse document frequencies, ln((1 + texts) / (1 + texts with the feature)) + 1.
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
    """Yields the bucket counts of successive blocks of texts, (at most ROWS, BUCKETS) uint8, clipped at 255."""
    from sklearn.feature_extraction.text import HashingVectorizer

    # Punctuation marks count as words, so that a text without words has features too.
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
    """Returns TF-IDF fitted to training texts, and the rows (E, M) of these texts.

    To save memory, the counts of each block of texts are freed once the TF-IDF rows of the block are computed.
    """
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
    shape = len(texts), len(columns_M)
    return found, sparse.csr_matrix((values, columns, np.asarray(row_ends)), shape)
