"""Reads examples with named fields from JSON lines, CSV, TFDS, Hugging Face or the embedded manual of Python."""

import csv
import json
import os
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.data.files import read_lines
from common.data.manual import MANUAL
from common.data.sources import in_blocks, open_tfds
from common.errors import UserError

NAMES = "labels.json"
_ENDINGS = (".jsonl", ".jsonl.gz", ".csv", ".csv.gz")

# (location for error messages, such as "FILE line N", fields)
Record = tuple[str, dict[str, Any]]
Found = tuple[dict[str, Iterator[Record]], Sequence[str] | None]


def open_records(
    source: str,
    splits: Mapping[str, str],
    fields: str,
    label: str,
    *,
    tfds_dir: str = "",
    optional: Container[str] = (),
) -> Found:
    """Returns the records of every split, and the names of the classes if the source has them.

    Args:
        source: "files:DIR", "tfds:NAME", "hf:NAME" or "embedded:NAME"; with optional splits also "files:FILE", which
            has the training examples.
        splits: names of the splits in the source; "a|b" is the first existing split.
        fields, label: field names of embedded examples.
        optional: splits that may be missing.

    Raises:
        UserError: the source is unknown, missing or damaged.
    """
    kind, _, place = source.partition(":")
    readers: dict[str, Callable[[], Found]] = {
        "embedded": lambda: _embedded(place, splits, fields, label),
        "files": lambda: _files(Path(os.path.expanduser(place)), splits, optional),
        "hf": lambda: _hugging_face(place, splits, label, optional),
        "tfds": lambda: _tfds(place, splits, label, tfds_dir, optional),
    }
    if kind not in readers:
        raise UserError(
            f"--config.data.source={source} must be files:DIR, tfds:NAME, hf:NAME or embedded:NAME"
        )
    return readers[kind]()


def _embedded(name: str, splits: Mapping[str, str], fields: str, label: str) -> Found:
    if name not in MANUAL:
        raise UserError(
            f"--config.data.source=embedded:{name}: no such examples; there are: {', '.join(sorted(MANUAL))}"
        )
    make, parts, classes = MANUAL[name]
    if len(fields.split()) != parts:
        raise UserError(
            f"embedded:{name} has {parts} texts per example, but --config.data.fields={fields!r}"
        )

    def records(split: str) -> Iterator[Record]:
        for number, (texts, topic) in enumerate(make(split)):
            named = dict(zip((f.split("|")[0] for f in fields.split()), texts, strict=True))
            yield f"embedded:{name} example {number}", {**named, label.split("|")[0]: topic}

    return {split: records(split) for split in splits}, classes


def _files(place: Path, splits: Mapping[str, str], optional: Container[str]) -> Found:
    if optional and place.is_file():
        return {"train": _records(place)}, _names(place.parent / NAMES)
    if not place.is_dir():
        raise UserError(f"no directory {place} (--config.data.source)")
    paths = {split: _find(place, name, split in optional) for split, name in splits.items()}
    return {split: _records(path) for split, path in paths.items() if path}, _names(place / NAMES)


def _names(path: Path) -> list[str] | None:
    if not path.is_file():
        return None
    try:
        names = json.loads("\n".join(read_lines(path)))
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from error
    if not isinstance(names, list) or len(set(map(str, names))) != len(names) or not names:
        raise UserError(f"{path} must be a list of distinct names, one per class")
    return [str(name) for name in names]


def _find(directory: Path, names: str, optional: bool) -> Path | None:
    tried = [f"{name}{ending}" for name in names.split("|") if name for ending in _ENDINGS]
    for one in tried:
        if (directory / one).is_file():
            return directory / one
    if optional:
        return None
    there = sorted(p.name for p in directory.iterdir() if p.is_file())
    raise UserError(
        f"no {' or '.join(tried)} in {directory}; there are: {', '.join(there[:10]) or 'no files'}"
    )


def _records(path: Path) -> Iterator[Record]:
    lines = read_lines(path)
    if path.name.removesuffix(".gz").endswith(".csv"):
        # The default limit of a field is 131,072 characters.
        csv.field_size_limit(sys.maxsize)
        reader = csv.DictReader((f"{line}\n" for line in lines), strict=True)
        try:
            for row in reader:
                if None in row or None in row.values():
                    raise UserError(
                        f"{path} line {reader.line_num} has a different number of columns than line 1"
                    )
                yield f"{path} line {reader.line_num}", row
        except csv.Error as error:
            raise UserError(f"{path} line {reader.line_num}: {error}") from error
        return
    for number, line in enumerate(lines, start=1):
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path} line {number} is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise UserError(f"{path} line {number} is not a JSON object")
        yield f"{path} line {number}", fields


def _tfds(
    name: str, splits: Mapping[str, str], label: str, directory: str, optional: Container[str]
) -> Found:
    builder, _ = open_tfds(name, splits["train"], directory, "text")
    chosen = {
        split: _choose(names, builder.info.splits, split in optional)
        for split, names in splits.items()
    }

    def records(split: str) -> Iterator[Record]:
        _, found = open_tfds(name, split, directory, "text")
        for number, example in enumerate(
            example for block in in_blocks(found) for example in block
        ):
            fields = {k: v.decode() if isinstance(v, bytes) else v for k, v in example.items()}
            yield f"tfds:{name}, split {split}, example {number}", fields

    found = {split: records(one) for split, one in chosen.items() if one}
    return found, _class_names(builder.info.features, label)


def _choose(names: str, there: Container[str], optional: bool) -> str | None:
    """Returns the first existing split of "a|b"; if none exists, None for an optional split, else the last name."""
    every = names.split("|")
    found = next((one for one in every if one.partition("[")[0] in there), None)
    return found if found or optional else every[-1]


def _class_names(features: Mapping[str, Any], label: str) -> Sequence[str] | None:
    """Returns the class names of the label feature; None for a plain integer."""
    found = dict(features)
    return next((getattr(found[n], "names", None) for n in label.split("|") if n in found), None)


def _hugging_face(
    name: str, splits: Mapping[str, str], label: str, optional: Container[str]
) -> Found:
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"hf:{name} needs the package datasets: pip install datasets; or save the examples as files and use"
            " --config.data.source=files:DIR"
        ) from error
    try:
        found = datasets.load_dataset(name)
    except (
        Exception
    ) as error:  # The network, the hub and the code of a data set may raise anything.
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"cannot read hf:{name}: {reason}") from error
    chosen = {split: _choose(names, found, split in optional) for split, names in splits.items()}
    for split in filter(None, chosen.values()):
        if split not in found:
            raise UserError(f"hf:{name} has no split {split}; there are: {', '.join(found)}")

    def records(split: str) -> Iterator[Record]:
        for number, example in enumerate(found[split]):
            yield f"hf:{name}, split {split}, example {number}", dict(example)

    names = _class_names(found[chosen["train"]].features, label)
    return {split: records(one) for split, one in chosen.items() if one}, names
