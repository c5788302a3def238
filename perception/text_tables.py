"""Reads texts from tables and writes the tables with more columns. Formats: CSV, TSV, JSON lines, parquet, plain lines.

Tables are read and written in blocks of rows, so that a table may be larger than the memory, except a .parquet.gz. All
columns of a table are kept. For plain lines, only the added columns are written.
"""

import csv
import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from common.arguments import check_file
from common.data.files import decoded_lines, lines_of
from common.data.record import has_surrogate
from common.data.record_files import parse_json_lines
from common.errors import UserError, check
from common.storage.addresses import shown
from perception.table_files import (
    FORMATS,
    HINT,
    check_encoding,
    check_names,
    csv_rows,
    delimiter_of,
    format_of,
    import_pyarrow,
    is_compressed,
    open_parquet,
)

LINES = ".txt"
"""File name extension of plain text, with one text or a tab-separated pair on each line. May be followed by .gz."""

Record = tuple[str, Mapping[str, Any]]
"""Location of a row for error messages, such as "FILE line N", and the fields of the row."""

Fields = Sequence[Sequence[str]]
"""The text columns of a table: for each column, its possible names. The first name that exists in the table is used."""

Columns = Mapping[str, type]
"""Columns to add to a table, in order: name -> type, which is `str`, `float` or `list` (of texts)."""


class Block(NamedTuple):
    """Consecutive rows of a table.

    Attributes:
      texts: for each row, its texts that are not blank. In a table of pairs, () if one of the two texts is blank.
      rows: the rows, in the representation of the table's class.
    """

    texts: list[tuple[str, ...]]
    rows: Any


Labelled = Iterable[tuple[Block, list[list]]]
"""Blocks of a table, and the values of the added columns in each row of the block."""


class Table(Protocol):
    """A table of texts in a file."""

    def blocks(self, size: int, fields: Fields, added: Columns) -> Iterator[Block]:
        """Yields blocks of at most `size` rows.

        Args:
          added: columns that `write` will add.

        Raises:
          UserError: the file is unreadable, damaged or in another encoding; a row is malformed, lacks a text column or
            has a value of another type in it; a column name is repeated or occurs in `added`; or pyarrow is missing.
        """

    def write(self, file: BinaryIO, added: Columns, blocks: Labelled) -> None:
        """Writes the rows with the columns of `added`.

        Args:
          blocks: the rows and the values of the added columns. In a row without a text to classify, added texts are "",
            and added numbers and lists are None.
        """


def ending(path: Path) -> str:
    """Returns the format of a file by its name, such as ".csv" or ".csv.gz"; "" for an unknown format."""
    found = format_of(path, (*FORMATS, LINES))
    return found and found + ".gz" * path.name.lower().endswith(".gz")


def open_table(path: Path, pair: bool = False, encoding: str = "") -> Table:
    """Returns the table in a file. The name of the file determines the format.

    Args:
      pair: whether the table has pairs of texts; then a line of plain text has two texts, see `Lines`.
      encoding: encoding of a text file; "" is UTF-8, or UTF-16 with a byte order mark.

    Raises:
      UserError: the file is missing, unreadable or a folder, or the extension of its name or the encoding is unknown.
    """
    check_encoding(encoding)
    check_file("--input", path)
    match format_of(path, (*FORMATS, LINES)):
        case ".csv" | ".tsv":
            return Csv(path, pair, encoding)
        case ".jsonl":
            return JsonLines(path, pair, encoding)
        case ".txt":
            return Lines(path, pair, encoding)
        case ".parquet":
            return Parquet(path, pair)
    raise UserError(
        f"--input={shown(path)} has a name that ends with none of {', '.join((*FORMATS, LINES))} (each optionally"
        " followed by .gz): save the texts in one of these formats"
    )


def _texts(record: Record, fields: Fields, pair: bool) -> tuple[str, ...]:
    """Returns the texts of a row without blank texts; () if one text of a pair is blank."""
    place, row = record
    advice = "columns with --text=FIRST --text=SECOND" if pair else "column with --text=NAME"
    parts = []
    for names in fields:
        found = next((name for name in names if name in row), None)
        check(
            found is not None,
            f"{place}: no column {' or '.join(names)}; its columns: {', '.join(map(repr, row)) or 'none'}; add the"
            f" column, or name the text {advice}",
        )
        part = "" if row[found] is None else row[found]
        check(
            isinstance(part, str),
            f"{place}: the column {found} must have text, got {part!r:.80}: write the value as text, or name the text"
            f" {advice}",
        )
        check(
            not has_surrogate(part),
            f"{place}: the column {found} contains half of a surrogate pair, which is not valid Unicode:"
            " remove or replace the character",
        )
        parts.append(part)
    filled = tuple(part for part in parts if part.strip())
    return () if pair and len(filled) < len(parts) else filled


