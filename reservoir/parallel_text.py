"""Loads parallel text (generated text, files, TFDS or a user's function) and builds tokenizers for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common.data.cache import fingerprint
from common.data.tokenizer import RECIPE, Tokenizer, train_tokenizer
from common.errors import check
from common.runtime.processes import is_main

if TYPE_CHECKING:
    from ml_collections import ConfigDict


@dataclass(frozen=True)
class ParallelText:
    """Sentence pairs: `target[i]` is the translation of `source[i]`."""

    source: Sequence[str]
    target: Sequence[str]

    def __len__(self) -> int:
        return len(self.source)

    def repeated(self, train: "ParallelText") -> int:
        """Returns the number of pairs that are also pairs of `train`."""
        pairs = list(zip(self.source, self.target, strict=True))
        both = set(pairs).intersection(zip(train.source, train.target, strict=True))
        return sum(pair in both for pair in pairs)


def load_parallel(data: "ConfigDict", split: str) -> ParallelText:
    """Returns the sentence pairs of a split, in the order of the data source.

    Drops pairs with an empty or blank side from the training split. Other splits keep these pairs, because scores count
    every line. Prints the number of these pairs.

    Args:
      data: a configuration with these fields:
        `source`: "embedded:NAME", "files:DIR", "tfds:NAME" or "import:MODULE:FUNCTION". FUNCTION(split) returns
          pairs (source sentence, target sentence).
        `source_language`, `target_language`: names of the languages in the data source, such as "de".
        `splits`: names of train, valid and test in the data source; not used for "import:".
        `tfds_dir`: folder of TFDS's data sets; "" for TFDS's default.
      split: "train", "valid" or "test", or the name of any other split in the data source.

    Raises:
      UserError: the data source, the split or a language is unknown, missing, damaged or empty, or the two sides have
        different numbers of lines.
    """
    kind, _, place = data.source.partition(":")
    # A user's function gets the name of the split itself.
    name = split if kind == "import" else data.splits.get(split, split)
    languages = (data.source_language, data.target_language)
    if kind == "embedded":
        text = _load_embedded(place, name, languages)
    else:
        # Imported here, because generated text does not need this module.
        from reservoir import parallel_sources

        text = ParallelText(*parallel_sources.load(data, split))
    pairs = zip(text.source, text.target, strict=True)
    blank = [
        n for n, (source, target) in enumerate(pairs) if not source.strip() or not target.strip()
    ]
    if blank and is_main():
        print(
            f"number of sentence pairs with a blank side in split {name}: {len(blank):,} of {len(text):,}, the first is"
            f" pair {blank[0] + 1:,}; {'they are left out' if split == 'train' else 'scores count them'}"
        )
    if blank and split == "train":
        dropped = set(blank)
        sides = (text.source, text.target)
        text = ParallelText(
            *([line for n, line in enumerate(side) if n not in dropped] for side in sides)
        )
    check(
        len(text) > 0,
        f"--config.data.source={data.source} has no {languages[0]}-{languages[1]} sentence pair"
        f"{' with text on both sides' if split == 'train' else ''} in split {name}: add at least one such pair",
    )
    return text


def _load_embedded(name: str, split: str, languages: tuple[str, str]) -> ParallelText:
    from reservoir.embedded import EMBEDDED  # imported here, because other sources do not need it

    check(
        name in EMBEDDED,
        f"--config.data.source=embedded:{name} is unknown: use embedded:{' or embedded:'.join(sorted(EMBEDDED))}",
    )
    generated = tuple(name.split("_")[-2:])
    check(
        languages == generated,
        f"--config.data.source=embedded:{name} translates {'-'.join(generated)}, not {'-'.join(languages)}; set"
        f" --config.data.source_language={generated[0]} and --config.data.target_language={generated[1]}",
    )
    return ParallelText(*EMBEDDED[name](split))


def build_tokenizers(
    data: "ConfigDict", train: ParallelText, cache_dir: str | Path
) -> tuple[Tokenizer, Tokenizer]:
    """Trains one SentencePiece model on both sides of the training text, or loads the tokenizers from the cache.

    Args:
      data: a configuration with these fields:
        `vocab_size`: number of subwords of the joint model, including special tokens.
        `dictionaries`: "shared" (both vocabularies have all subwords) or "separate" (the vocabulary of a side has
          only the subwords that occur in this side's training text).

    Returns:
      The tokenizers of the source and the target.

    Raises:
      UserError: `train_tokenizer` fails, or a file in the cache is damaged, or cannot be read or written.
    """
    settings = [str(data.vocab_size), data.dictionaries, *RECIPE]
    key = fingerprint(settings, train.source, train.target)[:16]
    paths = [Path(cache_dir) / f"tokenizer-{key}-{side}.npz" for side in ("source", "target")]
    if not all(path.exists() for path in paths):
        joint = train_tokenizer(data.vocab_size, train.source, train.target)
        for path, lines in zip(paths, (train.source, train.target), strict=True):
            tokenizer = joint if data.dictionaries == "shared" else joint.restricted(lines)
            tokenizer.save(path, "--config.data.cache_dir")
    source, target = map(Tokenizer.load, paths)
    return source, target
