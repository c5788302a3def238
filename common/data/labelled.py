"""Loads labelled texts and pairs of texts for classification."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from common.data.cache import fingerprint
from common.data.record import Record, has_surrogate
from common.data.records import open_records
from common.errors import UserError, check


@dataclass(frozen=True)
class LabelledText:
    """Labelled examples.

    Attributes:
      texts: one or two texts for each example.
      labels_E: class index of each example, (examples,) int32. If an example may have several classes, (examples,
        classes) int32: 1 for each class of the example, 0 for all other classes.
    """

    texts: Sequence[tuple[str, ...]]
    labels_E: np.ndarray

    def __len__(self) -> int:
        return len(self.texts)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (64 hex digits) of texts and labels."""
        lines = (part for parts in self.texts for part in (str(len(parts)), *parts))
        return fingerprint(lines, map(str, self.labels_E.tolist()))


class Field(NamedTuple):
    """A field of the examples.

    Attributes:
      names: name of the field. "a|b" is the first of the fields a and b that exists.
      remedy: advice for error messages about the field.
    """

    names: str
    remedy: str


Row = tuple[str, tuple[str, ...], dict[str, Any]]
"""Location of an example, its texts, and {label as text: label} for all its labels."""


def load_labelled(
    data: ConfigDict,
    *,
    classes: int = 0,
    unlabelled: bool = False,
    optional: tuple[str, ...] = (),
    splits: tuple[str, ...] = ("train", "valid", "test"),
) -> tuple[dict[str, LabelledText], tuple[str, ...]]:
    """Returns {split: labelled examples}, and the class names.

    The class names come from the list in labels.json (in the folder of the files), from TFDS, from Hugging Face or from
    embedded:NAME. If the source has no class names, they follow from the training labels:
    - If all labels are nonnegative integers: "0" to `classes` - 1. If `classes` is 0: "0" to the largest label, or the
      sorted labels if fewer than half of the integers from 0 to the largest label occur as labels.
    - Otherwise: the sorted labels.

    Args:
      data: a configuration with these fields:
        `source`, `tfds_dir`: see `open_records`.
        `splits`: split -> its name in the source. For "files:DIR", the split NAME is the file NAME.jsonl or NAME.csv in
          DIR, plain or .gz.
        `fields`: names of one or two text fields, separated by a space. "a|b" is the first of the fields a and b
          that exists.
        `label`: name of the label field (default "label").
        `multi_label`: whether the label is a list of any number of classes (default false).
      classes: required number of classes; 0 accepts any number. If the class names are the sorted training labels,
        `classes` is the maximum number of classes.
      unlabelled: whether to skip examples with the label -1.
      optional: splits that may be missing in the source. A missing split is not returned.

    Raises:
      UserError: `fields` is invalid, `open_records` fails, a split is empty, the number of classes is below 2 or does
        not agree with `classes`, or a text or a label is missing or invalid.
    """
    check(
        len(data.fields.split()) in (1, 2),
        f"--config.data.fields={data.fields!r} must name one or two text fields, separated by a space",
    )
    label = Field(data.get("label", "label"), "rename the field with the labels to 'label'")
    if "label" in data:
        label = Field(data.label, "set --config.data.label to the field of the label")
    records, names = open_records(
        data.source,
        {split: data.splits[split] for split in splits},
        data.fields,
        label.names,
        tfds_dir=data.tfds_dir,
        optional=optional,
    )
    several = data.get("multi_label")
    rows: dict[str, list[Row]] = {}
    for split, examples in records.items():
        # A user's function ("import:") gets the name of the split itself, so `data.splits` has no effect.
        other = f", or set --config.data.splits.{split} to another split"
        advice = "add examples" + other * (not data.source.startswith("import:"))
        kept = [x for x in examples if not unlabelled or str(_field(x, label)) != "-1"]
        check(
            bool(kept),
            f"--config.data.source={data.source} has no {'labelled ' * unlabelled}examples in its {split} split:"
            f" {advice}",
        )
        rows[split] = [(x[0], _texts(x, data.fields), _labels(x, label, several)) for x in kept]
    check(
        not names or classes in (0, len(names)),
        f"--config.data.source={data.source} has {len(names or ())} classes instead of {classes}, the number of classes"
        " of --config.dataset: set --config.data.source to data of --config.dataset",
    )
    known = tuple(names or _classes(rows["train"], label, classes))
    remedy = "choose another --config.data.source" if names else f"add classes, or {label.remedy}"
    check(
        len(known) > 1,
        f"--config.data.source={data.source} has a single class, {known[0]}; classification needs at least two:"
        f" {remedy}",
    )
    by_number = bool(names) or known == tuple(map(str, range(len(known))))
    numbers = {name: number for number, name in enumerate(known)}
    found = {}
    for split, examples in rows.items():
        indices = [_indices(place, labels, numbers, by_number) for place, _, labels in examples]
        labels = [np.isin(np.arange(len(known)), x) if several else x[0] for x in indices]
        texts = [texts for _, texts, _ in examples]
        found[split] = LabelledText(texts, np.asarray(labels, np.int32))
    return found, known


