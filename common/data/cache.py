"""Fingerprints for cache keys, and atomic file writes."""

import hashlib
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from common.errors import UserError


def fingerprint(*parts: Iterable[str]) -> str:
    """Returns the SHA-256 (64 hex digits) of lists of strings. Order and list boundaries change the result."""
    digest = hashlib.sha256()
    for part in parts:
        for line in part:
            encoded = line.encode()
            digest.update(b"%d:" % len(encoded))
            digest.update(encoded)
        digest.update(b";")
    return digest.hexdigest()


def fingerprint_arrays(*arrays: np.ndarray) -> str:
    """Returns the SHA-256 (64 hex digits) of the values, dtypes, shapes and order of arrays."""
    digest = hashlib.sha256()
    for x in arrays:
        digest.update(f"{x.dtype} {x.shape};".encode())
        digest.update(np.ascontiguousarray(x).reshape(-1).view(np.uint8))
    return digest.hexdigest()


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
