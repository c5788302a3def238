"""Types of examples with named fields, and a check of their texts."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

Record = tuple[str, dict[str, Any]]
"""Location of an example for error messages, such as "FILE line N", and the fields of the example."""

Records = tuple[dict[str, Iterable[Record]], Sequence[str] | None]
"""Split -> its examples, and the class names; None for a source without class names."""

_SURROGATE = re.compile("[\ud800-\udfff]")


def has_surrogate(text: str) -> bool:
    """Returns whether a text contains a lone surrogate, which is not valid text."""
    return _SURROGATE.search(text) is not None
