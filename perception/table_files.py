"""Opens tables for training and for labelling: formats by name, encodings, and the delimiters of CSV files."""

import csv
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from common.data.files import lines_of, nonempty, opened
from common.data.record_files import UNCLOSED, parse_rows
from common.errors import UserError, check, file_error, missing_package
from common.storage.addresses import shown

FORMATS = (".csv", ".tsv", ".jsonl", ".parquet")
"""File name extensions of tables with named columns. Each may be followed by .gz."""

DELIMITERS = ",;\t|"
"""Candidate delimiters of a CSV file. The delimiter that splits the header into the most columns is used."""

Row = tuple[str, list[str] | str]
"""Location and values of a row. A malformed row has a string that describes its fault instead of values."""

HINT = ": name the encoding of the file, such as --encoding=cp1252 or --encoding=utf-16-le, or restore the file"


def format_of(path: Path, formats: Iterable[str] = FORMATS) -> str:
    """Returns the entry of `formats` that ends the file name, ignoring case and a final .gz; "" if no entry does."""
    name = path.name.lower().removesuffix(".gz")
    return next((ending for ending in formats if name.endswith(ending)), "")


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def check_encoding(encoding: str) -> None:
    """Raises a UserError for an unknown encoding. "" is UTF-8, or UTF-16 with a byte order mark."""
    try:
        "x".encode(encoding or "utf-8")
    # The codec "undefined" raises a UnicodeError.
    except (LookupError, UnicodeError) as error:
        raise UserError(
            f"--encoding={encoding} is not the name of a text encoding in Python: use another name, such as cp1252"
        ) from error


def delimiter_of(path: Path, encoding: str) -> str:
    """Returns the delimiter of a CSV or TSV file."""
    if format_of(path) == ".tsv":
        return "\t"
    first = next((line for line in lines_of(path, encoding, HINT) if line.strip()), "")

    def columns(delimiter: str) -> int:
        try:
            return len(next(csv.reader([first], delimiter=delimiter), []))
        # By default, the csv module rejects a name of more than 131,072 characters.
        except csv.Error:
            return 0

    return max(DELIMITERS, key=columns)


def check_names(place: str, names: Sequence[str]) -> None:
    """Raises a UserError if a table repeats the name of a column."""
    twice = sorted({name for name in names if names.count(name) > 1})
    check(
        not twice,
        f"{place} repeats the column{'s' * (len(twice) > 1)} {' and '.join(map(repr, twice))}: give each column its"
        " own name, or remove the repetitions",
    )


def csv_rows(path: Path, delimiter: str, encoding: str, name: str) -> Iterator[Row]:
    """Yields the rows of a CSV or TSV file, the header first; see `common.data.record_files.parse_rows`.

    Args:
      name: name of the file in the locations of rows.

    Raises:
      UserError: the file is unreadable, empty or not text in the encoding, the header repeats a column, or a quote is
        never closed.
    """
    header = True
    for place, row in parse_rows(name, text_of(path, encoding), delimiter):
        check(
            row != UNCLOSED,
            f"{place}{UNCLOSED}: correct the file, because all rows below would be lost",
        )
        if header and not isinstance(row, str):
            check_names(place, row)
            header = False
        yield place, row


def import_pyarrow(path: Path) -> Any:
    """Returns the package pyarrow. Raises a UserError that names `path`, a Parquet file, if the import fails."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        what = f"reading {shown(path)}"
        raise missing_package(what, "pyarrow", error, "save the table as CSV") from error
    return pyarrow


@contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    """Context manager that opens a Parquet file, plain or .gz, as a `pyarrow.parquet.ParquetFile`.

    Raises:
      UserError: pyarrow is missing, or the file is unreadable or damaged. Errors while the caller reads the file also
        become UserErrors.
    """
    pyarrow = import_pyarrow(path)
    try:
        with ExitStack() as stack:
            source = path
            if is_compressed(path):
                source = BytesIO(stack.enter_context(opened(path)).read())
            yield stack.enter_context(pyarrow.parquet.ParquetFile(source))
    except UserError:
        raise
    # For a damaged page, pyarrow raises an OSError without an error number.
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise file_error(shown(path), error) from error


def text_of(path: Path, encoding: str) -> Iterator[str]:
    """Yields the lines of a table. Raises a UserError if the file is unreadable, empty or not text in the encoding."""
    return nonempty(shown(path), lines_of(path, encoding, HINT))
