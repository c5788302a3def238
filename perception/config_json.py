"""config.json of a Hugging Face model <-> `Backbone`. Whatever a backbone cannot express is refused by name."""

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
from perception.json_fields import Fields

CONFIG = "config.json"


@dataclass(frozen=True)
class Family:
    """How a family is read from the fields of a file, and written to them.

    Attributes:
      name: what the names of its classes begin with.
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
"""What may differ between two backbones whose states are the same."""


def read(path: Path) -> Backbone:
    """The backbone that a config.json describes.

    Raises:
      UserError: the file is missing or damaged, the family unknown, or a field is one that no backbone here has.
    """
    check(path.is_file(), f"{path.parent} has no {path.name}")
    try:
        values = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise UserError(f"{path} is damaged: {error}") from error
    check(isinstance(values, dict), f"{path} is damaged: it is no object")
    return from_json(values, path)


def from_json(values: dict[str, Any], path: Path) -> Backbone:
    """`path` is for messages."""
    rope = values.get("rope_parameters") or {}  # where transformers 5 has what 4 had beside it
    given = Fields(path, {**values, **rope})
    given.only(quantization_config=None)
    family = values.get("model_type") or _family_of(values.get("architectures"))
    check(
        bool(family or values.get("architectures")),
        f"{path} has no model_type: it is of no model of Hugging Face's",
    )
    check_choice(f"{path}: model_type", str(family), FAMILIES)
    return FAMILIES[family].read(given)


def _family_of(architectures: Any) -> str | None:
    """Of a name such as BertForMaskedLM."""
    name = str((architectures or [""])[0])
    known = (
        key
        for key, f in FAMILIES.items()
        if re.fullmatch(rf"{f.name}(Model|For\w+|LMHeadModel)", name)
    )
    return next(known, None)


def to_json(shape: Backbone) -> dict[str, Any]:
    """What transformers reads the backbone from.

    Raises:
      UserError: the backbone is none that the family's files can express.
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
    check(not lost, f"{CONFIG} of the family {shape.family} cannot say {', '.join(lost)}")
    return values


def differences(one: Backbone, other: Backbone) -> list[str]:
    """Where the states of two backbones would differ, "width 64 (not 32)"; of lists the first entry that does."""
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
