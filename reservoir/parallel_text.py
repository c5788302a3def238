"""Loads parallel text (generated text, files, TFDS or a user's function) and builds tokenizers for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common.data.cache import fingerprint
from common.data.tokenizer import RECIPE, Tokenizer, train_tokenizer
from common.errors import UserError, check
from common.storage.addresses import shown

if TYPE_CHECKING:
    from ml_collections import ConfigDict


@dataclass(frozen=True)
class ParallelText:
    """Sentence pairs: `target[i]` is the translation of `source[i]`."""

    source: Sequence[str]
    target: Sequence[str]

    def __post_init__(self) -> None:
        if len(self.source) != len(self.target):
            raise ValueError(
                "source and target must have the same length, with one target line for each source line, got"
                f" {len(self.source)} and {len(self.target)}"
            )

    def __len__(self) -> int:
        return len(self.source)


def load_parallel(data: "ConfigDict", split: str) -> ParallelText:
    """Returns the sentence pairs of a split, in the order of the data source.

    Drops pairs with an empty or blank side from the training split. Other splits keep these pairs, because scores count
    every line.

    Args:
        data: a configuration with these fields:
            `source`: "embedded:NAME", "files:DIR", "tfds:NAME" or "import:MODULE:FUNCTION". FUNCTION(split) returns
                pairs (source sentence, target sentence).
            `source_language`, `target_language`: names of the languages in the data source, such as "de".
            `splits`: names of train, valid and test in the data source.
            `tfds_dir`: folder of TFDS's data sets; "" for TFDS's default.
        split: "train", "valid" or "test", or the name of any other split in the data source.

    Raises:
        UserError: the data source, the split or a language is unknown, missing, damaged or empty.
    """
    kind, _, place = data.source.partition(":")
    name = data.splits.get(split, split)
    languages = (data.source_language, data.target_language)
    match kind:
        case "embedded":
            text = _load_embedded(place, name, languages)
        case "files":
            option = f"--config.data.splits.{split}" if split in data.splits else "--split"
            text = _load_files(place, name, languages, option)
        case "tfds":
            text = _load_tfds(place, name, languages, data.tfds_dir)
        case "import":
            from common.data.own import own_examples

            pairs = own_examples(data.source, split, (tuple, list), "a pair of sentences")
            for number, pair in enumerate(pairs):
                check(
                    [isinstance(side, str) for side in pair] == [True, True],
                    f"--config.data.source={data.source}: example {number} of split {split!r} is {pair!r:.80} instead"
                    " of a pair of sentences",
                )
            text = ParallelText(*map(list, zip(*pairs, strict=True)))
        case _:
            raise UserError(
                f"--config.data.source={data.source} must be embedded:NAME, files:DIR, tfds:NAME or"
                " import:MODULE:FUNCTION"
            )
    if split == "train":
        pairs = zip(text.source, text.target, strict=True)
        kept = [(source, target) for source, target in pairs if source.strip() and target.strip()]
        text = ParallelText([source for source, _ in kept], [target for _, target in kept])
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


def _load_files(place: str, split: str, languages: tuple[str, str], option: str) -> ParallelText:
    from common.data.files import source_folder

    folder = source_folder(place)
    sides = zip(("source", "target"), languages, strict=True)
    return read_parallel(*(_find(folder, split, *side, option) for side in sides))


def read_parallel(*paths: Path) -> ParallelText:
    """Reads a text file and the file with its translation, line by line. Unpacks .gz and .zip.

    Raises:
        UserError: a file is missing, damaged, empty or not UTF-8, or the files have different numbers of lines.
    """
    from common.data.files import read_lines

    source, target = (read_lines(path) for path in paths)
    check(
        len(source) == len(target),
        f"{shown(paths[0])} and {shown(paths[1])} must have the same number of lines, because each line translates the"
        f" same line of the other file, got {len(source)} and {len(target)}",
    )
    return ParallelText(source, target)


def _find(folder: Path, split: str, side: str, language: str, option: str) -> Path:
    """Returns the file of a side ("source" or "target") of a split. `option` names the split, for error messages."""
    plain, zipped = (folder / f"{split}.{language}{ending}" for ending in ("", ".gz"))
    for path in (plain, zipped):
        if path.is_file():
            return path
    names = (path.name.removesuffix(".gz") for path in folder.iterdir() if path.is_file())
    splits = sorted({n.removesuffix(f".{language}") for n in names if n.endswith(f".{language}")})
    advice = (
        f"choose one of its splits in {language!r}: {', '.join(splits)} ({option})"
        if splits
        else f"set --config.data.{side}_language, because no name of a file ends with .{language} or .{language}.gz"
    )
    raise UserError(
        f"--config.data.source=files:{shown(folder)} has no {plain.name} or {zipped.name}: {advice}"
    )


def _load_tfds(name: str, split: str, languages: tuple[str, str], directory: str) -> ParallelText:
    from common.data.tfds import in_blocks, open_tfds

    _, examples = open_tfds(name, split, directory, "translate")
    sides: tuple[list[str], list[str]] = ([], [])
    for block in in_blocks(examples):
        for side, language in zip(sides, languages, strict=True):
            check(
                language in block[0],
                f"tfds:{name} has {', '.join(block[0])} but no {language}: set --config.data.source_language and"
                " --config.data.target_language",
            )
            side.extend(example[language].decode() for example in block)
    return ParallelText(*sides)


def build_tokenizers(
    data: "ConfigDict", train: ParallelText, cache_dir: str | Path
) -> tuple[Tokenizer, Tokenizer]:
    """Trains one SentencePiece model on both sides of the training text, or loads the model from the cache.

    Args:
        data: a configuration with these fields:
            `vocab_size`: number of subwords of the joint model, including special tokens.
            `dictionaries`: "shared" (both vocabularies have all subwords) or "separate" (the vocabulary of a side has
                only the subwords that occur in this side's training text).

    Returns:
        The tokenizers of the source and the target.

    Raises:
        UserError: `dictionaries` is unknown, the vocabulary is too small or too large for the text, or a file in the
            cache is damaged or cannot be written.
    """
    check(
        data.dictionaries in ("shared", "separate"),
        f"--config.data.dictionaries={data.dictionaries} must be shared or separate",
    )
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
