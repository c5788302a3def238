"""Converts config.json of a Hugging Face model to a `Backbone` and back. Rejects unsupported fields by name."""

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config import check, check_choice
from common.errors import UserError
from perception.backbones import Backbone
from perception.families.fields import Fields
from perception.families.table import FAMILIES
from perception.quantized import KINDS

CONFIG = "config.json"

QUANTIZATION, METHOD = "quantization_config", "train_less"
"""Field of config.json that describes quantized kernels, and its `quant_method` for the kernels of this project."""


FREE = ("targets", "dropout", "longest", "scaled_init", "tied")
"""Fields of `Backbone` without effect on the hidden states in evaluation, for equal parameters."""


@dataclass(frozen=True)
class Quantization:
    """The field `quantization_config` of a model that `quantized_files` wrote.

    Attributes:
      kind: format of the kernels.
      base: fingerprint of the unquantized model.
    """

    kind: str
    base: str


def _quantization(values: Mapping[str, Any], path: Path) -> Quantization | None:
    """Returns the quantization that the fields of a config.json describe, or None for an unquantized model.

    Raises:
      UserError: another program has quantized the model, or the field is damaged.
    """
    field = values.get(QUANTIZATION)
    if field is None:
        return None
    ours = isinstance(field, dict) and field.get("quant_method") == METHOD
    check(ours, f"{path}: {QUANTIZATION}={field!r} is not supported; it must be absent")
    try:
        found = Quantization(field["kind"], field["base"])
    except KeyError as error:
        raise UserError(f"{path} is damaged: {QUANTIZATION} has no {error}") from error
    check(found.kind in KINDS, f"{path}: {QUANTIZATION} has the unknown kind {found.kind!r}")
    return found


def read(path: Path) -> tuple[Backbone, Quantization | None]:
    """Returns the backbone that a config.json describes, and how its kernels are quantized.

    Raises:
      UserError: the file is missing or damaged, or the family or a field is not supported.
    """
    check(path.is_file(), f"{path.parent} has no {path.name}")
    try:
        values = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise UserError(f"{path} is damaged: {error}") from error
    check(isinstance(values, dict), f"{path} is damaged: it is not a JSON object")
    return from_json(values, path), _quantization(values, path)


def from_json(values: dict[str, Any], path: Path) -> Backbone:
    """Returns the backbone that the fields of a config.json describe; `path` is for error messages."""
    rope = values.get("rope_parameters") or {}  # rotary fields as transformers 5 stores them
    fields = Fields(path, {**values, **rope})
    _quantization(values, path)
    family = values.get("model_type") or _family_of(values.get("architectures"))
    check(
        bool(family or values.get("architectures")),
        f"{path} has neither model_type nor architectures: it does not describe a Hugging Face model",
    )
    check_choice(f"{path}: model_type", str(family), FAMILIES)
    return FAMILIES[family].read(fields)


def _family_of(architectures: Any) -> str | None:
    """Returns the family of the first class name, such as BertForMaskedLM, or None if no family has this name."""
    name = str((architectures or [""])[0])
    known = (
        key
        for key, f in FAMILIES.items()
        if re.fullmatch(rf"{f.name}(Model|For\w+|LMHeadModel)", name)
    )
    return next(known, None)


def to_json(shape: Backbone) -> dict[str, Any]:
    """Returns the fields of a config.json that transformers can read.

    Raises:
      UserError: the family's config.json cannot express the backbone.
    """
    family = FAMILIES[shape.family]
    values = {
        "architectures": [f"{family.name}Model"],
        "model_type": shape.family,
        "vocab_size": shape.vocabulary,
        **family.write(shape),
    }
    values = json.loads(json.dumps(values))
    lost = differences(shape, from_json(values, Path(CONFIG)))
    check(not lost, f"{CONFIG} of the family {shape.family} cannot express {', '.join(lost)}")
    return values


def differences(one: Backbone, other: Backbone) -> list[str]:
    """Lists the differing fields of two backbones, such as "width 64 (not 32)", without the fields in FREE.

    Of a tuple only the first differing entry is listed.
    """
    if one.layers != other.layers:
        return [f"layers {one.layers} (not {other.layers})"]
    found = []
    for name in (field.name for field in dataclasses.fields(Backbone) if field.name not in FREE):
        a, b = getattr(one, name), getattr(other, name)
        if isinstance(a, tuple) and a != b:
            number = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
            name, a, b = f"{name}[{number}]", a[number], b[number]
        if a != b:
            found.append(f"{name} {a!r} (not {b!r})")
    return found
