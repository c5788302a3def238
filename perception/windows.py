"""Splits long texts into windows. Sorts the windows by length into batches that have few different shapes."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from tokenizers import Encoding, Tokenizer

from perception.subword import Subword

GROWTH = 4
"""Factor between the allowed numbers of rows in a batch: `multiple` (argument of `batches`) times 1, GROWTH, GROWTH**2,
..., up to the maximum. A larger factor means fewer compiled programs but more padding rows."""


class Windows:
    """Encodes texts as windows of at most `longest` token ids, including special tokens.

    A text that fits has one window. The windows of a longer text do not overlap, differ by at most one token in length,
    and have the same special tokens as a whole text.
    """

    def __init__(self, tokenizer: Subword, longest: int):
        self._tokenizer = Tokenizer.from_str(tokenizer.to_json())
        self._longest = longest

    def __call__(self, texts: Sequence[str]) -> list[list[list[int]]]:
        """Returns the windows of each text."""
        return [self._split(found) for found in self._tokenizer.encode_batch(list(texts))]

    def _split(self, found: Encoding) -> list[list[int]]:
        ids, special = found.ids, found.special_tokens_mask
        if len(ids) <= self._longest:
            return [ids]
        first, last = special.index(0), len(ids) - special[::-1].index(0)
        before, text, after = ids[:first], ids[first:last], ids[last:]
        room = self._longest - len(before) - len(after)
        parts = np.array_split(text, -(-len(text) // room))
        return [[*before, *part.tolist(), *after] for part in parts]


class WindowBatch(NamedTuple):
    """A batch of windows.

    Attributes:
      texts_B: index of the text of each row.
      weights_B: weight of each row in the mean over the windows of its text, float64. Padding rows have the weight 0.
      inputs: int32 arrays "tokens" (B, L) and "lengths" (B,), the number of tokens of each row. The array "firsts"
        (B,), the number of tokens in the first segment of each row, is present only if the argument `firsts` of
        `batches` is not empty. Both numbers are 0 in padding rows.
    """

    texts_B: np.ndarray
    weights_B: np.ndarray
    inputs: dict[str, np.ndarray]


def batches(
    windows: Sequence[Sequence[Sequence[int]]],
    *,
    buckets: Sequence[int],
    rows: int,
    multiple: int,
    pad: int,
    firsts: Sequence[int] = (),
) -> Iterator[WindowBatch]:
    """Yields batches of windows, longest windows first.

    Args:
      windows: the windows of each text.
      buckets: lengths of batches, ascending. A batch has the shortest length that holds its longest window.
      rows: maximum number of rows, rounded up to a multiple of `multiple`.
      multiple: the number of rows is `multiple` times a power of GROWTH, or the maximum.
      pad: id of the padding token.
      firsts: number of tokens in the first segment of each pair of texts. A pair has one window.
    """
    flat = list(chain.from_iterable(windows))
    counts_E = np.fromiter(map(len, windows), np.int64, len(windows))
    texts = np.repeat(np.arange(len(windows)), counts_E)
    lengths = np.fromiter(map(len, flat), np.int32, len(flat))
    order = np.argsort(-lengths, kind="stable")
    most = -(-rows // multiple) * multiple
    for start in range(0, len(flat), most):
        members = order[start : start + most]
        count = len(members)
        length = buckets[np.searchsorted(buckets, lengths[members[0]])]
        size = _size(count, most, multiple)
        tokens_BL = np.full((size, length), pad, np.int32)
        for row, member in enumerate(members):
            tokens_BL[row, : lengths[member]] = flat[member]
        texts_B, weights_B = np.zeros(size, np.int64), np.zeros(size)
        texts_B[:count] = texts[members]
        weights_B[:count] = 1 / counts_E[texts[members]]
        lengths_B = np.zeros(size, np.int32)
        lengths_B[:count] = lengths[members]
        inputs = {"tokens": tokens_BL, "lengths": lengths_B}
        if len(firsts):
            inputs["firsts"] = np.zeros(size, np.int32)
            inputs["firsts"][:count] = np.asarray(firsts)[members]
        yield WindowBatch(texts_B, weights_B, inputs)


def _size(count: int, most: int, multiple: int) -> int:
    size = multiple
    while size < count:
        size *= GROWTH
    return min(size, most)
