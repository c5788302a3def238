"""Names and counts the layers of a model, from its configuration, for reports."""

from collections.abc import Mapping
from typing import Any

from common.report.groups import Layers
from reservoir.kinds import label


def layers_of(config: Mapping[str, Any]) -> Layers | None:
    """Returns the kind, the number of layers and the number of frozen layers of an encoder or language model.

    The kind is the paper's name of the reservoirs ("T", "FFN") or, without reservoirs, of the model. As in Tables 1 and
    3, backskipping and LayerDrop are separate kinds. Returns None if the configuration has no number of layers.
    """
    model = config.get("model", {})
    total = model.get("encoder_layers", model.get("layers"))
    if total is None:
        return None
    reservoir, pattern = model.get("reservoir", "none"), model.get("placement", "")
    # Only fine-tuning runs have these fields. LoRA freezes all layers.
    mode, lora = config.get("reservoirs", "keep"), config.get("lora", {}).get("rank", 0)
    if reservoir == "none":
        plain = "LayerDrop" if model.get("layerdrop") else "transformer"
        if mode == "freeze_now":
            return Layers(f"{plain}, frozen in fine-tuning", total, config["freeze_now"])
        if lora:
            return Layers(f"{plain}, LoRA", total, total)
        return Layers(model.get("kind", plain), total, 0)
    kind = label(reservoir)
    if lora:
        return Layers(f"{kind}, LoRA", total, total)
    if model.get("reservoir_trained"):
        return Layers(f"{kind}, trained", total, 0)
    if model.get("backskip", {}).get("estimator", "none") != "none":
        kind += " backskip"
    if mode == "tune":
        return Layers(f"{kind}, tuned", total, 0)
    # A pattern such as "LLRLRLL" overrides `model.reservoirs`.
    is_pattern = bool(pattern) and set(pattern) <= {"L", "R"}
    return Layers(kind, total, pattern.count("R") if is_pattern else model["reservoirs"])