def _check_added(place: str, there: Iterable[str], added: Columns) -> None:
    """Raises a UserError if a table has a column with the name of an added column.

    The first added column is the label. If only label columns (NAME, NAME_2) are in conflict, the error advises another
    --label=NAME. Otherwise it advises to rename columns of the input, because --label does not rename the columns of
    probabilities.
    """
    taken = sorted(set(there) & set(added))
    if not taken:
        return
    label, several = next(iter(added)), len(taken) > 1
    advice = f"rename {'these columns' if several else 'this column'} of the input"
    if all(name == label or name.startswith(f"{label}_") for name in taken):
        advice = "choose another name for the label with --label=NAME"
    raise UserError(
        f"{place}: the input already has the column{'s' * several} {' and '.join(taken)}, which the output adds:"
        f" {advice}"
    )


def _stream(file: BinaryIO, compressed: bool) -> AbstractContextManager[BinaryIO]:
    return gzip.GzipFile(fileobj=file, mode="wb", mtime=0) if compressed else nullcontext(file)


@contextmanager
def _text_writer(file: BinaryIO, compressed: bool) -> Iterator[TextIOWrapper]:
    """Yields a text stream that writes UTF-8 to `file`, through gzip if `compressed`."""
    with _stream(file, compressed) as stream:
        # Write a lone surrogate as its escape sequence, which is also valid in JSON.
        text = TextIOWrapper(stream, "utf-8", errors="backslashreplace", newline="")
        try:
            yield text
        finally:
            # Unlike `close`, `detach` leaves the stream open. Both flush the stream.
            text.detach()


def _in_blocks(rows: Iterable[Any], size: int) -> Iterator[list]:
    """Yields lists of at most `size` rows. If reading raises a UserError, first yields the rows before the error."""
    block: list = []
    try:
        for row in rows:
            block.append(row)
            if len(block) == size:
                yield block
                block = []
    except UserError:
        if block:
            yield block
        raise
    if block:
        yield block


@dataclass(frozen=True)
class Lines:
    """Plain text with one text per line.

    `write` writes only the values of the added columns, separated by tabs. For an empty text, and for a text without a
    class, it writes an empty line.

    Attributes:
      source: a file, or a stream of bytes.
      pair: whether a line has two texts, separated by a tab.
      encoding: encoding of `source`; "" is UTF-8, or UTF-16 with a byte order mark.
    """

    source: Path | BinaryIO
    pair: bool = False
    encoding: str = ""

    def blocks(self, size: int, fields: Fields, added: Columns) -> Iterator[Block]:
        del fields, added
        if isinstance(self.source, Path):
            name, lines = shown(self.source), lines_of(self.source, self.encoding, HINT)
        else:
            name = "standard input"
            lines = decoded_lines(self.source, name, self.encoding, HINT)
        parts = (self._split(f"{name} line {n}", text) for n, text in enumerate(lines, start=1))
        for block in _in_blocks(parts, size):
            yield Block(block, None)

    def _split(self, place: str, line: str) -> tuple[str, ...]:
        if not line.strip():
            return ()
        parts = tuple(line.split("\t")) if self.pair else (line,)
        check(
            len(parts) == 1 + self.pair,
            f"{place} has {len(parts) - 1} tabs, but the run classifies pairs of texts: separate the two texts by one"
            " tab",
        )
        return parts if all(map(str.strip, parts)) else ()

    def write(self, file: BinaryIO, added: Columns, blocks: Labelled) -> None:
        compressed = isinstance(self.source, Path) and is_compressed(self.source)
        with _text_writer(file, compressed) as text:
            for _, values in blocks:
                for row in values:
                    cells = (f"{x:.4f}" if isinstance(x, float) else x for x in row)
                    text.write(("\t".join(cells) if row and row[0] else "") + "\n")
                text.flush()


