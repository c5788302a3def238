"""Subword tokenizers of the `tokenizers` library: that of a pretrained model, or byte-level BPE trained on lines."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from common.data.cache import fingerprint, write_atomic
from common.errors import UserError

SPECIALS = ("[SEP]", "[UNK]", "[CLS]", "[MASK]", "<s>", "</s>")
"""Of a trained tokenizer. It puts none of them into a text; the last one fills rows up."""

PADS = ("[PAD]", "<pad>", "</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>")
"""What fills rows up: the padding, otherwise the end of a text; the first of them that a tokenizer has."""

_RECIPE = "byte-level BPE 1"
"""Names what `_train` does, in the keys of the cache."""

_BLOCK = 100_000


class Subword:
    """Turns texts into ids from 0 to `size` - 1, with the special tokens that its model reads.

    Attributes:
        size: number of ids, special ones included.
        pad: id of what fills rows up; it may occur in texts too.
        fingerprint: names the tokenizer; equal ones make equal ids.
    """

    def __init__(self, text: str) -> None:
        """Takes the content of a tokenizer.json; its own truncation and padding do not count.

        Raises:
            ValueError: it is no tokenizer.
        """
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing more special
            raise ValueError(str(error)) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        found = (self._tokenizer.token_to_id(name) for name in PADS)
        self.pad = next((number for number in found if number is not None), 0)
        self.fingerprint = fingerprint([self._tokenizer.to_str()])

    def encode(self, lines: Sequence[str], longest: int) -> list[list[int]]:
        """Gives the ids of each line, at most `longest`: the end of a text is cut, the special tokens stay.

        Raises:
            UserError: the special tokens alone are as many.
        """
        return self.encode_and_count(lines, longest)[0]

    def encode_and_count(self, lines: Sequence[str], longest: int) -> tuple[list[list[int]], int]:
        """As `encode`, and how many lines were cut."""
        special = self._tokenizer.num_special_tokens_to_add(False)
        if longest <= special:
            raise UserError(
                f"rows of {longest} tokens have no room for a text besides the {special} special tokens"
            )
        self._tokenizer.enable_truncation(longest)
        rows, cut = [], 0
        for start in range(0, len(lines), _BLOCK):
            for found in self._tokenizer.encode_batch(list(lines[start : start + _BLOCK])):
                rows.append(found.ids)
                cut += bool(found.overflowing)
        return rows, cut

    def to_json(self) -> str:
        """The content of a tokenizer.json."""
        self._tokenizer.no_truncation()
        return self._tokenizer.to_str(pretty=True)

    def save(self, path: Path) -> None:
        """Writes a tokenizer.json."""
        write_atomic(Path(path), lambda file: file.write(self.to_json().encode()))

    @classmethod
    def load(cls, path: Path) -> "Subword":
        """Reads what `save` wrote, or the tokenizer.json of a pretrained model.

        Raises:
            UserError: the file is missing or is no tokenizer.
        """
        try:
            return cls(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"cannot read a tokenizer from {path}: {error.strerror}") from error
        except ValueError as error:
            raise UserError(f"cannot read a tokenizer from {path}: {error}") from error


def build_subword(vocab_size: int, lines: Sequence[str], cache_dir: str | Path) -> Subword:
    """Trains a tokenizer of at most `vocab_size` ids, special ones included, or finds it in the cache.

    A text that has no more pairs to join gives fewer.

    Raises:
        UserError: a vocabulary without room for the 256 bytes.
    """
    least = len(SPECIALS) + 256
    if vocab_size < least:
        raise UserError(f"data.vocab_size {vocab_size} is below {least}: bytes and special tokens")
    key = fingerprint([_RECIPE, str(vocab_size)], lines)[:16]
    path = Path(cache_dir) / f"subword-{key}.json"
    if not path.exists():
        _train(vocab_size, lines).save(path)
    return Subword.load(path)


def _train(vocab_size: int, lines: Sequence[str]) -> Subword:
    """The recipe of the perception paper: quotes as in print, NFKD, single spaces, lower case, no accents."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Replace("``", '"'),
            normalizers.Replace("''", '"'),
            normalizers.NFKD(),
            normalizers.Replace(Regex(" {2,}"), " "),
            normalizers.Lowercase(),
            normalizers.StripAccents(),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_blocks(lines), trainer, length=len(lines))
    return Subword(tokenizer.to_str())


def _blocks(lines: Sequence[str]) -> Iterator[list[str]]:
    for start in range(0, len(lines), _BLOCK):
        yield list(lines[start : start + _BLOCK])
