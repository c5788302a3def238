"""Converts config.json of a Hugging Face model to a `Backbone` and back."""

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config import check_choice
from common.errors import UserError, check
from common.storage.addresses import shown
from perception.backbones import Backbone
from perception.families.fields import Fields, as_json, read_object
from perception.families.table import FAMILIES
from perception.quantized import KINDS

CONFIG = "config.json"

QUANTIZATION, METHOD = "quantization_config", "train_less"
"""Field of config.json that describes quantized kernels, and its `quant_method` in files of this project."""

FREE = ("targets", "dropout", "longest", "scaled_init", "tied")
"""Fields of `Backbone` that do not change the hidden states in evaluation if the parameters are equal."""


@dataclass(frozen=True)
class Quantization:
    """Quantization in config.json: the format `kind` of kernels, the fingerprint `base` of the unquantized model."""

    kind: str
    base: str


def _quantization(values: Mapping[str, Any], path: Path) -> Quantization | None:
    """Reads the quantization from the fields of a config.json. Returns None for an unquantized model."""
    field = values.get(QUANTIZATION)
    if field is None:
        return None
    method = field.get("quant_method") if isinstance(field, dict) else None
    check(
        method == METHOD,
        f"{shown(path)}: quant_method={as_json(method)} in {QUANTIZATION} is not supported: use the unquantized model",
    )
    again = (
        "quantize the unquantized model again: python -m perception.adapters quantize"
        " --pretrained=UNQUANTIZED --save=DIR"
    )
    try:
        found = Quantization(field["kind"], field["base"])
    except KeyError as error:
        raise UserError(
            f"{shown(path)} is damaged: {QUANTIZATION} has no {error}; {again}"
        ) from error
    check(
        found.kind in KINDS,
        f"{shown(path)}: kind={as_json(found.kind)} in {QUANTIZATION} is none of {', '.join(KINDS)}; {again}",
    )
    return found


def read(path: Path, option: str) -> tuple[Backbone, Quantization | None]:
    """Reads the backbone and the quantization of its kernels from a config.json.

    Args:
      option: command-line option that names the directory of the file, for error messages.

    Raises:
      UserError: the file is missing or damaged, or the family or a field is not supported.
    """
    check(
        path.is_file(),
        f"{option}={shown(path.parent)} has no {path.name}: give the directory of a Hugging Face model",
    )
    values = read_object(path)
    return from_json(values, path), _quantization(values, path)


def from_json(values: dict[str, Any], path: Path) -> Backbone:
    """Converts the fields of a config.json to a backbone. Error messages name the file `path`."""
    # transformers 5 stores rotary fields in this object.
    rope = Fields(path, values).object("rope_parameters")
    fields = Fields(path, {**values, **rope})
    _quantization(values, path)
    architectures = values.get("architectures")
    family = values.get("model_type") or _family_of(architectures)
    check(
        bool(family or architectures),
        f"{shown(path)} has neither model_type nor architectures, so its model is unknown: use the config.json of a"
        " Hugging Face model",
    )
    check(
        bool(family),
        f"{shown(path)}: architectures={as_json(architectures)} is not supported: use a model of one of the families"
        f" {', '.join(FAMILIES)}",
    )
    check_choice(f"{shown(path)}: model_type", family, FAMILIES)
    return FAMILIES[family].read(fields)


def _family_of(architectures: Any) -> str | None:
    """Returns the family of the first or only class in `architectures`, such as BertForMaskedLM; None if unknown."""
    first = architectures[0] if architectures and isinstance(architectures, list) else architectures
    name = str(first)
    known = (
        key
        for key, f in FAMILIES.items()
        if re.fullmatch(rf"{f.name}(Model|For\w+|LMHeadModel)", name)
    )
    return next(known, None)


def to_json(shape: Backbone) -> dict[str, Any]:
    """Converts a backbone to the fields of a config.json that transformers can read.

    Raises:
      UserError: the backbone has a property that the family's config.json cannot express.
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
    check(
        not lost,
        f"{CONFIG} of the family {shape.family} cannot describe a backbone with {', '.join(lost)}: use a backbone with"
        " the values in parentheses",
    )
    return values


def differences(one: Backbone, other: Backbone) -> list[str]:
    """Lists the differences of two backbones, such as "width 64 (not 32)", except in the fields FREE.

    For tuples of equal length, only the first different entry is listed. If the numbers of layers differ, only this
    difference is listed.
    """
    if one.layers != other.layers:
        return [f"layers {one.layers} (not {other.layers})"]
    found = []
    for name in (field.name for field in dataclasses.fields(Backbone) if field.name not in FREE):
        a, b = getattr(one, name), getattr(other, name)
        if isinstance(a, tuple) and a != b and len(a) == len(b):
            number = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
            name, a, b = f"{name}[{number}]", a[number], b[number]
        if a != b:
            found.append(f"{name} {a!r} (not {b!r})")
    return found
