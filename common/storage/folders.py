"""Folders of runs and data, on this machine or in a bucket: gs://BUCKET/PATH, s3://BUCKET/PATH.

A folder in a bucket has one local copy, in `.cache/buckets`, which programs read and write like any other folder. The
modules `stores`, `mirror`, `lease` and `uploads` are imported only for a folder in a bucket.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from common.storage.addresses import address, copy_of


def open_folder(text: str | Path, wanted: Callable[[str], bool] | None = None) -> Path:
    """Returns the path of the folder `text`; a Path unchanged. Can be the `type` of an argparse option.

    For a folder in a bucket, updates the local copy (`mirror.download`) and returns the path of the copy. Raises a
    UserError if the address is wrong, the Python package for the bucket is missing, or `mirror.download` fails.

    Args:
      wanted: function (path of a file relative to the folder) -> whether to update the file. None updates all files.
    """
    folder = copy_of(str(text))
    if isinstance(text, Path):  # `copy_of` has refused Path("gs://..."), which lacks a slash.
        return text
    if address(folder):
        from common.storage import mirror

        mirror.download(folder, wanted)
    return folder


def open_file(text: str) -> Path:
    """Returns the path of the file `text`, which may be missing. Can be the `type` of an argparse option.

    For a file in a bucket, downloads the file and returns the path of the local copy. The file must not be at
    the top level of the bucket. Raises the errors of `open_folder`.
    """
    path = copy_of(text)
    if address(path):
        open_folder(text.rpartition("/")[0], lambda name: name == path.name)
        path.parent.mkdir(parents=True, exist_ok=True)
    return path


def open_path(text: str) -> Path:
    """Returns the path of the file or folder `text`, which may be missing; see `open_file` and `open_folder`."""
    path = open_folder(text)
    return path if path.exists() else open_file(text)


@contextmanager
def output(path: Path) -> Iterator[None]:
    """Context manager that uploads the local copy `path` on exit, also after an exception.

    Does nothing if `path` is not in a bucket.
    """
    try:
        yield
    finally:
        if address(path):
            from common.storage import mirror

            mirror.upload(path)
