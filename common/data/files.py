"""Reads plain and compressed files."""

import codecs
import gzip
import io
import os
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from common.errors import UserError, check, file_error, reason_of
from common.storage.addresses import shown
from common.storage.folders import open_folder

_CHUNK = 2**20
"""Size in bytes of the buffer for reading."""

_ESCAPED = re.compile("[\udc80-\udcff]")
"""Characters by which the error handler "surrogateescape" replaces undecodable bytes. Valid text has none of them."""

_NO_TEXT = {
    b"\x1f\x8b": "is compressed with gzip: unpack it, or add .gz to its name",
    b"PK\x03\x04": "is an Excel file or another zip archive: save the table as CSV, or unpack the archive",
    b"\xd0\xcf\x11\xe0": "is an Excel file: save the table as CSV",
}
"""First bytes of a file that is no text -> its description for the error message."""


def source_folder(place: str) -> Path:
    """Returns the folder of --config.data.source=files:DIR, or the downloaded copy if DIR is in a bucket.

    `place` is DIR, which may begin with ~. Raises a UserError if the folder is missing or cannot be downloaded.
    """
    folder = open_folder(os.path.expanduser(place))
    check(
        folder.is_dir(),
        f"--config.data.source=files:{place}: there is no directory {shown(folder)}; give an existing directory",
    )
    return folder


def names_in(folder: Path) -> str:
    """Returns the first ten names of files in a folder, and "..." if there are more; "none" if there are no files."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    return ", ".join([*names[:10], *["..."] * (len(names) > 10)]) or "none"


def choices(folder: Path, endings: Sequence[str] = ("",)) -> str:
    """Returns advice for an error message about a missing file of --config.data.source=files:DIR.

    The advice lists up to ten files of the folder that have one of the endings, without the ending.
    """
    named = re.compile(f"(.*?)({'|'.join(map(re.escape, endings))})")
    matches = (named.fullmatch(path.name) for path in folder.iterdir() if path.is_file())
    names = sorted({match[1] for match in matches if match})
    if not names:
        return "the folder has no suitable file: choose another --config.data.source"
    return f"choose one of its files: {', '.join(names[:10])}{', ...' * (len(names) > 10)}"


def find_file(
    option: str, folder: Path, names: str, endings: Sequence[str], optional: bool = False
) -> Path | None:
    """Returns the first existing file of a folder whose name is one of `names` plus one of `endings`.

    Args:
      option: command-line option with the value `names`, for error messages.
      names: a name, or several names "a|b", the first choice first.
      optional: whether to return None if there is no such file.

    Raises:
      UserError: `optional` is False, and there is no such file or `names` is empty.
    """
    tried = [f"{name}{ending}" for name in names.split("|") if name for ending in endings]
    found = next((folder / name for name in tried if (folder / name).is_file()), None)
    if found is None and not optional:
        check(bool(tried), f"{option} is empty: name a file in {shown(folder)}")
        raise UserError(
            f"{option}={names}: there is no file {' or '.join(tried)} in {shown(folder)}; {choices(folder, endings)}"
        )
    return found


ADVICE = "; convert the text to UTF-8"
"""Advice for errors about a wrong encoding or NUL bytes, for programs without an option that sets the encoding."""


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Context manager that opens a file, decompressed if its name ends with .gz or .zip.

    Raises a UserError, also while the caller reads, if the file cannot be read, is damaged or encrypted, or is a .zip
    that does not contain exactly one file.
    """
    try:
        if path.suffix.lower() == ".zip":
            with zipfile.ZipFile(path) as archive:
                names = [n for n in archive.namelist() if not n.endswith("/")]
                check(
                    len(names) == 1,
                    f"{shown(path)} contains {len(names)} files instead of exactly one: make an archive of one file",
                )
                with archive.open(names[0]) as file:
                    yield file
        else:
            with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
                yield file
    except (EOFError, gzip.BadGzipFile, zlib.error, zipfile.BadZipFile) as error:
        raise UserError(
            f"{shown(path)} is damaged or truncated, or not a {path.suffix.lower()} file: {reason_of(error)}; copy or"
            f" download it again, or remove {path.suffix} from its name if the file is not compressed"
        ) from error
    except OSError as error:
        raise file_error(shown(path), error) from error
    except RuntimeError as error:  # zipfile raises a RuntimeError for an encrypted archive.
        raise UserError(f"cannot read {shown(path)}: {error}; unpack the archive") from error


def read_bytes(path: Path) -> bytes:
    """Returns the contents of a file; `opened` documents the formats and errors."""
    with opened(path) as file:
        return file.read()


def decoded_lines(
    file: BinaryIO, name: str | Path, encoding: str = "", hint: str = ""
) -> Iterator[str]:
    """Yields the lines of a text file without their line ends.

    Lines end with a line feed, or with a carriage return and a line feed. In a file without line feeds, lines end with
    a carriage return. Reads the file in chunks, so a file with line feeds may be larger than memory.

    Args:
      name: name of the file for error messages.
      encoding: encoding of the file. "" means UTF-16 if the file starts with UTF-16's byte order mark, else UTF-8.
      hint: text to append to the error messages about the encoding and about NUL bytes, such as ADVICE.

    Raises:
      UserError: the file is not in the encoding, contains NUL bytes, or is a gzip, zip or Excel file.
    """
    buffer = io.BufferedReader(file, _CHUNK)
    start = buffer.peek()
    for mark, told in _NO_TEXT.items():
        check(not start.startswith(mark), f"{name} {told}")
    is_utf16 = start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    encoding = encoding or ("utf-16" if is_utf16 else "utf-8")
    wrong = f"is not {encoding.removesuffix('-sig').upper()}{hint}"
    number = 0
    try:
        for line in io.TextIOWrapper(buffer, encoding, errors="surrogateescape", newline="\n"):
            number += 1
            if number == 1:
                line = line.removeprefix("\ufeff")
            if "\0" in line:
                raise UserError(f"{name} line {number} contains NUL bytes{hint}")
            if _ESCAPED.search(line):
                raise UserError(f"{name} line {number} {wrong}")
            if line.endswith("\n"):
                yield line[:-1].removesuffix("\r")
            elif last := line.removesuffix("\r"):
                yield from [last] if number > 1 else last.split("\r")
    # In damaged UTF-16, the undecodable bytes may be below 128. The error handler does not escape these bytes, so the
    # decoder fails, at an unknown line.
    except UnicodeError as error:
        raise UserError(f"{name} {wrong}") from error


def lines_of(path: Path, encoding: str = "", hint: str = "") -> Iterator[str]:
    """Yields the lines of a plain or compressed text file; see `opened` and `decoded_lines`."""
    with opened(path) as file:
        yield from decoded_lines(file, shown(path), encoding, hint)


def nonempty(path: str | Path, lines: Iterator[str]) -> Iterator[str]:
    """Yields `lines`, the lines of the file `path`. After the last line, raises a UserError if all lines are blank."""
    blank = True
    for line in lines:
        blank = blank and not line.strip()
        yield line
    check(
        not blank, f"{path} is empty or contains only white space: add text, or choose another file"
    )


def read_lines(path: Path) -> list[str]:
    """Returns the lines of a text file, decompressed if its name ends with .gz or .zip; see `decoded_lines`.

    Unicode's other line separators, such as U+2028, are text, because tools that align parallel text treat them as
    text.

    Raises:
      UserError: the file is empty, or `opened` or `decoded_lines` fails.
    """
    lines = list(lines_of(Path(path), hint=ADVICE))
    check(bool(lines), f"{shown(path)} is empty: add text, or choose another file")
    return lines
