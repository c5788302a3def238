"""Reads text as bytes from a user's files or function, or from Python's manual."""

from itertools import chain
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from common.data.text_sources import IMPORT, python_manual, text_folder
from common.errors import check
from common.storage.addresses import shown

ENDINGS = ("", ".gz", ".zip")
SPLITS = ("train", "valid", "test")


def load_bytes(data: ConfigDict) -> dict[str, np.ndarray]:
    """Returns the splits "train", "valid" and "test", each (bytes,) uint8.

    Args:
      data: a configuration with these fields:
        `source`: "embedded:python", "files:DIR" or "import:MODULE:FUNCTION". FUNCTION(split) returns texts, which are
          joined by line feeds.
        `file`: name of a file in DIR that is split by position into train, valid and test.
        `shares`: fractions of `file` for train, valid and test. With `limit`, fractions of its first `limit` bytes.
        `limit`: number of bytes to use from the start of `file`; 0 (the default) for all bytes.
        `splits`: split -> file name in DIR. Used if `file` is "".
        In file names, the endings .gz and .zip may be left out. "a|b" is the first of the files a and b that
        exists.

    Raises:
      UserError: the source is unknown or cannot be read, a split is empty, or the user's function fails.
    """
    if data.source.startswith(IMPORT):
        from common.data.user_source import user_examples

        parts = {split: user_examples(data.source, split, str, "a text") for split in SPLITS}
    elif (folder := text_folder(data.source)) is None:
        parts = {split: chain(*python_manual(split)) for split in SPLITS}
    else:
        return _read_files(data, folder)
    texts = {split: "\n".join(some).encode() for split, some in parts.items()}
    source = f"--config.data.source={data.source}"
    return {split: _whole(source, text, split) for split, text in texts.items()}


def _read_files(data: ConfigDict, folder: Path) -> dict[str, np.ndarray]:
    from common.data.files import find_file, read_bytes

    if data.file:
        path = find_file("--config.data.file", folder, data.file, ENDINGS)
        limit = data.get("limit") or None
        return _cut(path, read_bytes(path)[:limit], data.shares, limit)
    paths = {
        split: find_file(f"--config.data.splits.{split}", folder, data.splits[split], ENDINGS)
        for split in SPLITS
    }
    remedy = "add text to this file, or set --config.data.splits.{} to another file"
    return {
        split: _whole(path, read_bytes(path), split, remedy.format(split))
        for split, path in paths.items()
    }


def _cut(
    path: Path, whole: bytes, shares: tuple[float, ...], limit: int | None
) -> dict[str, np.ndarray]:
    """Splits a text by position into train, valid and test. The test split gets all bytes after the valid split."""
    train, valid = (round(len(whole) * share) for share in shares[:2])
    ends = {"train": (0, train), "valid": (train, train + valid), "test": (train + valid, None)}
    view = memoryview(whole)
    remedy = "use a larger --config.data.limit" if len(whole) == limit else "use a longer file"
    return {split: _whole(path, view[slice(*end)], split, remedy) for split, end in ends.items()}


def _whole(
    source: Path | str, text: bytes | memoryview, split: str, remedy: str = "use a longer text"
) -> np.ndarray:
    place = shown(source) if isinstance(source, Path) else source
    check(len(text) > 0, f"the {split} split of {place} has no bytes: {remedy}")
    return np.frombuffer(text, np.uint8)
