"""Reads examples from a user's function: --config.data.source=import:MODULE:FUNCTION."""

from typing import Any

from common.data.record import has_surrogate
from common.errors import UserError, check, raised
from common.user_parts import imported


def user_examples(
    source: str,
    split: str,
    kind: type | tuple[type, ...],
    form: str,
    *,
    optional: bool = False,
) -> list[Any]:
    """Calls the user's FUNCTION(split); returns the examples of the split as a list.

    Error messages count examples from 1.

    Args:
      source: "import:MODULE:FUNCTION".
      split: "train", "valid" or "test".
      kind: expected type of an example, or a tuple of allowed types.
      form: description of `kind` for the error message, such as "a text".
      optional: whether the split may be empty.

    Raises:
      UserError: the function cannot be imported or fails, does not return an iterable of examples, returns an example
        that is not a `kind` or contains a lone surrogate, or returns no example although `optional` is False.
    """
    function = imported("--config.data.source", source)
    option = f"--config.data.source={source}"
    try:
        returned = function(split)
        examples = list(returned)
    except Exception as error:  # A user's function may raise any type of exception.
        raise UserError(
            f"{option} fails for split {split!r}: {raised(error)}; correct this function"
        ) from error
    check(
        not isinstance(returned, str | dict),
        f"{option} returns a {type(returned).__name__} for split {split!r}: return a list of examples, each {form}",
    )
    check(
        bool(examples) or optional,
        f"{option} returns no example for split {split!r}: return at least one",
    )
    for number, example in enumerate(examples, start=1):
        check(
            isinstance(example, kind),
            f"{option}: example {number} of split {split!r} is of type {type(example).__name__} instead of {form}:"
            " correct this function",
        )
        texts = example if isinstance(example, list | tuple) else [example]
        check(
            not any(isinstance(text, str) and has_surrogate(text) for text in texts),
            f"{option}: example {number} of split {split!r} contains a lone surrogate (half of a surrogate pair,"
            " such as \\ud83d), which is not valid Unicode; remove or replace the surrogate",
        )
    return examples
