"""Reads texts from tables and writes the tables with more columns. Formats: CSV, TSV, JSON lines, parquet, plain lines.

Tables are read and written in blocks of rows, so that a table may be larger than the memory. All columns of a table are
kept.
"""

import csv
import gzip
import json
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from common.config import check
from common.data.files import check_is_text
from common.errors import UserError

Record = tuple[str, Mapping[str, Any]]
"""Location of a row for error messages, such as "FILE line N", and the fields of the row."""


Columns = Mapping[str, type]
"""Columns to add to a table, in order: name -> type, which is `str`, `float` or `list` (of texts)."""


class Block(NamedTuple):
    """Consecutive rows of a table.

    Attributes:
      texts: the texts of each row without blank texts. In a table of pairs, () if one of the two texts is blank.
      rows: the rows, in the representation of the table's class.
    """

    texts: list[tuple[str, ...]]
    rows: Any


class Table(Protocol):
    """A table of texts in a file."""

    def blocks(self, size: int, fields: str, added: Columns) -> Iterator[Block]:
        """Yields blocks of at most `size` rows.

        Args:
          fields: names of the text fields, separated by spaces; "a|b" is the first existing field.
          added: columns that `write` will add.

        Raises:
          UserError: the file is missing or damaged, a row has no text field, the table has a column of `added`, or
            the table repeats a column.
        """

    def write(
        self, file: BinaryIO, added: Columns, blocks: Iterable[tuple[Block, list[list]]]
    ) -> None:
        """Writes rows with further columns.

        Args:
          added: the columns.
          blocks: blocks of this table, and the values of the columns in each row. A row whose first value is "" has no
            values: its texts are "", its numbers and lists None.
        """


def ending(path: Path) -> str:
    """Returns the extension of a file's name, such as ".csv" or ".csv.gz"."""
    return "".join(path.suffixes[-2:] if path.suffix == ".gz" else path.suffixes[-1:])


def open_table(path: Path, pair: bool = False) -> Table:
    """Returns the table in a file, without opening the file. The name of the file determines the format.

    Args:
      pair: whether the table has pairs of texts; then a line of plain text has two texts, see `Lines`.

    Raises:
      UserError: the extension of the file name is unknown.
    """
    match ending(path):
        case ".csv" | ".csv.gz":
            return Csv(path, ",", pair)
        case ".tsv" | ".tsv.gz":
            return Csv(path, "\t", pair)
        case ".jsonl" | ".jsonl.gz":
            return JsonLines(path, pair)
        case ".txt" | ".txt.gz":
            return Lines(path, pair)
        case ".parquet":
            return Parquet(path, pair)
    raise UserError(
        f"{path}: the name must end with .csv, .tsv, .jsonl or .txt (each optionally followed by .gz), or with"
        " .parquet"
    )


def _texts(record: Record, fields: str, pair: bool) -> tuple[str, ...]:
    """Returns the texts of a row without blank texts; () if one text of a pair is blank.

    Raises:
      UserError: a field does not exist, or is not text.
    """
    place, row = record
    parts = []
    for names in fields.split():
        found = next((name for name in names.split("|") if name in row), None)
        check(
            found is not None,
            f"{place}: no field {names.replace('|', ' or ')}; there are: {', '.join(map(str, row))}"
            " (--config.data.fields=NAME)",
        )
        part = "" if row[found] is None else row[found]
        check(isinstance(part, str), f"{place}: the field {found} is not text but {part!r}")
        try:
            part.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"{place}: the field {found} contains a lone surrogate, which is not valid text"
            ) from error
        parts.append(part)
    filled = tuple(part for part in parts if part.strip())
    return () if pair and len(filled) < len(parts) else filled


def _check_names(place: str, names: Sequence[str], added: Iterable[str]) -> None:
    """Raises a UserError if a table repeats a column, or has a column that will be added."""
    twice = sorted({name for name in names if names.count(name) > 1})
    check(not twice, f"{place} repeats the column {', '.join(map(repr, twice))}")
    _check_added(place, names, added)


def _check_added(place: str, there: Iterable[str], added: Iterable[str]) -> None:
    taken = sorted(set(there) & set(added))
    check(
        not taken,
        f"{place}: the column {', '.join(taken)} exists already: rename it, or choose another name for the label with"
        " --config.data.label=NAME",
    )


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Opens a file, and decompresses it if its name ends with .gz. Turns errors while reading into UserErrors."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path} is damaged or truncated: {error}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


