"""Reads plain and compressed files."""

import gzip
import os
import zipfile
import zlib
from codecs import BOM_UTF8
from pathlib import Path

from common.config import check
from common.errors import UserError
from common.storage.folders import open_folder, shown


def source_folder(place: str) -> Path:
    """Returns the folder of --config.data.source=files:DIR. Downloads a DIR in a bucket and returns the copy.

    Args:
        place: DIR, which may begin with ~.

    Raises:
        UserError: the folder is missing, or the bucket cannot be read.
    """
    folder = open_folder(os.path.expanduser(place))
    check(folder.is_dir(), f"no directory {shown(folder)} (--config.data.source)")
    return folder


def names_in(folder: Path) -> str:
    """Returns the names of at most ten files of a folder, for an error message."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    return ", ".join(names[:10]) or "none"


def check_is_text(name: str | Path, start: bytes) -> None:
    """Raises a UserError if the contents of a file start like compressed data or like an Excel file."""
    kinds = {
        b"\x1f\x8b": "is compressed with gzip: unpack it, or add .gz to its name",
        b"PK\x03\x04": "is an Excel file or another zip archive: save the table as CSV, or unpack the archive",
        b"\xd0\xcf\x11\xe0": "is an Excel file: save the table as CSV",
    }
    for mark, told in kinds.items():
        check(not start.startswith(mark), f"{name} {told}")


def read_bytes(path: Path) -> bytes:
    """Returns the contents of a file, decompressed if its name ends with .gz or .zip.

    Raises:
        UserError: the file cannot be read or is damaged, or a .zip does not contain exactly one file.
    """
    try:
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                names = [n for n in archive.namelist() if not n.endswith("/")]
                if len(names) != 1:
                    raise UserError(f"{path} contains {len(names)} files instead of exactly one")
                return archive.read(names[0])
        raw = path.read_bytes()
        return gzip.decompress(raw) if path.suffix == ".gz" else raw
    # zipfile raises a RuntimeError for an encrypted archive.
    except (EOFError, gzip.BadGzipFile, zlib.error, zipfile.BadZipFile, RuntimeError) as error:
        raise UserError(f"{path} is damaged or truncated: {error}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def read_lines(path: Path) -> list[str]:
    """Returns the lines of a UTF-8 text file, decompressed if its name ends with .gz or .zip.

    Lines end with a line feed, or with a carriage return and a line feed. Other Unicode line separators are text,
    because tools that align parallel text treat them as text.

    Raises:
        UserError: the file cannot be read, is empty, is damaged, or is not UTF-8.
    """
    raw = read_bytes(Path(path)).removeprefix(BOM_UTF8)
    if not raw:
        raise UserError(f"{path} is empty")
    check_is_text(path, raw)
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path} line {line} is not UTF-8") from error
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
