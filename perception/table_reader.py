"""Reads a user's tables: CSV, TSV, JSON lines or Parquet, plain or .gz, one file or a directory, or Hugging Face data.

A damaged row is listed with its location, and reading continues. An error is raised if rows could be lost unnoticed:
wrong encoding, unclosed quote, truncated archive.
"""

import codecs
import csv
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from common.config import check
from common.data.files import check_is_text, names_in, read_bytes
from common.data.record_files import (
    NAMES,
    UNCLOSED,
    Parsed,
    Record,
    parse_csv,
    parse_json_lines,
    read_names,
)
from common.errors import UserError
from common.storage.folders import open_path, shown
from perception.datasets import SPLITS

if TYPE_CHECKING:
    import datasets

FORMATS = (".csv", ".tsv", ".jsonl", ".parquet")
"""Endings of the files that can be read. Each may be followed by .gz."""

DELIMITERS = ",;\t|"
"""Candidate delimiters of a CSV file. The delimiter that splits the header into the most columns is used."""

MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
"""Byte order mark at the start of a file -> encoding."""

WHOLE = "all"
"""Name of the single split of a source without splits."""


@dataclass
class Table:
    """Rows with named columns.

    Attributes:
      columns: names of the columns, in the order of the source.
      records: location and fields of each row.
      damaged: location and fault of each row that could not be read.
      names: column -> class names, for columns whose values are indices of class names. The key "" has the names from
        labels.json, which apply to any label column.
      delimited: whether the columns are named by the first line of a CSV or TSV file.
    """

    columns: list[str] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    names: dict[str, Sequence[str]] = field(default_factory=dict)
    delimited: bool = False

    def add(self, parsed: Iterable[Parsed]) -> None:
        known = dict.fromkeys(self.columns)
        for place, found in parsed:
            if isinstance(found, str):
                self.damaged.append(f"{place}{found}")
            else:
                known |= dict.fromkeys(found)
                self.records.append((place, found))
        self.columns = list(known)


def read_tables(source: str, encoding: str = "", download: bool = False) -> dict[str, Table]:
    """Returns the tables "train", "valid" and "test" of a source, or the table WHOLE of a source without splits.

    Args:
      source: a file, a folder, or "hf:NAME[@REVISION]".
      encoding: encoding of text files; "" is UTF-8, or UTF-16 with a byte order mark.
      download: whether a Hugging Face data set may be downloaded.

    Raises:
      UserError: the source is missing, damaged, empty, or of an unknown format.
    """
    try:
        "x".encode(encoding or "utf-8")
    except LookupError as error:
        raise UserError(f"--encoding={encoding}: no such encoding") from error
    if source.startswith("hf:"):
        found = _hugging_face(source.removeprefix("hf:"), download)
    else:
        found = _read_place(open_path(os.path.expanduser(source)), encoding)
    for table in found.values():
        if not table.records:
            reason = f"; {table.damaged[0]}" if table.damaged else ""
            raise UserError(f"--data={source}: no row could be read{reason}")
    return found


def _read_place(place: Path, encoding: str) -> dict[str, Table]:
    if place.is_dir():
        return _read_folder(place, encoding)
    check(place.exists(), f"--data={shown(place)}: no such file or folder")
    check(
        bool(_format(place)),
        f"--data={place}: the name must end with {', '.join(FORMATS)}, optionally followed by .gz",
    )
    return {WHOLE: _read_files([place], encoding)}


def _read_folder(folder: Path, encoding: str) -> dict[str, Table]:
    """Reads all tables of a directory. Files named like splits become splits. Otherwise all files form one table.

    Hidden files, such as the ._NAME files of macOS, are not read.
    """
    files = sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and _format(path) and not path.name.startswith(".")
    )
    check(
        bool(files), f"--data={folder}: no table ({', '.join(FORMATS)}) among: {names_in(folder)}"
    )
    formats = sorted({_format(path) for path in files})
    check(
        len(formats) == 1,
        f"--data={folder} mixes {' and '.join(formats)} files: keep one format, or name one file",
    )
    by_stem: dict[str, list[Path]] = {}
    for path in files:
        by_stem.setdefault(_stem(path), []).append(path)
    twice = [paths for paths in by_stem.values() if len(paths) > 1]
    check(
        not twice,
        f"--data={folder} has the same table twice: {', '.join(p.name for paths in twice for p in paths)}",
    )
    splits = {}
    for split, names in SPLITS.items():
        stems = [name for name in names.split("|") if name in by_stem]
        check(len(stems) < 2, f"--data={folder} has several {split} splits: {', '.join(stems)}")
        if stems:
            splits[split] = by_stem.pop(stems[0])
    if "train" not in splits:
        check(
            not splits,
            f"--data={folder} has a split {', '.join(splits)} but no train{formats[0]}: rename the training examples",
        )
        return {WHOLE: _read_files(files, encoding)}
    check(
        not by_stem,
        f"--data={folder} has train{formats[0]} and other tables that are not splits: {', '.join(by_stem)}",
    )
    return {split: _read_files(paths, encoding) for split, paths in splits.items()}


