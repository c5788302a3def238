"""Helpers for all model families: typed access to config.json, sizes, activations, and tables of tensor names."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.config import check_choice
from common.errors import check, file_error, parse_json
from common.storage.addresses import shown
from perception.backbones import Backbone

_NEEDED = object()


@dataclass(frozen=True)
class Fields:
    """Typed access to the fields of config.json or adapter_config.json.

    A field that is missing or null gets the default value (but see `optional`). A field without a default value is
    required. A wrong value, or a required field without a value, raises a UserError that names the file and the field.

    Attributes:
      group: text before the names of fields in error messages, such as "rope_scaling.".
      names: argument `name` of a method -> name of the field in the file, for fields whose two names differ.
    """

    path: Path
    values: Mapping[str, Any]
    group: str = ""
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """The path of the file, for error messages."""
        return shown(self.path)

    def called(self, name: str) -> str:
        """Returns the name of a field for error messages."""
        return self.group + self.names.get(name, name)

    def get(self, name: str, default: Any = _NEEDED) -> Any:
        value = self.values.get(self.names.get(name, name))
        value = default if value is None else value
        check(
            value is not _NEEDED,
            f"{self.place} has no value for the required field {self.called(name)}: use the complete file of the model",
        )
        return value

    def _check(self, name: str, value: Any, fits: bool, kind: str) -> Any:
        check(fits, f"{self.place}: {self.called(name)} must be {kind}, got {as_json(value)}")
        return value

    def count(
        self, name: str, default: Any = _NEEDED, *, least: int = 1, nullable: bool = False
    ) -> int:
        value = self.get(name, default)
        fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
        kind = f"{'null or ' * nullable}a whole number of at least {least}"
        return self._check(name, value, fits, kind)

    def optional(self, name: str, default: int | None) -> int | None:
        """Returns a positive integer, or None if the field is null. A missing field gets the default value."""
        missing = self.values.get(self.names.get(name, name), default) is None
        return None if missing else self.count(name, default, nullable=True)

    def number(self, name: str, default: Any = _NEEDED) -> float:
        value = self.get(name, default)
        fits = is_number(value) and value >= 0
        return self._check(name, value, fits, "a finite number of at least 0")

    def flag(self, name: str, default: Any = _NEEDED) -> bool:
        value = self.get(name, default)
        return self._check(name, value, isinstance(value, bool), "true or false")

    def object(self, name: str) -> dict[str, Any]:
        """Returns a JSON object, which is empty if the field is missing or null."""
        value = self.get(name, {})
        return self._check(name, value, isinstance(value, dict), "a JSON object")

    def layer_kinds(self, layers: int, known: Iterable[str], default: list[str]) -> list[str]:
        """Returns the kind of attention of each layer, one of `known`, from the field `layer_types`."""
        value, known = self.get("layer_types", default), [*known]
        fits = isinstance(value, list) and len(value) == layers and all(x in known for x in value)
        kind = f"a list with {' or '.join(known)} for each of the {layers} layers"
        return self._check("layer_types", value, fits, kind)

    def one_of(self, name: str, known: Mapping[str, Any], default: Any = _NEEDED) -> Any:
        """Returns `known[value]` for the value of the field."""
        value = self.get(name, default)
        check_choice(f"{self.place}: {self.called(name)}", value, known)
        return known[value]

    def only(self, **expected: Any) -> None:
        """Raises a UserError unless each field is missing, is null, or has the expected value."""
        for name, value in expected.items():
            self._check_equal(name, value, " or absent")

    def must(self, **expected: Any) -> None:
        """Raises a UserError unless each field has the expected value. The fields are required."""
        for name, value in expected.items():
            check(
                self.get(name, None) is not None,
                f"{self.place} has no value for the required field {self.called(name)}, which must be {as_json(value)}:"
                " use a model with this value",
            )
            self._check_equal(name, value)

    def _check_equal(self, name: str, value: Any, otherwise: str = "") -> None:
        found = self.get(name, value)
        check(
            found == value,
            f"{self.place}: {self.called(name)}={as_json(found)} is not supported: use a model or an adapter whose"
            f" {self.called(name)} is {as_json(value)}{otherwise}",
        )


def read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises a UserError if the file cannot be read, or does not contain a JSON object."""
    try:
        values = parse_json(path.read_text())
    except (ValueError, OSError) as error:
        raise file_error(shown(path), error) from error
    check(
        isinstance(values, dict),
        f"{shown(path)} is damaged: it is not a JSON object; restore the file",
    )
    return values


def as_json(value: Any) -> str:
    """Formats a value as in a JSON file, for error messages."""
    return json.dumps(value)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""Name of an activation in transformers -> its name in this project."""

THEIRS = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
"""Name of an activation in this project -> its name in transformers."""


def heads_of(fields: Fields) -> int:
    width, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    check(
        width % heads == 0 or fields.values.get("head_dim") is not None,
        f"{fields.place}: {fields.called('hidden_size')}={width} is not divisible by"
        f" {fields.called('num_attention_heads')}={heads}; correct the file",
    )
    return heads


def sizes(fields: Fields) -> tuple[int, int, int, int]:
    names = ("num_hidden_layers", "hidden_size", "intermediate_size")
    return *map(fields.count, names), heads_of(fields)


def sizes_json(shape: Backbone) -> dict[str, Any]:
    return {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.width,
        "intermediate_size": shape.hidden[0],
        "num_attention_heads": shape.heads[0],
        "hidden_act": THEIRS[shape.activation],
        "tie_word_embeddings": shape.tied,
    }


@dataclass(frozen=True)
class Names:
    """Parameter names in the files of a model family.

    Attributes:
      prefix: prefix of the backbone's names in files that include an output layer.
      layers: name of the list of layers.
      outside: module path in this project -> module path in the files, for modules outside the layers. A path in this
        project may also be an embedding table, such as "embed/types".
      inside: module path in this project -> module path in the files, both relative to a layer. Modules with the same
        path in the files are stored there as one matrix: their matrices, concatenated along the outputs in the order of
        `inside`.
    """

    prefix: str
    layers: str
    outside: Mapping[str, str]
    inside: Mapping[str, str]


ATTENTION, FORWARD = "residuals/0/function/", "residuals/1/function/"
