"""Safetensors: interoperability with the reference library, memory use, and damaged files."""

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from common.errors import UserError
from perception.safetensor_files import (
    INDEX,
    WHOLE,
    Tensor,
    TensorFiles,
    require_empty,
    staged,
    write,
)

VALUES = {
    "a": np.arange(24, dtype=np.float32).reshape(4, 6),
    "b": np.arange(15, dtype=jnp.bfloat16).reshape(3, 5),
    "c": np.arange(7, dtype=np.float16),
}
ALL = (slice(None), slice(None))


def tensors(values: dict[str, np.ndarray]) -> dict[str, Tensor]:
    return {n: Tensor(x.shape, x.dtype, lambda x=x: x) for n, x in values.items()}


@pytest.fixture
def sharded(tmp_path) -> Path:
    """Returns a directory with two shards that the reference library wrote."""
    shards = {"one.safetensors": ("a",), "two.safetensors": ("b", "c")}
    for file, names in shards.items():
        save_file({name: VALUES[name] for name in names}, tmp_path / file)
    places = {name: file for file, names in shards.items() for name in names}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return tmp_path


@pytest.mark.parametrize("name", VALUES)
def test_read_returns_array_slices(name: str, sharded) -> None:
    files, value = TensorFiles(sharded), VALUES[name]
    index = (slice(1, 3), slice(2, 5))[: value.ndim]
    part = files.read(name, index)
    assert part.dtype == value.dtype and files.shape(name) == value.shape
    np.testing.assert_array_equal(part, value[index])
    np.testing.assert_array_equal(files.read(name, ALL[: value.ndim]), value)


@pytest.mark.parametrize(("largest", "count"), [(10**9, 1), (100, 2), (1, 3)])
def test_written_shards_are_read_by_reference_library(largest: int, count: int, tmp_path) -> None:
    """A shard is filled up to the size limit. A tensor above the limit gets its own shard."""
    write(tmp_path, tensors(VALUES), largest)
    paths = sorted(tmp_path.glob("*.safetensors"))
    assert len(paths) == count
    found = {name: (value, path.name) for path in paths for name, value in load_file(path).items()}
    for name, value in VALUES.items():
        np.testing.assert_array_equal(found[name][0], value)
        np.testing.assert_array_equal(TensorFiles(tmp_path).read(name, (slice(None),)), value)
    if count == 1:
        assert paths[0].name == WHOLE and not (tmp_path / INDEX).exists()
    else:
        index = json.loads((tmp_path / INDEX).read_text())
        assert index["weight_map"] == {name: file for name, (_, file) in found.items()}
        assert index["metadata"]["total_size"] == sum(x.nbytes for x in VALUES.values())


def test_write_holds_one_tensor_at_a_time(tmp_path) -> None:
    """Each tensor is requested only after the previous tensor is written."""
    sizes = []

    def get() -> np.ndarray:
        sizes.append(sum(p.stat().st_size for p in tmp_path.iterdir()))
        return np.zeros(10**6, np.float32)

    write(tmp_path, {name: Tensor((10**6,), np.dtype(np.float32), get) for name in "xyz"})
    assert np.diff(sizes).min() == 4 * 10**6


def test_staged_directory_appears_when_complete(tmp_path) -> None:
    out = tmp_path / "a" / "out"
    with staged(out) as folder:
        (folder / "file").write_text("whole")
        assert not out.exists()
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    with pytest.raises(UserError, match="out is not empty"), staged(out):
        raise AssertionError("too late")
    assert (out / "file").read_text() == "whole"


def _copy_missing(folder: Path) -> None:
    shutil.copyfile(folder.parent / "lost", folder / "file")


def _read_only(folder: Path) -> None:
    raise PermissionError(errno.EACCES, "Permission denied", str(folder / "file"))


def _full(folder: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", str(folder.parent / "lost"))


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (_copy_missing, r"^cannot read \S+/lost: No such file or directory; correct the path"),
        (_read_only, r"^cannot write to --out=\S+/out: Permission denied; choose another"),
        (_full, r"^cannot write to --out=\S+/out: No space left on device; free space"),
        (lambda folder: (folder / "a" / "b").touch(), r"^cannot write to --out=\S+/out: No such"),
    ],
    ids=["missing source", "read-only", "full disk", "missing folder"],
)
def test_staged_error_names_output_only_if_writing_fails(work, message: str, tmp_path) -> None:
    with pytest.raises(UserError, match=message), staged(tmp_path / "out") as folder:
        work(folder)
    assert list(tmp_path.iterdir()) == []


def test_staged_passes_on_an_error_without_a_file(tmp_path) -> None:
    with pytest.raises(ConnectionError, match="reset"), staged(tmp_path / "out"):
        raise ConnectionError("reset")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["mkdir", "replace"])
