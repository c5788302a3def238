"""Reads documents of plain text from files, or from the manual that Python installs (`pydoc_data`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from common.config import check
from common.data.files import names_in, read_lines, source_folder
from common.data.own import SCHEME, own_examples
from common.errors import UserError

if TYPE_CHECKING:
    from ml_collections import ConfigDict

DOCUMENTS = ("line", "paragraph", "file")
"""Values of `data.documents`: a document is a line, a paragraph (ended by an empty line), or a file."""


def load_text(data: "ConfigDict", split: str) -> list[str]:
    """Returns the documents of a split, without empty documents.

    Args:
        data: a configuration with these fields:
            `source`: "embedded:python", "files:DIR" or "import:MODULE:FUNCTION". FUNCTION(split) returns documents.
            `splits`: split -> names or patterns of files in DIR, separated by spaces, such as "books/*.txt". The ending
                .gz may be left out.
            `documents`: one of DOCUMENTS.
        split: "train", "valid" or "test".

    Raises:
        UserError: the source is unknown; a file is missing, damaged or empty.
    """
    check(
        data.documents in DOCUMENTS,
        f"--config.data.documents={data.documents} must be one of {', '.join(DOCUMENTS)}",
    )
    if data.source.startswith(SCHEME):
        return [d for d in own_examples(data.source, split, str, "a text") if d.strip()]
    folder = text_folder(data.source)
    if folder is None:
        files = python_manual(split)
    else:
        files = [read_lines(path) for path in _find(folder, data.splits[split], split)]
    documents = [d for lines in files for d in cut(lines, data.documents) if d.strip()]
    check(bool(documents), f"{data.source} has no text in its {split} split")
    return documents


def text_folder(source: str) -> Path | None:
    """Returns the folder of a source "files:DIR", or None for "embedded:python". Other sources raise a UserError."""
    kind, _, place = source.partition(":")
    option = f"--config.data.source={source}"
    check(
        kind in ("embedded", "files"),
        f"{option} must be embedded:python, files:DIR or import:MODULE:FUNCTION",
    )
    if kind == "files":
        return source_folder(place)
    check(place == "python", f"{option}: the only embedded text is embedded:python")
    return None


def cut(lines: Sequence[str], end: str) -> list[str]:
    """Splits lines into documents; `end` is one of DOCUMENTS."""
    match end:
        case "line":
            return list(lines)
        case "file":
            return ["\n".join(lines)]
        case _:
            return "\n".join(line.strip() for line in lines).split("\n\n")


def _find(folder: Path, patterns: str, split: str) -> list[Path]:
    """Returns the files of all patterns, sorted by name within each pattern."""
    option = f"--config.data.splits.{split}"
    check(bool(patterns.split()), f"{option} is empty: name at least one file")
    paths = []
    for pattern in patterns.split():
        try:
            plain, packed = (set(folder.glob(name)) for name in (pattern, f"{pattern}.gz"))
        except (ValueError, NotImplementedError) as error:
            raise UserError(f"{option}={pattern} is not a valid file pattern: {error}") from error
        # Read a file that exists plain and gzipped only once.
        once = (p for p in plain | packed if p.suffix != ".gz" or p.with_suffix("") not in plain)
        matches = sorted(path for path in once if path.is_file())
        if not matches:
            raise UserError(
                f"no {pattern} or {pattern}.gz in {folder} ({option}); its files: {names_in(folder)}"
            )
        paths += matches
    return paths


def in_split(number: int, split: str) -> bool:
    """Returns whether part `number` of a text is in a split. Of 10 parts, 8 are "train", 1 "valid" and 1 "test"."""
    return number % 10 in {"valid": (8,), "test": (9,)}.get(split, range(8))


def python_manual(split: str) -> list[list[str]]:
    """Returns the lines of each topic of Python's manual that is in a split. The manual has 100,000 words."""
    from pydoc_data.topics import topics

    names = enumerate(sorted(topics))
    return [topics[name].split("\n") for number, name in names if in_split(number, split)]
