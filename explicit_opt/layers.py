"""The kind and the number of the layers of a digit classifier, read from its configuration, for reports."""

from collections.abc import Mapping
from typing import Any

from common.report.groups import Layers


def layers_of(config: Mapping[str, Any]) -> Layers | None:
    """Returns the layers of a digit classifier; None for a language model, which has no field `model.layers`."""
    total = config.get("model", {}).get("layers")
    return None if total is None else Layers("softmax", total, 0)