def test_staged_directory_that_cannot_be_created_raises_error(name, monkeypatch, tmp_path) -> None:
    fault = PermissionError(errno.EACCES, "Permission denied", str(tmp_path))
    monkeypatch.setattr(Path, name, Mock(side_effect=fault))
    match = r"^cannot write to --out=\S+/out: Permission denied;"
    with pytest.raises(UserError, match=match), staged(tmp_path / "out"):
        pass


def test_fingerprint_depends_on_content(sharded, tmp_path_factory) -> None:
    before = TensorFiles(sharded).fingerprint
    assert len(before) == 64
    save_file({"a": VALUES["a"] + 1}, sharded / "one.safetensors")
    assert TensorFiles(sharded).fingerprint != before
    save_file({"a": VALUES["a"]}, sharded / "one.safetensors")
    assert TensorFiles(sharded).fingerprint == before


def _cut(folder: Path) -> None:
    path = folder / "two.safetensors"
    path.write_bytes(path.read_bytes()[:-3])


def _header(folder: Path) -> None:
    path = folder / "one.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:8] + b"x" + content[9:])


def _index(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / INDEX).write_text(text)


def _moved(folder: Path) -> None:
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(text.replace('"a": "one', '"a": "two'))


def _elsewhere(name: str) -> Callable[[Path], None]:
    """Returns a function that changes the index of a folder: the file `name` replaces the shard one.safetensors.

    `name` is outside the folder or in a subfolder. If `name` is relative, the function also copies the shard there.
    """

    def move(folder: Path) -> None:
        text = (folder / INDEX).read_text().replace("one.safetensors", name)
        if not name.startswith("/"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes((folder / "one.safetensors").read_bytes())
        (folder / INDEX).write_text(text)

    return move


def _pickle(folder: Path) -> None:
    (folder / INDEX).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")


DAMAGE = {
    "a cut shard": (_cut, "two.safetensors is damaged or truncated: .*not fully covered"),
    "a header": (_header, "one.safetensors is damaged or truncated: invalid JSON in header"),
    "an empty file": (
        lambda folder: (folder / "one.safetensors").write_bytes(b""),
        "one.safetensors is damaged or truncated: header too small",
    ),
    "a pointer to a file": (
        lambda folder: (folder / "one.safetensors").write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
        ),
        "one.safetensors is a Git LFS pointer, not the weights: run git lfs pull",
    ),
    "an absent shard": (
        lambda folder: (folder / "two.safetensors").unlink(),
        f"{INDEX} lists two.safetensors, which does not exist",
    ),
    "a wrong index": (
        _moved,
        f"{INDEX} lists tensor a in two.safetensors, but two.safetensors does not contain it",
    ),
    "a broken index": (_index("[1"), f"{INDEX} is damaged"),
    "an index of nothing": (
        _index('{"metadata": {}}'),
        f"{INDEX} is damaged: missing or unknown entry 'weight_map'",
    ),
    "an index of lists": (_index('{"weight_map": {"a": []}}'), f"{INDEX} is damaged"),
    "a file above the folder": (
        _elsewhere("../one.safetensors"),
        "lists ../one.safetensors, which",
    ),
    "a file below the folder": (
        _elsewhere("x/one.safetensors"),
        "is not the name of a file in the same directory",
    ),
    "a file elsewhere": (_elsewhere("/one.safetensors"), f"{INDEX} lists /one.safetensors, which"),
    "a pickle": (_pickle, f"neither {WHOLE} nor {INDEX}; pytorch_model.bin is a pickle"),
    "no weights": (
        lambda folder: (folder / INDEX).unlink(),
        f"neither {WHOLE} nor {INDEX}: copy the weights",
    ),
}


def test_unreadable_file_raises_error(tmp_path, monkeypatch) -> None:
    save_file(VALUES, tmp_path / WHOLE)
    monkeypatch.setattr(Path, "open", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(UserError, match=rf"^cannot read \S+{WHOLE}: Permission denied;"):
        TensorFiles(tmp_path)


@pytest.mark.parametrize("name", ["file", "file/out"])
def test_unwritable_output_raises_error(name: str, tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=rf"--out=\S+/{name}: \S+/file is not a folder; choose"):
        require_empty(tmp_path / name)


@pytest.mark.parametrize("name", ["is_dir", "iterdir"])
def test_unreadable_output_raises_error(name: str, monkeypatch, tmp_path) -> None:
    fault = PermissionError(errno.EACCES, "Permission denied")
    monkeypatch.setattr("perception.safetensor_files.check_folder", lambda option, folder: None)
    monkeypatch.setattr(Path, name, Mock(side_effect=fault))
    with pytest.raises(UserError, match=r"^cannot read --save=\S+: Permission denied; choose"):
        require_empty(tmp_path, "--save")


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_files_raise_errors(case: str, sharded) -> None:
    damage, message = DAMAGE[case]
    damage(sharded)
    with pytest.raises(UserError, match=message):
        TensorFiles(sharded)
