"""The lossless tokenizer with bytes as tokens: decoding returns every byte of the text.

Therefore bits per byte can be compared between models with different vocabularies.
"""

from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from common.data.cache import fingerprint

FILES = ("tokenizer.json", "tokenizer.model")
"""Possible file names of the tokenizer in a workdir. The tokens of a run without these files are bytes."""


class LosslessTokenizer:
    """Splits a text into bytes. The subclass `common.data.subwords.Subwords` splits a text into subwords.

    Attributes:
      size: number of token ids, V.
      lengths_V: number of bytes of each token; 0 for special tokens, which do not occur in texts.
      fingerprint: SHA-256 of the tokenizer. Tokenizers with equal fingerprints give equal ids.
      name: name of the file that `save` writes; "" if the tokens are bytes.
    """

    def __init__(self):
        self.size, self.name = 256, ""
        self.lengths_V = np.ones(256, np.int64)
        self.fingerprint = fingerprint(["", ""])

    def encode(self, text: bytes) -> np.ndarray:
        """Returns the token ids of a text, (tokens,)."""
        return np.frombuffer(text, np.uint8)

    def decode(self, tokens: np.ndarray | list[int]) -> bytes:
        """Returns the bytes of token ids."""
        return np.asarray(tokens, np.uint8).tobytes()

    def cached_tokens(self, text: np.ndarray, data: ConfigDict) -> np.ndarray:
        """Returns the token ids of a text (an array of bytes). Subwords are cached in `data.cache_dir`."""
        del data
        return text

    def save(self, workdir: Path) -> None:
        """Writes the tokenizer's file to the workdir; writes nothing if the tokens are bytes."""
