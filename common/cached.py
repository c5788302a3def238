"""Reads cached results from JSON files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError
from common.runtime.processes import all_reduce_max, is_main


def cached_json(
    path: Path, is_valid: Callable[[dict[str, Any]], bool | np.bool_]
) -> dict[str, Any] | None:
    """Reads a cached result from a JSON file. All processes must call this function.

    Args:
      is_valid: content of the file -> whether to reuse the file. Called on process 0 only. An OSError, ValueError,
        KeyError, TypeError or AttributeError counts as False, except for a UserError, which is raised.

    Returns:
      The content on process 0, {} on all other processes. None on all processes if the file is missing, is not JSON, or
      is not valid.
    """
    content, valid = {}, False
    if is_main():
        try:
            content = json.loads(path.read_text())
            valid = bool(is_valid(content))
        except UserError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            valid = False
    return content if all_reduce_max(np.asarray([valid]))[0] else None
