"""Reads the labels of a table: one class per text, or several classes per text. Rejects regression targets."""

import ast
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from common.data.record import has_surrogate
from common.errors import UserError, check
from perception.table_reader import Table
from perception.table_splits import Example, Label, classes_of

MISSING = ("", "#n/a")
"""Values, in lower case, that mean a missing label. Spreadsheets write "#N/A" for a missing value. Words such as NA,
None or null are class names, because nothing in a CSV file tells a missing label from such a name."""

DOUBTFUL = ("na", "n/a", "nan", "none", "null")
"""Class names, in lower case, that may stand for missing labels."""

MOST_CLASSES = 1000
"""Maximum number of classes. A label column with more classes is an error."""

MOST_NUMBERS = 20
"""Maximum number of distinct labels if all labels are numbers. A column with more labels is a regression target, with
exceptions for integers (see `_is_regression`)."""

LEAST_TEXTS = 10
"""Smallest mean number of texts per label for which more than MOST_NUMBERS integer labels are classes. With fewer texts
per label, the column is usually a regression target, such as a score from 0 to 100 (see `_is_regression`)."""

LOOKED_AT = 1000
"""Maximum number of rows that are examined to recognise lists of classes."""

MARKS = {"1": True, "1.0": True, "true": True, "0": False, "0.0": False, "false": False}
"""Value, in lower case, in the column of a class -> whether the text has this class."""


def is_missing(value: Any) -> bool:
    """Returns whether a value is None, NaN, or one of the texts MISSING."""
    # Only NaN differs from itself.
    return value is None or value != value or str(value).strip().lower() in MISSING


def label_kind(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str], separator: str = ""
) -> str:
    """Returns the format of labels: "one" (one class), "marks" (a column of 0 and 1 for each class), "split" or "list".

    The format is "split" if there is a separator. It is "list" if most labels in the first LOOKED_AT rows are lists,
    also lists written as text in JSON's or Python's notation. Missing labels do not count.

    Raises a UserError if a separator is combined with several label columns.
    """
    check(
        not separator or len(columns) == 1,
        f"--separator={separator} is for one --label column, but there are {len(columns)}: remove --separator, or"
        " name one --label column",
    )
    if len(columns) > 1:
        return "marks"
    if separator:
        return "split"
    values = [row.get(columns[0]) for row in rows[:LOOKED_AT]]
    there = [value for value in values if not is_missing(value)]
    return "list" if 2 * sum(_list(value) is not None for value in there) > len(there) else "one"


def label_reader(
    kind: str, columns: Sequence[str], names: Sequence[str] | None, separator: str = ""
) -> Callable[[Mapping[str, Any]], Label]:
    """Returns a function that reads the label of a row: a class, or an alphabetically sorted tuple of classes.

    The function raises a ValueError that describes an invalid label.

    Args:
      kind: format of labels, see `label_kind`.
      names: class names that replace their indices in the labels; None to keep the labels.
    """
    column = columns[0]

    def one(row: Mapping[str, Any]) -> Label:
        value = row.get(column)
        if is_missing(value):
            raise ValueError(f"the label in column {column} is missing")
        if isinstance(value, list | dict):
            raise ValueError(
                f"the label in column {column} is of the type {type(value).__name__}: write one class in each row, or"
                " a list of classes in each row"
            )
        return _name(value, names)

    def marks(row: Mapping[str, Any]) -> Label:
        values = {name: str(row.get(name)).strip().lower() for name in columns}
        wrong = next((name for name, value in values.items() if value not in MARKS), None)
        if wrong is not None:
            raise ValueError(
                f"with several --label columns, the column {wrong} must have one of {', '.join(MARKS)}, got"
                f" {row.get(wrong)!r:.80}"
            )
        return tuple(sorted(name for name, value in values.items() if MARKS[value]))

    def split(row: Mapping[str, Any]) -> Label:
        value = row.get(column)
        if value is None or value != value or isinstance(value, list | dict):  # NaN != NaN
            fault = (
                "is missing"
                if not isinstance(value, list | dict)
                else f"is of the type {type(value).__name__}, but --separator needs text: leave out --separator"
            )
            raise ValueError(f"the label in column {column} {fault}")
        parts = map(str.strip, str(value).split(separator))
        return tuple(sorted({_name(part, names) for part in parts if not is_missing(part)}))

    def listed(row: Mapping[str, Any]) -> Label:
        value = row.get(column)
        if is_missing(value):
            raise ValueError(f"the label in column {column} is missing")
        found = _list(value)
        if found is None or any(isinstance(x, list | dict) or is_missing(x) for x in found):
            fault = "is not a list" if found is None else "has an entry that is not a class"
            raise ValueError(
                f"the label {str(value)[:40]!r} in column {column} {fault}, unlike most labels of this column"
            )
        return tuple(sorted({_name(x, names) for x in found}))

    return {"one": one, "marks": marks, "split": split, "list": listed}[kind]