@dataclass(frozen=True)
class Csv:
    """Values separated by a delimiter, with a header. Quoted values may contain line breaks."""

    path: Path
    pair: bool = False
    encoding: str = ""

    def blocks(self, size: int, fields: Fields, added: Columns) -> Iterator[Block]:
        rows = self._rows()
        place, header = next(rows)
        _check_added(place, header, added)
        for block in _in_blocks(rows, size):
            named = ((place, dict(zip(header, row, strict=True))) for place, row in block)
            texts = [_texts(record, fields, self.pair) for record in named]
            yield Block(texts, [row for _, row in block])

    @cached_property
    def _delimiter(self) -> str:
        return delimiter_of(self.path, self.encoding)

    def _rows(self) -> Iterator[tuple[str, list[str]]]:
        """Yields location and values of each row, the header first. Raises a UserError for a malformed row."""
        for place, row in csv_rows(self.path, self._delimiter, self.encoding, shown(self.path)):
            if isinstance(row, str):
                raise UserError(f"{place}{row}: correct the row")
            yield place, row

    def write(self, file: BinaryIO, added: Columns, blocks: Labelled) -> None:
        _, header = next(self._rows())
        with _text_writer(file, is_compressed(self.path)) as text:
            writer = csv.writer(text, delimiter=self._delimiter, lineterminator="\n")
            writer.writerow([*header, *added])
            for block, values in blocks:
                for row, new in zip(block.rows, values, strict=True):
                    writer.writerow([*row, *map(_cell, new)])


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value


@dataclass(frozen=True)
class JsonLines:
    """One JSON object per line. Blank lines are skipped."""

    path: Path
    pair: bool = False
    encoding: str = ""

    def blocks(self, size: int, fields: Fields, added: Columns) -> Iterator[Block]:
        for block in _in_blocks(self._records(), size):
            for place, row in block:
                _check_added(place, row, added)
            texts = [_texts(record, fields, self.pair) for record in block]
            yield Block(texts, [row for _, row in block])

    def _records(self) -> Iterator[Record]:
        lines = lines_of(self.path, self.encoding, HINT)
        for place, row in parse_json_lines(shown(self.path), lines):
            if isinstance(row, str):
                raise UserError(f"{place}{row}; correct the line")
            yield place, row

    def write(self, file: BinaryIO, added: Columns, blocks: Labelled) -> None:
        with _text_writer(file, is_compressed(self.path)) as text:
            for block, values in blocks:
                for row, new in zip(block.rows, values, strict=True):
                    whole = row | dict(zip(added, new, strict=True))
                    text.write(json.dumps(whole, ensure_ascii=False) + "\n")


@dataclass(frozen=True)
class Parquet:
    """A parquet file, read with the package pyarrow."""

    path: Path
    pair: bool = False

    def blocks(self, size: int, fields: Fields, added: Columns) -> Iterator[Block]:
        with open_parquet(self.path) as file:
            names = file.schema_arrow.names
            check_names(shown(self.path), names)
            _check_added(shown(self.path), names, added)
            wanted = {name for either in fields for name in either}
            number = 1
            for batch in file.iter_batches(batch_size=size):
                texts = []
                unread = dict.fromkeys(names)
                columns = {name: batch.column(name).to_pylist() for name in wanted & {*names}}
                for i in range(batch.num_rows):
                    row = unread | {name: values[i] for name, values in columns.items()}
                    place = f"{shown(self.path)} row {number + i}"
                    texts.append(_texts((place, row), fields, self.pair))
                number += batch.num_rows
                yield Block(texts, batch)

    def write(self, file: BinaryIO, added: Columns, blocks: Labelled) -> None:
        pyarrow = import_pyarrow(self.path)
        with open_parquet(self.path) as source:
            schema = source.schema_arrow
        kinds = {
            str: pyarrow.string(),
            float: pyarrow.float64(),
            list: pyarrow.list_(pyarrow.string()),
        }
        for name, kind in added.items():
            schema = schema.append(pyarrow.field(name, kinds[kind]))
        with (
            _stream(file, is_compressed(self.path)) as made,
            pyarrow.parquet.ParquetWriter(made, schema) as writer,
        ):
            for block, values in blocks:
                columns = zip(*values, strict=True)
                arrays = [
                    pyarrow.array(column, schema.field(name).type)
                    for name, column in zip(added, columns, strict=True)
                ]
                rows = [*block.rows.columns, *arrays]
                writer.write_batch(pyarrow.RecordBatch.from_arrays(rows, schema=schema))
