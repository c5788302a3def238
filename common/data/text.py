"""Reads documents of plain text: lines, paragraphs or files."""

from pathlib import Path

from ml_collections import ConfigDict

from common.config import check_choice
from common.data.files import choices, read_lines
from common.data.text_sources import DOCUMENTS, IMPORT, cut, python_manual, text_folder
from common.errors import UserError, check
from common.storage.addresses import shown


def load_text(data: ConfigDict, split: str) -> list[str]:
    """Returns the documents of a split, without blank documents.

    Args:
      data: a configuration with these fields:
        `source`: "embedded:python", "files:DIR" or "import:MODULE:FUNCTION". FUNCTION(split) returns documents.
        `splits`: split -> names or patterns of files in DIR, separated by spaces, such as "books/*.txt". The ending
          .gz may be left out.
        `documents`: one of DOCUMENTS, the kind of a document. Has no effect on FUNCTION.
      split: "train", "valid" or "test".

    Raises:
      UserError: a field of `data` is invalid, the source cannot be read, the user's function fails, or the split has no
        text.
    """
    check_choice("--config.data.documents", data.documents, DOCUMENTS)
    if data.source.startswith(IMPORT):
        from common.data.user_source import user_examples

        found = user_examples(data.source, split, str, "a text")
    else:
        folder = text_folder(data.source)
        if folder is None:
            files = python_manual(split)
        else:
            files = [read_lines(path) for path in _find(folder, data.splits[split], split)]
        found = [d for lines in files for d in cut(lines, data.documents)]
    documents = [d for d in found if d.strip()]
    check(
        bool(documents),
        f"--config.data.source={data.source} has only blank text in its {split} split: add text to this split",
    )
    return documents


def _find(folder: Path, patterns: str, split: str) -> list[Path]:
    """Returns the files of all patterns, sorted by path within each pattern."""
    option = f"--config.data.splits.{split}"
    check(bool(patterns.split()), f"{option} is empty: name at least one file")
    paths = []
    for pattern in patterns.split():
        try:
            plain, packed = (set(folder.glob(name)) for name in (pattern, f"{pattern}.gz"))
        # For "." and "./", Python 3.11 raises an IndexError and an AttributeError.
        except (ValueError, NotImplementedError, IndexError, AttributeError) as error:
            raise UserError(
                f"{option}={pattern} is not a valid file pattern: give names or patterns relative to {shown(folder)},"
                " such as *.txt"
            ) from error
        # If a file exists both plain and gzipped, read the plain file only.
        once = (p for p in plain | packed if p.suffix != ".gz" or p.with_suffix("") not in plain)
        matches = sorted(path for path in once if path.is_file())
        if not matches:
            raise UserError(
                f"{option}={pattern}: there is no file {pattern} or {pattern}.gz in {shown(folder)}; {choices(folder)}"
            )
        paths += matches
    return paths
