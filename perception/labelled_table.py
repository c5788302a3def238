"""Makes labelled examples from a user's tables: finds the columns, skips unusable rows, removes copies, cuts splits."""

import filecmp
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common.data.record import has_surrogate
from common.data.record_files import NAMES
from common.errors import check
from common.storage import addresses
from perception.table_columns import check_header, find_columns
from perception.table_labels import (
    DOUBTFUL,
    check_labels,
    find_classes,
    label_kind,
    label_reader,
    tidy_labels,
)
from perception.table_reader import WHOLE, Table, by_split_column
from perception.table_splits import (
    Example,
    Label,
    Notes,
    check_splits,
    classes_of,
    counted,
    cut_splits,
    rare_classes,
    shown,
    similar_groups,
    without_copies,
    without_leaks,
)

FILES = {"train": "train.jsonl", "valid": "validation.jsonl", "test": "test.jsonl"}
"""Split -> name of the file to which `write` writes the split."""

TEXTS = ("text", "text_pair")
"""Fields of the first and the second text of an example in the written files."""

DATA = "data"
"""Name of the folder in --out to which `write` writes."""

NOTES = "notes.txt"

COLUMNS = "Texts are in the column"
"""Start of a note of `prepare`. A folder whose NOTES has such a line was written by `write`."""

PURPOSES = {"train": "for training", "valid": "for validation", "test": "for the test"}


@dataclass(frozen=True)
class Prepared:
    """Labelled splits. No text and no group of near-duplicates is in two splits.

    Attributes:
      splits: {split: examples} for "train", "valid" and "test".
      classes: names of the classes, in the order of their indices.
      notes: sentences about the data, such as the columns found, and the rows skipped or removed.
      several: whether a text may have any number of classes; False: each text has one class.
      text, label: names of the text columns and of the label columns.
    """

    splits: dict[str, list[Example]]
    classes: list[str]
    notes: Notes
    several: bool
    text: tuple[str, ...]
    label: tuple[str, ...]


def prepare(
    tables: Mapping[str, Table],
    text: Sequence[str] = (),
    label: Sequence[str] = (),
    strict: bool = False,
    pair: bool = False,
    separator: str = "",
) -> Prepared:
    """Returns the labelled examples in three splits, without unusable rows and copies.

    Also removes texts whose most frequent labels are tied, and some near-duplicates (`without_leaks`, `cut_splits`).

    Args:
      tables: {split: table} of `read_tables`. {WHOLE: table} is divided by its column "split" (`by_split_column`), or
        cut into three splits. A missing "valid" or "test" is cut from "train".
      text: names of the text columns; () to find them. Without `pair`, the texts of several columns are joined by a
        space.
      label: name of the label column, or names of several columns of 0 and 1, one for each class; () to find the label
        column.
      strict: whether unusable rows, and rows with the same text and different labels, are errors.
      pair: whether an example is a pair of texts from two columns, such as a premise and a hypothesis.
      separator: text that separates the classes in a label; "" if labels have no separator.

    Raises:
      UserError: the columns or labels are unusable, `separator` is set for several label columns, `strict` rejects a
        row, or the usable examples do not suffice for three splits.
    """
    tables, divided = by_split_column(tables, (*text, *label))
    columns = list(dict.fromkeys(name for table in tables.values() for name in table.columns))
    records = [record for table in tables.values() for record in table.records]
    delimited = any(table.delimited for table in tables.values())
    header = check_header(records, columns, bool(text and label)) if delimited else []
    text, label = find_columns(records, columns, tuple(text), tuple(label), pair)
    notes = Notes(
        [
            *header,
            f"{COLUMNS}{'s' * (len(text) > 1)} {' and '.join(text)}, labels in the"
            f" column{'s' * (len(label) > 1)} {' and '.join(label)}.",
            *divided,
        ]
    )
    kind = label_kind([fields for _, fields in records], label, separator)
    if kind != "one":
        notes.sentences.append("A text may have several classes, or none.")
    found, faults = {}, {}
    for split, table in tables.items():
        names = table.names.get(label[0], table.names.get(""))
        found[split], skipped = _clean(
            table, text, label_reader(kind, label, names, separator), pair
        )
        faults[split] = [*table.damaged, *skipped]
    if unusable := [fault for some in faults.values() for fault in some]:
        check(
            not strict,
            f"--strict refuses {counted(len(unusable), 'unusable row')} ({shown(unusable)}): correct the rows, or"
            " remove --strict",
        )
        notes.rows += unusable
        notes.sentences.append(f"Skipped {counted(len(unusable), 'row')}: {shown(unusable)}.")
    for split, examples in found.items():
        of = "" if split == WHOLE else f" of the split {split}"
        check(
            bool(examples),
            f"--data has no usable row{of} ({shown(faults[split])}): correct the rows, or name other columns with"
            " --text and --label",
        )
    found = tidy_labels(found)
    every = [e.label for examples in found.values() for e in examples]
    check_labels(
        [c for one in every for c in classes_of(one)], " --label=".join(label), kind != "one"
    )
    if bare := sum(not classes_of(one) for one in every):
        notes.sentences.append(f"{counted(bare, 'text')} without any class.")
    found = {split: without_copies(split, x, notes, strict) for split, x in found.items()}
    group = similar_groups(found)
    if WHOLE in found:
        found = cut_splits(found[WHOLE], group, ("test", "valid"), notes)
    else:
        found = without_leaks(found, group, notes)
        missing = tuple(split for split in ("test", "valid") if split not in found)
        found |= cut_splits(found["train"], group, missing, notes)
    classes = find_classes(found["train"], tables)
    check_splits(found, classes)
    notes.sentences += [*_warnings(classes), *rare_classes(found, classes)]
    sizes = ", ".join(f"{len(found[split]):,} {name}" for split, name in PURPOSES.items())
    notes.sentences.append(f"Examples: {sizes}, of {len(classes)} classes.")
    splits = {split: found[split] for split in FILES}
    return Prepared(splits, classes, notes, kind != "one", text, label)


