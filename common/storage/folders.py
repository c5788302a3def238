"""Folders of runs and data, on this machine or in a bucket: gs://BUCKET/PATH, s3://BUCKET/PATH.

A folder in a bucket has one copy on this machine, in `.cache/buckets`, that programs read and write like any other
folder. The path of the copy says which folder of which bucket it is. The other modules of this package download and
upload; they are imported only for a folder in a bucket.
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
    """Returns the path that `text` names; for an address in a bucket the path of its copy, without downloading it.

    Raises:
      UserError: the address has an unknown scheme, or no bucket or no folder.
    """
    scheme, separator, place = text.partition("://")
    if not separator:
        return Path(text)
    parts = place.rstrip("/").split("/")
    if scheme not in SCHEMES:
        raise UserError(f"{text}: the address of a bucket begins with gs:// or s3://")
    if len(parts) < 2 or {"", ".", ".."} & set(parts):
        raise UserError(f"{text} must be {scheme}://BUCKET/FOLDER")
    return ROOT.joinpath(scheme, *parts)


def address(folder: Path) -> str:
    """Returns the address of which this folder is a copy; "" for a folder of this machine alone."""
    root, path = ROOT.absolute(), folder.absolute()
    scheme, *parts = path.relative_to(root).parts if path.is_relative_to(root) else ("",)
    return f"{scheme}://{'/'.join(parts)}" if scheme in SCHEMES and len(parts) > 1 else ""


def shown(folder: Path) -> str:
    """Returns the name of a folder in messages: its address in a bucket, or its path."""
    return address(folder) or str(folder)


def open_folder(text: str, wanted: Callable[[str], bool] | None = None) -> Path:
    """Returns the folder that `text` names; downloads what has changed in a bucket. A type for argparse.

    Args:
      wanted: whether to download the file with this path in the folder; None downloads all files.

    Raises:
      UserError: the address is wrong, the bucket cannot be read, or a package for it is missing.
    """
    folder = copy_of(text)
    if address(folder):
        from common.storage import mirror

        mirror.download(folder, wanted)
    return folder


def open_file(text: str) -> Path:
    """Returns the file that `text` names; downloads it if it is in a bucket and is there. A type for argparse.

    Raises:
      UserError: as `open_folder`.
    """
    path = copy_of(text)
    if address(path):
        open_folder(text.rpartition("/")[0], lambda name: name == path.name)
        path.parent.mkdir(parents=True, exist_ok=True)
    return path


def open_path(text: str) -> Path:
    """Returns the file or the folder that `text` names; downloads it if it is in a bucket. It may be missing.

    Raises:
      UserError: as `open_folder`.
    """
    path = open_folder(text)
    return path if path.exists() else open_file(text)


def lock_bucket(folder: Path) -> Lock | None:
    """Returns the lease of a run in a bucket, which also uploads the run's files; None for a folder of this machine.

    Raises:
      UserError: another process trains in the folder, or the bucket cannot be written.
    """
    if not address(folder):
        return None
    from common.storage.uploads import Uploads

    return Uploads(folder)


@contextmanager
def output(path: Path) -> Iterator[None]:
    """Uploads, at the end of the context, the file or the folder that it has written into a copy.

    Does nothing for the paths of this machine.
    """
    try:
        yield
    finally:
        if address(path):
            from common.storage import mirror

            mirror.upload(path)
