"""Reads plain and compressed files."""

import gzip
import zipfile
import zlib
from codecs import BOM_UTF8
from pathlib import Path

from common.errors import UserError


def read_bytes(path: Path) -> bytes:
    """Returns the contents of a file, decompressed if its name ends with .gz or .zip.

    Raises:
        UserError: the file cannot be read or is damaged, or a .zip does not have exactly one file.
    """
    try:
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                names = [n for n in archive.namelist() if not n.endswith("/")]
                if len(names) != 1:
                    raise UserError(f"{path} contains {len(names)} files, but must contain one")
                return archive.read(names[0])
        raw = path.read_bytes()
        return gzip.decompress(raw) if path.suffix == ".gz" else raw
    # RuntimeError: an encrypted .zip.
    except (EOFError, gzip.BadGzipFile, zlib.error, zipfile.BadZipFile, RuntimeError) as error:
        raise UserError(f"{path} is damaged or truncated: {error}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def read_lines(path: Path) -> list[str]:
    """Returns the lines of a UTF-8 text file, which may be a .gz or .zip.

    Only line feeds, with or without carriage returns, end a line. Other Unicode line separators are text, because the
    tools that align parallel text treat them as text.

    Raises:
        UserError: the file cannot be read, is empty, damaged, or not UTF-8.
    """
    raw = read_bytes(Path(path)).removeprefix(BOM_UTF8)
    if not raw:
        raise UserError(f"{path} is empty")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path} line {line} is not UTF-8") from error
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
