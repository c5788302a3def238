"""The local copy of a folder in a bucket: downloads and uploads changed files.

Each upload or download of a file writes a local record: the version of the object in the bucket, and the size and
modification time of the file. A comparison with the record later shows whether the object or the file has changed.

During training (`common.storage.uploads`), files are uploaded one by one, in an order that allows resuming after any
upload. The marker file of a checkpoint is uploaded after the other files of the checkpoint. Checkpoints to resume from
are uploaded after the files that they refer to. A checkpoint without its marker is not downloaded.
"""

import fcntl
import json
import os
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from common.atomic import replacing
from common.errors import UserError
from common.storage import addresses
from common.storage.stores import Changed, Object, open_store

LEASE = "lease.json"
"""Name of the object that identifies the process that may write the folder; see `common.storage.lease`."""

LOCK = "lock"
"""Name of a run's lock file (`common.train.workdir`), which is not uploaded."""

_MARKER = "_CHECKPOINT_METADATA"
"""Marker of a complete checkpoint: a file of orbax that is uploaded last and deleted first."""

_ENDS = ("summary.json", "requested_config.json")
"""Files that mark the end of a run. They are uploaded after all other files."""

_ATTEMPTS = 5
"""Maximum number of attempts to download a folder that another process changes during the download."""


class Mirror:
    """A folder in a bucket and its local copy. The paths of files are relative to the folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.store, name = open_store(addresses.address(folder))
        self._prefix = f"{name}/"
        self._records = (
            addresses.ROOT / "records" / folder.absolute().relative_to(addresses.ROOT.absolute())
        )

    def object_name(self, path: str) -> str:
        return self._prefix + path

    def objects(self) -> dict[str, Object]:
        """Returns {path: object} for all files of the folder in the bucket, without leases and locks.

        Raises a UserError if the name of an object is not a valid file path.
        """
        found = {}
        for name, known in self.store.list(self._prefix).items():
            path = name.removeprefix(self._prefix)
            # The store's web console creates objects whose names end in "/", to show folders.
            if path.endswith("/") or not path:
                continue
            if {"", ".", ".."} & set(path.split("/")):
                raise UserError(
                    f"{addresses.address(self.folder)}: the object name {name!r} is not a valid file path; rename the"
                    " object"
                )
            if PurePosixPath(path).name not in (LEASE, LOCK):
                found[path] = known
        return found

    def files(self) -> dict[str, os.stat_result]:
        """Returns {path: stat result} for the files of the local copy that may be uploaded.

        Omits locks, leases, hidden and temporary files, and symbolic links.
        """
        found = {}
        for parent, children, names in os.walk(self.folder):
            children[:] = [name for name in children if "orbax-checkpoint-tmp" not in name]
            for path in (Path(parent, name) for name in names if not _is_temporary(name)):
                with suppress(FileNotFoundError):
                    if not path.is_symlink():
                        found[path.relative_to(self.folder).as_posix()] = path.stat()
        return found

    def record(self, path: str) -> list[str]:
        """Returns the record of a file: the object's version, and the file's size and modification time (ns), as text.

        Returns [] if the file was never uploaded or downloaded.
        """
        try:
            return (self._records / path).read_text().split()
        except OSError:
            return []

    def is_uploaded(self, path: str, stat: os.stat_result) -> bool:
        """Returns whether a file is unchanged since its last upload or download."""
        return self.record(path)[1:] == [str(stat.st_size), str(stat.st_mtime_ns)]

    def upload(self, path: str) -> None:
        """Uploads a file. Raises a FileNotFoundError if the file does not exist."""
        file = self.folder / path
        stat = file.stat()  # read before the upload, so that a change during the upload is detected
        version = self.store.upload(self.object_name(path), file)
        self._record(path, version, stat)

    def delete_object(self, path: str) -> None:
        self.store.delete(self.object_name(path))
        (self._records / path).unlink(missing_ok=True)

    def download(self, path: str, known: Object) -> None:
        """Replaces a local file with its object in the bucket. Raises Changed if the version is not `known.version`."""
        file = self.folder / path
        with replacing(file) as partial:
            self.store.download(self.object_name(path), known.version, partial)
            os.utime(partial, (known.time, known.time))
        self._record(path, known.version, file.stat())

    def delete_file(self, path: str) -> None:
        """Deletes a file and its empty parent folders. Orbax would mistake an empty folder for a checkpoint."""
        (self.folder / path).unlink(missing_ok=True)
        (self._records / path).unlink(missing_ok=True)
        for parent in (self.folder / path).parents:
            if parent == self.folder:
                return
            with suppress(OSError):
                parent.rmdir()

    def _record(self, path: str, version: str, stat: os.stat_result) -> None:
        with replacing(self._records / path) as partial:
            partial.write_text(f"{version} {stat.st_size} {stat.st_mtime_ns}\n")


def _is_temporary(name: str) -> bool:
    return name in (LOCK, LEASE) or name.startswith(".") or name.endswith(".partial")


def checkpoint_of(path: str) -> str:
    """Returns the folder of the checkpoint that contains the file; "" for a file outside of checkpoints."""
    parts = PurePosixPath(path).parts
    for place, part in enumerate(parts[:-3]):
        if part == "checkpoints" and parts[place + 2].isdecimal():
            return "/".join(parts[: place + 3])
    return ""


def download(folder: Path, wanted: Callable[[str], bool] | None = None) -> None:
    """Updates the local copy of a folder in a bucket (`update`). Skips runs whose local copy is locked for training.

    `wanted` is as in `folders.open_folder`. Raises a UserError if the bucket cannot be read or `update` fails.
    """
    mirror = Mirror(folder)
    with alone(folder):
        training = [lock.parent for lock in folder.rglob(LOCK) if _is_locked(lock)]

        def here(path: str) -> bool:
            inside = any((folder / path).is_relative_to(run) for run in training)
            return not inside and (wanted is None or wanted(path))

        lease, _ = mirror.store.read(mirror.object_name(LEASE)) or (b"", "")
        update(mirror, here, lease_fields(lease)["copy"] in ("", identity()))


def update(mirror: Mirror, wanted: Callable[[str], bool], ours: bool) -> None:
    """Updates the local copy: downloads changed objects, and deletes the files whose objects were deleted.

    Args:
      wanted: function (path of a file) -> whether the file may be changed.
      ours: whether the last writer of the folder in the bucket used this local copy, or the folder has no lease. If
        True, keeps files that have changed only locally, because they are newer than their objects. If False, discards
        all local changes.

    Raises:
      UserError: a request to the store or a local write fails, an object's name is not a valid file path, or other
        processes change the folder during every attempt.
    """
    for _ in range(_ATTEMPTS):
        with suppress(Changed):
            _update(mirror, wanted, ours)
            return
    raise UserError(
        f"{addresses.address(mirror.folder)} changed during each of {_ATTEMPTS} downloads: try again later"
    )


def _update(mirror: Mirror, wanted: Callable[[str], bool], ours: bool) -> None:
    objects = {path: known for path, known in mirror.objects().items() if wanted(path)}
    files = {path: stat for path, stat in mirror.files().items() if wanted(path)}
    # A checkpoint without its marker was not uploaded completely: do not download its files.
    marked = {checkpoint_of(path) for path in objects if path.endswith(f"/{_MARKER}")} | {""}
    complete = {path for path in objects if checkpoint_of(path) in marked}
    for path in sorted(complete, key=order):
        same = mirror.record(path)[:1] == [objects[path].version] and path in files
        if not same or not (ours or mirror.is_uploaded(path, files[path])):
            mirror.download(path, objects[path])
    for path in files.keys() - complete:
        if not ours or (mirror.record(path) and path not in objects):
            mirror.delete_file(path)


def upload(path: Path) -> None:
    """Uploads a file, or all files of a folder that are new or have changed since their last upload or download."""
    if path.is_file():
        Mirror(path.parent).upload(path.name)
        return
    mirror = Mirror(path)
    for path, stat in mirror.files().items():
        if not mirror.is_uploaded(path, stat):
            mirror.upload(path)


def order(path: str) -> tuple[int, str, bool, str]:
    """Returns the sort key of a file in the order of uploads, so that the run can be resumed after any upload.

    The order is: all checkpoints except checkpoints to resume from; files outside of checkpoints; checkpoints to resume
    from; files that mark the end of the run. The marker of a checkpoint is its last file.
    """
    checkpoint = checkpoint_of(path)
    if checkpoint:
        rank = 2 if PurePosixPath(checkpoint).parent.name == "latest" else 0
    else:
        rank = 3 if PurePosixPath(path).name in _ENDS else 1
    return rank, checkpoint, path.endswith(_MARKER), path


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Context manager that locks the local copies of a whole bucket, so that only one process downloads to them.

    Waits while another process holds the lock. The copies are in the current directory, in `.cache/buckets`.
    """
    scheme, bucket = folder.absolute().relative_to(addresses.ROOT.absolute()).parts[:2]
    lock = addresses.ROOT / "locks" / f"{scheme}-{bucket}"
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
    """Returns a unique name of the local copies in this `.cache/buckets`: the host name and a random id.

    The lease of a folder in a bucket stores the name of the local copy from which the folder was last written.
    """
    path, word = addresses.ROOT / "id", uuid.uuid4().hex
    if not path.exists():
        addresses.ROOT.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(word)
        partial.write_text(word)
        with suppress(FileExistsError):
            # Unlike a rename, a link does not replace the file of a faster process.
            os.link(partial, path)
        partial.unlink()
    return f"{socket.gethostname()}/{path.read_text()}"


