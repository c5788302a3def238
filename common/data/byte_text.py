"""Text as bytes, from three files or from one file that is split by position."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from common.data.files import read_bytes
from common.data.text import python_manual
from common.errors import UserError

if TYPE_CHECKING:
    from ml_collections import ConfigDict

ENDINGS = ("", ".gz", ".zip")
SPLITS = ("train", "valid", "test")


def load_bytes(data: "ConfigDict") -> dict[str, np.ndarray]:
    """Returns the splits "train", "valid" and "test", each (bytes,) uint8.

    Args:
        data: a configuration with these fields:
            `source`: "embedded:python" or "files:DIR".
            `file`: one file in DIR that is split by position into train, valid and test; "" for three files.
            `shares`: fractions of `file` for train, valid and test.
            `limit`: only the first bytes of `file` are read; 0 (the default) for all.
            `splits`: names of three files. The endings .gz and .zip are optional; "a|b" is the first existing file.

    Raises:
        UserError: the source or a file is unknown, missing, damaged or empty.
    """
    kind, _, place = data.source.partition(":")
    if kind == "embedded":
        if place != "python":
            raise UserError(
                f"--config.data.source={data.source}: no such text; there is: embedded:python"
            )
        return {split: _manual(split) for split in SPLITS}
    if kind != "files":
        raise UserError(f"--config.data.source={data.source} must be embedded:python or files:DIR")
    directory = Path(os.path.expanduser(place))
    if not directory.is_dir():
        raise UserError(f"no directory {directory} (--config.data.source)")
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


def _cut(path: Path, whole: bytes, shares: tuple[float, ...]) -> dict[str, np.ndarray]:
    """Splits a text by position into train, valid and test; rounding goes to test."""
    train, valid = (round(len(whole) * share) for share in shares[:2])
    ends = {"train": (0, train), "valid": (train, train + valid), "test": (train + valid, None)}
    view = memoryview(whole)
    return {split: _whole(path, view[slice(*end)], split) for split, end in ends.items()}


def _whole(path: Path, text: bytes | memoryview, split: str) -> np.ndarray:
    if not len(text):
        raise UserError(f"{path} has no bytes in its {split} split")
    return np.frombuffer(text, np.uint8)
