"""Finds the text and label columns of a user's table."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common.config import check_choice
from common.errors import UserError, check
from perception.table_labels import is_missing
from perception.table_splits import counted

TEXT_NAMES = ("text", "sentence", "message", "comment", "review", "body", "content", "description")

LABEL_NAMES = ("label", "labels", "class", "category", "target", "topic", "intent", "sentiment")
"""Common names of label columns, in lower case. `_choose` examines names before values."""

PAIR_NAMES = (
    ("premise", "hypothesis"),
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("question", "answer"),
    ("text", "text_pair"),
    ("text_a", "text_b"),
)
"""Common names, in lower case, of the two text columns in a table of pairs."""

MOST_NAME_WORDS = 5
"""Maximum number of words in the name of a text column. A longer name may be a text of a table without a header."""

LOOKED_AT = 1000
"""Maximum number of rows that are examined to recognise the header and the columns of texts and labels."""


def check_header(records: Sequence[tuple], columns: Sequence[str], named: bool) -> list[str]:
    """Checks whether the first line of a CSV or TSV file looks like a row instead of the names of columns.

    The line looks like a row if it contains a long text in a column of texts, or a label that later rows repeat. But a
    line with a common name of a text or label column is a header, unless later rows repeat the name as a label.

    Args:
      named: whether the user has named the text columns and the label columns, so that the line is a header.

    Returns:
      A note if the line looks like a row and `named` is True; otherwise [].

    Raises:
      UserError: the line looks like a row and `named` is False.
    """
    rows = [fields for _, fields in records[:LOOKED_AT]]
    # Leave out repeated headers, which remain where files were appended to each other.
    rows = [row for row in rows if any(row.get(name) != name for name in columns)]
    values = {name: [row.get(name) for row in rows] for name in columns}
    texts = [x for x in columns if len(x.split()) > MOST_NAME_WORDS and _is_prose(values[x])]
    labels = [x for x in columns if x.strip() in values[x] and 2 * len(set(values[x])) <= len(rows)]
    common = {*TEXT_NAMES, *LABEL_NAMES, *(name for pair in PAIR_NAMES for name in pair)}
    header = any(name.strip().lower() in common for name in columns if name not in labels)
    if header or not (texts or labels):
        return []
    looks = f"looks like an example ({(*texts, *labels)[0][:40]!r}), not like names of columns"
    check(
        named,
        f"the first row of --data {looks}: add a header with the names of the columns, such as text and label; if this"
        " row is the header, name its columns with both --text and --label",
    )
    return [f"The first row {looks}, but is read as a header, because --text and --label are set."]


def find_columns(
    records: Sequence[tuple],
    columns: Sequence[str],
    text: tuple[str, ...],
    label: tuple[str, ...],
    pair: bool = False,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the names of the text columns and of the label columns.

    Raises:
      UserError: the table has too few columns, a named column is missing or named twice, the text or label columns
        cannot be recognised, or `pair` is set and there are not two text columns.
    """
    needed = 2 + pair
    check(
        len(columns) >= needed,
        f"--data has only {counted(len(columns), 'column')} ({', '.join(map(repr, columns))}), but needs {needed}:"
        f" {'two columns of texts' if pair else 'a column of texts'} and a column of labels; add the missing columns,"
        " or separate the columns in a .tsv file by tabs, and in a .csv file by one of , ; | and tab",
    )
    for option, names in (("--text", text), ("--label", label)):
        for name in names:
            check_choice(option, name, tuple(columns))
        _check_once(option, names)
    for name in label:
        check(
            name not in text,
            f"--label={name} is also a column of --text: remove it from one of the two options",
        )
    values = {
        name: [record[1].get(name) for record in records[:LOOKED_AT]]
        for name in columns
        if name not in (*text, *label)
    }
    if pair and not text:
        text = _pair_columns(list(values))
    check(
        not pair or len(text) == 2,
        f"--pair needs two --text columns, got {len(text)}: name them with --text=FIRST --text=SECOND",
    )
    if pair:
        values = {name: x for name, x in values.items() if name not in text}
    if not text:
        text = (_choose("--text", values, TEXT_NAMES, _is_prose, columns),)
        values.pop(text[0], None)
    if not label:
        label = (_choose("--label", values, LABEL_NAMES, _is_classes, columns),)
    return text, label


def _check_once(option: str, names: Sequence[str]) -> None:
    twice = list(dict.fromkeys(name for name in names if names.count(name) > 1))
    given = " and ".join(f"{option}={name}" for name in twice)
    check(
        not twice,
        f"{given} {'are' if len(twice) > 1 else 'is'} given more than once: name each column once",
    )


def _pair_columns(columns: Sequence[str]) -> tuple[str, str]:
    """Returns the columns of the first pair in PAIR_NAMES that the table has, ignoring case.

    Raises a UserError if the table has no such pair.
    """
    known = {name.strip().lower(): name for name in columns}
    for names in PAIR_NAMES:
        if set(names) <= set(known):
            return known[names[0]], known[names[1]]
    raise UserError(
        "the two columns of --pair cannot be recognised: name them with --text=FIRST --text=SECOND; the columns are"
        f" {', '.join(columns)}"
    )


def _choose(
    option: str,
    values: Mapping[str, Sequence[Any]],
    names: Sequence[str],
    suits: Callable[[Sequence[Any]], bool],
    columns: Sequence[str],
) -> str:
    """Returns the only column in `values` whose name is in `names`, ignoring case.

    If no column or more than one column has such a name, returns the only column for whose values `suits` is true.
    Raises a UserError, which lists `columns`, if `suits` is true for no column or for more than one.
    """
    named = [name for name in values if name.strip().lower() in names]
    found = named if len(named) == 1 else [name for name, x in values.items() if suits(x)]
    if len(found) != 1:
        which = f"could be {' or '.join(found)}" if found else "cannot be recognised"
        raise UserError(
            f"the column of {option} {which}: name it with {option}=NAME; the columns are {', '.join(columns)}"
        )
    return found[0]


def _is_prose(values: Sequence[Any]) -> bool:
    """Returns whether a column can hold texts.

    The texts must have at least three words on average. The number of distinct texts must be more than half of the
    number of values.
    """
    texts = [x for x in values if isinstance(x, str) and x.strip()]
    words = sum(len(text.split()) for text in texts)
    return bool(texts) and words >= 3 * len(texts) and 2 * len(set(texts)) > len(values)


def _is_classes(values: Sequence[Any]) -> bool:
    """Returns whether a column can hold class labels.

    The column must have at least two distinct values. If it has more than two distinct values, a value must occur at
    least five times on average. Missing values, lists and dictionaries are ignored.
    """
    labels = [str(x) for x in values if not is_missing(x) and not isinstance(x, list | dict)]
    return 2 <= len(set(labels)) <= max(2, len(labels) / 5)
