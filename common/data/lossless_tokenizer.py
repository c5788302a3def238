"""A lossless tokenizer: decoding returns every byte of the text.

Therefore bits per byte can be compared between models with different vocabularies.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from common.atomic import write_atomic
from common.data.cache import fingerprint
from common.errors import check

FILES = ("tokenizer.json", "tokenizer.model")
"""Possible file names of the tokenizer in a workdir. The tokens of a run without these files are bytes."""

_BLOCK = 10_000
"""Number of lines per call of the tokenizer. Limits memory."""


class LosslessTokenizer:
    """Splits bytes into tokens (pieces), and joins tokens to bytes.

    Attributes:
      size: number of token ids, V.
      lengths_V: number of bytes of each piece; 0 for special tokens, which do not occur in texts.
      fingerprint: SHA-256 of the tokenizer. Tokenizers with equal fingerprints give equal ids.
      name: name of the file that `save` writes; "" if the tokens are bytes.
    """

    def __init__(
        self,
        pieces_V: Sequence[bytes],
        encode: Callable[[list[str]], Iterable[list[int]]] | None = None,
        content: bytes = b"",
        name: str = "",
    ):
        """Makes a tokenizer.

        Args:
          pieces_V: bytes of each piece; b"" for special tokens.
          encode: function from lines with their line feeds to the ids of each line; None if the tokens are bytes.
          content, name: bytes and name of the file that `save` writes.

        Raises:
          UserError: one of the 256 byte values is not a piece.
        """
        self.size = len(pieces_V)
        self.lengths_V = np.array([len(piece) for piece in pieces_V], np.int64)
        self.fingerprint = fingerprint([name, content.hex()])
        self._pieces_V, self._encode, self._content, self.name = pieces_V, encode, content, name
        single = {piece: number for number, piece in enumerate(pieces_V) if len(piece) == 1}
        missing = [n for n in range(256) if bytes([n]) not in single]
        check(
            not missing,
            f"the tokenizer has no piece for {len(missing)} of the 256 bytes, so it would lose parts of a text: choose"
            " a --config.data.tokenizer with byte fallback",
        )
        self._id_of_byte = np.array([single[bytes([n])] for n in range(256)], np.int32)

    def encode(self, text: bytes) -> np.ndarray:
        """Returns the token ids of a text, (tokens,). Encodes a line as bytes if its tokens decode to other bytes."""
        if self._encode is None:
            return np.frombuffer(text, np.uint8)
        lines, tokens = text.splitlines(keepends=True), [np.zeros(0, np.int32)]
        for start in range(0, len(lines), _BLOCK):
            block = lines[start : start + _BLOCK]
            # errors="replace" changes a line that is not UTF-8, so the comparison below encodes the line as bytes.
            ids = self._encode([line.decode(errors="replace") for line in block])
            for line, row in zip(block, ids, strict=True):
                if self.decode(row) == line:
                    tokens.append(np.asarray(row, np.int32))
                else:
                    tokens.append(self._id_of_byte[np.frombuffer(line, np.uint8)])
        return np.concatenate(tokens)

    def decode(self, tokens: np.ndarray | list[int]) -> bytes:
        """Returns the bytes of token ids."""
        if self._encode is None:
            return np.asarray(tokens, np.uint8).tobytes()
        return b"".join([self._pieces_V[token] for token in tokens])

    def save(self, workdir: Path) -> None:
        """Writes the tokenizer's file to the workdir; writes nothing if the tokens are bytes."""
        if self._content:
            write_atomic(workdir / self.name, lambda file: file.write(self._content))
