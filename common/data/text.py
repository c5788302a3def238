"""Plain text as documents: from files, or the English text that comes with every Python."""

import os
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from common.data.sources import read_lines
from common.errors import UserError

if TYPE_CHECKING:
    from ml_collections import ConfigDict

DOCUMENTS = ("line", "paragraph", "file")
"""Where a document ends: at the end of a line, at an empty line, at the end of a file."""


def load_text(data: "ConfigDict", split: str) -> list[str]:
    """The documents of one split, without empty ones.

    Args:
        data: has `source` ("embedded:python" or "files:DIR"), `splits` (for each split the files in DIR: names or
            patterns such as "books/*.txt", separated by spaces; a .gz may be left out) and `documents`, one of
            DOCUMENTS.
        split: "train", "valid" or "test".

    Raises:
        UserError: the source or a file is unknown, missing, damaged or empty.
    """
    if data.documents not in DOCUMENTS:
        raise UserError(
            f"data.documents is {data.documents!r}; it must be one of {', '.join(DOCUMENTS)}"
        )
    kind, _, place = data.source.partition(":")
    if kind == "embedded":
        if place != "python":
            raise UserError(f"no embedded text {place!r}; there is: python")
        files = python_manual(split)
    elif kind == "files":
        directory = Path(os.path.expanduser(place))
        if not directory.is_dir():
            raise UserError(f"no directory {directory} (data.source)")
        files = [read_lines(path) for path in _find(directory, data.splits[split], split)]
    else:
        raise UserError(f"data.source is {data.source!r}; it must be embedded:python or files:DIR")
    documents = [d for lines in files for d in cut(lines, data.documents) if d.strip()]
    if not documents:
        raise UserError(f"{data.source} has no text in its {split} split")
    return documents


def cut(lines: Sequence[str], end: str) -> list[str]:
    """Lines as documents that end where `end`, one of DOCUMENTS, says."""
    match end:
        case "line":
            return list(lines)
        case "file":
            return ["\n".join(lines)]
        case _:
            return "\n".join(line.strip() for line in lines).split("\n\n")


def _find(directory: Path, patterns: str, split: str) -> list[Path]:
    """The files of all patterns, each pattern's in the order of their names."""
    if not patterns.split():
        raise UserError(f"data.splits.{split} names no file")
    found = []
    for pattern in patterns.split():
        try:
            plain, packed = (set(directory.glob(name)) for name in (pattern, f"{pattern}.gz"))
            # A file that is there in both forms is one file.
            packed = {p for p in packed if p.with_suffix("") not in plain}
            here = sorted(
                {p for p in plain if p.suffix != ".gz" or p.with_suffix("") not in plain} | packed
            )
        except (ValueError, NotImplementedError) as error:
            raise UserError(
                f"data.splits.{split}={pattern!r} is no file pattern: {error}"
            ) from error
        here = [path for path in here if path.is_file()]
        if not here:
            names = sorted(p.name for p in directory.iterdir() if p.is_file())
            raise UserError(
                f"no {pattern} or {pattern}.gz in {directory} (data.splits.{split}); there are:"
                f" {', '.join(names[:10]) or 'no files'}"
            )
        found.append(here)
    return list(chain.from_iterable(found))


def python_manual(split: str) -> list[list[str]]:
    """The manual of the Python language, as its `help` prints it, about 100,000 words; a tenth of the topics each is
    held out."""
    from pydoc_data.topics import topics

    place = {"valid": 8, "test": 9}
    chosen = [
        topics[name].split("\n")
        for number, name in enumerate(sorted(topics))
        if (number % 10 == place[split] if split in place else number % 10 < 8)
    ]
    return chosen
