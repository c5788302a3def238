"""Addresses of folders in buckets, gs://BUCKET/PATH and s3://BUCKET/PATH, and the paths of their local copies."""

from pathlib import Path

from common.errors import UserError

SCHEMES = ("gs", "s3")

ROOT = Path(".cache/buckets")


def copy_of(text: str) -> Path:
    """Returns `text` as a path. For an address in a bucket, returns the path of the local copy, without downloading.

    Raises a UserError if the address has an unknown scheme, an empty part, "." or "..", or lacks bucket or folder.
    """
    scheme, colon, place = text.partition(":/")
    if not colon or (scheme not in SCHEMES and not place.startswith("/")):
        return Path(text)
    parts = place.removeprefix("/").rstrip("/").split("/")
    if scheme not in SCHEMES:
        raise UserError(
            f"{text}: an address in a bucket must begin with gs:// or s3://; correct it, or give a path on this machine"
        )
    if not place.startswith("/") or len(parts) < 2 or {"", ".", ".."} & set(parts):
        raise UserError(
            f"{text}: an address in a bucket must be {scheme}://BUCKET/FOLDER, without empty parts, '.' or '..'"
        )
    return ROOT.joinpath(scheme, *parts)


def address(folder: Path) -> str:
    """Returns the address of the folder in a bucket whose local copy is `folder`; "" if `folder` is no local copy."""
    root, path = ROOT.absolute(), folder.absolute()
    scheme, *parts = path.relative_to(root).parts if path.is_relative_to(root) else ("",)
    return f"{scheme}://{'/'.join(parts)}" if scheme in SCHEMES and len(parts) > 1 else ""


def shown(folder: Path) -> str:
    """Returns the name of a folder or file for messages: its address if it is a local copy, otherwise its path."""
    return address(folder) or str(folder)
