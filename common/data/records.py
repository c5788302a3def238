"""Reads examples with named fields from JSON lines, CSV, TFDS, Hugging Face or Python's manual."""

import csv
import json
import os
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.config import check
from common.data.files import names_in, read_lines, source_folder
from common.data.manual import MANUAL
from common.data.own import own_examples
from common.data.tfds import in_blocks, open_tfds
from common.errors import UserError
from common.storage.folders import copy_of

NAMES = "labels.json"
_ENDINGS = (".jsonl", ".jsonl.gz", ".csv", ".csv.gz")

Record = tuple[str, dict[str, Any]]
"""Location of an example for error messages, such as "FILE line N", and the fields of the example."""

Parsed = tuple[str, dict[str, Any] | str]
"""Location of an example, and its fields. An example that cannot be parsed has an error text instead of fields.

The error message is location + text, such as "FILE line 3" + " is not JSON".
"""

UNCLOSED = " or a later line opens a quote that is never closed"
"""Error text of a CSV file with an open quote, which turns all lines below into one row."""

Records = tuple[dict[str, Iterator[Record]], Sequence[str] | None]
"""Split -> its examples, and the class names; None for a source without class names."""


def open_records(
    source: str,
    splits: Mapping[str, str],
    fields: str,
    label: str,
    *,
    tfds_dir: str = "",
    optional: Container[str] = (),
) -> Records:
    """Opens a source of examples. Returns split -> its examples, and the class names (None without class names).

    Args:
        source: "files:DIR", "tfds:NAME", "hf:NAME", "embedded:NAME" or "import:MODULE:FUNCTION". FUNCTION(split)
            returns a dictionary {field: value} for each example. "files:FILE" is a file of training examples, allowed
            if the other splits are optional.
        splits: split -> its name in the source. "a|b" is the first of the names a and b that exists.
        fields, label: names of the text fields, separated by spaces, and of the label field.
        tfds_dir: data directory of TFDS; "" for TFDS's default.
        optional: splits that may be missing.

    Raises:
        UserError: the source is unknown, missing or damaged.
    """
    kind, _, place = source.partition(":")
    match kind:
        case "embedded":
            return _embedded(place, splits, fields, label)
        case "files":
            return _files(place, splits, optional)
        case "hf":
            return _hugging_face(place, splits, label, optional)
        case "tfds":
            return _tfds(place, splits, label, tfds_dir, optional)
        case "import":
            return _own(source, splits, optional)
    raise UserError(
        f"--config.data.source={source} must be files:DIR, tfds:NAME, hf:NAME, embedded:NAME or"
        " import:MODULE:FUNCTION"
    )


def _own(source: str, splits: Iterable[str], optional: Container[str]) -> Records:
    def records(split: str) -> list[Record]:
        form = "a dictionary of fields"
        examples = own_examples(source, split, dict, form, optional=split in optional)
        return [(f"{source} example {n} of {split}", fields) for n, fields in enumerate(examples)]

    by_split = {split: records(split) for split in splits}
    return {split: iter(examples) for split, examples in by_split.items() if examples}, None


def _embedded(name: str, splits: Mapping[str, str], fields: str, label: str) -> Records:
    check(
        name in MANUAL,
        f"--config.data.source=embedded:{name} does not exist; choose one of {', '.join(sorted(MANUAL))}",
    )
    make, parts, classes = MANUAL[name]
    names = [field.split("|")[0] for field in fields.split()]
    check(
        len(names) == parts,
        f"embedded:{name} has {parts} texts per example, but --config.data.fields={fields!r} names {len(names)} fields",
    )

    def records(split: str) -> Iterator[Record]:
        for number, (texts, topic) in enumerate(make(split)):
            named = dict(zip(names, texts, strict=True)) | {label.split("|")[0]: topic}
            yield f"embedded:{name} example {number}", named

    return {split: records(split) for split in splits}, classes


def _files(place: str, splits: Mapping[str, str], optional: Container[str]) -> Records:
    file = copy_of(os.path.expanduser(place))
    if optional and file.is_file():
        return {"train": _records(file)}, read_names(file.parent / NAMES)
    folder = source_folder(place)
    paths = {split: _find(folder, name, split in optional) for split, name in splits.items()}
    return {split: _records(path) for split, path in paths.items() if path}, read_names(
        folder / NAMES
    )


def read_names(path: Path) -> list[str] | None:
    """Returns the class names in a labels.json; None if the file is missing. Raises a UserError if it is damaged."""
    if not path.is_file():
        return None
    try:
        names = json.loads("\n".join(read_lines(path)))
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from error
    distinct = isinstance(names, list) and len(set(map(str, names))) == len(names) > 0
    check(distinct, f"{path} must be a list of distinct names, one per class")
    return [str(name) for name in names]


