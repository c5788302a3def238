"""Loads, trains and caches lossless tokenizers with subwords as tokens."""

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from common.atomic import write_atomic
from common.data.cache import fingerprint, read_array, reading_tokenizer
from common.data.lossless_tokenizer import FILES, LosslessTokenizer
from common.errors import check

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


class Subwords(LosslessTokenizer):
    """A lossless tokenizer with subwords (pieces) as tokens. The base class documents the attributes."""

    def __init__(
        self,
        pieces_V: Sequence[bytes],
        encode: Callable[[list[str]], Iterable[list[int]]],
        content: bytes,
        name: str,
    ):
        """Makes a tokenizer.

        Args:
          pieces_V: bytes of each piece; b"" for special tokens.
          encode: function from lines with their line ends to the ids of each line.
          content, name: bytes and name of the file that `save` writes.

        Raises:
          UserError: one of the 256 byte values is not a piece.
        """
        self.size, self.name = len(pieces_V), name
        self.lengths_V = np.array([len(piece) for piece in pieces_V], np.int64)
        self.fingerprint = fingerprint([name, content.hex()])
        self._pieces_V, self._encode, self._content = pieces_V, encode, content
        single = {piece: number for number, piece in enumerate(pieces_V) if len(piece) == 1}
        missing = [n for n in range(256) if bytes([n]) not in single]
        check(
            not missing,
            f"the tokenizer has no piece for {len(missing)} of the 256 bytes, so it would lose parts of a text: choose"
            " a --config.data.tokenizer with byte fallback",
        )
        self._id_of_byte = np.array([single[bytes([n])] for n in range(256)], np.int32)

    def encode(self, text: bytes) -> np.ndarray:
        """Returns the token ids of a text, (tokens,). Encodes a line as bytes if its subwords would change the line."""
        lines, tokens = text.splitlines(keepends=True), [np.zeros(0, np.int32)]
        for start in range(0, len(lines), _BLOCK):
            block = lines[start : start + _BLOCK]
            # errors="replace" changes a line that is not UTF-8, so its tokens decode to other bytes.
            ids = self._encode([line.decode(errors="replace") for line in block])
            for line, row in zip(block, ids, strict=True):
                if self.decode(row) == line:
                    tokens.append(np.asarray(row, np.int32))
                else:
                    tokens.append(self._id_of_byte[np.frombuffer(line, np.uint8)])
        return np.concatenate(tokens)

    def decode(self, tokens: np.ndarray | list[int]) -> bytes:
        return b"".join([self._pieces_V[token] for token in tokens])

    def cached_tokens(self, text: np.ndarray, data: ConfigDict) -> np.ndarray:
        """Returns the token ids of a text, memory-mapped. The first call for a text stores them in `data.cache_dir`.

        Raises a UserError if the cached file is damaged, or the cache cannot be read or written.
        """
        key = fingerprint([self.fingerprint, sha256(text).hexdigest()])[:16]
        path = Path(os.path.expanduser(data.cache_dir)) / f"text-{key}.npy"
        if not path.exists():
            tokens = self.encode(text.tobytes())
            tokens = tokens.astype(np.uint16 if self.size <= 2**16 else np.int32)
            write_atomic(path, lambda file: np.save(file, tokens), "--config.data.cache_dir")
        return read_array(path)

    def save(self, workdir: Path) -> None:
        write_atomic(workdir / self.name, lambda file: file.write(self._content))


def load(path: Path) -> Subwords:
    """Loads a lossless tokenizer from a SentencePiece model or a tokenizer.json.

    A tokenizer.json must have byte-level BPE, or pieces as in SentencePiece ("▁" for a space, "<0x0A>" for a byte).

    Raises:
      UserError: the file cannot be read or is not a tokenizer, or its vocabulary lacks one of the 256 bytes.
    """
    with reading_tokenizer(path):
        content = path.read_bytes()
        return _from_json(content) if path.suffix == ".json" else _from_model(content)


def trained(data: ConfigDict, training_text: np.ndarray) -> Subwords:
    """Trains a SentencePiece model on a text (bytes,) uint8, or loads the model of an earlier call from the cache."""
    key = fingerprint([str(data.vocab_size), repr(_TRAINER), sha256(training_text).hexdigest()])[
        :16
    ]
    path = Path(os.path.expanduser(data.cache_dir)) / f"sentencepiece-{key}.model"
    if not path.exists():
        from common.data.tokenizer import train_model

        text = training_text.tobytes().decode(errors="ignore")
        model = train_model(data.vocab_size, [list(filter(None, text.split("\n")))], _TRAINER)
        write_atomic(path, lambda file: file.write(model), "--config.data.cache_dir")
    return load(path)


def _from_model(content: bytes) -> Subwords:
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_proto=content)

    def piece(number: int) -> bytes:
        if model.is_byte(number):
            return bytes([int(model.id_to_piece(number)[1:-1], 16)])
        special = model.is_control(number) or model.is_unknown(number)
        return b"" if special else model.id_to_piece(number).replace("\u2581", " ").encode()

    pieces_V = [piece(number) for number in range(model.get_piece_size())]
    return Subwords(pieces_V, model.encode, content, FILES[1])


def _from_json(content: bytes) -> Subwords:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(content.decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    special = {
        token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special
    }
    decoder = json.dumps(json.loads(content).get("decoder"))
    alphabet = _byte_of_character() if "ByteLevel" in decoder else None
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

    return Subwords(pieces_V, encode, content, FILES[0])


def _byte_of_character() -> dict[str, int]:
    """Returns {character: byte} for byte-level BPE (GPT-2).

    188 bytes are represented by their own printable Latin-1 character. The other 68 bytes, such as the space, are
    represented by the characters from code point 256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [n for n in range(256) if n not in printable]
    return {chr(n): n for n in printable} | {chr(256 + i): n for i, n in enumerate(others)}
