"""Parallel text: embedded (generated), from files, or from TFDS."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.data.files import read_lines
from common.errors import UserError

if TYPE_CHECKING:
    from ml_collections import ConfigDict

_TFDS_BLOCK = 10_000
"""Examples per read: TFDS reads blocks several times faster than single examples."""


@dataclass(frozen=True)
class ParallelText:
    """Sentence i of `target` is the translation of sentence i of `source`."""

    source: Sequence[str]
    target: Sequence[str]

    def __post_init__(self) -> None:
        if len(self.source) != len(self.target):
            raise ValueError(f"{len(self.source)} source lines but {len(self.target)} target lines")

    def __len__(self) -> int:
        return len(self.source)


def load_parallel(data: "ConfigDict", split: str) -> ParallelText:
    """Returns the sentence pairs of a split, in their order.

    Pairs with an empty side are left out of the training split only, because scores count every line.

    Args:
        data: a configuration with these fields:
            `source`: "embedded:NAME", "files:DIR" or "tfds:NAME".
            `source_language`, `target_language`.
            `splits`: names of train, valid and test in the source.
            `tfds_dir`: "" for TFDS's default.
        split: "train", "valid" or "test".

    Raises:
        UserError: the source is unknown, missing or damaged.
    """
    kind, _, place = data.source.partition(":")
    name = data.splits[split]
    languages = (data.source_language, data.target_language)
    if kind == "embedded":
        text = _load_embedded(place, name, languages)
    elif kind == "files":
        text = _load_files(Path(os.path.expanduser(place)), name, languages)
    elif kind == "tfds":
        text = _load_tfds(place, name, languages, data.tfds_dir)
    else:
        raise UserError(
            f"--config.data.source={data.source} must be embedded:NAME, files:DIR or tfds:NAME"
        )
    if split == "train":
        kept = [
            (source, target)
            for source, target in zip(text.source, text.target, strict=True)
            if source.strip() and target.strip()
        ]
        text = ParallelText([source for source, _ in kept], [target for _, target in kept])
    if not len(text):
        raise UserError(f"{data.source} has no {languages[0]}-{languages[1]} text in split {name}")
    return text


def _load_embedded(name: str, split: str, languages: tuple[str, str]) -> ParallelText:
    from common.data.embedded import EMBEDDED  # generators of text, which other sources do not need

    if name not in EMBEDDED:
        raise UserError(
            f"--config.data.source=embedded:{name}: no such text; there are: {', '.join(sorted(EMBEDDED))}"
        )
    generated = tuple(name.split("_")[-2:])
    if languages != generated:
        raise UserError(
            f"embedded:{name} translates {'-'.join(generated)}, not {'-'.join(languages)}"
        )
    return ParallelText(*EMBEDDED[name](split))


def _load_files(directory: Path, split: str, languages: tuple[str, str]) -> ParallelText:
    if not directory.is_dir():
        raise UserError(f"no directory {directory} (--config.data.source)")
    paths = [_find(directory, split, language) for language in languages]
    source, target = (read_lines(path) for path in paths)
    if len(source) != len(target):
        raise UserError(
            f"{paths[0]} has {len(source)} lines but {paths[1]} has {len(target)}; "
            "each line must translate the same line of the other file"
        )
    return ParallelText(source, target)


def _find(directory: Path, split: str, language: str) -> Path:
    plain = directory / f"{split}.{language}"
    zipped = directory / f"{split}.{language}.gz"
    for path in (plain, zipped):
        if path.is_file():
            return path
    names = (path.name.removesuffix(".gz") for path in directory.iterdir() if path.is_file())
    splits = sorted({n.removesuffix(f".{language}") for n in names if n.endswith(f".{language}")})
    raise UserError(
        f"no {plain.name} or {zipped.name} in {directory}; "
        f"its splits in {language!r}: {', '.join(splits) or 'none'}"
    )


def open_tfds(name: str, split: str, directory: str, package: str) -> tuple[Any, Any]:
    """Opens a prepared TFDS data set: returns its builder and the examples of a split, with random access.

    Args:
        directory: "" for TFDS's default.
        package: the subpackage of tensorflow_datasets that defines the data set.

    Raises:
        UserError: the data set is not prepared or cannot be read.
    """
    import tensorflow_datasets as tfds

    place = directory or None
    try:
        builder = tfds.builder(name, data_dir=place)
        examples = builder.as_data_source(split=split) if builder.is_prepared() else None
    except tfds.core.DatasetNotFoundError:
        examples = None
    except Exception as error:  # The code of a data set may raise anything.
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"cannot read tfds:{name}, split {split}: {reason}") from error
    if examples is None:
        # Without TensorFlow, TFDS knows a data set only after the import of its subpackage.
        raise UserError(
            f"the TFDS data set {name} is not prepared in {directory or 'the default TFDS directory'}; "
            'prepare it with: python -c "import tensorflow_datasets as tfds, '
            f"tensorflow_datasets.{package}; tfds.builder({name!r}, data_dir={place!r}, "
            "file_format='array_record').download_and_prepare()\""
        )
    return builder, examples


def in_blocks(examples: Any) -> Iterator[list[dict]]:
    """Yields all examples of a TFDS split in blocks."""
    for start in range(0, len(examples), _TFDS_BLOCK):
        yield examples.__getitems__(range(start, min(start + _TFDS_BLOCK, len(examples))))


def _load_tfds(name: str, split: str, languages: tuple[str, str], directory: str) -> ParallelText:
    _, examples = open_tfds(name, split, directory, "translate")
    sides: tuple[list[str], list[str]] = ([], [])
    for block in in_blocks(examples):
        for side, language in zip(sides, languages, strict=True):
            if language not in block[0]:
                raise UserError(f"tfds:{name} has {', '.join(block[0])} but no {language}")
            side.extend(example[language].decode() for example in block)
    return ParallelText(*sides)
