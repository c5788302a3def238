"""Names and counts the layers of a model, from its configuration, for reports."""

from collections.abc import Mapping
from typing import Any

from common.report.groups import Layers
from reservoir import methods
from reservoir.kinds import RESERVOIRS, Kind


def layers_of(config: Mapping[str, Any]) -> Layers | None:
    """Returns the kind, the number of layers and the number of frozen layers of an encoder or language model.

    With reservoirs, the kind is the label of the kind of reservoir, such as "T" or "FFN". A user's kind of reservoir,
    "module:attribute", has the label "attribute" unless `methods.imported_part` finds the `Kind`. Without reservoirs,
    the kind is `model.kind` or, without this field, "transformer". As in Tables 1 and 3, backskipping and LayerDrop are
    separate kinds; so are trained reservoirs ("T, trained"). A method of fine-tuning adds its label, as in "T, tuned".
    Returns None if the configuration has no number of layers, or names a user's method that `methods.of_run` does not
    find.
    """
    layers, method = _pretrained(config.get("model", {})), methods.of_run(config)
    if layers is None or method is None:
        return None
    kind = ", ".join(filter(None, (layers.kind, method.label)))
    return Layers(kind, layers.total, method.frozen(config, layers))


def _pretrained(model: Mapping[str, Any]) -> Layers | None:
    """Returns the kind and the numbers of layers before fine-tuning; None if `model` has no number of layers."""
    total = model.get("encoder_layers", model.get("layers"))
    if total is None:
        return None
    reservoir, pattern = model.get("reservoir", "none"), model.get("placement", "")
    if reservoir == "none":
        plain = "LayerDrop" if model.get("layerdrop") else "transformer"
        return Layers(model.get("kind", plain), total, 0)
    found = RESERVOIRS.get(reservoir) or methods.imported_part(reservoir, Kind)
    kind = found.label if found else reservoir.rpartition(":")[2]
    if model.get("reservoir_trained"):
        return Layers(f"{kind}, trained", total, 0)
    if model.get("backskip", {}).get("estimator", "none") != "none":
        kind += " backskip"
    # A pattern such as "LLRLRLL" overrides `model.reservoirs`.
    is_pattern = bool(pattern) and set(pattern) <= {"L", "R"}
    return Layers(kind, total, pattern.count("R") if is_pattern else model["reservoirs"])
