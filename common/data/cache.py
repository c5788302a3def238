"""Fingerprints of texts and arrays, and error messages for damaged files of arrays and tokenizers."""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from common.errors import UserError, file_error
from common.storage.addresses import shown


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


def read_array(path: Path) -> np.ndarray:
    """Memory-maps a cached array. Raises a UserError if its .npy file `path` is damaged or cannot be read."""
    try:
        return np.load(path, mmap_mode="r")
    except OSError as error:
        raise file_error(path, error) from error
    except (ValueError, EOFError) as error:
        raise UserError(
            f"{path} is damaged: remove the file; the next run writes it again"
        ) from error


@contextmanager
def reading_tokenizer(path: Path) -> Iterator[None]:
    """Context manager for reading the tokenizer's file `path`. Turns any exception into a UserError with the path."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{shown(path)}: {error}") from error
    except OSError as error:
        raise UserError(
            f"cannot read a tokenizer from {shown(path)}: {error.strerror or error}; restore the file"
        ) from error
    except Exception as error:  # `tokenizers` raises plain Exceptions.
        # Do not quote the exception: NumPy's message suggests loading pickles.
        raise UserError(
            f"cannot read a tokenizer from {shown(path)}: the file is damaged or not a tokenizer; restore it, choose"
            " another file, or delete it if it is in a cache"
        ) from error