def _clean(
    table: Table,
    text: Sequence[str],
    read_label: Callable[[Mapping[str, Any]], Label],
    pair: bool,
) -> tuple[list[Example], list[str]]:
    """Returns the usable examples among the records of a table, and "location: fault" for every other record."""
    found, faults = [], []
    for place, fields in table.records:
        parts = [part.strip() if isinstance(part, str) else part for part in map(fields.get, text)]
        fault = next(filter(None, map(_text_fault, text, parts)), "")
        empty = [name for name, part in zip(text, parts, strict=True) if not part]
        if not fault and empty and (pair or len(empty) == len(text)):
            columns = "columns" if len(empty) > 1 else "column"
            fault = f"no text in the {columns} {' and '.join(empty)}"
        try:
            label = read_label(fields)
        except ValueError as error:
            fault = fault or str(error)
        if fault:
            faults.append(f"{place}: {fault}")
            continue
        texts = tuple(parts) if pair else (" ".join(filter(None, parts)),)
        found.append(Example(place, texts, label))
    return found, faults


def _text_fault(column: str, value: Any) -> str:
    """Returns the fault of a value in a text column, or "" for valid text and None (an empty cell)."""
    if value is None:
        return ""
    if not isinstance(value, str):
        return f"the column {column} has a value of the type {type(value).__name__} instead of text"
    if has_surrogate(value):
        return f"the column {column} contains half of a surrogate pair, which is not valid Unicode"
    return ""


def _warnings(classes: Sequence[str]) -> list[str]:
    folded = defaultdict(list)
    for name in classes:
        folded[name.casefold()].append(name)
    doubtful = [
        f"The label {name!r} is treated as a class: leave the cells empty if their labels are missing."
        for name in classes
        if name.casefold() in DOUBTFUL
    ]
    return doubtful + [
        f"The labels {' and '.join(map(repr, same))} differ only in case, and are treated as different classes:"
        " write them alike in --data if they are one class."
        for same in folded.values()
        if len(same) > 1
    ]


def _row(example: Example) -> dict[str, str | tuple[str, ...]]:
    texts = dict(zip(TEXTS, example.texts, strict=False))
    return {**texts, "label": example.label, "row": example.place}


def _is_own(folder: Path) -> bool:
    """Returns whether `write` has written the files of a folder, or the folder has no files but hidden ones."""
    if all(path.name.startswith(".") for path in folder.iterdir()):
        return True
    notes = folder / NOTES
    found = notes.read_text("utf-8", errors="replace").splitlines() if notes.is_file() else []
    return any(line.startswith(COLUMNS) for line in found)


def write(prepared: Prepared, out: Path) -> Path:
    """Writes the splits as JSON lines, the class names and the notes to `out`/data. Returns this directory.

    Unchanged files keep their modification time, because a finished run is reused only if its summary is newer than its
    data files.

    Raises:
      UserError: `out`/data has files of another program; or `out` has runs, and splits or class names in `out`/data
        differ from `prepared`.
    """
    folder = out / DATA
    folder.mkdir(parents=True, exist_ok=True)
    check(
        _is_own(folder),
        f"--out={addresses.shown(out)}: the folder {addresses.shown(folder)} has files that this program did not write"
        " and could replace: choose another --out",
    )
    with TemporaryDirectory(dir=folder, prefix=".") as temporary:
        new = Path(temporary)
        for split, examples in prepared.splits.items():
            with (new / FILES[split]).open("w", encoding="utf-8", newline="\n") as file:
                for example in examples:
                    file.write(json.dumps(_row(example), ensure_ascii=False) + "\n")
        classes = json.dumps(prepared.classes, ensure_ascii=False, indent=2)
        (new / NAMES).write_bytes(f"{classes}\n".encode())
        lines = *prepared.notes.sentences, *prepared.notes.rows
        (new / NOTES).write_bytes("".join(f"{line}\n" for line in lines).encode())
        names = sorted(path.name for path in new.iterdir())
        _, different, missing = filecmp.cmpfiles(new, folder, names, shallow=False)
        changed = sorted([*different, *missing])
        # Other notes on the same data, as after an update of this program, do not matter to the runs.
        check(
            changed in ([], [NOTES]) or not (out / "runs").exists(),
            f"--out={addresses.shown(out)} has runs, and this command would change their data"
            f" ({', '.join(changed)} in {addresses.shown(folder)}): choose another --out, or use the same"
            " --data with the same options, such as --text and --label, as for these runs; if an earlier version of"
            " this program made the runs, --kept prints their tables",
        )
        # NOTES first: after an interruption, the folder is still recognised as written by this function.
        for name in sorted(changed, key=lambda name: name != NOTES):
            (new / name).replace(folder / name)
    return folder
