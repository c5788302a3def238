"""The fields of a JSON file that somebody else wrote, each read as what it has to be."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config import check, check_choice

_NEEDED = object()


@dataclass(frozen=True)
class Fields:
    """What the file at `path` says. A field that is absent or null has its default; where there is none it is needed.

    All methods raise a UserError that names the file and the field.
    """

    path: Path
    values: Mapping[str, Any]

    def get(self, name: str, default: Any = _NEEDED) -> Any:
        value = self.values.get(name)
        value = default if value is None else value
        check(value is not _NEEDED, f"{self.path} has no {name}")
        return value

    def _check(self, name: str, value: Any, fits: bool, kind: str) -> Any:
        check(fits, f"{self.path}: {name} must be {kind}, got {value!r}")
        return value

    def count(self, name: str, default: Any = _NEEDED) -> int:
        value = self.get(name, default)
        fits = isinstance(value, int) and not isinstance(value, bool) and value > 0
        return self._check(name, value, fits, "a whole number of at least 1")

    def optional(self, name: str, default: int | None) -> int | None:
        """A count, or null, which here is not the same as absent."""
        return None if self.values.get(name, default) is None else self.count(name, default)

    def number(self, name: str, default: Any = _NEEDED) -> float:
        value = self.get(name, default)
        return self._check(name, value, is_number(value) and value >= 0, "a number of at least 0")

    def flag(self, name: str, default: Any = _NEEDED) -> bool:
        value = self.get(name, default)
        return self._check(name, value, isinstance(value, bool), "true or false")

    def one_of(self, name: str, known: Mapping[str, Any], default: Any = _NEEDED) -> Any:
        """What the field's text stands for."""
        value = self.get(name, default)
        check_choice(f"{self.path}: {name}", str(value), known)
        return known[value]

    def only(self, **expected: Any) -> None:
        """Fields that have one value here, since another would be another model."""
        for name, value in expected.items():
            found = self.get(name, value)
            check(
                found == value,
                f"{self.path}: {name}={found!r} is not supported; it must be {value!r} or absent",
            )


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
