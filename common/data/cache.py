"""Cached files: cache keys of their inputs, and atomic writes."""

import hashlib
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

from common.errors import UserError


def fingerprint(*parts: Iterable[str]) -> str:
    """Returns the SHA-256 (64 hex digits) of lists of strings; changes with their order and boundaries."""
    digest = hashlib.sha256()
    for part in parts:
        for line in part:
            encoded = line.encode()
            digest.update(b"%d:" % len(encoded))
            digest.update(encoded)
        digest.update(b";")
    return digest.hexdigest()


def write_atomic(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Calls `write` on a temporary file and renames it to `path`, so that readers never see an incomplete file.

    Several processes may write the same path; the last rename wins.

    Raises:
        UserError: the directory cannot be created or written, or the disk is full.
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
