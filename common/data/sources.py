"""Parallel text from three kinds of places: generated in the code, files, and TFDS."""

import gzip
import os
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.data.embedded import EMBEDDED
from common.errors import UserError

if TYPE_CHECKING:
    from ml_collections import ConfigDict

_TFDS_BLOCK = 10_000
"""Examples read at once: TFDS reads blocks several times as fast as single examples."""


@dataclass(frozen=True)
class ParallelText:
    """Sentence i of `target` is the translation of sentence i of `source`."""

    source: Sequence[str]
    target: Sequence[str]

    def __post_init__(self) -> None:
        if len(self.source) != len(self.target):
            raise ValueError(f"{len(self.source)} source but {len(self.target)} target lines")

    def __len__(self) -> int:
        return len(self.source)


def load_parallel(data: "ConfigDict", split: str) -> ParallelText:
    """Reads one split of the text that `data.source` names.

    Args:
        data: has `source` ("embedded:NAME", "files:DIR" or "tfds:NAME"), `source_language`,
            `target_language`, `splits` (what train, valid and test are called in the source) and
            `tfds_dir` ("" is TFDS's default).
        split: "train", "valid" or "test".

    Returns:
        The pairs in the order of the source. Training text is without the pairs that have an
        empty side; the others are whole, so that scores count every line.

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
            f"data.source is {data.source!r}; it must be embedded:NAME, files:DIR or tfds:NAME"
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
    if name not in EMBEDDED:
        raise UserError(f"no embedded text {name!r}; there are: {', '.join(sorted(EMBEDDED))}")
    generated = tuple(name.split("_")[-2:])
    if languages != generated:
        raise UserError(
            f"embedded:{name} translates {'-'.join(generated)}, not {'-'.join(languages)}"
        )
    return ParallelText(*EMBEDDED[name](split))


def _load_files(directory: Path, split: str, languages: tuple[str, str]) -> ParallelText:
    if not directory.is_dir():
        raise UserError(f"no directory {directory} (data.source)")
    paths = [_find(directory, split, language) for language in languages]
    source, target = (read_lines(path) for path in paths)
    if len(source) != len(target):
        raise UserError(
            f"{paths[0]} has {len(source)} lines but {paths[1]} has {len(target)}; "
            "they must be translations line by line"
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


def read_lines(path: Path) -> list[str]:
    """Reads a UTF-8 text file, gzipped where it ends in .gz, without its line ends.

    Only line feeds (and the carriage returns before them) end a line: other Unicode separators
    are text, as they are for the tools that made the line pairs.

    Raises:
        UserError: the file cannot be read, is empty, damaged, or not UTF-8.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
        if path.suffix == ".gz":
            raw = gzip.decompress(raw)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path} is damaged or cut off: {error}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    raw = raw.removeprefix(BOM_UTF8)
    if not raw:
        raise UserError(f"{path} is empty")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path} line {line} is not UTF-8") from error
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def open_tfds(name: str, split: str, directory: str, package: str) -> tuple[Any, Any]:
    """A prepared TFDS data set: its builder, and the examples of a split with random access.

    Args:
        directory: "" is TFDS's default.
        package: of tensorflow_datasets, in which the set is defined.

    Raises:
        UserError: it is not prepared, or cannot be read.
    """
    import tensorflow_datasets as tfds

    place = directory or None
    try:
        builder = tfds.builder(name, data_dir=place)
        examples = builder.as_data_source(split=split) if builder.is_prepared() else None
    except tfds.core.DatasetNotFoundError:
        examples = None
    except Exception as error:  # whatever a data set's own code raises
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"cannot read tfds:{name}, split {split}: {reason}") from error
    if examples is None:
        # Without TensorFlow, TFDS knows its sets only once their package is imported.
        raise UserError(
            f"no TFDS data set {name} is prepared in {directory or 'the default TFDS directory'}; "
            'prepare it with: python -c "import tensorflow_datasets as tfds, '
            f"tensorflow_datasets.{package}; tfds.builder({name!r}, data_dir={place!r}, "
            "file_format='array_record').download_and_prepare()\""
        )
    return builder, examples


def in_blocks(examples: Any) -> Iterator[list[dict]]:
    """All examples of a TFDS split, a block at a time."""
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
