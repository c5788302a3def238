"""Finds texts that are nearly equal: min-hashing with banding (Broder 1997; Leskovec, Rajaraman, Ullman, ch. 3).

Two texts are near-duplicates if their sets of word pairs have a Jaccard similarity of at least SIMILAR. Case and white
space are ignored, and in most texts also punctuation (see `_words`) and the values of numbers (see LEAST_WORDS): "Your
code is 1234" equals "your code is 9876!". In scripts without spaces, such as Chinese, each character is a word.
"""

import re
import unicodedata
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

SIMILAR = 0.7
"""Smallest Jaccard similarity of near-duplicates."""

BANDS, ROWS_PER_BAND = 20, 4
"""Number of bands, and of hashes per band. For each band, a text is compared with the first text that has the same
hashes in this band. At similarity 0.7, two texts share the hashes of one or more bands with the probability 0.996."""

ROWS = 20_000
"""Maximum number of texts whose bands are computed at once, and of pairs of texts that are compared at once."""

UNSPACED = (
    "\u0e00-\u0eff"  # Thai and Lao
    "\u1000-\u109f"  # Burmese
    "\u1780-\u17ff"  # Khmer
    "\u3005\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Chinese and Japanese
)
"""Ranges of characters of scripts that are written without spaces between words."""

WORD = re.compile(rf"[{UNSPACED}]|[^\W_{UNSPACED}]+|[^\w\s]+|_+")
DIGITS = re.compile(r"\d+")

LEAST_WORDS = 3
"""Smallest number of words without digits for which the values of numbers are ignored. Words without digits must also
be at least half of all words."""


def normalise(text: str) -> str:
    """Returns a text in lower case and Unicode's form NFKC, with single spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _words(text: str) -> list[str]:
    """Returns the matches of WORD that begin with a letter or digit, or else all matches, such as "?!"."""
    found = WORD.findall(text)
    return [word for word in found if word[0].isalnum()] or found


def _pairs(text: str) -> list[str]:
    """Returns the pairs of neighbouring words, with start and end as words. Digits may become "0", see LEAST_WORDS."""
    text = normalise(text)
    words = _words(text)
    if DIGITS.search(text):
        plain = sum(not DIGITS.search(word) for word in words)
        if plain >= LEAST_WORDS and 2 * plain >= len(words):
            words = [DIGITS.sub("0", word) for word in words]
    return [f"{a} {b}" for a, b in pairwise(["<", *words, ">"])]


def groups(texts: Sequence[str]) -> np.ndarray:
    """Returns the index of each text's group of near-duplicates, (E,).

    A group is a connected component: two of its texts may be similar to a third text, but not to each other.
    """
    from scipy import sparse
    from scipy.sparse.csgraph import connected_components

    blocks = [_bands(_sets(texts[start : start + ROWS])) for start in range(0, len(texts), ROWS)]
    candidates = [_candidates(key_E) for key_E in np.concatenate(blocks, axis=1)]
    pairs = np.stack(np.divmod(np.unique(np.concatenate(candidates)), len(texts)), axis=1)
    # Compute the word pairs of the candidates again: keeping the word pairs of all texts would take much memory.
    found = [_similar(texts, pairs[start : start + ROWS]) for start in range(0, len(pairs), ROWS)]
    ends = np.concatenate([pairs[:0], *found])
    graph = sparse.coo_matrix((np.ones(len(ends)), (ends[:, 0], ends[:, 1])), (len(texts),) * 2)
    return connected_components(graph, directed=False)[1]


def _sets(texts: Sequence[str]) -> "csr_matrix":
    """Returns a sparse matrix with a row for each text: 1 in the column (hash) of each of its word pairs."""
    from sklearn.feature_extraction.text import HashingVectorizer

    hashed = HashingVectorizer(
        analyzer=_pairs,
        n_features=2**31 - 1,
        binary=True,
        alternate_sign=False,
        norm=None,
        dtype=np.float32,
    )
    return hashed.transform(texts)


def _bands(sets: "csr_matrix") -> np.ndarray:
    """Returns the key of each text in each band, (BANDS, E). A key combines the minima of the band's hashes."""
    generator = np.random.default_rng(0)
    columns = sets.indices.astype(np.uint64)
    keys = []
    for _ in range(BANDS):
        key_E = np.zeros(sets.shape[0], np.uint64)
        for _ in range(ROWS_PER_BAND):
            factor, mixer = generator.integers(1, 2**63, 2, np.uint64) | np.uint64(1)
            # The upper half of column * factor + mixer, modulo 2^64, is a hash of the column.
            hashes = (columns * factor + mixer) >> np.uint64(32)
            minima_E = np.minimum.reduceat(hashes, sets.indptr[:-1])
            key_E = (key_E ^ minima_E) * (mixer | np.uint64(1))
        keys.append(key_E)
    return np.stack(keys)


def _candidates(key_E: np.ndarray) -> np.ndarray:
    """Pairs each text with the first earlier text of the same key, if any. Returns pairs (a, b) as numbers a E + b."""
    _, first, inverse_E = np.unique(key_E, return_index=True, return_inverse=True)
    other_E = first[inverse_E]
    at = np.flatnonzero(other_E != np.arange(len(key_E)))
    return at * len(key_E) + other_E[at]


def _similar(texts: Sequence[str], pairs: np.ndarray) -> np.ndarray:
    """Returns the rows of `pairs` whose two texts are near-duplicates. `pairs`, (pairs, 2), holds indices of texts."""
    members, at = np.unique(pairs, return_inverse=True)
    sets = _sets([texts[i] for i in members])
    a, b = (sets[rows] for rows in at.reshape(pairs.shape).T)
    shared = np.asarray(a.multiply(b).sum(1)).ravel()
    union = np.diff(a.indptr) + np.diff(b.indptr) - shared
    return pairs[shared >= SIMILAR * union]