def _list(value: Any) -> list | None:
    """Returns a list, or parses a list in the notation of JSON or Python; None for other values."""
    text = value.strip() if isinstance(value, str) else ""
    for read in (json.loads, ast.literal_eval) if text.startswith("[") else ():
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            value = read(text)
            break
    return value if isinstance(value, list) else None


def _name(value: Any, names: Sequence[str] | None) -> str:
    """Returns a label as text. Replaces an index by its entry in `names`, unless its digits are a name in `names`."""
    text = str(value).strip()
    if has_surrogate(text):
        raise ValueError(
            f"the label {text[:40]!r} contains half of a surrogate pair, which is not valid Unicode"
        )
    if names and text.isdecimal() and int(text) < len(names) and text not in names:
        return names[int(text)]
    return text


def _number(label: str) -> float | None:
    try:
        value = float(label)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def tidy_labels(found: Mapping[str, list[Example]]) -> dict[str, list[Example]]:
    """If all labels are whole numbers, writes them without decimals ("1.0" becomes "1").

    Labels that consist of digits are not changed, because they may be codes with leading zeros.
    """
    every = {c for examples in found.values() for e in examples for c in classes_of(e.label)}
    numbers = {name: _number(name) for name in every}
    if any(value is None or value != int(value) for value in numbers.values()):
        return dict(found)

    def tidy(label: Label) -> Label:
        if isinstance(label, tuple):
            return tuple(map(tidy, label))
        return label if label.isdecimal() else str(int(numbers[label]))

    return {
        split: [replace(e, label=tidy(e.label)) for e in examples]
        for split, examples in found.items()
    }


def _is_regression(counts: Counter[str], multi_label: bool) -> bool:
    """Returns whether labels are values of a numeric target. `counts` maps each label to its number of texts.

    Labels are a target if there are more than MOST_NUMBERS distinct labels and all of them are numbers. Integers are
    not a target if the mean number of texts per label is at least LEAST_TEXTS, if a label has leading zeros (a code),
    if `multi_label` is set, or if no label occurs twice (ids, which `check_labels` rejects).
    """
    numbers = {label: _number(label) for label in counts}
    if len(counts) <= MOST_NUMBERS or None in numbers.values():
        return False
    if any(value != int(value) for value in numbers.values()):
        return True
    codes = any(label.isdecimal() and label != str(int(label)) for label in counts)
    return (
        not multi_label and not codes and len(counts) < counts.total() < LEAST_TEXTS * len(counts)
    )


def check_labels(labels: Sequence[str], column: str, multi_label: bool = False) -> None:
    """Raises a UserError unless the labels can be the names of two or more classes.

    Args:
      labels: the labels of all texts; with `multi_label`, all labels of each text.
      column: value of --label, for the error message.
      multi_label: whether a text may have several labels.
    """
    counts = Counter(labels)
    option, several = f"--label={column}", len(counts)
    check(bool(counts), f"{option}: no text has a class; name another column")
    check(
        several > 1,
        f"{option} has a single class, {next(iter(counts), '')!r}, but classification needs at least two: name another"
        " column",
    )
    if _is_regression(counts, multi_label):
        some = ", ".join(list(counts)[:3])
        raise UserError(
            f"{option} has {several:,} different numbers ({some}, ...) among {len(labels):,} labels and looks like a"
            " regression target: predicting a number is regression, which this program does not do; write the classes"
            " as words, such as low and high"
        )
    single = sum(count == 1 for count in counts.values())
    check(
        several <= 2 or 2 * single <= len(labels),
        f"{option}: more than half of its labels ({single:,} of {len(labels):,}) occur only once, like ids or texts;"
        " name a column of classes, or add texts",
    )
    check(
        several <= MOST_CLASSES,
        f"{option} has {several:,} classes, more than {MOST_CLASSES:,}: merge classes, or name another column",
    )


def find_classes(train: Sequence[Example], tables: Mapping[str, Table]) -> list[str]:
    """Returns the classes of the training examples.

    Orders the classes as in the first list of class names (`Table.names` of all tables) that contains all classes.
    Without such a list, orders them by number if all are numbers, otherwise alphabetically.
    """
    labels = {name for e in train for name in classes_of(e.label)}
    for table in tables.values():
        for names in table.names.values():
            if labels <= set(names):
                return [name for name in names if name in labels]
    numeric = all(_number(label) is not None for label in labels)
    return sorted(labels, key=(lambda label: (_number(label), label)) if numeric else None)
