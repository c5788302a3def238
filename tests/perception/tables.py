"""Makes small labelled tables as CSV, JSON lines and Parquet."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

WORDS = ("apple", "river", "stone", "cloud", "music", "table", "green", "quiet", "seven", "north")


def sentence(number: int, words: int = 6) -> str:
    """Returns a sentence for a number. Sentences for different numbers share few word pairs."""
    return (
        " ".join(np.random.default_rng(number).choice(WORDS, words)) + f" {chr(97 + number % 26)}"
    )


def rows(count: int, classes: int = 2, start: int = 0) -> list[dict]:
    names = ("spam", "ham", "other", "more")
    return [{"text": sentence(start + i), "label": names[i % classes]} for i in range(count)]


def as_csv(found: list[dict], delimiter: str = ",") -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, list(found[0]), delimiter=delimiter, lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    return file.getvalue()


def as_lines(found: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in found)


def as_parquet(found: list[dict], names: list[str] | None = None) -> bytes:
    """Returns a Parquet file. `names` replaces the names of the columns."""
    file, table = io.BytesIO(), pa.Table.from_pylist(found)
    pq.write_table(table.rename_columns(names or table.column_names), file)
    return file.getvalue()


def put(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def number_rows(make: Callable[[int], object], count: int = 60) -> str:
    return as_csv([{"text": sentence(i), "label": make(i)} for i in range(count)])


MANY = rows(40)
