"""Documents of plain text, from files or from the manual that comes with Python."""

import os
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from common.data.files import read_lines
from common.errors import UserError

if TYPE_CHECKING:
    from ml_collections import ConfigDict

DOCUMENTS = ("line", "paragraph", "file")
"""Document boundaries: every line, empty lines, or every file."""


def load_text(data: "ConfigDict", split: str) -> list[str]:
    """Returns the nonempty documents of a split.

    Args:
        data: a configuration with these fields:
            `source`: "embedded:python" or "files:DIR".
            `splits`: for each split the files in DIR: names or patterns such as "books/*.txt", separated by spaces;
                the ending .gz is optional.
            `documents`: one of DOCUMENTS.
        split: "train", "valid" or "test".

    Raises:
        UserError: the source or a file is unknown, missing, damaged or empty.
    """
    if data.documents not in DOCUMENTS:
        raise UserError(
            f"--config.data.documents={data.documents} must be one of {', '.join(DOCUMENTS)}"
        )
    kind, _, place = data.source.partition(":")
    if kind == "embedded":
        if place != "python":
            raise UserError(
                f"--config.data.source={data.source}: no such text; there is: embedded:python"
            )
        files = python_manual(split)
    elif kind == "files":
        directory = Path(os.path.expanduser(place))
        if not directory.is_dir():
            raise UserError(f"no directory {directory} (--config.data.source)")
        files = [read_lines(path) for path in _find(directory, data.splits[split], split)]
    else:
        raise UserError(f"--config.data.source={data.source} must be embedded:python or files:DIR")
    documents = [d for lines in files for d in cut(lines, data.documents) if d.strip()]
    if not documents:
        raise UserError(f"{data.source} has no text in its {split} split")
    return documents


def cut(lines: Sequence[str], end: str) -> list[str]:
    """Splits lines into documents; `end` is one of DOCUMENTS."""
    match end:
        case "line":
            return list(lines)
        case "file":
            return ["\n".join(lines)]
        case _:
            return "\n".join(line.strip() for line in lines).split("\n\n")


def _find(directory: Path, patterns: str, split: str) -> list[Path]:
    """Returns the files of all patterns, sorted by name within each pattern."""
    if not patterns.split():
        raise UserError(f"--config.data.splits.{split} is empty: name at least one file")
    found = []
    for pattern in patterns.split():
        try:
            plain, packed = (set(directory.glob(name)) for name in (pattern, f"{pattern}.gz"))
            # A file that exists plain and gzipped is read once.
            packed = {p for p in packed if p.with_suffix("") not in plain}
            here = sorted(
                {p for p in plain if p.suffix != ".gz" or p.with_suffix("") not in plain} | packed
            )
        except (ValueError, NotImplementedError) as error:
            raise UserError(
                f"--config.data.splits.{split}={pattern} is not a valid file pattern: {error}"
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
    """Returns topics of the manual of Python (100,000 words): 8 of 10 for "train", 1 of 10 for "valid" and "test"."""
    from pydoc_data.topics import topics

    place = {"valid": 8, "test": 9}
    chosen = [
        topics[name].split("\n")
        for number, name in enumerate(sorted(topics))
        if (number % 10 == place[split] if split in place else number % 10 < 8)
    ]
    return chosen