def roles(word: str) -> tuple[bool, bool]:
    """Returns whether the processes of a run have different local copies, and whether this process leads its copy.

    If the copies differ, the first process of each copy leads: only the leader downloads to the copy, and deletes in
    it. If all processes share one copy, the second value is True on every process. All processes must call this
    function.

    Args:
      word: the word in the lock of the run in this process's copy (`common.train.workdir.lock_word`). Processes of
        several hosts share a copy if they have the same id and read the word of process 0. The id alone does not prove
        this, because an image of a disk or container may contain the file of the id.
    """
    import jax  # only runs of several processes call this function

    from common.runtime.processes import all_gather

    found, me = all_gather([identity(), word]), jax.process_index()
    first = found[0][1]
    copies = [name.partition("/")[2] if read == first else name for name, read in found]
    different = len(set(copies)) > 1
    return different, not different or copies.index(copies[me]) == me


def lease_fields(content: bytes) -> dict[str, Any]:
    """Returns the fields of a lease from the content of its object (b"" if the object is missing).

    "holder" describes the process that holds the lease. "copy" is the `identity` of the folder's last writer. "seconds"
    is the holder's TRAINLESS_LEASE_SECONDS. Without a lease, "holder" and "copy" are "". A damaged lease has an unknown
    holder and copy. In both cases, "seconds" is missing.
    """
    unknown = {"holder": "an unknown process", "copy": "unknown"}
    try:
        fields = unknown | json.loads(content) if content else {"holder": "", "copy": ""}
        return fields | {key: float(fields[key]) for key in ("seconds",) if key in fields}
    except (ValueError, TypeError):
        return unknown