@contextmanager
def _text_writer(file: BinaryIO, compressed: bool) -> Iterator[TextIOWrapper]:
    """Yields a text stream that writes to `file`."""
    with ExitStack() as stack:
        stream = file
        if compressed:
            stream = stack.enter_context(gzip.GzipFile(fileobj=file, mode="wb", mtime=0))
        # Write a lone surrogate as its escape sequence, as JSON does.
        text = TextIOWrapper(stream, "utf-8", errors="backslashreplace", newline="")
        stack.callback(text.detach)  # flushes, and leaves `file` open
        yield text


def _decoded(lines: Iterable[bytes], source: str) -> Iterator[str]:
    """Yields lines of UTF-8 text, including their line ends."""
    for number, line in enumerate(lines, start=1):
        if number == 1:
            check_is_text(source, line)
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise UserError(f"{source} line {number} is not UTF-8") from error
        yield text.removeprefix("\ufeff") if number == 1 else text


def _in_blocks(rows: Iterable[Any], size: int) -> Iterator[list]:
    """Yields lists of at most `size` rows. If reading fails, first yields the rows before the failure."""
    block: list = []
    iterator = iter(rows)
    while True:
        try:
            row = next(iterator)
        except StopIteration:
            break
        except UserError:
            if block:
                yield block
            raise
        block.append(row)
        if len(block) == size:
            yield block
            block = []
    if block:
        yield block


@dataclass(frozen=True)
class Lines:
    """Plain text with one text per line.

    `write` writes only the values of the added columns, separated by tabs. For an empty text it writes an empty line.

    Attributes:
      source: a file, or a stream of bytes.
      pair: whether a line has two texts, separated by a tab.
    """

    source: Path | BinaryIO
    pair: bool = False

    def blocks(self, size: int, fields: str, added: Columns) -> Iterator[Block]:
        del fields, added
        if not isinstance(self.source, Path):
            yield from self._blocks(self.source, "standard input", size)
            return
        with _opened(self.source) as file:
            yield from self._blocks(file, str(self.source), size)

    def _blocks(self, lines: Iterable[bytes], name: str, size: int) -> Iterator[Block]:
        texts = (line.rstrip("\r\n") for line in _decoded(lines, name))
        parts = (self._split(f"{name} line {n}", text) for n, text in enumerate(texts, start=1))
        for block in _in_blocks(parts, size):
            yield Block(block, None)

    def _split(self, place: str, line: str) -> tuple[str, ...]:
        parts = line.split("\t") if self.pair and line.strip() else [line]
        check(
            not self.pair or len(parts) == 2 or not line.strip(),
            f"{place} has {len(parts) - 1} tabs: a pair of texts is separated by one tab",
        )
        return tuple(parts) if all(map(str.strip, parts)) else ()

    def write(
        self, file: BinaryIO, added: Columns, blocks: Iterable[tuple[Block, list[list]]]
    ) -> None:
        compressed = isinstance(self.source, Path) and self.source.suffix == ".gz"
        with _text_writer(file, compressed) as text:
            for _, values in blocks:
                for row in values:
                    cells = (f"{x:.4f}" if isinstance(x, float) else x for x in row)
                    text.write(("\t".join(cells) if row and row[0] else "") + "\n")
                text.flush()


@dataclass(frozen=True)
class Csv:
    """Values separated by commas or tabs, with a header. Quoted values may contain line breaks."""

    path: Path
    delimiter: str
    pair: bool = False

    def blocks(self, size: int, fields: str, added: Columns) -> Iterator[Block]:
        with _opened(self.path) as file:
            rows = self._rows(file)
            place, header = next(rows, ("", []))
            check(bool(header), f"{self.path} has no header")
            _check_names(place, header, added)
            for block in _in_blocks(rows, size):
                named = ((place, dict(zip(header, row, strict=True))) for place, row in block)
                texts = [_texts(record, fields, self.pair) for record in named]
                yield Block(texts, [row for _, row in block])

    def _rows(self, file: BinaryIO) -> Iterator[tuple[str, list[str]]]:
        """Yields location and values of each row, the header first."""
        # By default the csv module refuses fields of more than 131,072 characters.
        csv.field_size_limit(sys.maxsize)
        lines = _decoded(file, str(self.path))
        reader = csv.reader(lines, delimiter=self.delimiter, strict=True)
        columns = 0
        try:
            for row in reader:
                # In a table with one column, an empty line is a row with an empty value.
                row = row or [""] * (columns == 1)
                if not row:
                    continue
                place = f"{self.path} line {reader.line_num}"
                columns = columns or len(row)
                check(
                    len(row) == columns,
                    f"{place} has {len(row)} values, but the header has {columns}",
                )
                yield place, row
        except csv.Error as error:
            raise UserError(f"{self.path} line {reader.line_num}: {error}") from error

    def write(
        self, file: BinaryIO, added: Columns, blocks: Iterable[tuple[Block, list[list]]]
    ) -> None:
        with _opened(self.path) as source:
            _, header = next(self._rows(source))
        with _text_writer(file, self.path.suffix == ".gz") as text:
            writer = csv.writer(text, delimiter=self.delimiter, lineterminator="\n")
            writer.writerow([*header, *added])
            for block, values in blocks:
                for row, new in zip(block.rows, values, strict=True):
                    writer.writerow([*row, *map(_cell, new)])


