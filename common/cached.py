"""The one cache of results: JSON files that are used again if they are still valid."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from common.runtime.processes import all_reduce_max, is_main


def cached_json(
    path: Path, is_valid: Callable[[dict[str, Any]], bool | np.bool_]
) -> dict[str, Any] | None:
    """Reads a result from a JSON file; a collective call.

    Args:
      is_valid: decides, on the first process, whether the content may be used. A missing field makes it invalid.

    Returns:
      None, on all processes, if the file is missing, damaged or invalid. On processes other than the first {} stands
      for the content.
    """
    found, valid = {}, False
    if is_main():
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            found = json.loads(path.read_text())
            valid = bool(is_valid(found))
    return found if all_reduce_max(np.asarray([valid]))[0] else None
