"""The copy of a folder in a bucket: downloads and uploads of files that have changed.

A record for each file, beside the copies, stores the version of the object that was equal to the file, and the size and
modification time of the file at that time. So a change of the object and a change of the file are detected separately.

Files are uploaded one by one, in an order in which the run can be resumed after any upload: the marker file of a
checkpoint follows its other files, and checkpoints to resume from follow the files that they refer to. A checkpoint
without its marker is not downloaded.
"""

import fcntl
import json
import os
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from common.errors import UserError
from common.storage import folders
from common.storage.stores import Changed, Object, open_store

LEASE = "lease.json"
"""Name of the object that says which process writes the folder; see `common.storage.lease`."""

LOCK = "lock"
"""Name of a run's lock file (`common.train.workdir`), which has no object."""

_MARKER = "_CHECKPOINT_METADATA"
"""Marker of a complete checkpoint: a file of orbax that is uploaded last and deleted first."""

_ENDS = ("summary.json", "requested_config.json")
"""Files that a run writes at its end."""

_ATTEMPTS = 5
"""Attempts to download a folder that another process changes meanwhile."""


class _Record(NamedTuple):
    """The version of an object, and the size and time (ns) of the file that was equal to it."""

    version: str
    size: int
    time: int


class Mirror:
    """The objects of a folder in a bucket beside the files of its copy. Paths are relative to the folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.store, name = open_store(folders.address(folder))
        self._prefix = f"{name}/"
        self._records = (
            folders.ROOT / "records" / folder.absolute().relative_to(folders.ROOT.absolute())
        )

    def object_name(self, path: str) -> str:
        return self._prefix + path

    def objects(self) -> dict[str, Object]:
        """Returns path -> object of all objects that are files of the folder, without the lease.

        Raises:
          UserError: the name of an object cannot be the path of a file.
        """
        found = {}
        for name, known in self.store.list(self._prefix).items():
            path = name.removeprefix(self._prefix)
            if (
                path.endswith("/") or not path
            ):  # a console of the store shows such objects as folders
                continue
            if {"", ".", ".."} & set(path.split("/")):
                raise UserError(
                    f"{folders.address(self.folder)}: the object {name!r} cannot be a file"
                )
            if PurePosixPath(path).name not in (LEASE, LOCK):
                found[path] = known
        return found

    def files(self) -> dict[str, os.stat_result]:
        """Returns path -> size and time of all files of the copy, without files that are being written."""
        found = {}
        for parent, children, names in os.walk(self.folder):
            children[:] = [name for name in children if "orbax-checkpoint-tmp" not in name]
            for path in (Path(parent, name) for name in names if not _is_temporary(name)):
                with suppress(FileNotFoundError):
                    if not path.is_symlink():
                        found[path.relative_to(self.folder).as_posix()] = path.stat()
        return found

    def known(self, path: str) -> _Record | None:
        """Returns the record of a file; None for a file that was never equal to an object."""
        try:
            version, size, time = (self._records / path).read_text().split()
            return _Record(version, int(size), int(time))
        except (OSError, ValueError):
            return None

    def is_uploaded(self, path: str, stat: os.stat_result) -> bool:
        """Returns whether a file is as it was when it was last equal to its object."""
        record = self.known(path)
        return record is not None and record[1:] == (stat.st_size, stat.st_mtime_ns)

    def upload(self, path: str) -> str:
        """Uploads a file; returns its version. Raises a FileNotFoundError if the file has been deleted."""
        file = self.folder / path
        stat = (
            file.stat()
        )  # before reading, so that a file that changes meanwhile is uploaded again
        version = self.store.upload(self.object_name(path), file)
        self._record(path, version, stat)
        return version

    def delete_object(self, path: str) -> None:
        self.store.delete(self.object_name(path))
        with suppress(OSError):
            (self._records / path).unlink()

    def download(self, path: str, known: Object) -> None:
        """Replaces a file by its object. Raises Changed if the object has another version meanwhile."""
        file = self.folder / path
        partial = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
        try:
            partial.parent.mkdir(parents=True, exist_ok=True)
            self.store.download(self.object_name(path), known.version, partial)
            os.utime(partial, (known.time, known.time))
            partial.replace(file)
        except OSError as error:
            raise UserError(f"cannot write to {file.parent}: {error.strerror or error}") from error
        finally:
            partial.unlink(missing_ok=True)
        self._record(path, known.version, file.stat())

    def delete_file(self, path: str) -> None:
        """Deletes a file and the folders that it leaves empty: orbax takes an empty folder for a checkpoint."""
        (self.folder / path).unlink(missing_ok=True)
        with suppress(OSError):
            (self._records / path).unlink()
        for parent in (self.folder / path).parents:
            if parent == self.folder:
                return
            with suppress(OSError):
                parent.rmdir()

    def _record(self, path: str, version: str, stat: os.stat_result) -> None:
        record = self._records / path
        record.parent.mkdir(parents=True, exist_ok=True)
        partial = record.with_name(f".{record.name}.{uuid.uuid4().hex}")
        partial.write_text(f"{version} {stat.st_size} {stat.st_mtime_ns}\n")
        partial.replace(record)


def _is_temporary(name: str) -> bool:
    """Returns whether a file is never uploaded: a lock, or a file that is being written."""
    return name in (LOCK, LEASE) or name.startswith(".") or name.endswith(".partial")


def checkpoint_of(path: str) -> str:
    """Returns the folder of the checkpoint that a file belongs to; "" for a file of no checkpoint."""
    parts = PurePosixPath(path).parts
    for place, part in enumerate(parts[:-3]):
        if part == "checkpoints" and parts[place + 2].isdecimal():
            return "/".join(parts[: place + 3])
    return ""


def download(folder: Path, wanted: Callable[[str], bool] | None = None) -> None:
    """Downloads the files of a folder that have changed in its bucket. Leaves runs alone that train on this machine.

    Args:
      wanted: as `folders.open_folder`.

    Raises:
      UserError: the bucket cannot be read, or changes faster than it can be read.
    """
    mirror = Mirror(folder)
    with alone(folder):
        training = [lock.parent for lock in folder.rglob(LOCK) if _is_locked(lock)]

        def here(path: str) -> bool:
            inside = any((folder / path).is_relative_to(run) for run in training)
            return not inside and (wanted is None or wanted(path))

        lease, _ = mirror.store.read(mirror.object_name(LEASE)) or (b"", "")
        update(mirror, here, last_writer(lease) in ("", identity()))


def update(mirror: Mirror, wanted: Callable[[str], bool], ours: bool) -> None:
    """Makes the copy equal to the folder in the bucket.

    Args:
      wanted: whether the file with this path may change.
      ours: whether this copy was the last to write the folder. If so, local changes are kept, because they are newer
        than the objects; otherwise they are discarded.
    """
    for _ in range(_ATTEMPTS):
        objects = {path: found for path, found in mirror.objects().items() if wanted(path)}
        marked = {checkpoint_of(path) for path in objects if path.endswith(f"/{_MARKER}")} | {""}
        objects = {path: found for path, found in objects.items() if checkpoint_of(path) in marked}
        try:
            _update(mirror, objects, {p: s for p, s in mirror.files().items() if wanted(p)}, ours)
            return
        except Changed:
            continue
    raise UserError(f"{folders.address(mirror.folder)} changes faster than it can be read")


def _update(
    mirror: Mirror, objects: dict[str, Object], files: dict[str, os.stat_result], ours: bool
) -> None:
    for path in sorted(objects, key=order):
        record = mirror.known(path)
        same = record is not None and record.version == objects[path].version and path in files
        if not same or not (ours or mirror.is_uploaded(path, files[path])):
            mirror.download(path, objects[path])
    for path in files.keys() - objects.keys():
        if not ours or mirror.known(path):
            mirror.delete_file(path)


def upload(path: Path) -> None:
    """Uploads a file, or the files of a folder, that have changed since they were uploaded or downloaded."""
    if path.is_file():
        Mirror(path.parent).upload(path.name)
        return
    mirror = Mirror(path)
    for path, stat in mirror.files().items():
        if not mirror.is_uploaded(path, stat):
            mirror.upload(path)


def order(path: str) -> tuple[int, str, bool, str]:
    """Returns the sort key of uploads; a run can be resumed after any of them.

    Checkpoints come first, then small files; then checkpoints to resume from, which refer to both; then the files that
    say that the run has ended. Within a checkpoint, its marker comes last.
    """
    checkpoint = checkpoint_of(path)
    if checkpoint:
        rank = 2 if PurePosixPath(checkpoint).parent.name == "latest" else 0
    else:
        rank = 3 if PurePosixPath(path).name in _ENDS else 1
    return rank, checkpoint, path.endswith(_MARKER), path


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Excludes other processes on this machine from downloading from the same bucket."""
    scheme, bucket = folder.absolute().relative_to(folders.ROOT.absolute()).parts[:2]
    lock = folders.ROOT / "locks" / f"{scheme}-{bucket}"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_locked(lock: Path) -> bool:
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def identity() -> str:
    """Returns a random name of the copies in this working directory on this host."""
    path, word = folders.ROOT / "id", uuid.uuid4().hex
    if not path.exists():
        folders.ROOT.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(word)
        partial.write_text(word)
        with suppress(FileExistsError):
            os.link(partial, path)  # unlike a rename it keeps the word of a process that was faster
        partial.unlink()
    return f"{socket.gethostname()}/{path.read_text()}"


def last_writer(lease: bytes) -> str:
    """Returns the `identity` of the copy that has written a folder last; "" if no run has written it."""
    if not lease:
        return ""
    try:
        return str(json.loads(lease)["copy"])
    except (ValueError, KeyError, TypeError):
        return "unknown"