def _format(path: Path) -> str:
    """Returns the entry of FORMATS with which the name of a file ends, or "" for other files."""
    name = path.name.lower().removesuffix(".gz")
    return next((ending for ending in FORMATS if name.endswith(ending)), "")


def _stem(path: Path) -> str:
    name = path.name.lower().removesuffix(".gz")
    return name.removesuffix(_format(path))


def _read_files(paths: Sequence[Path], encoding: str) -> Table:
    names = read_names(paths[0].parent / NAMES)
    table = Table(names={"": names} if names else {})
    for path in paths:
        raw = read_bytes(path)
        check(bool(raw.strip()), f"{path} is empty")
        path = Path(path.name)  # the report shows file names only
        if _format(path) == ".parquet":
            table.add(_parse_parquet(path, raw))
            continue
        lines = _decode(path, raw, encoding)
        if _format(path) == ".jsonl":
            table.add(parse_json_lines(path, lines))
        else:
            table.add(_parse_delimited(path, lines))
            table.delimited = True
    return table


def _decode(path: Path, raw: bytes, encoding: str) -> list[str]:
    """Returns the lines of a text file. Line ends are LF, CR LF or, in a file without LF, CR."""
    check_is_text(path, raw)
    mark = next((mark for mark in MARKS if raw.startswith(mark)), b"")
    used = encoding or MARKS.get(mark, "utf-8")
    try:
        text = raw.decode(used).removeprefix("\ufeff")
    except (UnicodeDecodeError, UnicodeError) as error:
        line = raw.count(b"\n", 0, getattr(error, "start", 0)) + 1
        raise UserError(
            f"{path} line {line} is not {used.upper()}: name the encoding of the file, such as --encoding=cp1252"
        ) from error
    check(
        "\0" not in text,
        f"{path} contains zero bytes: name the encoding of the file, such as --encoding=utf-16-le",
    )
    text = text.replace("\r\n", "\n")
    if "\n" not in text:
        text = text.replace("\r", "\n")
    return text.removesuffix("\n").split("\n")


def _parse_delimited(path: Path, lines: Sequence[str]) -> Iterator[Parsed]:
    """Parses CSV or TSV.

    Raises:
      UserError: the header repeats a column, or a quote is never closed.
    """
    marks = "\t" if _format(path) == ".tsv" else DELIMITERS
    delimiter = max(marks, key=lambda mark: len(_header(lines[0], mark)))
    header = _header(lines[0], delimiter)
    twice = sorted({name for name in header if header.count(name) > 1})
    check(not twice, f"{path} line 1 repeats the column {', '.join(map(repr, twice))}")
    for place, found in parse_csv(path, lines, delimiter):
        check(
            found != UNCLOSED,
            f"{place}{UNCLOSED}: correct the file, because all rows below would be lost",
        )
        yield place, found


def _header(line: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=delimiter), [])
    except csv.Error:  # a name longer than 131,072 characters
        return []


def _parse_parquet(path: Path, raw: bytes) -> Iterator[Parsed]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(io.BytesIO(raw)).to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{path} is damaged: {error}") from error
    for number, row in enumerate(rows, start=1):
        yield f"{path} row {number}", row


def _hugging_face(name: str, download: bool) -> dict[str, Table]:
    """Reads a Hugging Face data set from the local cache or, with `download`, from the hub.

    Raises:
      UserError: the package datasets is missing, or the data set cannot be read.
    """
    name, _, revision = name.partition("@")
    if not download:
        # huggingface_hub and datasets read this variable when they are imported.
        os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"--data=hf:{name} needs the package datasets: pip install datasets; or save the examples as a file"
        ) from error
    try:
        there = datasets.load_dataset(name, revision=revision or None)
    except Exception as error:  # Downloads and data set scripts raise any exception type.
        reason = " ".join(str(error).split())[:300]
        hint = "" if download else "; --download fetches a data set that is not in the local cache"
        raise UserError(f"cannot read --data=hf:{name}: {reason}{hint}") from error
    splits = {}
    for split, names in SPLITS.items():
        found = next((one for one in names.split("|") if one in there), None)
        if found:
            splits[split] = _of_examples(f"hf:{name}, split {found}", there[found])
    check("train" in splits, f"--data=hf:{name} has no split train; there are: {', '.join(there)}")
    return splits


def _of_examples(place: str, examples: "datasets.Dataset") -> Table:
    features = {name: getattr(f, "names", None) for name, f in examples.features.items()}
    table = Table(names={name: names for name, names in features.items() if names})
    table.add((f"{place}, example {i}", dict(one)) for i, one in enumerate(examples))
    return table
