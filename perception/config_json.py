"""Converts config.json of a Hugging Face model to a `Backbone` and back. Rejects unsupported fields by name."""

import dataclasses
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config import check, check_choice
from common.errors import UserError
from perception import families
from perception.backbones import Backbone
from perception.families import Fields

CONFIG = "config.json"


@dataclass(frozen=True)
class Family:
    """Reader and writer of a family's fields.

    Attributes:
      name: prefix of the family's class names in transformers.
    """

    name: str
    read: Callable[[Fields], Backbone]
    write: Callable[[Backbone], dict[str, Any]]


FAMILIES = {
    "bert": Family("Bert", families.read_bert, families.write_bert),
    "qwen2": Family("Qwen2", families.read_qwen2, families.write_gated),
    "mistral": Family("Mistral", families.read_mistral, families.write_gated),
    "phi": Family("Phi", families.read_phi, families.write_phi),
    "openelm": Family("OpenELM", families.read_openelm, families.write_openelm),
}


FREE = ("targets", "dropout", "longest", "scaled_init", "tied")
"""Fields of `Backbone` that do not change its states."""


def read(path: Path) -> Backbone:
    """Returns the backbone that a config.json describes.

    Raises:
      UserError: the file is missing or damaged, or the family or a field is not supported.
    """
    check(path.is_file(), f"{path.parent} has no {path.name}")
    try:
        values = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise UserError(f"{path} is damaged: {error}") from error
    check(isinstance(values, dict), f"{path} is damaged: it is not a JSON object")
    return from_json(values, path)


def from_json(values: dict[str, Any], path: Path) -> Backbone:
    """Returns the backbone that the fields of a config.json describe; `path` is for error messages."""
    rope = values.get("rope_parameters") or {}  # transformers 5 moved the rotary fields there
    fields = Fields(path, {**values, **rope})
    fields.only(quantization_config=None)
    family = values.get("model_type") or _family_of(values.get("architectures"))
    check(
        bool(family or values.get("architectures")),
        f"{path} has neither model_type nor architectures: it does not describe a Hugging Face model",
    )
    check_choice(f"{path}: model_type", str(family), FAMILIES)
    return FAMILIES[family].read(fields)


def _family_of(architectures: Any) -> str | None:
    """Returns the family of a class name such as BertForMaskedLM."""
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
    """Lists differences that change the states, such as "width 64 (not 32)"; for tuples the first differing entry."""
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
