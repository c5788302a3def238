"""SentencePiece BPE tokenizers of translation: a joint model with a shared vocabulary or one per side."""

import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO
from zipfile import BadZipFile

import numpy as np
import sentencepiece

from common.data.cache import fingerprint, write_atomic
from common.data.sources import ParallelText
from common.errors import UserError

if TYPE_CHECKING:
    from ml_collections import ConfigDict

PAD, BOS, EOS, UNK = range(4)
"""Ids of padding, begin of sentence, end of sentence and unknown pieces, in every vocabulary."""

_SPECIALS = 4
_TRAINER = {
    "model_type": "bpe",
    "character_coverage": 1.0,
    "normalization_rule_name": "nmt_nfkc",
    "byte_fallback": False,
    "pad_id": PAD,
    "bos_id": BOS,
    "eos_id": EOS,
    "unk_id": UNK,
}
_MOST_LINES = 1_000_000
"""Maximum lines for training BPE; more lines need memory and change little."""

_BLOCK = 100_000


class Tokenizer:
    """Turns text into token ids from 0 to `size` - 1 and back.

    Attributes:
        size: number of ids, including the four special tokens.
        fingerprint: equal for tokenizers that give equal ids.
    """

    pad_id, bos_id, eos_id, unk_id = PAD, BOS, EOS, UNK

    def __init__(self, model: bytes, pieces: Sequence[int] | np.ndarray | None = None) -> None:
        """Makes a tokenizer.

        Args:
            model: a serialized SentencePiece model with the special ids above.
            pieces: the model's ids of the pieces in the vocabulary, which are renumbered without gaps; special tokens
                are always included. None for all pieces.
        """
        self._model = model
        self._sentencepiece = sentencepiece.SentencePieceProcessor(model_proto=model)
        everything = np.arange(self._sentencepiece.get_piece_size())
        chosen = everything if pieces is None else np.asarray(pieces, np.int64)
        self._pieces = np.union1d(chosen, np.arange(_SPECIALS))
        self._ids = np.full(len(everything), UNK)
        self._ids[self._pieces] = np.arange(len(self._pieces))
        self.size = len(self._pieces)
        self.fingerprint = fingerprint([model.hex()], map(str, self._pieces))

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of each line, without begin and end of sentence."""
        return [self._ids[ids].tolist() for ids in self._sentencepiece.encode(list(lines))]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Returns the text of each row of ids without padding, begin and end; unknown pieces become " ⁇ "."""
        return self._sentencepiece.decode(
            [self._pieces[np.asarray(row, np.int64)].tolist() for row in ids]
        )

    def restricted(self, lines: Sequence[str]) -> "Tokenizer":
        """Returns a tokenizer whose vocabulary only has the pieces that occur in `lines`."""
        used = np.zeros(self._sentencepiece.get_piece_size(), bool)
        for start in range(0, len(lines), _BLOCK):
            for ids in self._sentencepiece.encode(list(lines[start : start + _BLOCK])):
                used[ids] = True
        return Tokenizer(self._model, np.flatnonzero(used))

    def save(self, path: Path) -> None:
        """Writes model and vocabulary to an .npz file."""
        write_atomic(Path(path), self._write)

    def _write(self, file: BinaryIO) -> None:
        np.savez(file, model=np.frombuffer(self._model, np.uint8), pieces=self._pieces)

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Loads a tokenizer that `save` wrote.

        Raises:
            UserError: the file is missing or is not a tokenizer.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                return cls(file["model"].tobytes(), file["pieces"])
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"cannot read a tokenizer from {path}: {reason}") from error
        except (ValueError, KeyError, EOFError, RuntimeError, BadZipFile) as error:
            # NumPy's own message about files that are no archive would suggest to load pickles.
            raise UserError(
                f"cannot read a tokenizer from {path}: the file is damaged or no tokenizer"
            ) from error


def build_tokenizers(
    data: "ConfigDict", train: ParallelText, cache_dir: str | Path
) -> tuple[Tokenizer, Tokenizer]:
    """Trains a joint model on both sides of the training text, or loads it from the cache.

    Args:
        data: a configuration with these fields:
            `vocab_size`: pieces of the joint model, including special tokens.
            `dictionaries`: "shared" (both sides have all pieces) or "separate" (each side has only the pieces that
                occur in its training text).
        train: the training text.
        cache_dir: folder of cached tokenizers.

    Returns:
        The tokenizers of the source and the target.

    Raises:
        UserError: `dictionaries` is unknown, or the vocabulary is too small or too large for the text.
    """
    if data.dictionaries not in ("shared", "separate"):
        raise UserError(
            f"--config.data.dictionaries={data.dictionaries} must be shared or separate"
        )
    settings = [str(data.vocab_size), data.dictionaries, repr(_TRAINER), str(_MOST_LINES)]
    key = fingerprint(settings, train.source, train.target)[:16]
    paths = [Path(cache_dir) / f"tokenizer-{key}-{side}.npz" for side in ("source", "target")]
    if not all(path.exists() for path in paths):
        joint = Tokenizer(_train(data.vocab_size, train.source, train.target))
        for path, lines in zip(paths, (train.source, train.target), strict=True):
            tokenizer = joint if data.dictionaries == "shared" else joint.restricted(lines)
            tokenizer.save(path)
    source, target = map(Tokenizer.load, paths)
    return source, target


def build_tokenizer(vocab_size: int, lines: Sequence[str], cache_dir: str | Path) -> Tokenizer:
    """Trains a model of `vocab_size` pieces, including special tokens, or loads it from the cache.

    Raises:
        UserError: the vocabulary is too small or too large for the text.
    """
    key = fingerprint([str(vocab_size), repr(_TRAINER), str(_MOST_LINES)], lines)[:16]
    path = Path(cache_dir) / f"tokenizer-{key}.npz"
    if not path.exists():
        Tokenizer(_train(vocab_size, lines)).save(path)
    return Tokenizer.load(path)


def _train(vocab_size: int, *sides: Sequence[str]) -> bytes:
    """Returns a serialized SentencePiece model of all sides, which have equally many lines."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_sample(sides),
            model_writer=model,
            vocab_size=vocab_size,
            minloglevel=2,
            **_TRAINER,
        )
    except RuntimeError as error:
        message = str(error)
        if largest := re.search(r"value <= (\d+)", message):
            hint = f"too large for the training text; the largest possible is {largest[1]}"
        elif smallest := re.search(r"required_chars\. \d+ vs (\d+)", message):
            hint = f"too small for the training text; the smallest possible is {smallest[1]}"
        else:
            hint = f"refused by SentencePiece: {message}"
        raise UserError(f"--config.data.vocab_size={vocab_size} is {hint}") from error
    return model.getvalue()


def _sample(sides: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields the lines of all sides, or a fixed random sample of _MOST_LINES."""
    count, most = len(sides[0]), _MOST_LINES // len(sides)
    places: Sequence[int] | np.ndarray = range(count)
    if count > most:
        places = np.random.default_rng(0).choice(count, most, replace=False)
    for i in places:
        for side in sides:
            yield side[i]
