"""Text as bytes: whole files, plain, gzipped or zipped, cut by position where one file is all there is."""

import gzip
import os
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from common.data.text import python_manual
from common.errors import UserError

if TYPE_CHECKING:
    from ml_collections import ConfigDict

ENDINGS = ("", ".gz", ".zip")
SPLITS = ("train", "valid", "test")


def load_bytes(data: "ConfigDict") -> dict[str, np.ndarray]:
    """The splits "train", "valid" and "test", each (bytes,) uint8. One file is read once.

    Args:
        data: has `source` ("embedded:python" or "files:DIR"); `file`, one file in DIR of which train, valid and test
            are `shares` by position, or ""; `limit`, how many bytes at the beginning of that file are taken, 0 for all
            (as where the field is missing); and `splits`, the names of three files. A .gz or .zip may be left out;
            "a|b" is the first of them that is there.

    Raises:
        UserError: the source or a file is unknown, missing, damaged or empty.
    """
    kind, _, place = data.source.partition(":")
    if kind == "embedded":
        if place != "python":
            raise UserError(f"no embedded text {place!r}; there is: python")
        return {split: _manual(split) for split in SPLITS}
    if kind != "files":
        raise UserError(f"data.source is {data.source!r}; it must be embedded:python or files:DIR")
    directory = Path(os.path.expanduser(place))
    if not directory.is_dir():
        raise UserError(f"no directory {directory} (data.source)")
    if data.file:
        path = _find(directory, data.file)
        return _cut(path, read_bytes(path)[: data.get("limit") or None], data.shares)
    paths = {split: _find(directory, data.splits[split]) for split in SPLITS}
    return {split: _whole(path, read_bytes(path), split) for split, path in paths.items()}


def _manual(split: str) -> np.ndarray:
    text = "\n".join(line for topic in python_manual(split) for line in topic)
    return np.frombuffer(text.encode(), np.uint8)


def _find(directory: Path, name: str) -> Path:
    for one in name.split("|"):
        for ending in ENDINGS:
            if (path := directory / f"{one}{ending}").is_file():
                return path
    there = sorted(p.name for p in directory.iterdir() if p.is_file())
    raise UserError(
        f"no {name.replace('|', ' or ')} (nor with .gz or .zip) in {directory}; there are:"
        f" {', '.join(there[:10]) or 'no files'}"
    )


def read_bytes(path: Path) -> bytes:
    """Returns the contents of a file, unpacked where its name ends in .gz or .zip.

    Raises:
        UserError: the file is missing or damaged, or a .zip does not hold exactly one file.
    """
    try:
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                names = [n for n in archive.namelist() if not n.endswith("/")]
                if len(names) != 1:
                    raise UserError(f"{path} holds {len(names)} files, one is expected")
                return archive.read(names[0])
        if path.suffix == ".gz":
            return gzip.decompress(path.read_bytes())
        return path.read_bytes()
    except (OSError, EOFError, zlib.error, zipfile.BadZipFile, RuntimeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error


def _cut(path: Path, whole: bytes, shares: tuple[float, ...]) -> dict[str, np.ndarray]:
    """Train, valid and test one after the other; what is rounded off goes to the last."""
    train, valid = (round(len(whole) * share) for share in shares[:2])
    ends = {"train": (0, train), "valid": (train, train + valid), "test": (train + valid, None)}
    view = memoryview(whole)
    return {split: _whole(path, view[slice(*end)], split) for split, end in ends.items()}


def _whole(path: Path, text: bytes | memoryview, split: str) -> np.ndarray:
    if not len(text):
        raise UserError(f"{path} has no bytes in its {split} split")
    return np.frombuffer(text, np.uint8)
