"""Atomic file writes: readers see the old file or the whole new file."""

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from common.errors import UserError


def write_atomic(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Calls `write` on a temporary file and renames the file to `path`, so that readers never see an incomplete file.

    Several processes may write the same path. The last rename wins.

    Raises:
        UserError: the folder of `path` cannot be created or written, or the disk is full.
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


def write_whole(path: Path, text: str) -> None:
    """Writes a text file atomically."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
