"""Fingerprints of texts and arrays, for cache keys."""

import hashlib
from collections.abc import Iterable

import numpy as np


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
