"""Tokenizers of the `tokenizers` library: a pretrained model's tokenizer, or byte-level BPE trained on texts."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from common.atomic import write_atomic
from common.data.cache import fingerprint
from common.errors import UserError, file_error
from common.storage.addresses import shown

TOKENIZER = "tokenizer.json"
"""File of a tokenizer, in the directory of a run or of a pretrained model."""

SPECIALS = ("[SEP]", "[UNK]", "[CLS]", "[MASK]", "<s>", "</s>")
"""Special tokens in the vocabulary of a trained tokenizer. "</s>" is the padding token. Encoding adds no special
tokens, except that a tokenizer of `Subword.separating_pairs` adds "[SEP]" between the texts of a pair."""

PADS = ("[PAD]", "<pad>", "</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>")
"""Candidates for the padding token. The first candidate in a tokenizer's vocabulary is used, otherwise the id 0."""

_RECIPE = "byte-level BPE 1"
"""Version of `_train`, part of the cache key."""

_BLOCK = 10_000
"""Maximum number of texts that the `tokenizers` library gets at once."""


class Subword:
    """Encodes texts as token ids from 0 to `size` - 1, including the special tokens that the tokenizer adds.

    Attributes:
      size: number of ids, including special tokens.
      pad: id of the padding token, which may also occur inside a text.
      fingerprint: hash of the tokenizer. Tokenizers with the same hash return the same ids.
    """

    def __init__(self, text: str) -> None:
        """Loads a tokenizer from the content of a tokenizer.json, without its truncation and padding.

        Raises a ValueError if `text` is not a tokenizer.
        """
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # tokenizers raises plain Exceptions.
            raise ValueError(str(error)) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        found = (self._tokenizer.token_to_id(name) for name in PADS)
        self.pad = next((number for number in found if number is not None), 0)
        self.fingerprint = fingerprint([self._tokenizer.to_str()])

    def encode(self, lines: Sequence[str], longest: int) -> list[list[int]]:
        """Returns the token ids of each line, truncated to `longest` ids. `encode_parts` documents the error."""
        return self.encode_parts([(line,) for line in lines], longest)[0]

    @property
    def separates_pairs(self) -> bool:
        """Whether the tokenizer adds more special tokens to a pair of texts than to one text."""
        special = self._tokenizer.num_special_tokens_to_add
        return special(True) > special(False)

    def encode_parts(
        self, texts: Sequence[tuple[str, ...]], longest: int
    ) -> tuple[list[list[int]], list[int], int]:
        """Encodes texts, or pairs of texts.

        The longer text of a pair is truncated first. A tokenizer without `separates_pairs` encodes the two texts joined
        by a space, and truncates the end of the joined text.

        Returns:
          (ids, firsts, truncated). ids: token ids of each text or pair, at most `longest`. firsts: number of tokens of
          each text or pair in the first segment (type id 0; all tokens of a single or joined text). truncated: number
          of truncated texts and pairs.

        Raises:
          UserError: the special tokens leave no space for text.
        """
        pairs = bool(texts) and len(texts[0]) == 2 and self.separates_pairs
        inputs = texts if pairs else [" ".join(parts) for parts in texts]
        least = self._tokenizer.num_special_tokens_to_add(pairs) + (2 if pairs else 1)
        if longest < least:
            raise UserError(
                f"--config.data.max_length={longest} leaves no space for {'two texts' if pairs else 'text'} beside the"
                f" special tokens of the tokenizer: set at least {least}"
            )
        self._tokenizer.enable_truncation(longest)
        rows, firsts, cut = [], [], 0
        for block in _blocks(inputs):
            for found in self._tokenizer.encode_batch(block):
                rows.append(found.ids)
                firsts.append(found.type_ids.count(0) if pairs else len(found.ids))
                cut += bool(found.overflowing)
        return rows, firsts, cut

    def separating_pairs(self) -> "Subword":
        """Returns a copy of this trained tokenizer that puts the token [SEP] between the two texts of a pair."""
        made = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        made.post_processor = processors.TemplateProcessing(
            single="$A",
            pair="$A:0 [SEP]:0 $B:1",
            special_tokens=[("[SEP]", made.token_to_id("[SEP]"))],
        )
        return Subword(made.to_str())

    def to_json(self) -> str:
        """Returns the content of a tokenizer.json."""
        self._tokenizer.no_truncation()
        return self._tokenizer.to_str(pretty=True)

    def save(self, path: Path, option: str = "") -> None:
        """Writes a tokenizer.json. `option` is the option that names the folder, for error messages."""
        write_atomic(Path(path), lambda file: file.write(self.to_json().encode()), option)

    @classmethod
    def load(cls, path: Path) -> "Subword":
        """Loads a tokenizer.json. Raises a UserError if the file is missing, unreadable or not a tokenizer."""
        try:
            return cls(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise file_error(shown(path), error) from error


def build_subword(vocab_size: int, lines: Sequence[str], cache_dir: str | Path) -> Subword:
    """Trains a tokenizer of at most `vocab_size` ids, including special tokens, or loads it from the cache.

    The tokenizer has fewer ids if the training text is short.

    Raises:
      UserError: the vocabulary is too small for the 256 bytes and the special tokens, or the file in the cache is
        damaged or cannot be written.
    """
    least = len(SPECIALS) + 256
    if vocab_size < least:
        raise UserError(
            f"--config.data.vocab_size={vocab_size} must be at least {least}, for 256 bytes and the special tokens"
        )
    key = fingerprint([_RECIPE, str(vocab_size)], lines)[:16]
    path = Path(os.path.expanduser(cache_dir)) / f"subword-{key}.json"
    if not path.exists():
        _train(vocab_size, lines).save(path, "--config.data.cache_dir")
    return Subword.load(path)


def _train(vocab_size: int, lines: Sequence[str]) -> Subword:
    """Trains byte-level BPE. Normalises text: `` and '' become ", NFKD, single spaces, lower case, no accents."""
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


def _blocks(lines: Sequence[Any]) -> Iterator[list[Any]]:
    for start in range(0, len(lines), _BLOCK):
        yield list(lines[start : start + _BLOCK])
