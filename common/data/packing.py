"""Documents packed into rows of one length: whole ones next to each other, long ones cut.

B batch, L length of a row, N rows.
"""

from functools import cached_property

import numpy as np

from common.data.corpus import TokenizedCorpus
from common.data.tokenizer import BOS, EOS, PAD


class PackedRows:
    """Every token of a corpus in exactly one row.

    A row is <s>, then documents with </s> behind each (RoBERTa's FULL-SENTENCES, where a document is what the corpus
    has on a line). One that does not fit in what is left of a row begins the next one; one that is longer
    than a row is cut.
    """

    def __init__(self, corpus: TokenizedCorpus, length: int) -> None:
        """Takes the corpus, which is read as rows are asked for, and L."""
        self._corpus, self.length = corpus, length
        # A stream of all documents with their ends; the tokens themselves stay where they are.
        self._ends = corpus.offsets[1:] + np.arange(1, len(corpus) + 1)

    @cached_property
    def _borders(self) -> np.ndarray:
        """Where each row begins in the stream, and the end of it, (N + 1,)."""
        room, total = self.length - 1, int(self._ends[-1])
        borders = [0]
        while (start := borders[-1]) < total:
            whole = int(np.searchsorted(self._ends, start + room, side="right"))
            end = int(self._ends[whole - 1]) if whole else 0
            borders.append(end if end > start else start + room)
        return np.asarray(borders)

    def __len__(self) -> int:
        return len(self._borders) - 1

    def __getitem__(self, rows_B: np.ndarray) -> np.ndarray:
        """The rows of these numbers, (B, L) int32; -1 is a row of padding."""
        inside_B = rows_B >= 0
        starts_B = self._borders[rows_B]
        sizes_B = np.where(inside_B, self._borders[np.maximum(rows_B, 0) + 1] - starts_B, -1)
        steps_L = np.arange(-1, self.length - 1)
        filled_BL = (steps_L >= 0) & (steps_L < sizes_B[:, None])
        at_K = (starts_B[:, None] + steps_L)[filled_BL]
        documents_K = np.searchsorted(self._ends, at_K, side="right")
        last_K = at_K == self._ends[documents_K] - 1
        # As many ends lie before a place of the stream as documents do.
        found_K = self._corpus.tokens[at_K - documents_K - last_K]
        tokens_BL = np.full((len(rows_B), self.length), PAD, np.int32)
        tokens_BL[inside_B, 0] = BOS
        tokens_BL[filled_BL] = np.where(last_K, EOS, found_K)
        return tokens_BL
