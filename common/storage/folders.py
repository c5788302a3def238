"""Folders of runs and data, on this machine or in a bucket: gs://BUCKET/PATH, s3://BUCKET/PATH.

A folder in a bucket has one local copy, in `.cache/buckets`, which programs read and write like any other folder. The
path of the copy contains the name of the bucket and the path in the bucket. The other modules of this package download
and upload files, and are imported only for a folder in a bucket.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from common.errors import UserError

SCHEMES = ("gs", "s3")

ROOT = Path(".cache/buckets")


class Lock(Protocol):
    """An exclusive right to write a folder."""

    def upload(self) -> None: ...

    def release(self) -> None: ...


def copy_of(text: str) -> Path:
    """Returns `text` as a path. For an address in a bucket, returns the path of the local copy, without downloading.

    Raises:
      UserError: the address has an unknown scheme, or lacks the bucket or the folder.
    """
    scheme, separator, place = text.partition("://")
    if not separator:
        return Path(text)
    parts = place.rstrip("/").split("/")
    if scheme not in SCHEMES:
        raise UserError(f"{text}: an address in a bucket must begin with gs:// or s3://")
    if len(parts) < 2 or {"", ".", ".."} & set(parts):
        raise UserError(f"{text} must be {scheme}://BUCKET/FOLDER")
    return ROOT.joinpath(scheme, *parts)


def address(folder: Path) -> str:
    """Returns the address of a folder in a bucket from the path of its local copy; "" for other folders."""
    root, path = ROOT.absolute(), folder.absolute()
    scheme, *parts = path.relative_to(root).parts if path.is_relative_to(root) else ("",)
    return f"{scheme}://{'/'.join(parts)}" if scheme in SCHEMES and len(parts) > 1 else ""


def shown(folder: Path) -> str:
    """Returns the name of a folder for messages: the address in a bucket, or the local path."""
    return address(folder) or str(folder)


def open_folder(text: str, wanted: Callable[[str], bool] | None = None) -> Path:
    """Returns the path of the folder `text`.

    For a folder in a bucket, downloads changed files and returns the path of the local copy. Can be the `type` of an
    argparse option.

    Args:
      wanted: function from the path of a file, relative to the folder, to whether to download it; None downloads all.

    Raises:
      UserError: the address is wrong, the bucket cannot be read, or a package for it is missing.
    """
    folder = copy_of(text)
    if address(folder):
        from common.storage import mirror

        mirror.download(folder, wanted)
    return folder


def open_file(text: str) -> Path:
    """Returns the path of the file `text`. The file may be missing.

    For a file in a bucket, downloads the file and returns the path of the local copy. Can be the `type` of an argparse
    option.

    Raises:
      UserError: see `open_folder`.
    """
    path = copy_of(text)
    if address(path):
        open_folder(text.rpartition("/")[0], lambda name: name == path.name)
        path.parent.mkdir(parents=True, exist_ok=True)
    return path


def open_path(text: str) -> Path:
    """Returns the path of the file or folder `text`, which may be missing.

    For an address in a bucket, downloads the file or folder and returns the path of the local copy.

    Raises:
      UserError: see `open_folder`.
    """
    path = open_folder(text)
    return path if path.exists() else open_file(text)


def lock_bucket(folder: Path) -> Lock | None:
    """Takes the lease of a run in a bucket, and uploads the run's files until `release`.

    Returns None for a local folder.

    Raises:
      UserError: another process trains in the folder, or the bucket is not writable.
    """
    if not address(folder):
        return None
    from common.storage.uploads import Uploads

    return Uploads(folder)


@contextmanager
def output(path: Path) -> Iterator[None]:
    """Context manager that uploads `path`, the local copy of a file or folder in a bucket, on exit.

    Also uploads after an exception. Does nothing for other paths.
    """
    try:
        yield
    finally:
        if address(path):
            from common.storage import mirror

            mirror.upload(path)
