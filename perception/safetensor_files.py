"""Named tensors in the files of a folder: safetensors, one file or several with an index. No pickle is ever loaded.

https://github.com/huggingface/safetensors#format: the length of a header, the header as JSON, the bytes of all tensors.
"""

import hashlib
import json
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from common.config import check
from common.data.cache import write_atomic
from common.errors import UserError

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LARGEST = 5 * 10**9
"""Bytes of tensors in a file, as Hugging Face cuts them; a single larger tensor has a file of its own."""

TYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}
"""Of weights."""
_COPIED = {"F64": np.float64, "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8}
_COPIED |= {"U8": np.uint8, "BOOL": np.bool_}
_ALL = {**TYPES, **{name: np.dtype(kind) for name, kind in _COPIED.items()}}
_NAMES = {dtype: name for name, dtype in _ALL.items()}
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


class TensorFiles:
    """The tensors of a folder, which stay on disk until they are read.

    Attributes:
      names: of all tensors.
    """

    def __init__(self, directory: Path):
        """Opens model.safetensors, or the shards that model.safetensors.index.json names; reads their headers.

        Raises:
          UserError: there are none, a file is damaged, or the index does not fit the files.
        """
        self.directory = directory
        self._files, self._places = _open(directory)
        self.names = frozenset(self._places)

    def _slice(self, name: str) -> Any:
        return self._files[self._places[name]].get_slice(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """One slice per dimension; no more than these numbers is copied. Float32, float16 or bfloat16.

        Raises:
          UserError: the tensor is of another type.
        """
        self._type(name, TYPES)
        return self._slice(name)[index or ...]

    def tensor(self, name: str) -> "Tensor":
        """The whole of it, of whatever type, to be written elsewhere.

        Raises:
          UserError: numpy has no such type.
        """
        dtype = self._type(name, _ALL)
        return Tensor(self.shape(name), dtype, lambda: self._slice(name)[...])

    def _type(self, name: str, known: Mapping[str, np.dtype]) -> np.dtype:
        found = self._slice(name).get_dtype()
        check(
            found in known,
            f"the tensor {name} of {self.directory} is of the type {found}; known are {', '.join(known)}",
        )
        return known[found]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (64 hex digits) of the names and the contents of the files."""
        digest = hashlib.sha256()
        for name in sorted(self._files):
            with (self.directory / name).open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(f"{name}:{content};".encode())
        return digest.hexdigest()


def _open(directory: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Open files by their names, and the file of each tensor."""
    if (directory / WHOLE).is_file():
        file = _open_file(directory / WHOLE)
        return {WHOLE: file}, dict.fromkeys(file.keys(), WHOLE)
    index = directory / INDEX
    if not index.is_file():
        pickle = next((name for name in _PICKLES if (directory / name).exists()), None)
        only = f": {pickle} is a pickle, which can run code and is never loaded" if pickle else ""
        raise UserError(f"{directory} has neither {WHOLE} nor {INDEX}{only}")
    places = _read_index(index)
    files = {}
    for name in sorted(set(places.values())):
        check((directory / name).is_file(), f"{index} names {name}, which is not there")
        files[name] = _open_file(directory / name)
    held = {name: frozenset(file.keys()) for name, file in files.items()}
    for tensor, name in places.items():
        check(tensor in held[name], f"{index} says that {tensor} is in {name}, which has it not")
    return files, places


def _open_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise UserError(f"{path} is damaged or cut off: {reason}") from error


def _read_index(path: Path) -> dict[str, str]:
    try:
        places = json.loads(path.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UserError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    check(
        isinstance(places, dict) and all(isinstance(name, str) for name in places.values()),
        f"{path} is damaged: its weight_map maps no tensors to files",
    )
    return places


@dataclass(frozen=True)
class Tensor:
    """A tensor to be written; `get` gives its value when its turn has come."""

    shape: tuple[int, ...]
    dtype: np.dtype
    get: Callable[[], np.ndarray]

    @property
    def size(self) -> int:
        """In bytes."""
        return int(np.prod(self.shape)) * self.dtype.itemsize


def write(directory: Path | None, tensors: Mapping[str, Tensor], largest: int = LARGEST) -> None:
    """Gets and writes one tensor after the other: no more than one of them is in memory.

    Args:
      directory: None on a process that only has to take part in getting them.
      largest: bytes of tensors in a file; more are cut into several files with an index.

    Raises:
      UserError: the folder cannot be written.
    """
    # The widest types first: every tensor then begins at a multiple of its item's size.
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    if directory is None:
        for tensor in tensors.values():
            tensor.get()
        return
    files: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if files[-1] and sum(t.size for t in files[-1].values()) + tensor.size > largest:
            files.append({})
        files[-1][name] = tensor
    if len(files) == 1:
        write_atomic(directory / WHOLE, lambda file: _write_file(file, files[0]))
        return
    places = {}
    for number, part in enumerate(files, 1):
        path = directory / f"model-{number:05}-of-{len(files):05}.safetensors"
        write_atomic(path, lambda file, part=part: _write_file(file, part))
        places |= dict.fromkeys(part, path.name)
    total = sum(tensor.size for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    write_atomic(directory / INDEX, lambda file: file.write(text.encode()))


def _write_file(file: BinaryIO, tensors: Mapping[str, Tensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # without it transformers refuses
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.size
        kind = _NAMES[tensor.dtype]
        header[name] = {"dtype": kind, "shape": tensor.shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors.values():
        file.write(np.ascontiguousarray(tensor.get(), tensor.dtype).reshape(-1).view(np.uint8))


@contextmanager
def staged(directory: Path) -> Iterator[Path]:
    """A folder beside `directory` that takes its place when the block has ended well, and is gone otherwise.

    Raises:
      UserError: `directory` is there already and not empty, or cannot be written.
    """
    require_empty(directory)
    directory = directory.absolute()
    temporary = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        temporary.replace(directory)
    except OSError as error:
        raise UserError(f"cannot write to {directory}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def require_empty(directory: Path) -> None:
    """Nothing may lie where something is about to be written.

    Raises:
      UserError: the folder has files, or is a file.
    """
    check(not directory.exists() or directory.is_dir(), f"{directory} is a file")
    check(
        not directory.is_dir() or not any(directory.iterdir()),
        f"{directory} is not empty; choose another folder",
    )
