"""The kind and the number of the layers of a digit classifier, read from its configuration, for reports."""

from collections.abc import Mapping
from typing import Any

from common.report.groups import Layers


def layers_of(config: Mapping[str, Any]) -> Layers | None:
    """Returns the layers of a digit classifier, all trained. Returns None for a language model, which has no layers."""
    total = config.get("model", {}).get("layers")
    return None if total is None else Layers("softmax", total, 0)
