"""Sources of plain text: a user's folder or function, or the manual that Python installs (`pydoc_data`)."""

from collections.abc import Sequence
from pathlib import Path

from common.errors import check

IMPORT = "import:"
"""Prefix of the source "import:MODULE:FUNCTION", which names a user's function."""

DOCUMENTS = ("line", "paragraph", "file")
"""Values of `data.documents`: a document is a line, a paragraph (ended by a blank line), or a file."""


def text_folder(source: str) -> Path | None:
    """Returns the folder of a source "files:DIR", None for "embedded:python".

    Raises a UserError for any other source, and for a folder that is missing or cannot be downloaded.
    """
    kind, _, place = source.partition(":")
    if kind == "files":
        from common.data.files import source_folder

        return source_folder(place)
    check(
        source == "embedded:python",
        f"--config.data.source={source} must be embedded:python (the Python manual), files:DIR or"
        " import:MODULE:FUNCTION",
    )
    return None


def cut(lines: Sequence[str], document: str) -> list[str]:
    """Splits lines into documents. `document` is the kind of a document, one of DOCUMENTS."""
    match document:
        case "line":
            return list(lines)
        case "file":
            return ["\n".join(lines)]
        case _:
            return "\n".join(line.strip() for line in lines).split("\n\n")


def in_split(number: int, split: str) -> bool:
    """Returns whether part `number` is in a split: "valid" for the last digit 8, "test" for 9, otherwise "train"."""
    return number % 10 in {"valid": (8,), "test": (9,)}.get(split, range(8))


def python_manual(split: str) -> list[list[str]]:
    """Returns the lines of each topic of a split of Python's manual, which has about 65,000 words in Python 3.11."""
    from pydoc_data.topics import topics

    names = enumerate(sorted(topics))
    return [topics[name].split("\n") for number, name in names if in_split(number, split)]
