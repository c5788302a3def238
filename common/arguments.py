"""Parses and checks options of programs: numbers, NAME=VALUE pairs, files and folders. Checks texts of functions."""

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable
from pathlib import Path

from common.config import finite
from common.errors import UserError, check
from common.storage.addresses import shown


def check_folder(option: str, folder: Path) -> None:
    """Raises a UserError unless `folder` is writable or can be created. Does not create the folder."""
    path = folder.absolute()
    # Below an unreadable folder, Path.exists raises a PermissionError up to Python 3.13. os.path.exists returns False.
    existing = next(parent for parent in (path, *path.parents) if os.path.exists(parent))
    fault = "is not writable" if existing.is_dir() else "is not a folder"
    check(
        existing.is_dir() and os.access(existing, os.W_OK),
        f"cannot write to {option}={shown(folder)}: {shown(existing)} {fault}; choose another folder",
    )


def check_file(option: str, path: Path) -> None:
    """Raises a UserError if `path` is missing, is a folder or is not readable."""
    check(
        os.access(path, os.R_OK) and not os.path.isdir(path),
        f"{option}={shown(path)} is not a file that can be read: give the path of a readable file",
    )


def check_output(path: Path, source: Path | None, overwrite: bool) -> None:
    """Raises a UserError if --output=`path` cannot be written, is the file `source`, or exists without `overwrite`.

    `path` may be a pipe or a device.

    Args:
      source: file of --input; None for standard input.
      overwrite: whether the option --overwrite is set.
    """
    check_folder("the folder of --output", path.parent)
    check(not path.is_dir(), f"--output={shown(path)} is a folder: name a file")
    if path.is_file():
        check(
            source is None or path.resolve() != source.resolve(),
            f"--output={shown(path)} is the file of --input, which would be lost: name another file",
        )
        check(overwrite, f"--output={shown(path)} exists: add --overwrite to replace it")


def int_arg(option: str, least: int = 1) -> Callable[[str], int]:
    """Returns an argparse `type` for integers of at least `least`, in digits. `option` is for error messages."""

    def read(text: str) -> int:
        hint = "" if text.isdecimal() else "; use digits only"
        check(
            text.isdecimal() and int(text) >= least,
            f"{option} must be a whole number of at least {least}, got {text!r}{hint}",
        )
        return int(text)

    return read


def float_arg(option: str) -> Callable[[str], float]:
    """Returns an argparse `type` for finite floats. `option` is for error messages."""

    def read(text: str) -> float:
        try:
            return finite(text)
        except ValueError as error:
            raise UserError(f"{option} must be a finite number, got {text!r}") from error

    return read


def check_texts(name: str, texts: Iterable[str]) -> list[str]:
    """Returns the argument `name` of a function as a list. Raises a UserError unless it is an iterable of texts.

    A single text is an error too, because its letters would be the texts.
    """
    listed = [*texts] if isinstance(texts, Iterable) and not isinstance(texts, str) else [None]
    check(
        all(isinstance(text, str) for text in listed),
        f"{name} must be a list of texts, got {texts!r:.80}",
    )
    return listed


def parse_pairs(option: str, texts: Iterable[str], form: str) -> dict[str, str]:
    """Parses the values of an option, each NAME=VALUE, to {name: value}. A value may be empty.

    Args:
      option: the option with the character before its value, such as "--margin=", for error messages.
      form: the required form and an example, for the UserError about a malformed text or a repeated name.
    """
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        check(bool(name and equals), f"{option}{text} must be {form}")
        check(name not in pairs, f"{option}{text}: {name} is given twice: give it once, as {form}")
        pairs[name] = value
    return pairs


def check_unused(options: Namespace, names: Iterable[str], reason: str) -> None:
    """Raises a UserError if the command line sets one of the options `names`. `reason` says why they have no effect."""
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name)]
    check(not given, f"{reason}: leave out {' and '.join(given)}")


def add_margin(parser: ArgumentParser) -> None:
    """Adds the repeatable option --margin. `common.report.report.parse_margins` parses its values."""
    parser.add_argument(
        "--margin",
        action="append",
        default=[],
        metavar="METRIC=X",
        help="margin of equivalence of a metric, in units of the metric, such as bleu=0.5; may be repeated",
    )
