"""Tokenized sentences, and their cache on disk."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from common.atomic import write_atomic
from common.data.cache import fingerprint, read_array
from common.data.special_ids import EOS, PAD

if TYPE_CHECKING:
    from common.data.tokenizer import Tokenizer

_BLOCK = 100_000
"""Number of lines per call of the tokenizer. Limits memory."""


class TokenizedCorpus:
    """Sentences, or other texts, as token ids.

    Attributes:
      tokens: token ids of all sentences, concatenated, (total,) uint16 or int32.
      offsets: start of each sentence in `tokens`, then the length of `tokens`, (sentences + 1,) int64.
      lengths: number of tokens of each sentence without the token `end`, (sentences,) int64.
      end: id of the end token that a batch appends to each sentence. None appends nothing.
      pad: id of the padding token.
      fingerprint: fingerprint of texts and tokenizer; "" unless `tokenize_corpus` returned the corpus.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        offsets: np.ndarray,
        end: int | None = EOS,
        pad: int = PAD,
        fingerprint: str = "",
    ) -> None:
        self.tokens = tokens
        self.offsets = offsets
        self.lengths = np.diff(offsets)
        self.end, self.pad = end, pad
        self.fingerprint = fingerprint

    @classmethod
    def from_lists(
        cls, sentences: Sequence[Sequence[int]], end: int | None = EOS, pad: int = PAD
    ) -> "TokenizedCorpus":
        offsets = np.cumsum([0, *map(len, sentences)], dtype=np.int64)
        flat = np.fromiter(chain.from_iterable(sentences), np.int32, offsets[-1])
        return cls(flat, offsets, end, pad)

    @property
    def needed(self) -> np.ndarray:
        """Number of tokens of each sentence, including the end token unless `end` is None, (sentences,)."""
        return self.lengths + (self.end is not None)

    def __len__(self) -> int:
        return len(self.lengths)


def tokenize_corpus(
    text: Sequence[str], tokenizer: "Tokenizer", cache_dir: str | Path
) -> TokenizedCorpus:
    """Returns the token ids of each line, without begin-of-sentence and end-of-sentence tokens.

    The first call for a text and a tokenizer stores the token ids in `cache_dir`. All calls memory-map the stored ids.

    Raises:
      UserError: a cached file is damaged or cannot be read, or the cache cannot be written.
    """
    key = fingerprint([tokenizer.fingerprint], text)
    tokens, offsets = (Path(cache_dir) / f"{name}-{key[:16]}.npy" for name in ("tokens", "offsets"))
    if not (tokens.exists() and offsets.exists()):
        kind = np.uint16 if tokenizer.size <= 2**16 else np.int32
        blocks, lengths = [np.zeros(0, kind)], [0]
        for start in range(0, len(text), _BLOCK):
            sentences = tokenizer.encode(text[start : start + _BLOCK])
            lengths += map(len, sentences)
            blocks.append(np.fromiter(chain.from_iterable(sentences), kind))
        option = "--config.data.cache_dir"
        ends = np.cumsum(lengths, dtype=np.int64)
        write_atomic(tokens, lambda file: np.save(file, np.concatenate(blocks)), option)
        write_atomic(offsets, lambda file: np.save(file, ends), option)
    return TokenizedCorpus(read_array(tokens), np.array(read_array(offsets)), fingerprint=key)
