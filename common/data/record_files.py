"""Reads examples with named fields from JSON lines and CSV."""

import csv
import json
import os
import sys
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from common.data.files import ADVICE, find_file, lines_of, nonempty, source_folder
from common.data.record import Record, Records
from common.errors import UserError, check, file_error, parse_json
from common.storage.addresses import copy_of, shown

NAMES = "labels.json"
_ENDINGS = (".jsonl", ".jsonl.gz", ".csv", ".csv.gz")

Parsed = tuple[str, dict[str, Any] | str]
"""Location of an example, and the fields of the example, or an error text if the example cannot be parsed.

The error message is location + error text, such as "FILE line 3" + " is not JSON".
"""

UNCLOSED = " or a later line opens a quote that is never closed"
"""Error text of a CSV row with a quote that is never closed, so that all following lines belong to the row."""


def open_files(place: str, splits: Mapping[str, str], optional: Container[str]) -> Records:
    """Opens a folder of files, or a file of training examples; see `common.data.records.open_records`."""
    file = copy_of(os.path.expanduser(place))
    if optional and file.is_file():
        return {"train": _records(file)}, read_names(file.parent / NAMES)
    folder = source_folder(place)
    records = {}
    for split, names in splits.items():
        option = f"--config.data.splits.{split}"
        if path := find_file(option, folder, names, _ENDINGS, split in optional):
            records[split] = _records(path)
    return records, read_names(folder / NAMES)


def read_names(path: Path) -> list[str] | None:
    """Returns the class names in the labels.json `path`, or None if there is no such file.

    Raises:
      UserError: the file cannot be read, or is not a JSON list of one or more distinct names.
    """
    if not path.is_file():
        return None
    text = "\n".join(lines_of(path, hint=ADVICE))
    try:
        names = parse_json(text)
    except ValueError as error:
        raise file_error(shown(path), error) from error
    distinct = isinstance(names, list) and len(set(map(str, names))) == len(names) > 0
    check(
        distinct,
        f"{shown(path)} must be a JSON list of one or more distinct names, one per class; correct or delete the file",
    )
    return [str(name) for name in names]


def _records(path: Path) -> Iterator[Record]:
    name = shown(path)
    lines = nonempty(name, lines_of(path, hint=ADVICE))
    is_csv = path.name.removesuffix(".gz").endswith(".csv")
    parsed = named_rows(parse_rows(name, lines)) if is_csv else parse_json_lines(name, lines)
    remedy = "correct the line"
    if not path.name.endswith(_ENDINGS):
        remedy += (
            f", or give a file of JSON lines or CSV, whose name ends in {' or '.join(_ENDINGS)}"
        )
    for place, fields_or_error in parsed:
        if isinstance(fields_or_error, str):
            raise UserError(f"{place}{fields_or_error}; {remedy}")
        yield place, fields_or_error


def parse_json_lines(path: str | Path, lines: Iterable[str]) -> Iterator[Parsed]:
    """Yields the location and the fields of each line, or an error text for a line that is not a JSON object.

    Skips blank lines.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{path} line {number}"
        try:
            fields = parse_json(line)
        except ValueError as error:
            # `json` counts this line as line 1, so take only the column of its position.
            known = isinstance(error, json.JSONDecodeError)
            yield place, f" is not JSON: {f'{error.msg}: column {error.colno}' if known else error}"
            continue
        yield place, fields if isinstance(fields, dict) else " is not a JSON object"


def parse_rows(
    path: str | Path, lines: Iterable[str], delimiter: str = ","
) -> Iterator[tuple[str, list[str] | str]]:
    """Yields the location and the values of each row of a CSV file, or an error text for a malformed row.

    The first row is the header. A row may span several lines; its location is its last line, or its first line if a
    quote is never closed. Skips empty lines, except below the header of a table with one column, where they are
    rows with an empty value.

    The first iteration removes the limit of the module `csv` on the length of a field, in the whole process. The
    default, 131,072 characters, is less than a long text.
    """
    csv.field_size_limit(sys.maxsize)
    reader = csv.reader((f"{line}\n" for line in lines), strict=True, delimiter=delimiter)
    columns = header = 0
    while True:
        start = reader.line_num + 1
        try:
            row = next(reader, None)
        except csv.Error as error:
            if "end of data" in str(error):
                yield f"{path} line {start}", UNCLOSED
            else:
                yield f"{path} line {reader.line_num}", f": {error}"
            continue
        if row is None:
            return
        row = row or [""] * (columns == 1)
        if not row:
            continue
        if not columns:
            columns, header = len(row), reader.line_num
        fault = f" has a different number of columns than line {header} ({len(row)} instead of {columns})"
        yield f"{path} line {reader.line_num}", row if len(row) == columns else fault


def named_rows(rows: Iterable[tuple[str, list[str] | str]]) -> Iterator[Parsed]:
    """Yields location and fields, or error text, of the rows of `parse_rows`. The header names the fields."""
    header: list[str] = []
    for place, row in rows:
        if isinstance(row, str):
            yield place, row
        elif header:
            yield place, dict(zip(header, row, strict=True))
        else:
            header = row
