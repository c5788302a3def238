"""Texts and pairs of texts with a class each: JSON lines, CSV, TFDS, or paragraphs of the manual of Python.

M examples.
"""

import csv
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common.data.manual import MANUAL
from common.data.sources import in_blocks, open_tfds, read_lines
from common.errors import UserError

if TYPE_CHECKING:
    from ml_collections import ConfigDict

SPLITS = ("train", "valid", "test")
LABEL, NAMES = "label", "labels.json"

# Where it stands ("FILE line N"), and its fields.
Record = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class LabelledText:
    """Examples in the order of the source: `texts` of one or two parts each, and `labels_M`, their classes from 0."""

    texts: Sequence[tuple[str, ...]]
    labels_M: np.ndarray

    def __len__(self) -> int:
        return len(self.texts)


def load_labelled(data: "ConfigDict") -> tuple[dict[str, LabelledText], tuple[str, ...]]:
    """The splits "train", "valid" and "test", and the names of the classes.

    Names come from labels.json beside the files (a list) or from TFDS. Without them the classes are the numbers up to
    the greatest label of the training examples, or the labels themselves, sorted, where they are words.

    Args:
        data: has `source` ("files:DIR", "tfds:NAME", "embedded:python" or "embedded:python_pairs"), `splits`
            (what train, valid and test are called: DIR has NAME.jsonl or NAME.csv, plain or .gz), `fields` (the names
            of one or two fields of text, separated by spaces; of "a|b" the first that is there) and `tfds_dir`.

    Raises:
        UserError: the source is unknown, missing or damaged; a text is empty; a label is missing or out of range.
    """
    kind, _, place = data.source.partition(":")
    readers: dict[str, Callable[[], tuple[dict[str, Iterator[Record]], Sequence[str] | None]]] = {
        "embedded": lambda: _embedded(place, data.fields),
        "files": lambda: _files(Path(os.path.expanduser(place)), data.splits),
        "tfds": lambda: _tfds(place, data.splits, data.tfds_dir),
    }
    if kind not in readers:
        raise UserError(
            f"data.source is {data.source!r}; it must be files:DIR, tfds:NAME or embedded:NAME"
        )
    if len(data.fields.split()) not in (1, 2):
        raise UserError(f"data.fields={data.fields!r} must name one field of text, or two")
    records, names = readers[kind]()
    found = {split: list(records[split]) for split in SPLITS}
    for split, examples in found.items():
        if not examples:
            raise UserError(f"{data.source} has no examples in its {split} split")
    classes = tuple(names or _classes(found["train"]))
    if len(classes) < 2:
        raise UserError(f"{data.source} has a single class, {classes[0]}: there is nothing to tell")
    return {
        split: _read(examples, data.fields, classes) for split, examples in found.items()
    }, classes


def _classes(train: Sequence[Record]) -> list[str]:
    labels = {str(_field(record, LABEL)) for record in train}
    if all(label.isdecimal() for label in labels):
        return [str(number) for number in range(max(map(int, labels)) + 1)]
    return sorted(labels)


def _read(records: Sequence[Record], fields: str, classes: Sequence[str]) -> LabelledText:
    numbers = {name: number for number, name in enumerate(classes)}
    texts, labels = [], []
    for record in records:
        place, _ = record
        parts = tuple(_field(record, name) for name in fields.split())
        for name, part in zip(fields.split(), parts, strict=True):
            if not isinstance(part, str) or not part.strip():
                fault = "empty" if isinstance(part, str) else f"no text but {part!r}"
                raise UserError(f"{place}: the field {name.replace('|', ' or ')} is {fault}")
        label = _field(record, LABEL)
        number = label if isinstance(label, int) else numbers.get(str(label))
        if number is None:
            number = int(label) if str(label).isdecimal() else -1
        if not 0 <= number < len(classes):
            raise UserError(
                f"{place}: the label {label!r} is none of the {len(classes)} classes"
                f" (0 to {len(classes) - 1}: {', '.join(classes[:10])})"
            )
        texts.append(parts)
        labels.append(number)
    return LabelledText(texts, np.asarray(labels, np.int32))