def _cell(value: Any) -> Any:
    """Returns a value as it is written in CSV: lists are encoded as JSON."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value


@dataclass(frozen=True)
class JsonLines:
    """One JSON object per line."""

    path: Path
    pair: bool = False

    def blocks(self, size: int, fields: str, added: Columns) -> Iterator[Block]:
        with _opened(self.path) as file:
            for block in _in_blocks(self._records(file), size):
                for place, row in block:
                    _check_added(place, row, added)
                texts = [_texts(record, fields, self.pair) for record in block]
                yield Block(texts, [row for _, row in block])

    def _records(self, file: BinaryIO) -> Iterator[Record]:
        for number, line in enumerate(_decoded(file, str(self.path)), start=1):
            place = f"{self.path} line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(f"{place} is not JSON: {error}") from error
            check(isinstance(row, dict), f"{place} is not a JSON object")
            yield place, row

    def write(
        self, file: BinaryIO, added: Columns, blocks: Iterable[tuple[Block, list[list]]]
    ) -> None:
        with _text_writer(file, self.path.suffix == ".gz") as text:
            for block, values in blocks:
                for row, new in zip(block.rows, values, strict=True):
                    whole = row | dict(zip(added, new, strict=True))
                    text.write(json.dumps(whole, ensure_ascii=False) + "\n")


@dataclass(frozen=True)
class Parquet:
    """A parquet file, read with the package pyarrow."""

    path: Path
    pair: bool = False

    def blocks(self, size: int, fields: str, added: Columns) -> Iterator[Block]:
        with self._file() as file:
            names = file.schema_arrow.names
            _check_names(str(self.path), names, added)
            wanted = {name for either in fields.split() for name in either.split("|")}
            number = 0
            for batch in file.iter_batches(batch_size=size):
                texts = []
                unread = dict.fromkeys(names)
                columns = {name: batch.column(name).to_pylist() for name in wanted & {*names}}
                for i in range(batch.num_rows):
                    row = unread | {name: values[i] for name, values in columns.items()}
                    place = f"{self.path} row {number + i}"
                    texts.append(_texts((place, row), fields, self.pair))
                number += batch.num_rows
                yield Block(texts, batch)

    @contextmanager
    def _file(self) -> Iterator[Any]:
        pyarrow = _pyarrow()
        from pyarrow.parquet import ParquetFile

        try:
            with ParquetFile(self.path) as file:
                yield file
        except pyarrow.ArrowException as error:
            raise UserError(f"{self.path} is damaged: {error}") from error
        except OSError as error:
            reason = error.strerror or str(error)
            raise UserError(f"cannot read {self.path}: {reason}") from error

    def write(
        self, file: BinaryIO, added: Columns, blocks: Iterable[tuple[Block, list[list]]]
    ) -> None:
        pyarrow = _pyarrow()
        from pyarrow.parquet import ParquetWriter

        with self._file() as source:
            schema = source.schema_arrow
        kinds = {
            str: pyarrow.string(),
            float: pyarrow.float64(),
            list: pyarrow.list_(pyarrow.string()),
        }
        for name, kind in added.items():
            schema = schema.append(pyarrow.field(name, kinds[kind]))
        with ParquetWriter(file, schema) as writer:
            for block, values in blocks:
                columns = zip(*values, strict=True)
                arrays = [
                    pyarrow.array(column, schema.field(name).type)
                    for name, column in zip(added, columns, strict=True)
                ]
                rows = [*block.rows.columns, *arrays]
                writer.write_batch(pyarrow.RecordBatch.from_arrays(rows, schema=schema))


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise UserError(
            "parquet files need the package pyarrow: pip install pyarrow; or use CSV or JSON lines"
        ) from error
    return pyarrow
