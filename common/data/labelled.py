"""Labelled texts and pairs of texts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from common.data.cache import fingerprint
from common.data.records import Record, open_records
from common.errors import UserError
from common.runtime.processes import is_main

if TYPE_CHECKING:
    from ml_collections import ConfigDict

LABEL = "label"
SHARES, SEED = {"test": 0.3, "valid": 0.1}, 42
"""Fractions of the training examples that replace missing splits, and the seed of the choice."""


@dataclass(frozen=True)
class LabelledText:
    """Examples: `texts` of one or two parts each, and `labels_M`, their classes from 0, (examples,)."""

    texts: Sequence[tuple[str, ...]]
    labels_M: np.ndarray

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def fingerprint(self) -> str:
        """SHA-256 (64 hex digits) of texts and labels."""
        lines = (part for parts in self.texts for part in (str(len(parts)), *parts))
        return fingerprint(lines, map(str, self.labels_M.tolist()))


@dataclass(frozen=True)
class Rules:
    """Rules of a data set.

    Attributes:
        classes: number of classes; 0 to infer it from the labels.
        unlabelled: whether to skip examples with the label -1 instead of raising an error.
        cut: splits that may be missing and are then cut from the training examples.
        splits: splits to read.
    """

    classes: int = 0
    unlabelled: bool = False
    cut: tuple[str, ...] = ()
    splits: tuple[str, ...] = ("train", "valid", "test")


def load_labelled(
    data: "ConfigDict",
    rules: Rules = Rules(),
) -> tuple[dict[str, LabelledText], tuple[str, ...]]:
    """Returns the splits "train", "valid" and "test", and the names of the classes.

    The names come from labels.json beside the files (a list), from TFDS or from Hugging Face. Without names the classes
    are the numbers up to the largest training label, or the sorted labels if they are words.

    Args:
        data: a configuration with these fields:
            `source`: "files:DIR", "tfds:NAME", "hf:NAME", "embedded:python" or "embedded:python_pairs".
            `splits`: names of train, valid and test; DIR has NAME.jsonl or NAME.csv, plain or .gz.
            `fields`: names of one or two text fields, separated by spaces; "a|b" is the first existing field.
            `tfds_dir`: "" for TFDS's default.
            `label`: name of the label field, by default "label".

    Raises:
        UserError: the source is unknown, missing or damaged; a text is empty; a label is missing or out of range.
    """
    if len(data.fields.split()) not in (1, 2):
        raise UserError(f"--config.data.fields={data.fields!r} must name one or two text fields")
    label = data.get("label", LABEL)
    records, names = open_records(
        data.source,
        {split: data.splits[split] for split in rules.splits},
        data.fields,
        label,
        tfds_dir=data.tfds_dir,
        optional=rules.cut,
    )
    found = {split: list(examples) for split, examples in records.items()}
    if rules.unlabelled:
        found = {
            split: [record for record in examples if str(_field(record, label)) != "-1"]
            for split, examples in found.items()
        }
    for split, examples in found.items():
        if not examples:
            raise UserError(f"{data.source} has no examples in its {split} split")
    if names and rules.classes and len(names) != rules.classes:
        raise UserError(
            f"{data.source} has {len(names)} classes, not {rules.classes}: check --config.data.source"
        )
    # Of all training examples, before missing splits are cut from them.
    classes = tuple(names or _classes(found["train"], label, rules.classes))
    if len(classes) < 2:
        raise UserError(
            f"{data.source} has a single class, {classes[0]}; classification needs at least two"
        )
    for split in SHARES:
        if split in rules.splits and split not in found:
            if split not in rules.cut:
                raise UserError(
                    f"{data.source} has no {split} split {data.splits[split]!r} (--config.data.splits.{split})"
                )
            _cut(found, split, data.source)
    by_number = bool(names) or classes == tuple(map(str, range(len(classes))))
    return {
        split: _read(found[split], data.fields, label, classes, by_number) for split in rules.splits
    }, classes


def _cut(found: dict[str, list[Record]], split: str, source: str) -> None:
    """Moves training examples to a missing split, chosen like `train_test_split` of Hugging Face's datasets."""
    train = found["train"]
    count = math.ceil(SHARES[split] * len(train))
    if count == len(train):
        raise UserError(
            f"{source} has {count} training examples, too few to cut a {split} split from them"
        )
    order = np.random.default_rng(SEED).permutation(len(train))
    found[split] = [train[i] for i in order[:count]]
    found["train"] = [train[i] for i in order[count:]]
    if is_main():
        print(
            f"{source} has no {split} split: using {count:,} of its {len(train):,} training examples,"
            f" chosen with seed {SEED}"
        )


def _classes(train: Sequence[Record], label: str, count: int) -> list[str]:
    labels = {_label(record, label) for record in train}
    if all(label.isdecimal() for label in labels):
        whole = count or max(map(int, labels)) + 1
        # Sparse numbers (codes, years) are names of classes, not indices.
        if count or whole <= 2 * len(labels):
            return [str(number) for number in range(whole)]
        return sorted(labels, key=int)
    if count and len(labels) > count:
        some = ", ".join(sorted(labels)[:10])
        raise UserError(
            f"the training examples have {len(labels)} classes instead of {count}: {some}"
        )
    return sorted(labels)


def _label(record: Record, field: str) -> str:
    place, label = record[0], _field(record, field)
    # NaN != NaN.
    if label is None or label != label or not str(label).strip():
        raise UserError(f"{place}: the label is missing")
    if isinstance(label, list | dict):
        raise UserError(f"{place}: the label must be a word or a number, got {label!r}")
    return str(label)


def _read(
    records: Sequence[Record],
    fields: str,
    label_field: str,
    classes: Sequence[str],
    by_number: bool,
) -> LabelledText:
    """Returns the texts and classes of records; `by_number`: integer labels are class indices, not names."""
    numbers = {name: number for number, name in enumerate(classes)}
    texts, labels = [], []
    for record in records:
        place, _ = record
        parts = tuple(_field(record, name) for name in fields.split())
        for name, part in zip(fields.split(), parts, strict=True):
            if not isinstance(part, str) or not part.strip():
                fault = "empty" if isinstance(part, str) else f"not text but {part!r}"
                raise UserError(f"{place}: the field {name.replace('|', ' or ')} is {fault}")
            if any("\ud800" <= character <= "\udfff" for character in part):
                raise UserError(
                    f"{place}: the field {name.replace('|', ' or ')} contains a lone surrogate, which is not valid text"
                )
        label, name = _field(record, label_field), _label(record, label_field)
        number = numbers.get(name, -1)
        if by_number and (isinstance(label, int | np.integer) or (number < 0 and name.isdecimal())):
            number = int(label)
        if not 0 <= number < len(classes):
            raise UserError(
                f"{place}: the label {label!r} is none of the {len(classes)} classes"
                f" (0 to {len(classes) - 1}: {', '.join(classes[:10])})"
            )
        texts.append(parts)
        labels.append(number)
    return LabelledText(texts, np.asarray(labels, np.int32))


def _field(record: Record, names: str) -> Any:
    place, fields = record
    for name in names.split("|"):
        if name in fields:
            return fields[name]
    raise UserError(
        f"{place}: no field {names.replace('|', ' or ')}; there are: {', '.join(map(str, fields))}"
    )