def _field(record: Record, names: str) -> Any:
    place, fields = record
    for name in names.split("|"):
        if name in fields:
            return fields[name]
    raise UserError(
        f"{place}: no field {names.replace('|', ' or ')}; there are: {', '.join(map(str, fields))}"
    )


def _embedded(name: str, fields: str) -> tuple[dict[str, Iterator[Record]], Sequence[str]]:
    if name not in MANUAL:
        raise UserError(f"no embedded examples {name!r}; there are: {', '.join(sorted(MANUAL))}")
    make, parts, classes = MANUAL[name]
    if len(fields.split()) != parts:
        raise UserError(f"embedded:{name} has examples of {parts} texts, data.fields={fields!r}")

    def records(split: str) -> Iterator[Record]:
        for number, (texts, label) in enumerate(make(split)):
            named = dict(zip((f.split("|")[0] for f in fields.split()), texts, strict=True))
            yield f"embedded:{name} example {number}", {**named, LABEL: label}

    return {split: records(split) for split in SPLITS}, classes


def _files(
    directory: Path, splits: "ConfigDict"
) -> tuple[dict[str, Iterator[Record]], Sequence[str] | None]:
    if not directory.is_dir():
        raise UserError(f"no directory {directory} (data.source)")
    names, path = None, directory / NAMES
    if path.is_file():
        try:
            names = json.loads("\n".join(read_lines(path)))
        except ValueError as error:
            raise UserError(f"{path} is damaged: {error}") from error
        if not isinstance(names, list) or len(set(map(str, names))) != len(names) or not names:
            raise UserError(f"{path} must be a list of different names, one for each label")
        names = [str(name) for name in names]
    return {split: _records(_find(directory, splits[split])) for split in SPLITS}, names


def _find(directory: Path, name: str) -> Path:
    tried = [f"{name}{ending}" for ending in (".jsonl", ".jsonl.gz", ".csv", ".csv.gz")]
    for one in tried:
        if (directory / one).is_file():
            return directory / one
    there = sorted(p.name for p in directory.iterdir() if p.is_file())
    raise UserError(
        f"no {' or '.join(tried)} in {directory}; there are: {', '.join(there[:10]) or 'no files'}"
    )


def _records(path: Path) -> Iterator[Record]:
    lines = read_lines(path)
    if path.name.removesuffix(".gz").endswith(".csv"):
        reader = csv.DictReader((f"{line}\n" for line in lines), strict=True)
        try:
            for row in reader:
                if None in row or None in row.values():
                    raise UserError(f"{path} line {reader.line_num} has other columns than line 1")
                yield f"{path} line {reader.line_num}", row
        except csv.Error as error:
            raise UserError(f"{path} line {reader.line_num}: {error}") from error
        return
    for number, line in enumerate(lines, start=1):
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path} line {number} is no JSON: {error}") from error
        if not isinstance(fields, dict):
            raise UserError(f"{path} line {number} is no JSON object")
        yield f"{path} line {number}", fields


def _tfds(
    name: str, splits: "ConfigDict", directory: str
) -> tuple[dict[str, Iterator[Record]], Sequence[str] | None]:
    opened = {split: open_tfds(name, splits[split], directory, "text") for split in SPLITS}
    builder, _ = opened["train"]
    # A label that is a plain number has no names.
    names = getattr(dict(builder.info.features).get(LABEL), "names", None)

    def records(split: str) -> Iterator[Record]:
        examples = (example for block in in_blocks(opened[split][1]) for example in block)
        for number, example in enumerate(examples):
            fields = {k: v.decode() if isinstance(v, bytes) else v for k, v in example.items()}
            yield f"tfds:{name}, split {splits[split]}, example {number}", fields

    return {split: records(split) for split in SPLITS}, names
