"""Reads examples from a user's function: --config.data.source=import:MODULE:FUNCTION."""

from typing import Any

from common.errors import UserError, check, last_frame
from common.plugin import imported


def own_examples(
    source: str,
    split: str,
    kind: type | tuple[type, ...],
    form: str,
    *,
    optional: bool = False,
) -> list[Any]:
    """Calls the user's FUNCTION(split); returns the examples of the split as a list.

    Args:
      source: "import:MODULE:FUNCTION".
      split: "train", "valid" or "test".
      kind: expected type of an example, or a tuple of allowed types.
      form: description of `kind` for the error message, such as "a text".
      optional: whether the split may be empty.

    Raises:
      UserError: the function cannot be imported, raises an exception, returns a single text, a dictionary or an
        object that is not iterable, returns an example that is not a `kind`, or returns no example although
        `optional` is False.
    """
    function = imported("--config.data.source", source)
    try:
        returned = function(split)
        examples = list(returned)
    except Exception as error:  # A user's function may raise any type of exception.
        frame = last_frame(error)
        reason = f": {error}" if str(error) else ""
        # The line is in this file if the function has the wrong parameters or returns no iterable.
        place = f" in {frame.filename}, line {frame.lineno}" if frame.filename != __file__ else ""
        raise UserError(
            f"--config.data.source={source} fails for split {split!r}: {type(error).__name__}{place}{reason};"
            " correct this function"
        ) from error
    check(
        not isinstance(returned, str | dict),
        f"--config.data.source={source} returns a {type(returned).__name__} for split {split!r}: return a list, each"
        f" example {form}",
    )
    check(
        bool(examples) or optional,
        f"--config.data.source={source} has no example in split {split!r}: the function must return at least one",
    )
    for number, example in enumerate(examples):
        check(
            isinstance(example, kind),
            f"--config.data.source={source}: example {number} of split {split!r} is of type {type(example).__name__}"
            f" instead of {form}: correct this function",
        )
    return examples
