"""Caches results in JSON files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from common.atomic import write_whole
from common.errors import UserError, parse_json
from common.runtime.processes import all_gather, all_reduce_max, is_main


def cached_json(
    path: Path, key: Any, fn: Callable[[], Any], keep: Callable[[Any], bool] = lambda value: True
) -> Any:
    """Returns the stored result of `fn`, or calls `fn` and stores its result. All processes must call this function.

    Args:
      key: JSON value that identifies all inputs of `fn`. A result that was stored with another key is not used.
      fn: computes the result, a JSON value. Called on all processes, or on none.
      keep: function (result) -> whether to store the result.
    """
    key = json.loads(json.dumps(key))  # tuples become lists, as in the file
    found = read_json_if(path, lambda content: content["key"] == key and "value" in content)
    if found is not None:
        return all_gather(found)[0]["value"]
    value = fn()
    if is_main() and keep(value):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"key": key, "value": value}, indent=1) + "\n")
    return value


def read_json_if(
    path: Path, is_valid: Callable[[dict[str, Any]], bool | np.bool_]
) -> dict[str, Any] | None:
    """Reads a JSON file if its content is valid. All processes must call this function.

    Args:
      is_valid: function (content of the file) -> whether to return the content. Called on process 0 only. A UserError
        that `is_valid` raises is passed on. Any other ValueError, and an OSError, KeyError, TypeError or AttributeError
        count as False.

    Returns:
      The content on process 0, {} on all other processes. None on all processes if the file cannot be read or is not
      JSON, or if its content is not valid.
    """
    content, valid = {}, False
    if is_main():
        try:
            content = parse_json(path.read_text())
            valid = bool(is_valid(content))
        except UserError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            valid = False
    return content if all_reduce_max(np.asarray([valid]))[0] else None
