"""Tokenized text: a flat array of token ids, memory-mapped from the cache."""

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from common.data.cache import fingerprint, write_atomic
from common.data.tokenizer import EOS, PAD, Tokenizer
from common.errors import UserError

_BLOCK = 100_000
"""Lines per call of the tokenizer, to limit memory."""


class TokenizedCorpus:
    """Sentences as token ids without begin and end of sentence.

    Attributes:
        tokens: token ids of all sentences, concatenated, (total,) uint16 or int32.
        offsets: start of each sentence in `tokens`, and the total, (sentences + 1,) int64.
        lengths: tokens of each sentence, (sentences,) int64.
        end: token that batches append to a sentence; None for no token.
        pad: padding token of batches.
    """

    def __init__(
        self, tokens: np.ndarray, offsets: np.ndarray, end: int | None = EOS, pad: int = PAD
    ) -> None:
        self.tokens = tokens
        self.offsets = offsets
        self.lengths = np.diff(offsets)
        self.end, self.pad = end, pad

    @classmethod
    def from_lists(
        cls, sentences: Sequence[Sequence[int]], end: int | None = EOS, pad: int = PAD
    ) -> "TokenizedCorpus":
        """Makes a corpus of sentences in memory."""
        offsets = np.cumsum([0, *map(len, sentences)], dtype=np.int64)
        flat = np.fromiter(chain.from_iterable(sentences), np.int32, offsets[-1])
        return cls(flat, offsets, end, pad)

    @property
    def needed(self) -> np.ndarray:
        """Tokens of each sentence in a batch, including the end of sentence, (sentences,)."""
        return self.lengths + (self.end is not None)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        """Returns the token ids of a sentence, (length,)."""
        if not 0 <= index < len(self):
            raise IndexError(f"sentence {index} of {len(self)}")
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]


def tokenize_corpus(
    text: Sequence[str], tokenizer: Tokenizer, cache_dir: str | Path
) -> TokenizedCorpus:
    """Tokenizes lines, or maps the token ids of an earlier call from the cache."""
    key = fingerprint([tokenizer.fingerprint], text)[:16]
    tokens, offsets = (Path(cache_dir) / f"{name}-{key}.npy" for name in ("tokens", "offsets"))
    if not (tokens.exists() and offsets.exists()):
        blocks, lengths = [], [0]
        for block, sizes in _tokenize(text, tokenizer):
            blocks.append(block)
            lengths.extend(sizes)
        flat = np.concatenate(blocks) if blocks else np.zeros(0, np.int32)
        write_atomic(tokens, lambda file: np.save(file, flat))
        write_atomic(offsets, lambda file: np.save(file, np.cumsum(lengths, dtype=np.int64)))
    try:
        return TokenizedCorpus(np.load(tokens, mmap_mode="r"), np.load(offsets))
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{tokens} or {offsets.name} is damaged; remove both") from error


def _tokenize(text: Sequence[str], tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, list[int]]]:
    """Yields token ids and sentence lengths of blocks of lines."""
    kind = np.uint16 if tokenizer.size <= 2**16 else np.int32
    for start in range(0, len(text), _BLOCK):
        sentences = tokenizer.encode(text[start : start + _BLOCK])
        lengths = [len(sentence) for sentence in sentences]
        yield np.fromiter(chain.from_iterable(sentences), kind, sum(lengths)), lengths