def _find(folder: Path, names: str, optional: bool) -> Path | None:
    tried = [f"{name}{ending}" for name in names.split("|") if name for ending in _ENDINGS]
    path = next((folder / file for file in tried if (folder / file).is_file()), None)
    if path is None and not optional:
        raise UserError(f"no {' or '.join(tried)} in {folder}; its files: {names_in(folder)}")
    return path


def _records(path: Path) -> Iterator[Record]:
    parse = parse_csv if path.name.removesuffix(".gz").endswith(".csv") else parse_json_lines
    for place, fields_or_error in parse(path, read_lines(path)):
        if isinstance(fields_or_error, str):
            raise UserError(f"{place}{fields_or_error}")
        yield place, fields_or_error


def parse_json_lines(path: Path, lines: Sequence[str]) -> Iterator[Parsed]:
    """Yields the location and the fields of each line, or an error text for a line that is not a JSON object."""
    for number, line in enumerate(lines, start=1):
        place = f"{path} line {number}"
        try:
            fields = json.loads(line)
        # `json` raises a RecursionError for deeply nested brackets.
        except (ValueError, RecursionError) as error:
            yield place, f" is not JSON: {error}"
            continue
        yield place, fields if isinstance(fields, dict) else " is not a JSON object"


def parse_csv(path: Path, lines: Sequence[str], delimiter: str = ",") -> Iterator[Parsed]:
    """Yields the location and the fields of each row, or an error text for a malformed row.

    Line 1 names the fields. A row may span several lines; its location is its last line. Skips empty lines.
    """
    # The default limit of a CSV field is 131,072 characters, less than a long text.
    csv.field_size_limit(sys.maxsize)
    reader = csv.DictReader((f"{line}\n" for line in lines), strict=True, delimiter=delimiter)
    while True:
        start = reader.reader.line_num + 1
        try:
            row = next(reader, None)
        except csv.Error as error:
            end = reader.reader.line_num
            if end == len(lines) and "end of data" in str(error):
                yield f"{path} line {start}", UNCLOSED
            else:
                yield f"{path} line {end}", f": {error}"
            continue
        if row is None:
            return
        complete = None not in row and None not in row.values()
        fault = " has a different number of columns than line 1"
        yield f"{path} line {reader.line_num}", row if complete else fault


def _tfds(
    name: str, splits: Mapping[str, str], label: str, directory: str, optional: Container[str]
) -> Records:
    builder, _ = open_tfds(name, splits["train"], directory, "text")
    chosen = _choose(splits, builder.info.splits, optional)

    def examples(split: str) -> Iterator[dict[str, Any]]:
        _, data = open_tfds(name, split, directory, "text")
        for block in in_blocks(data):
            for example in block:
                yield {k: v.decode() if isinstance(v, bytes) else v for k, v in example.items()}

    records = {split: _located(f"tfds:{name}", x, examples(x)) for split, x in chosen.items()}
    return records, _class_names(builder.info.features, label)


def _hugging_face(
    name: str, splits: Mapping[str, str], label: str, optional: Container[str]
) -> Records:
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"hf:{name} needs the package datasets: pip install datasets; or save the examples as files and use"
            " --config.data.source=files:DIR"
        ) from error
    try:
        data = datasets.load_dataset(name)
    except Exception as error:  # Downloads and data set scripts may raise any type of exception.
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"cannot read hf:{name}: {reason}") from error
    chosen = _choose(splits, data, optional)
    for split in chosen.values():
        check(split in data, f"hf:{name} has no split {split}; its splits: {', '.join(data)}")
    records = {split: _located(f"hf:{name}", x, data[x]) for split, x in chosen.items()}
    return records, _class_names(data[chosen["train"]].features, label)


def _located(source: str, split: str, examples: Iterable[Mapping[str, Any]]) -> Iterator[Record]:
    for number, example in enumerate(examples):
        yield f"{source}, split {split}, example {number}", dict(example)


def _choose(
    splits: Mapping[str, str], available: Container[str], optional: Container[str]
) -> dict[str, str]:
    """Resolves names "a|b" to the first available name; returns split -> name.

    Without any available name, an optional split is left out. A required split gets the last name of "a|b", and reading
    this split fails with an error message.
    """
    chosen = {}
    for split, names in splits.items():
        candidates = names.split("|")
        name = next((name for name in candidates if name.partition("[")[0] in available), None)
        if name or split not in optional:
            chosen[split] = name or candidates[-1]
    return chosen


def _class_names(features: Mapping[str, Any], label: str) -> Sequence[str] | None:
    """Returns the class names of the feature `label`; None if the feature has no names."""
    named = dict(features)
    return next((getattr(named[n], "names", None) for n in label.split("|") if n in named), None)
