"""Reads IDX files, the format of MNIST: a magic number, the dimensions, then unsigned bytes."""

import gzip
import zlib
from pathlib import Path

import numpy as np

from common.errors import UserError

_UNSIGNED_BYTE = 8


def read_idx(directory: Path, name: str) -> np.ndarray:
    """Returns the uint8 array in DIRECTORY/NAME or DIRECTORY/NAME.gz.

    Raises:
      UserError: the file is missing, damaged, or not an IDX file of unsigned bytes.
    """
    plain = directory / name
    path = plain if plain.is_file() else directory / f"{name}.gz"
    if not path.is_file():
        raise UserError(f"no {name} or {name}.gz in {directory}")
    try:
        raw = path.read_bytes()
        if path.suffix == ".gz":
            raw = gzip.decompress(raw)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path} is damaged or truncated: {error}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if len(raw) < 4 or raw[:3] != bytes((0, 0, _UNSIGNED_BYTE)) or len(raw) < 4 + 4 * raw[3]:
        raise UserError(f"{path} is not an IDX file of unsigned bytes")
    shape = np.frombuffer(raw, ">u4", raw[3], 4).astype(int)
    start = 4 + 4 * raw[3]
    if len(raw) - start != int(np.prod(shape)):
        raise UserError(
            f"{path} should hold {' x '.join(map(str, shape))} bytes but holds {len(raw) - start}"
        )
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)
