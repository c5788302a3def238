"""Reads and writes safetensors in a directory: one file, or shards with an index. Never loads pickles.

Format (https://github.com/huggingface/safetensors#format): length of the header, header as JSON, bytes of all tensors.
"""

import errno
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

from common.arguments import check_folder
from common.errors import UserError, check, file_error, full_disk, parse_json, write_error
from common.storage.addresses import shown

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"
"""File of an adapter in PEFT's format."""
LARGEST = 5 * 10**9
"""Maximum bytes of tensors in a shard, as in huggingface_hub. A larger tensor gets its own shard."""

TYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}
"""Supported dtypes of weights."""
_COPIED = {"F64": np.float64, "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8}
_COPIED |= {"U8": np.uint8, "BOOL": np.bool_}
CODES = {"I8": np.dtype(np.int8), "U8": np.dtype(np.uint8)}
"""Dtypes of the codes of quantized kernels."""
_ALL = {**TYPES, **{name: np.dtype(kind) for name, kind in _COPIED.items()}}
_NAMES = {dtype: name for name, dtype in _ALL.items()}
_PICKLES = {
    WHOLE: ("pytorch_model.bin", "pytorch_model.bin.index.json"),
    ADAPTER: ("adapter_model.bin",),
}


class TensorFiles:
    """Tensors of a directory, read from disk on demand.

    Attributes:
      names: names of all tensors.
    """

    def __init__(self, directory: Path, whole: str = WHOLE):
        """Opens a file, or the shards that its index lists, and reads their headers.

        Args:
          whole: name of the file; ".index.json" is appended for the name of the index.

        Raises:
          UserError: the files are missing, unreadable or damaged, or the index does not match the shards.
        """
        self.directory = directory
        self._files, self._places = _open(directory, whole)
        self.names = frozenset(self._places)

    def _slice(self, name: str) -> Any:
        return self._files[self._places[name]].get_slice(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(
        self, name: str, index: tuple[slice, ...], dtypes: Mapping[str, np.dtype] = TYPES
    ) -> np.ndarray:
        """Reads the part of a tensor that `index` selects, one slice per dimension; () reads the whole tensor.

        Raises a UserError if the tensor's dtype is not in `dtypes`, by default float32, float16 and bfloat16.
        """
        self._type(name, dtypes)
        return self._slice(name)[index or ...]

    def tensor(self, name: str) -> "Tensor":
        """Returns a whole tensor, for `write`, which reads its values.

        Raises a UserError for a dtype that is not supported, such as 8-bit floats.
        """
        dtype = self._type(name, _ALL)
        return Tensor(self.shape(name), dtype, lambda: self._slice(name)[...])

    def _type(self, name: str, known: Mapping[str, np.dtype]) -> np.dtype:
        found = self._slice(name).get_dtype()
        check(
            found in known,
            f"{shown(self.directory)}: tensor {name} has dtype {found}, but only {', '.join(known)} are supported:"
            " convert the tensor to one of these",
        )
        return known[found]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (64 hex digits) of file names and contents."""
        digest = hashlib.sha256()
        for name in sorted(self._files):
            with (self.directory / name).open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(f"{name}:{content};".encode())
        return digest.hexdigest()


def _open(directory: Path, whole: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns {file name: open file} and {tensor name: file name}."""
    if (directory / whole).is_file():
        file = _open_file(directory / whole)
        return {whole: file}, dict.fromkeys(file.keys(), whole)
    index = directory / f"{whole}.index.json"
    if not index.is_file():
        pickle = next((name for name in _PICKLES[whole] if (directory / name).exists()), None)
        only = ": copy the weights to this directory"
        if pickle:
            kind = "lists pickles" if pickle.endswith(".json") else "is a pickle"
            only = f"; {pickle} {kind}; a pickle can run code and is not loaded: convert the weights to safetensors"
        raise UserError(f"{shown(directory)} has neither {whole} nor {index.name}{only}")
    places = _read_index(index)
    files = {}
    for name in sorted(set(places.values())):
        check(
            (directory / name).is_file(),
            f"{shown(index)} lists {name}, which does not exist: copy the file to the directory of the index",
        )
        files[name] = _open_file(directory / name)
    held = {name: frozenset(file.keys()) for name, file in files.items()}
    for tensor, name in places.items():
        check(
            tensor in held[name],
            f"{shown(index)} lists tensor {tensor} in {name}, but {name} does not contain it: use the index and the"
            " shards of one model",
        )
    return files, places


_POINTER = b"version https://git-lfs"
"""First bytes of the file that a clone without git-lfs has in place of a large file."""


def _open_file(path: Path) -> Any:
    try:
        with path.open("rb") as file:  # safe_open reports an unreadable file as missing
            start = file.read(len(_POINTER))
        check(
            start != _POINTER,
            f"{shown(path)} is a Git LFS pointer, not the weights: run git lfs pull in its repository, or download the"
            " file from the Hugging Face hub",
        )
        return safe_open(path, framework="numpy")
    except OSError as error:
        raise UserError(
            f"cannot read {shown(path)}: {error.strerror or error}; correct the path or the permissions of the file"
        ) from error
    except SafetensorError as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise UserError(
            f"{shown(path)} is damaged or truncated: {reason}; copy or download the file again"
        ) from error


def _read_index(path: Path) -> dict[str, str]:
    try:
        places = parse_json(path.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise file_error(shown(path), error) from error
    check(
        isinstance(places, dict) and all(isinstance(name, str) for name in places.values()),
        f"{shown(path)} is damaged: weight_map must map tensor names to file names; restore the file",
    )
    outside = next((name for name in places.values() if Path(name).name != name), None)
    check(
        outside is None,
        f"{shown(path)} lists {outside}, which is not the name of a file in the same directory: list names without a"
        " folder",
    )
    return places


@dataclass(frozen=True)
class Tensor:
    """A tensor to write. `get` returns the value. `write` calls `get` only when it writes this tensor."""

    shape: tuple[int, ...]
    dtype: np.dtype
    get: Callable[[], np.ndarray]

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return int(np.prod(self.shape)) * self.dtype.itemsize


def write(
    directory: Path, tensors: Mapping[str, Tensor], largest: int = LARGEST, whole: str = WHOLE
) -> None:
    """Writes tensors one at a time, so that only one result of `Tensor.get` is in memory.

    Args:
      largest: maximum bytes of tensors in a shard, see LARGEST. Several shards get an index.
      whole: name of the file if there is a single shard.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    # Tensors with the widest dtypes come first, so that every tensor is aligned to its item size.
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    split = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: tensor.size,
        filename_pattern=whole.replace(".safetensors", "{suffix}.safetensors"),
        max_shard_size=largest,
    )
    for name, names in split.filename_to_tensors.items():
        with (directory / name).open("wb") as file:
            _write_file(file, {n: tensors[n] for n in names})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (directory / whole.replace(WHOLE, INDEX)).write_text(text)


def _write_file(file: BinaryIO, tensors: Mapping[str, Tensor]) -> None:
    # transformers rejects a file whose metadata do not name the format.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
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
def staged(directory: Path, option: str = "--out") -> Iterator[Path]:
    """Yields a temporary directory that is renamed to `directory` on success and deleted on error.

    Args:
      option: command-line option that names `directory`, for error messages.

    Raises:
      UserError: `require_empty` fails, `directory` cannot be written, or the caller's block cannot read another file.
    """
    require_empty(directory, option)
    place = f"{option}={shown(directory)}"
    directory = directory.absolute()
    temporary = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}")
    writing = True
    try:
        temporary.mkdir(parents=True)
        writing = False
        yield temporary
        writing = True
        temporary.replace(directory)
    except OSError as error:
        # The error of a full disk may name no file, or the file that was copied.
        if not writing and not full_disk(error) and error.errno != errno.EFBIG:
            if error.filename is None:
                raise
            path = Path(str(error.filename))
            if temporary not in (path, *path.parents):
                raise file_error(shown(path), error) from error
        raise write_error(place, error, "choose another directory") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def require_empty(directory: Path, option: str = "--out") -> None:
    """Raises a UserError unless a directory is writable, and missing or empty. The error names `option` ("--out")."""
    check_folder(option, directory)
    try:
        empty = not directory.is_dir() or not any(directory.iterdir())
    except OSError as error:
        raise UserError(
            f"cannot read {option}={shown(directory)}: {error.strerror or error}; choose another"
            " directory"
        ) from error
    check(
        empty,
        f"{option}={shown(directory)} is not empty: choose a new or empty directory",
    )
