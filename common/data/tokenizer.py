"""SentencePiece BPE tokenizers."""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import sentencepiece

from common.atomic import write_atomic
from common.data.cache import fingerprint, reading_tokenizer
from common.data.special_ids import BOS, EOS, PAD, UNK
from common.errors import UserError, check

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
"""Maximum number of lines for training BPE. Limits memory."""

RECIPE = (repr(_TRAINER), str(_MOST_LINES))
"""Training options of a tokenizer as text, for cache keys."""

_BLOCK = 100_000
"""Number of lines per call of SentencePiece in `Tokenizer.restricted`. Limits memory."""


class Tokenizer:
    """Encodes text as token ids from 0 to `size` - 1, and decodes token ids.

    Attributes:
      size: number of ids, including the four special tokens.
      fingerprint: SHA-256 of model and vocabulary. Tokenizers with equal fingerprints give equal ids.
    """

    def __init__(self, model: bytes, pieces: Sequence[int] | np.ndarray | None = None) -> None:
        """Makes a tokenizer from a SentencePiece model.

        Args:
          model: a serialized model with the special ids PAD, BOS, EOS and UNK.
          pieces: ids, in the model, of the pieces to keep besides the special tokens; None keeps all pieces. The
            tokenizer numbers the kept pieces without gaps.
        """
        self._model = model
        self._sentencepiece = sentencepiece.SentencePieceProcessor(model_proto=model)
        everything = np.arange(self._sentencepiece.get_piece_size())
        chosen = everything if pieces is None else np.asarray(pieces, np.int64)
        self._pieces = np.union1d(chosen, [PAD, BOS, EOS, UNK])
        self._ids = np.full(len(everything), UNK)
        self._ids[self._pieces] = np.arange(len(self._pieces))
        self.size = len(self._pieces)
        self.fingerprint = fingerprint([model.hex()], map(str, self._pieces))

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of each line, without begin-of-sentence and end-of-sentence tokens."""
        return [self._ids[ids].tolist() for ids in self._sentencepiece.encode(list(lines))]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Returns the text of each row of ids. Omits special tokens, except that the unknown token becomes " ⁇ "."""
        return self._sentencepiece.decode(
            [self._pieces[np.asarray(row, np.int64)].tolist() for row in ids]
        )

    def restricted(self, lines: Sequence[str]) -> "Tokenizer":
        """Returns a tokenizer with only the pieces that occur in `lines`, and the special tokens."""
        used = np.zeros(self._sentencepiece.get_piece_size(), bool)
        for start in range(0, len(lines), _BLOCK):
            for ids in self._sentencepiece.encode(list(lines[start : start + _BLOCK])):
                used[ids] = True
        return Tokenizer(self._model, np.flatnonzero(used))

    def save(self, path: Path, option: str = "") -> None:
        """Writes model and vocabulary to an .npz file. For `option` see `common.atomic.replacing`."""
        arrays = {"model": np.frombuffer(self._model, np.uint8), "pieces": self._pieces}
        write_atomic(Path(path), lambda file: np.savez(file, **arrays), option)

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Loads a tokenizer that `save` has written. Raises a UserError if the file is missing or damaged."""
        with reading_tokenizer(path), np.load(path, allow_pickle=False) as file:
            return cls(file["model"].tobytes(), file["pieces"])


def build_tokenizer(
    vocab_size: int, lines: Sequence[str], cache_dir: str | Path, added: int = 0
) -> Tokenizer:
    """Trains a tokenizer (`train_tokenizer`), or loads the tokenizer of an earlier call from `cache_dir`."""
    key = fingerprint([str(vocab_size - added), *RECIPE], lines)[:16]
    path = Path(cache_dir) / f"tokenizer-{key}.npz"
    if not path.exists():
        tokenizer = train_tokenizer(vocab_size, lines, added=added)
        tokenizer.save(path, "--config.data.cache_dir")
    return Tokenizer.load(path)


def train_tokenizer(vocab_size: int, *sides: Sequence[str], added: int = 0) -> Tokenizer:
    """Trains one BPE model on all sides of a parallel text, such as source and target.

    Args:
      vocab_size: value of --config.data.vocab_size, a number of tokens including special tokens.
      sides: the lines of each side; all sides have equally many lines.
      added: number of tokens that the caller adds to the tokenizer, which itself has `vocab_size - added` tokens.
        Negative if the caller leaves out tokens of the tokenizer.

    Raises:
      UserError: the vocabulary is too small or too large for the text, all lines of the text are blank or too long,
        or SentencePiece fails.
    """
    return Tokenizer(train_model(vocab_size, sides, _TRAINER, added))


def train_model(
    vocab_size: int, sides: Sequence[Sequence[str]], options: Mapping[str, object], added: int = 0
) -> bytes:
    """Trains a SentencePiece model. Returns the serialized model. `options` are options of `SentencePieceTrainer`.

    `train_tokenizer` documents `vocab_size`, `added` and the errors.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_sample(sides),
            model_writer=model,
            # Below 5 tokens, SentencePiece's error message lacks the smallest possible number of tokens. SentencePiece
            # reads `vocab_size` as a 32-bit integer.
            vocab_size=min(max(vocab_size - added, 5), 2**31 - 1),
            minloglevel=2,
            **options,
        )
    except RuntimeError as error:
        message = str(error)
        check(
            "sentences_.empty" not in message and "all_chars_count" not in message,
            "cannot train a tokenizer, because every line of the training text is blank, not UTF-8 or longer than 4,192"
            " bytes: add text, or split the lines",
        )
        if largest := re.search(r"value <= (\d+)", message):
            most = int(largest[1]) + added
            hint = f"too large for the training text; the largest possible is {most}"
        elif smallest := re.search(r"required_chars\. \d+ vs (\d+)", message):
            least = int(smallest[1]) + added
            hint = f"too small for the training text; the smallest possible is {least}"
        else:
            hint = f"refused by SentencePiece: {message}; try another number"
        raise UserError(f"--config.data.vocab_size={vocab_size} is {hint}") from error
    return model.getvalue()


def _sample(sides: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields the lines of all sides, or a fixed random sample of at most `_MOST_LINES` lines."""
    count, most = len(sides[0]), _MOST_LINES // len(sides)
    chosen: Sequence[int] | np.ndarray = range(count)
    if count > most:
        chosen = np.random.default_rng(0).choice(count, most, replace=False)
    for i in chosen:
        for side in sides:
            yield side[i]
