"""Packs the documents of a corpus into rows of equal length."""

from functools import cached_property

import numpy as np

from common.data.corpus import TokenizedCorpus
from common.data.special_ids import BOS, EOS, PAD


class PackedRows:
    """Rows that contain every token of a corpus exactly once: RoBERTa's FULL-SENTENCES, with documents as sentences.

    A row is <s>, then documents, each followed by </s>. A document that does not fit into the rest of a row starts the
    next row. A document longer than a row is split into several rows.
    """

    def __init__(self, corpus: TokenizedCorpus, length: int) -> None:
        """Prepares rows of `length` tokens. Only `__getitem__` reads the tokens of the corpus."""
        self._corpus, self.length = corpus, length
        self.fingerprint = corpus.fingerprint
        # The stream concatenates all documents, each followed by </s>. `_ends` are the positions after each </s>.
        self._ends = corpus.offsets[1:] + np.arange(1, len(corpus) + 1)

    @cached_property
    def _borders(self) -> np.ndarray:
        """Start of each row in the stream (see `__init__`), then the length of the stream, (rows + 1,)."""
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
        """Returns the rows with the indices `rows_B`, (B, L) int32. The index -1 gives a row of padding."""
        inside_B = rows_B >= 0
        starts_B = self._borders[rows_B]
        sizes_B = np.where(inside_B, self._borders[np.maximum(rows_B, 0) + 1] - starts_B, -1)
        steps_L = np.arange(-1, self.length - 1)
        filled_BL = (steps_L >= 0) & (steps_L < sizes_B[:, None])
        at = (starts_B[:, None] + steps_L)[filled_BL]
        documents = np.searchsorted(self._ends, at, side="right")
        is_last = at == self._ends[documents] - 1
        # The corpus has no </s>: from a position in the stream, subtract the number of </s> before this position. At a
        # </s>, subtract 1 more: the token before </s> is read and not used.
        corpus_tokens = self._corpus.tokens[at - documents - is_last]
        tokens_BL = np.full((len(rows_B), self.length), PAD, np.int32)
        tokens_BL[inside_B, 0] = BOS
        tokens_BL[filled_BL] = np.where(is_last, EOS, corpus_tokens)
        return tokens_BL