def _classes(train: Sequence[Row], label: Field, count: int) -> list[str]:
    labels = {text for _, _, labels in train for text in labels}
    check(
        bool(labels),
        f"no training example has a class in the field {label.names!r}: add classes, or {label.remedy}",
    )
    if all(label.isdecimal() for label in labels):
        indices = count or max(map(int, labels)) + 1
        # Sparse integers (codes, years) are class names, not class indices.
        if count or indices <= 2 * len(labels):
            return [str(number) for number in range(indices)]
        return sorted(labels, key=int)
    if count and len(labels) > count:
        first = ", ".join(sorted(labels)[:10]) + ", ..." * (len(labels) > 10)
        raise UserError(
            f"the training examples have {len(labels)} classes ({first}) instead of {count}, the number of classes of"
            f" --config.dataset: choose the source of this data set, or {label.remedy}"
        )
    return sorted(labels)


def _labels(record: Record, field: Field, several: bool | None) -> dict[str, Any]:
    """Returns {label as text: label} for all labels of a record. With `several`, the field holds a list of labels."""
    place, found = record[0], _field(record, field)
    if several and not isinstance(found, list):
        raise UserError(
            f"{place}: the label must be a list of classes, got {found!r}; correct the label, or set"
            " --config.data.multi_label=false"
        )
    labels = found if several else [found]
    for label in labels:
        # A missing label may be NaN, which is not equal to itself.
        if label is None or label != label or not str(label).strip():
            raise UserError(
                f"{place}: the field {field.names!r} has an empty label; add a label or remove the example, or"
                f" {field.remedy}"
            )
        if isinstance(label, list | dict):
            remedy = f"correct the label, or {field.remedy}"
            if several is False and isinstance(label, list):
                remedy = f"set --config.data.multi_label=true if an example may have several classes, or {field.remedy}"
            kind = "each class in the label" if several else "the label"
            raise UserError(f"{place}: {kind} must be a text or a number, got {label!r}; {remedy}")
    return {str(label): label for label in labels}


def _texts(record: Record, fields: str) -> tuple[str, ...]:
    place, texts = record[0], []
    for name in fields.split():
        text = _field(record, Field(name, "set --config.data.fields to the fields of the texts"))
        if not isinstance(text, str) or not text.strip():
            fault = "empty" if isinstance(text, str) else f"{text!r} instead of a text"
            raise UserError(
                f"{place}: the field {name.replace('|', ' or ')} is {fault}; add a text or remove the example"
            )
        if has_surrogate(text):
            raise UserError(
                f"{place}: the field {name.replace('|', ' or ')} contains a lone surrogate (half of a surrogate"
                " pair, such as \\ud83d), which is not valid Unicode; remove or replace the surrogate"
            )
        texts.append(text)
    return tuple(texts)


def _indices(
    place: str, labels: dict[str, Any], numbers: dict[str, int], by_number: bool
) -> list[int]:
    """Returns the class indices of the labels of an example.

    Args:
      numbers: class name -> class index.
      by_number: True reads integers, and texts of digits that are not class names, as class indices. All other labels
        are class names.
    """
    found = []
    for name, label in labels.items():
        number = numbers.get(name, -1)
        whole = isinstance(label, int | np.integer)
        if by_number and (whole or (number < 0 and name.isdecimal())):
            number = int(label)
        if not 0 <= number < len(numbers):
            classes = list(numbers)
            names = ", ".join(classes[:10]) + ", ..." * (len(classes) > 10)
            indexed = by_number and classes[0] != "0"
            index = f" or an index from 0 to {len(classes) - 1}" * indexed
            raise UserError(
                f"{place}: the label {label!r} is not one of the {len(classes)} classes {names}{index}; correct the"
                " label or remove the example"
            )
        found.append(number)
    return found


def _field(record: Record, field: Field) -> Any:
    place, fields = record
    for name in field.names.split("|"):
        if name in fields:
            return fields[name]
    found = ", ".join(map(str, fields)) or "none"
    raise UserError(
        f"{place} has no field {field.names.replace('|', ' or ')}; its fields: {found}; {field.remedy}"
    )
