"""Lossless tokenizers of running text.

Decoding returns every byte of the text, so bits per byte compare models with different vocabularies.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from common.config import check
from common.data.cache import fingerprint, write_atomic
from common.errors import UserError

BYTES, SENTENCEPIECE = "bytes", "sentencepiece"
"""Values of `data.tokenizer`. Any other value is the path of a tokenizer.json or a SentencePiece .model file."""

FILES = ("tokenizer.json", "tokenizer.model")
"""Possible file names of the tokenizer in a workdir. The tokens of a run without these files are bytes."""

_TRAINER = {
    "model_type": "bpe",
    "character_coverage": 1.0,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "add_dummy_prefix": False,
    "byte_fallback": True,
    "unk_id": 0,
    "bos_id": -1,
    "eos_id": -1,
    "pad_id": -1,
}

_BLOCK = 10_000
"""Number of lines per call of the tokenizer. Limits memory."""


class LosslessTokenizer:
    """Splits bytes into tokens (pieces), and joins tokens to bytes.

    Attributes:
      size: number of token ids, V.
      lengths_V: number of bytes of each piece; 0 for special tokens, which do not occur in texts.
      fingerprint: SHA-256 of the tokenizer. Tokenizers with equal fingerprints give equal ids.
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
            " a tokenizer with byte fallback",
        )
        self._id_of_byte = np.array([single[bytes([n])] for n in range(256)], np.int32)

    def encode(self, text: bytes) -> np.ndarray:
        """Returns the token ids of a text, (tokens,). A line that decodes to other bytes is encoded byte by byte."""
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


def of_bytes() -> LosslessTokenizer:
    """Returns the tokenizer with bytes as tokens."""
    return LosslessTokenizer([bytes([n]) for n in range(256)])


def in_run(workdir: Path) -> LosslessTokenizer:
    """Returns the tokenizer of a run. Raises a UserError if its file is damaged."""
    paths = (workdir / name for name in FILES)
    path = next(filter(Path.is_file, paths), None)
    return load(path) if path else of_bytes()


def load(path: Path) -> LosslessTokenizer:
    """Loads a SentencePiece model, or a tokenizer.json with byte-level BPE or SentencePiece-like pieces.

    Raises:
      UserError: the file is missing or is not a tokenizer, or one of the 256 byte values is not a piece.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read a tokenizer from {path}: {error.strerror}") from error
    try:
        return _from_json(content) if path.suffix == ".json" else _from_model(content)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except (
        Exception
    ) as error:  # tokenizers and sentencepiece raise plain Exceptions or RuntimeErrors.
        raise UserError(
            f"cannot read a tokenizer from {path}: the file is damaged or not a tokenizer"
        ) from error


def choose(data: ConfigDict, training_text: np.ndarray | None) -> LosslessTokenizer:
    """Returns the tokenizer of a configuration.

    Trains a SentencePiece model on the training text, or loads the model of an earlier call from the cache.

    Args:
      data: a configuration with the fields `tokenizer`, `vocab_size` and `cache_dir`. Without `tokenizer`, tokens are
        bytes.
      training_text: (bytes,) uint8. Used only to train SentencePiece.

    Raises:
      UserError: the tokenizer's file is missing or damaged, or the vocabulary is too large or too small.
    """
    kind = data.get("tokenizer", BYTES)
    if kind == BYTES:
        return of_bytes()
    if kind != SENTENCEPIECE:
        return load(Path(os.path.expanduser(kind)))
    key = fingerprint([str(data.vocab_size), repr(_TRAINER), sha256(training_text).hexdigest()])[
        :16
    ]
    path = Path(os.path.expanduser(data.cache_dir)) / f"sentencepiece-{key}.model"
    if not path.exists():
        from common.data.tokenizer import train_model

        text = training_text.tobytes().decode(errors="ignore")
        model = train_model(data.vocab_size, [list(filter(None, text.split("\n")))], _TRAINER)
        write_atomic(path, lambda file: file.write(model))
    return load(path)


def vocabulary_size(data: ConfigDict) -> int:
    """Returns the vocabulary size of a configuration without reading the training text."""
    trained = data.get("tokenizer", BYTES) == SENTENCEPIECE
    return data.vocab_size if trained else choose(data, None).size


def cached_tokens(tokenizer: LosslessTokenizer, text: np.ndarray, data: ConfigDict) -> np.ndarray:
    """Tokenizes a text (bytes,), and stores the token ids in the cache. A second call memory-maps the stored ids.

    Raises:
      UserError: the cached file is damaged, or the cache cannot be written.
    """
    if not tokenizer.name:
        return text
    key = fingerprint([tokenizer.fingerprint, sha256(text).hexdigest()])[:16]
    path = Path(os.path.expanduser(data.cache_dir)) / f"text-{key}.npy"
    if not path.exists():
        kind = np.uint16 if tokenizer.size <= 2**16 else np.int32
        tokens = tokenizer.encode(text.tobytes()).astype(kind)
        write_atomic(path, lambda file: np.save(file, tokens))
    try:
        return np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path} is damaged; remove it") from error


def _from_model(content: bytes) -> LosslessTokenizer:
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_proto=content)

    def piece(number: int) -> bytes:
        if model.is_byte(number):
            return bytes([int(model.id_to_piece(number)[1:-1], 16)])
        special = model.is_control(number) or model.is_unknown(number)
        return b"" if special else model.id_to_piece(number).replace("\u2581", " ").encode()

    pieces_V = [piece(number) for number in range(model.get_piece_size())]
    return LosslessTokenizer(pieces_V, model.encode, content, FILES[1])


def _from_json(content: bytes) -> LosslessTokenizer:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(content.decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    special = {
        token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special
    }
    alphabet = _byte_of_character() if "ByteLevel" in json.dumps(_decoder(content)) else None
    ids = tokenizer.get_vocab()
    pieces_V = [b""] * (max(ids.values(), default=-1) + 1)
    for text, number in ids.items():
        if text in special:
            continue
        if alphabet is not None and all(character in alphabet for character in text):
            pieces_V[number] = bytes(alphabet[character] for character in text)
        elif alphabet is None and re.fullmatch("<0x[0-9A-F]{2}>", text):
            pieces_V[number] = bytes([int(text[1:-1], 16)])
        elif alphabet is None:
            pieces_V[number] = text.replace("\u2581", " ").encode()

    def encode(lines: list[str]) -> list[list[int]]:
        return [row.ids for row in tokenizer.encode_batch(lines, add_special_tokens=False)]

    return LosslessTokenizer(pieces_V, encode, content, FILES[0])


def _decoder(content: bytes) -> dict | None:
    return json.loads(content).get("decoder")


def _byte_of_character() -> dict[str, int]:
    """Returns character -> byte for byte-level BPE (GPT-2). Unprintable bytes have the characters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [n for n in range(256) if n not in printable]
    return {chr(n): n for n in printable} | {chr(256 + i): n for i, n in enumerate(others)}
