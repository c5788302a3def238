"""The exceptions that end a program with a one-line message, and helpers that raise and describe exceptions."""

import errno
import json
import os
import re
import sysconfig
import traceback
from typing import Any


class UserError(ValueError):
    """Raised for wrong input that the user can correct: an argument, an option or a file.

    Also raised, instead of a TypeError, for an argument of a wrong type. The message is one line.
    `common.runtime.program` prints only the message.
    """

    def __init__(self, message: str):
        super().__init__(" ".join(message.splitlines()))


class Preempted(Exception):
    """Raised after a signal has stopped a run and the run has been saved.

    `common.runtime.program` prints the message and exits with `exit_code`.

    Attributes:
      number: number of the signal.
      exit_code: 128 plus the number of the signal, as a shell sets it.
    """

    def __init__(self, number: int, message: str):
        super().__init__(message)
        self.number, self.exit_code = number, 128 + number


def check(condition: bool, message: str) -> None:
    """Raises a UserError with `message` if `condition` is false."""
    if not condition:
        raise UserError(message)


_INTERNAL = re.compile(
    r" in OCDBT database at local file \"[^\"]*\"|\.? See full TensorStore details.*| \[os_error_code=.*"
)
"""Parts of TensorStore's messages that repeat a path or describe internal state."""


def reason_of(error: BaseException) -> str:
    """Returns the text of an exception in one line; the name of its type if it has no text.

    Leaves out TensorStore's internal state, and all words after the first 300 characters.
    """
    # Orbax raises an exception that describes TensorStore; only its cause has the reason.
    if "See full TensorStore details" in str(error) and error.__cause__:
        error = error.__cause__
    text = _INTERNAL.sub("", " ".join(str(error).split()))
    if len(text) > 300:
        text = text[:300].rsplit(" ", 1)[0] + " ..."
    return text or type(error).__name__


def missing_package(what: str, package: str, error: ImportError, otherwise: str) -> UserError:
    """Returns a UserError: `what` needs a package, whose import raised `error`. `otherwise` says what else to do."""
    return UserError(
        f"{what} needs the package {package}, which cannot be imported ({reason_of(error)}): pip install -U {package};"
        f" or {otherwise}"
    )


def named(error: Exception) -> str:
    """Returns "TYPE: TEXT" of an exception, or "TYPE" if its text is empty."""
    name = type(error).__name__
    return f"{name}: {error}" if str(error) else name


def place_of(error: Exception) -> str:
    """Returns the place in a user's code that has raised an exception, "FUNCTION (FILE, line N)".

    The place is the innermost line outside of site-packages and of the standard library; "FILE, line N" if this line is
    outside of a function, and for a SyntaxError. Returns "" if the line is in importlib or in the file that catches the
    exception: then the user's code is missing, or does not accept the arguments.
    """
    # Code that a user compiles from a string has a filename such as "<string>", which says nothing.
    if isinstance(error, SyntaxError) and error.lineno and not str(error.filename).startswith("<"):
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    others = "site-packages", sysconfig.get_path("stdlib")
    frame = ([x for x in frames if not any(y in x.filename for y in others)] or frames)[-1]
    if frame.filename == frames[0].filename or frame.filename.startswith("<frozen"):
        return ""
    place = f"{frame.filename}, line {frame.lineno}"
    return place if frame.name == "<module>" else f"{frame.name} ({place})"


def raised(error: Exception) -> str:
    """Returns "TYPE in PLACE: TEXT" of an exception of a user's code. PLACE (`place_of`) and TEXT may be missing."""
    kind, place = type(error).__name__, place_of(error)
    text = error.msg if isinstance(error, SyntaxError) else reason_of(error)
    return kind + f" in {place}" * bool(place) + f": {text}" * (text != kind)


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text. Raises a ValueError if the text is not JSON, or is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("its brackets are nested too deeply") from error


def file_error(path: object, error: Exception) -> UserError:
    """Returns a UserError for an exception that reading the file `path` has raised.

    The message says that the file cannot be read if `error` is an OSError with an error number, otherwise that the file
    is damaged. For a file in a bucket, `path` is its address (`common.storage.addresses.shown`).
    """
    if isinstance(error, OSError) and error.errno is not None:
        return UserError(
            f"cannot read {path}: {error.strerror}; correct the path or the permissions of the file"
        )
    reason = reason_of(error)
    if isinstance(error, KeyError):
        reason = f"missing or unknown entry {error}"
    return UserError(f"{path} is damaged: {reason}; correct or restore the file")


def full_disk(error: Exception) -> str:
    """Returns the system's text for a full disk or quota, if this is the cause of an exception; otherwise ""."""
    # Search the message, because storage libraries raise exceptions of other types than OSError.
    reasons = map(os.strerror, (errno.ENOSPC, errno.EDQUOT))
    return next((reason for reason in reasons if reason in str(error)), "")


def write_error(place: object, error: Exception, remedy: str) -> UserError:
    """Returns a UserError for an exception that writing `place`, such as a file, has raised.

    `remedy` says what to do, unless the disk is full.
    """
    if reason := full_disk(error):
        remedy = "free space, then repeat the command"
    reason = reason or getattr(error, "strerror", None) or reason_of(error)
    return UserError(f"cannot write to {place}: {reason}; {remedy}")
