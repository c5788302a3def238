"""Types of examples with named fields."""

from collections.abc import Iterator, Sequence
from typing import Any

Record = tuple[str, dict[str, Any]]
"""Location of an example for error messages, such as "FILE line N", and the fields of the example."""

Records = tuple[dict[str, Iterator[Record]], Sequence[str] | None]
"""Split -> its examples, and the class names; None for a source without class names."""
