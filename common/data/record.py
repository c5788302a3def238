"""Types of examples with named fields, and a check of their texts."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

Record = tuple[str, dict[str, Any]]
"""Location of an example for error messages, and the fields of the example.

The location is "FILE line N". For a source without lines, the location names the source and the number of the example.
Lines, rows and examples count from 1.
"""

Records = tuple[dict[str, Iterable[Record]], Sequence[str] | None]
"""{split: examples}, and the class names. The class names are None if the source does not define them."""

_SURROGATE = re.compile("[\ud800-\udfff]")


def has_surrogate(text: str) -> bool:
    """Returns whether a text contains a lone surrogate (U+D800 to U+DFFF), which is not valid Unicode."""
    return _SURROGATE.search(text) is not None
