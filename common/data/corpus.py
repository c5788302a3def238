"""Text as ids: one flat array per side, mapped from a file in the cache."""

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from common.data.cache import fingerprint, write_atomic
from common.data.tokenizer import EOS, PAD, Tokenizer
from common.errors import UserError

_BLOCK = 100_000
"""Lines tokenized at once, which bounds the memory."""


class TokenizedCorpus:
    """Sentences as ids without begin and end of sentence.

    Attributes:
        tokens: all ids, one sentence after the other, (total,) uint16 or int32.
        offsets: where each sentence begins in `tokens`, and the total, (sentences + 1,) int64.
        lengths: ids in each sentence, (sentences,) int64.
        end: what stands behind a sentence in a batch; None for nothing.
        pad: what fills its row up.
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
        """Sentences that are in memory already."""
        offsets = np.cumsum([0, *map(len, sentences)], dtype=np.int64)
        flat = np.fromiter(chain.from_iterable(sentences), np.int32, offsets[-1])
        return cls(flat, offsets, end, pad)

    @property
    def needed(self) -> np.ndarray:
        """Places that each sentence takes in a batch, its end included, (sentences,)."""
        return self.lengths + (self.end is not None)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        """Ids of one sentence, (length,)."""
        if not 0 <= index < len(self):
            raise IndexError(f"sentence {index} of {len(self)}")
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]


def tokenize_corpus(
    text: Sequence[str], tokenizer: Tokenizer, cache_dir: str | Path
) -> TokenizedCorpus:
    """Tokenizes the lines of one side, or maps the ids that an earlier call left in the cache."""
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
    """Ids and sentence lengths, block by block."""
    kind = np.uint16 if tokenizer.size <= 2**16 else np.int32
    for start in range(0, len(text), _BLOCK):
        sentences = tokenizer.encode(text[start : start + _BLOCK])
        lengths = [len(sentence) for sentence in sentences]
        yield np.fromiter(chain.from_iterable(sentences), kind, sum(lengths)), lengths
