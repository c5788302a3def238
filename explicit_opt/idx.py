"""Reads IDX files, the format of MNIST: magic number, dimensions, unsigned bytes."""

from pathlib import Path

import numpy as np

from common.data.files import read_bytes, source_folder
from common.errors import UserError, check
from common.storage.addresses import shown

_UNSIGNED_BYTE = 8


Images = tuple[np.ndarray, np.ndarray]
"""Pixels (E, M) uint8 and labels (E,)."""


def read_mnist(place: str) -> tuple[Images, Images]:
    """Returns the training images and the test images of a folder. `place` is DIR in --config.data.source=files:DIR.

    Raises a UserError if the folder is missing, `read_idx` fails, or images or labels have wrong axes, are empty or do
    not match.
    """
    directory = source_folder(place)
    return _read_part(directory, "train"), _read_part(directory, "t10k")


def _read_part(directory: Path, part: str) -> Images:
    images_name, labels_name = f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"
    pixels, labels = read_idx(directory, images_name), read_idx(directory, labels_name)
    check(
        pixels.ndim == 3,
        f"{shown(directory)}: {images_name} must have 3 axes (images, height, width), got {pixels.ndim}: download the"
        " file again",
    )
    check(
        labels.ndim == 1,
        f"{shown(directory)}: {labels_name} must have 1 axis, got {labels.ndim}: download the file again",
    )
    check(
        len(pixels) > 0, f"{shown(directory)}: {images_name} has no images: download the file again"
    )
    check(
        len(pixels) == len(labels),
        f"{shown(directory)}: {images_name} has {len(pixels)} images, but {labels_name} has {len(labels)} labels:"
        " download both files again",
    )
    return pixels.reshape(len(pixels), -1), labels.astype(np.int32)


def read_idx(directory: Path, name: str) -> np.ndarray:
    """Returns the uint8 array in DIRECTORY/NAME or DIRECTORY/NAME.gz.

    Raises a UserError if the file is missing, unreadable, damaged, or not an IDX file of unsigned bytes.
    """
    plain = directory / name
    path = plain if plain.is_file() else directory / f"{name}.gz"
    if not path.is_file():
        raise UserError(
            f"{shown(directory)} has no {name} or {name}.gz: download the four IDX files of MNIST into this"
            " folder"
        )
    raw = read_bytes(path)
    known = raw[:3] == bytes((0, 0, _UNSIGNED_BYTE)) and len(raw) > 3 and raw[3] > 0
    if not known or len(raw) < 4 + 4 * raw[3]:
        raise UserError(
            f"{shown(path)} is not an IDX file of unsigned bytes: download the file again, and keep .gz in its name"
            " unless you unpack it"
        )
    shape = np.frombuffer(raw, ">u4", raw[3], 4).astype(int)
    start = 4 + 4 * raw[3]
    if len(raw) - start != int(np.prod(shape)):
        raise UserError(
            f"{shown(path)} should have {' x '.join(map(str, shape))} bytes after its header, but has"
            f" {len(raw) - start}: download the file again"
        )
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)
