"""Files that are computed once: named by what they were computed from, and never half written."""

import hashlib
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

from common.errors import UserError


def fingerprint(*parts: Iterable[str]) -> str:
    """SHA-256 (64 hex digits) of several lists of strings; their order and borders count."""
    digest = hashlib.sha256()
    for part in parts:
        for line in part:
            encoded = line.encode()
            digest.update(b"%d:" % len(encoded))
            digest.update(encoded)
        digest.update(b";")
    return digest.hexdigest()


def write_atomic(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Calls `write` on a temporary file and renames it to `path` when it is complete.

    Processes may race for one path: each puts a whole file there, and the last one stays.

    Raises:
        UserError: the directory cannot be made or written, or the disk is full.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            write(file)
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"cannot write to {path.parent}: {error.strerror or error}") from error
    finally:
        if temporary.exists():
            temporary.unlink()
