"""Users' tables: formats, columns, cleaning, duplicates, splits, and errors for bad input."""

import gzip
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from ml_collections import ConfigDict

from common.data.labelled import load_labelled
from common.errors import UserError
from perception import labelled_table, near_duplicates, table_splits
from perception.labelled_table import prepare
from perception.table_reader import read_tables
from tests.perception.tables import (
    MANY,
    as_csv,
    as_lines,
    as_parquet,
    number_rows,
    put,
    rows,
    sentence,
)


def examples(source: Path | str, **options: object) -> dict[str, int]:
    """Returns how often each (text, label) occurs in all splits of a source."""
    reading = {name: options.pop(name) for name in ("encoding", "download") if name in options}
    found = prepare(read_tables(str(source), **reading), **options)
    return Counter((e.text, e.label) for some in found.splits.values() for e in some)


WANTED = Counter((row["text"], row["label"]) for row in MANY)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", as_csv(MANY)),
        ("a.csv.gz", gzip.compress(as_csv(MANY).encode(), mtime=0)),
        ("UPPER.CSV", as_csv(MANY)),
        ("semicolon.csv", as_csv(MANY, ";")),
        ("bar.csv", as_csv(MANY, "|")),
        ("a.tsv", as_csv(MANY, "\t")),
        ("a.tsv.gz", gzip.compress(as_csv(MANY, "\t").encode(), mtime=0)),
        ("mark.csv", b"\xef\xbb\xbf" + as_csv(MANY).encode()),
        ("utf16.csv", as_csv(MANY).encode("utf-16")),
        ("windows.csv", as_csv(MANY).replace("\n", "\r\n")),
        ("old_mac.csv", as_csv(MANY).replace("\n", "\r")),
        ("blank_lines.csv", as_csv(MANY).replace("\n", "\n\n")),
        ("a.jsonl", as_lines(MANY)),
        ("a.jsonl.gz", gzip.compress(as_lines(MANY).encode(), mtime=0)),
        ("a.parquet", as_parquet(MANY)),
        ("a.parquet.gz", gzip.compress(as_parquet(MANY), mtime=0)),
    ],
)
def test_formats_give_equal_examples(tmp_path, name, content) -> None:
    assert examples(put(tmp_path / name, content)) == WANTED


def test_encoding_option(tmp_path) -> None:
    umlauts = [{**row, "text": f"{row['text']} für {i}"} for i, row in enumerate(MANY)]
    for encoding in ("cp1252", "utf-16-le", "utf-8"):
        mark = "" if encoding == "cp1252" else "\ufeff"
        path = put(tmp_path / "a.csv", (mark + as_csv(umlauts)).encode(encoding))
        found = examples(path, encoding=encoding, text=("text",))
        assert found == Counter((row["text"], row["label"]) for row in umlauts)


def test_text_may_span_lines_and_have_a_million_characters(tmp_path) -> None:
    long = "word " * 200_000
    more = [
        *MANY,
        {"text": long, "label": "spam"},
        {"text": "two\nlines\u2028here", "label": "ham"},
    ]
    found = examples(put(tmp_path / "a.csv", as_csv(more)))
    assert found[(long.strip(), "spam")] == 1 and found[("two\nlines\u2028here", "ham")] == 1


def test_folder_of_parts_is_one_table(tmp_path) -> None:
    put(tmp_path / "monday.csv", as_csv(MANY[:15]))
    put(tmp_path / "tuesday.csv.gz", gzip.compress(as_csv(MANY[15:]).encode()))
    put(tmp_path / "README.txt", "not a table")
    assert examples(tmp_path) == WANTED


def test_hidden_files_of_a_folder_are_not_read(tmp_path) -> None:
    put(tmp_path / "test.csv", as_csv(rows(8, start=200)))
    put(tmp_path / "train.csv", as_csv(MANY))
    wanted = examples(tmp_path)
    for name in ("._train.csv", "._test.csv", ".DS_Store", ".old.jsonl"):
        put(tmp_path / name, b"\x00\x05\x16\x07")
    assert examples(tmp_path) == wanted
    put(tmp_path / "hidden" / "._a.csv", as_csv(MANY))
    assert "no table" in refused(tmp_path / "hidden")


def test_splits_of_a_folder_are_kept(tmp_path) -> None:
    put(tmp_path / "train.jsonl", as_lines(rows(40)))
    put(tmp_path / "dev.jsonl", as_lines(rows(6, start=100)))
    put(tmp_path / "test.jsonl", as_lines(rows(8, start=200)))
    found = prepare(read_tables(str(tmp_path))).splits
    assert {split: len(some) for split, some in found.items()} == {
        "train": 40,
        "valid": 6,
        "test": 8,
    }
    assert [e.text for e in found["test"]] == [row["text"] for row in rows(8, start=200)]


def split_rows(*names: str) -> list[dict]:
    """Returns 40 rows with names of splits, the first name for the last rows. The labels have an uncommon name."""
    return [
        {"Split": names[0] if i >= len(names) else names[i], "text": r["text"], "mood": r["label"]}
        for i, r in enumerate(MANY)
    ]


def test_column_split_divides_a_table(tmp_path) -> None:
    path = put(tmp_path / "a.csv", as_csv(split_rows("train", *["Dev"] * 4, *["test"] * 6)))
    found = prepare(read_tables(str(path)))
    assert found.label == ("mood",) and any(
        "column 'Split'" in note for note in found.notes.sentences
    )
    texts = {split: [e.text for e in some] for split, some in found.splits.items()}
    wanted = [row["text"] for row in MANY]
    assert texts == {
        "train": [wanted[0], *wanted[11:]],
        "valid": wanted[1:5],
        "test": wanted[5:11],
    }
    chosen = prepare(read_tables(str(path)), label=("Split",))
    assert chosen.classes == ["Dev", "test", "train"]


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (("train", "test", "extra"), "it has the value 'extra', which is no split"),
        (("test", "val"), "no row has the value 'train'"),
    ],
)
def test_incomplete_column_split_is_noted(tmp_path, names, why) -> None:
    path = put(tmp_path / "a.jsonl", as_lines(split_rows(*names)))
    found = prepare(read_tables(str(path)), label=("mood",))
    assert sum(map(len, found.splits.values())) == 40
    (note,) = [note for note in found.notes.sentences if "'Split'" in note]
    assert note.startswith(f"The column 'Split' is not used, because {why}: put the rows")
    assert prepare(read_tables(str(path))).label == found.label  # recognised, and not the column


def test_labels_json_names_integer_labels(tmp_path) -> None:
    put(
        tmp_path / "all.jsonl",
        as_lines([{"text": r["text"], "label": i % 2} for i, r in enumerate(MANY)]),
    )
    put(tmp_path / "labels.json", '["spam", "ham"]')
    assert examples(tmp_path) == WANTED
    assert prepare(read_tables(str(tmp_path))).classes == ["spam", "ham"]


def test_whole_numbers_are_classes_in_numeric_order(tmp_path) -> None:
    stars = [{"text": sentence(i), "stars": f"{i % 11}.0"} for i in range(110)]
    found = prepare(read_tables(str(put(tmp_path / "a.csv", as_csv(stars)))), label=("stars",))
    assert found.classes == [str(number) for number in range(11)]


@pytest.mark.parametrize(
    ("make", "count", "classes"),
    [
        (lambda i: i % 10 + 1, 40, 10),  # stars
        (lambda i: i % 30, 300, 30),  # class indices with many texts each
        (lambda i: f"{i % 30:03}", 150, 30),  # codes with leading zeros
        (lambda i: f"[{i % 30}]", 150, 30),  # lists of classes
    ],
)
def test_whole_numbers_with_many_texts_are_classes(tmp_path, make, count, classes) -> None:
    path = put(tmp_path / "a.csv", number_rows(make, count))
    assert len(prepare(read_tables(str(path)), label=("label",)).classes) == classes


@pytest.mark.parametrize(
    ("columns", "options", "wanted"),
    [
        ({"Text": "T", "Label": "L"}, {}, ("Text", "Label")),
        ({"id": "I", "subject line": "T", "queue": "L"}, {}, ("subject line", "queue")),
        ({"id": "I", "body": "T", "category": "L", "priority": "L2"}, {}, ("body", "category")),
        ({"a": "T", "b": "T2", "label": "L"}, {"text": ("b",)}, ("b", "label")),
        ({"x": "L", "y": "L2", "text": "T"}, {"label": ("y",)}, ("text", "y")),
    ],
)
def test_columns_are_recognised(tmp_path, columns, options, wanted) -> None:
    def cell(kind: str, i: int) -> str:
        made = {"T": sentence(i), "T2": sentence(i + 500), "I": str(i)}
        return made.get(kind) or "ab"[i % 2] + kind

    path = put(
        tmp_path / "a.csv", as_csv([{n: cell(k, i) for n, k in columns.items()} for i in range(60)])
    )
    (note, *_) = prepare(read_tables(str(path)), **options).notes.sentences
    assert note == f"Texts are in the column {wanted[0]}, labels in the column {wanted[1]}."


@pytest.mark.parametrize(
    ("text", "label", "options"),
    [
        ("message", "spam", {}),  # `message` is a common name of a text column
        ("subject line", "queue", {}),
        ("What did you like about our product", "spam", {"text": True, "label": True}),
    ],
)
def test_header_is_not_mistaken_for_a_row(tmp_path, text, label, options) -> None:
    """The second file repeats the header in its middle."""
    named = {name: ((text, label)[name == "label"],) for name in options}
    first, second = (
        as_csv([{text: row["text"], label: row["label"]} for row in some])
        for some in (MANY, rows(40, start=100))
    )
    assert examples(put(tmp_path / "a.csv", first), **named) == WANTED
    assert examples(put(tmp_path / "b.csv", first + second), **named) >= WANTED


def test_note_on_a_header_that_looks_like_a_row(tmp_path) -> None:
    path = put(
        tmp_path / "a.csv", as_csv([{"subject line": r["text"], "spam": r["label"]} for r in MANY])
    )
    note = prepare(read_tables(str(path)), text=("subject line",), label=("spam",)).notes.sentences[
        0
    ]
    assert note.startswith(
        "The first row looks like an example ('spam'), not like names of columns, but is read"
    )


def test_two_text_columns_are_joined(tmp_path) -> None:
    pairs = [{"title": f"title {r['text']}", **r} for r in MANY]
    found = examples(put(tmp_path / "a.csv", as_csv(pairs)), text=("title", "text"))
    assert (f"title {MANY[0]['text']} {MANY[0]['text']}", "spam") in found


def test_one_of_two_text_columns_may_be_empty(tmp_path) -> None:
    pairs = [{"title": "" if i % 2 else "title", **r} for i, r in enumerate(MANY)]
    pairs.append({"title": " ", "text": "", "label": "spam"})
    path = put(tmp_path / "a.csv", as_csv(pairs))
    found = examples(path, text=("title", "text"))
    assert (f"title {MANY[0]['text']}", "spam") in found and (MANY[1]["text"], "ham") in found
    with pytest.raises(UserError, match=r"a.csv line 42: no text in the columns title and text"):
        examples(path, text=("title", "text"), strict=True)


def test_codes_are_classes_as_written(tmp_path) -> None:
    """Leading zeros are kept. Numbers that are equal as floats but written differently are different classes."""
    codes = ("01", "1", "12345678901234567890", "12345678901234567891")
    coded = [{"text": sentence(i), "label": codes[i % 4]} for i in range(80)]
    tables = read_tables(str(put(tmp_path / "a.csv", as_csv(coded))))
    assert sorted(prepare(tables, label=("label",)).classes) == sorted(codes)


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_labels_that_look_missing_are_classes(tmp_path, name) -> None:
    """Empty cells, and null in JSON, are missing labels, but names such as NA are classes, also in training."""
    names = ("NA", "None", "null", "nan", "N/A", "yes")
    labelled = [{"text": sentence(i), "label": names[i % 6]} for i in range(90)]
    missing = [{"text": sentence(900), "label": ""}, {"text": sentence(901), "label": None}]
    write = as_csv if name.endswith("csv") else as_lines
    found = prepare(read_tables(str(put(tmp_path / name, write([*labelled, *missing])))))
    assert sorted(found.classes) == sorted(names)
    assert any(note.startswith("Skipped 2 rows") for note in found.notes.sentences)
    assert any(
        note.startswith("The label 'NA' is treated as a class") for note in found.notes.sentences
    )
    assert not any("label 'yes'" in note for note in found.notes.sentences)
    data = {"source": f"files:{labelled_table.write(found, tmp_path / 'out')}", "fields": "text"}
    splits = {"train": "train", "valid": "validation", "test": "test"}
    _, classes = load_labelled(ConfigDict(data | {"splits": splits, "tfds_dir": ""}))
    assert list(classes) == found.classes


def test_damaged_rows_are_skipped_and_counted(tmp_path) -> None:
    bad = [{"text": "", "label": "spam"}, {"text": "a text", "label": " "}]
    path = put(tmp_path / "a.csv", as_csv([*MANY, *bad]) + 'one column\n"x"y,spam\na,b,c\n')
    assert examples(path) == WANTED
    (note,) = [
        n for n in prepare(read_tables(str(path))).notes.sentences if n.startswith("Skipped")
    ]
    assert note.startswith("Skipped 5 rows: a.csv line 44 has a different number of columns")
    with pytest.raises(UserError, match=r"--strict refuses 5 unusable rows \(a.csv line 44 "):
        prepare(read_tables(str(path)), strict=True)


def test_unusable_rows_of_json_lines_are_skipped(tmp_path) -> None:
    bad = [
        {"text": None, "label": "spam"},
        {"text": 7, "label": "spam"},
        {"text": "x", "label": float("nan")},
        {"text": "x", "label": ["a", "b"]},
        {"text": "x"},
        {"text": "\ud800", "label": "spam"},
    ]
    path = put(tmp_path / "a.jsonl", as_lines([*MANY, *bad]))
    assert examples(path) == WANTED
    notes = prepare(read_tables(str(path))).notes.sentences
    assert any(
        note.startswith("Skipped 6 rows: a.jsonl line 41: no text in the column") for note in notes
    )


def refused(source: Path | str, **options: object) -> str:
    with pytest.raises(UserError) as caught:
        examples(source, **options)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 700
    return message


def test_equal_texts_keep_the_most_frequent_label(tmp_path) -> None:
    more = [{"text": text, "label": label} for text, label in (
        ("Call me now", "spam"), ("call  ME now", "ham"), ("call me now", "ham"),
        ("either way", "spam"), ("EITHER way", "ham"),
    )]  # fmt: skip
    found = examples(put(tmp_path / "a.csv", as_csv([*MANY, *more])))
    assert found == WANTED + Counter({("call  ME now", "ham"): 1})


def test_near_duplicates_stay_in_one_split(tmp_path) -> None:
    """The data contain thirty groups of three texts, which differ in a number and in exclamation marks."""
    more = [
        {"text": f"{sentence(i, 9)} code {k}{i}{'!' * k}", "label": ("spam", "ham")[i % 2]}
        for i in range(1000, 1030)
        for k in range(3)
    ]
    found = prepare(read_tables(str(put(tmp_path / "a.csv", as_csv([*MANY, *more])))))
    stems = {
        split: {e.text.partition(" code ")[0] for e in some if " code " in e.text}
        for split, some in found.splits.items()
    }
    assert all(stems.values()) and sum(map(len, stems.values())) == len(
        set().union(*stems.values())
    )
    for split in ("valid", "test"):  # these splits have at most one text of each group
        assert len(stems[split]) == sum(" code " in e.text for e in found.splits[split])
    kept = sum(map(len, found.splits.values()))
    (note,) = [
        note
        for note in found.notes.sentences
        if note.startswith("Of each group of near-duplicates")
    ]
    assert f" {len(MANY) + len(more) - kept} others removed" in note


def test_training_texts_equal_to_test_texts_are_removed(tmp_path) -> None:
    train, test = rows(40), rows(8, start=200)
    leaked = [{**test[0], "text": test[0]["text"].upper() + " !"}, {**test[1]}]
    put(tmp_path / "train.csv", as_csv([*train, *leaked]))
    put(tmp_path / "test.csv", as_csv(test))
    found = prepare(read_tables(str(tmp_path)))
    assert len(found.splits["test"]) == 8
    assert not {e.text for e in found.splits["train"]} & {row["text"] for row in (*leaked, *test)}
    assert any(
        n.startswith("Removed 2 examples of the split train, equal") for n in found.notes.sentences
    )


def test_splits_are_stratified_and_repeatable(tmp_path) -> None:
    unequal = [
        {**row, "label": "spam" if i % 10 == 0 else "ham"} for i, row in enumerate(rows(400))
    ]
    tables = read_tables(str(put(tmp_path / "a.csv", as_csv(unequal))))
    first, second = prepare(tables), prepare(tables)
    assert first == second
    sizes = {split: len(some) for split, some in first.splits.items()}
    assert sizes == {"train": 280, "valid": 40, "test": 80}
    for some in first.splits.values():
        assert sum(e.label == "spam" for e in some) == len(some) / 10


def test_rare_classes_are_in_every_split(tmp_path) -> None:
    """A proportional validation split would have no example of most of the eight classes with three texts."""
    found = rows(400, 1) + [{"text": sentence(900 + i), "label": f"rare{i % 8}"} for i in range(24)]
    made = prepare(read_tables(str(put(tmp_path / "a.csv", as_csv(found)))))
    for some in made.splits.values():
        counts = Counter(e.label for e in some)
        assert [counts[f"rare{k}"] for k in range(8)] == [1] * 8
    assert len({e.text for some in made.splits.values() for e in some}) == len(found)
    note = "Classes with few examples, so their scores depend on chance: 'rare0' (1 test, 1 validation)"
    assert any(line.startswith(note) and "'spam'" not in line for line in made.notes.sentences)


def test_note_names_classes_without_validation_examples(tmp_path) -> None:
    put(tmp_path / "train.csv", as_csv(rows(40)))
    put(tmp_path / "dev.csv", as_csv(rows(8, 1, start=100)))
    put(tmp_path / "test.csv", as_csv(rows(16, start=200)))
    found = prepare(read_tables(str(tmp_path)))
    assert any("'ham' (8 test, 0 validation)." in note for note in found.notes.sentences)


def test_rare_class_is_in_the_training_split_only(tmp_path) -> None:
    more = [{"text": sentence(900 + i), "label": "rare"} for i in range(2)]
    found = prepare(read_tables(str(put(tmp_path / "a.csv", as_csv([*MANY, *more])))))
    assert sum(e.label == "rare" for e in found.splits["train"]) == 2
    assert any("only in training: rare." in note for note in found.notes.sentences)


def test_validation_and_test_splits_of_large_tables_are_bounded(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(table_splits, "SHARES", {"test": (0.2, 30), "valid": (0.1, 10)})
    found = prepare(read_tables(str(put(tmp_path / "a.csv", as_csv(rows(400)))))).splits
    assert [len(found[split]) for split in ("train", "valid", "test")] == [360, 10, 30]


def test_note_names_labels_that_differ_only_in_case(tmp_path) -> None:
    mixed = [{**row, "label": ("spam", "Spam")[i % 2]} for i, row in enumerate(MANY)]
    found = prepare(read_tables(str(put(tmp_path / "a.csv", as_csv(mixed)))))
    assert (
        "The labels 'Spam' and 'spam' differ only in case, and are treated as different classes: write them alike in"
        " --data if they are one class." in found.notes.sentences
    )


def test_written_splits_are_read_by_training(tmp_path) -> None:
    """Class names such as "3" are read as names, not as numbers. An unchanged file keeps its modification time."""
    stars = [{"text": sentence(i), "label": (1, 3, 5)[i % 3]} for i in range(90)]
    found = prepare(read_tables(str(put(tmp_path / "a.jsonl", as_lines(stars)))))
    out = labelled_table.write(found, tmp_path / "out")
    times = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    labelled_table.write(found, tmp_path / "out")
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == times
    splits = {"train": "train", "valid": "validation", "test": "test"}
    data = {"source": f"files:{out}", "splits": splits, "fields": "text", "tfds_dir": ""}
    read, classes = load_labelled(ConfigDict(data))
    assert classes == ("1", "3", "5")
    for split, some in found.splits.items():
        assert [classes[k] for k in read[split].labels_E] == [e.label for e in some]
        assert [text for (text,) in read[split].texts] == [e.text for e in some]


def test_notes_list_every_row_that_is_left_out(tmp_path) -> None:
    """Blank labels, copies, texts without a most frequent label, and near-duplicates in validation or test."""
    more = [{"text": sentence(700 + i), "label": ""} for i in range(5)]
    more += [{"text": "the same text", "label": "ham"}] * 5
    more += [{"text": "either text", "label": label} for label in ("ham", "spam")]
    more += [{**row, "text": f"{row['text']} {k}!"} for k in (1, 2) for row in rows(8, start=800)]
    put(tmp_path / "dev.csv", as_csv([*rows(8, start=500), rows(1, start=800)[0]]))
    put(tmp_path / "train.csv", as_csv([*MANY, *more]))
    found = prepare(read_tables(str(tmp_path)))
    kept = {e.place for some in found.splits.values() for e in some}
    folder = labelled_table.write(found, tmp_path / "out")
    lines = (folder / "notes.txt").read_text().splitlines()[len(found.notes.sentences) :]
    reasons = dict(line.split(": ", 1) for line in lines)
    every = {f"train.csv line {n}" for n in range(2, 2 + 40 + len(more))}
    every |= {f"dev.csv line {n}" for n in range(2, 11)}
    assert reasons.keys() == every - kept and len(lines) == len(reasons)
    assert reasons["train.csv line 42"] == "the label in column label is missing"
    assert reasons["train.csv line 48"] == "same text as train.csv line 47"
    assert reasons["train.csv line 52"] == "no label of this text is the most frequent"
    assert reasons["train.csv line 54"] == "equal or nearly equal to dev.csv line 10"
    assert any(reason.startswith("nearly equal to train.csv") for reason in reasons.values())


def test_new_notes_on_the_data_of_existing_runs_are_written(tmp_path) -> None:
    found = prepare(read_tables(str(put(tmp_path / "a.csv", as_csv(MANY)))))
    labelled_table.write(found, tmp_path)
    (tmp_path / "runs").mkdir()
    labelled_table.write(replace(found, notes=replace(found.notes, rows=["more"])), tmp_path)
    assert (tmp_path / "data" / "notes.txt").read_text().endswith("\nmore\n")


def test_data_of_existing_runs_are_not_overwritten(tmp_path) -> None:
    first, second = (
        prepare(read_tables(str(put(tmp_path / name, as_csv(found)))))
        for name, found in (("a.csv", MANY), ("b.csv", rows(50)))
    )
    folder = labelled_table.write(first, tmp_path / "out")
    before = (folder / "train.jsonl").read_bytes()
    (tmp_path / "out" / "runs").mkdir()
    with pytest.raises(
        UserError, match=r"has runs, and .* would change their data \(notes.txt, test.json"
    ):
        labelled_table.write(second, tmp_path / "out")
    assert (folder / "train.jsonl").read_bytes() == before


def test_data_of_a_user_are_not_overwritten(tmp_path) -> None:
    """The user's folder has the names of the written files. Hidden files, as macOS writes them, are no reason."""
    found = prepare(read_tables(str(put(tmp_path / "a.csv", as_csv(MANY)))))
    folder = tmp_path / "out" / "data"
    put(folder / ".DS_Store", b"\x00")
    labelled_table.write(found, tmp_path / "out")
    labelled_table.write(
        replace(found, notes=replace(found.notes, rows=["more"])), tmp_path / "out"
    )
    for name in ("train.jsonl", "notes.txt"):
        put(folder / name, "of the user")
    with pytest.raises(UserError, match=r"out/data has files that this program did not write"):
        labelled_table.write(found, tmp_path / "out")
    assert (folder / "train.jsonl").read_text() == "of the user"


def test_interrupted_write_can_be_repeated(tmp_path, monkeypatch) -> None:
    found = prepare(read_tables(str(put(tmp_path / "a.csv", as_csv(MANY)))))
    replaced, move = [], Path.replace

    def interrupted(path: Path, target: Path) -> Path:
        if replaced:
            raise KeyboardInterrupt
        replaced.append(target.name)
        return move(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            labelled_table.write(found, tmp_path / "out")
    folder = labelled_table.write(found, tmp_path / "out")
    assert len(replaced) == 1 and len(list(folder.iterdir())) == 5


@pytest.mark.parametrize("seed", range(3))
def test_near_duplicate_groups_match_exhaustive_comparison(seed) -> None:
    """The reference compares all pairs of texts. Twenty texts are copies of other texts with one changed word."""
    generator = np.random.default_rng(seed)
    words = [f"w{chr(97 + i)}{chr(97 + j)}" for i in range(20) for j in range(20)]
    texts = [" ".join(generator.choice(words, 12)) for _ in range(60)]
    for text in texts[:20]:
        changed = text.split()
        changed[generator.integers(12)] = "changed"
        texts.append(" ".join(changed))

    def pairs(text: str) -> set[tuple[str, str]]:
        split = ["<", *text.split(), ">"]
        return set(pairwise(split))

    sets = [pairs(text) for text in texts]
    number = np.arange(len(texts))
    for i, a in enumerate(sets):
        for j, b in enumerate(sets[:i]):
            if len(a & b) >= near_duplicates.SIMILAR * len(a | b):
                number[number == number[i]] = number[j]
    found = near_duplicates.groups(texts)
    assert 20 < len(set(found.tolist())) < 80
    np.testing.assert_array_equal(found[:, None] == found[None], number[:, None] == number[None])


CHARACTERS = "天地人山水火木金土日月星云雨风雪花草树鸟鱼马牛羊春夏秋冬东西南北上下左右大小多少"


def chinese(number: int) -> str:
    return "".join(np.random.default_rng(number).choice(list(CHARACTERS), 16))


def test_near_duplicates_in_chinese_stay_in_one_split(tmp_path) -> None:
    """Each of sixty sentences without spaces has three variants.

    One is unchanged, one has one more character at the end, and one has one more character at each end.
    """
    variants = ("{}", "{}了", "请{}！")
    texts = [variant.format(chinese(i)) for i in range(60) for variant in variants]
    found = near_duplicates.groups(texts).reshape(60, 3)
    assert (found == found[:, :1]).all() and len(set(found[:, 0].tolist())) == 60
    labelled = [{"text": text, "label": "ab"[i // 3 % 2]} for i, text in enumerate(texts)]
    path = put(tmp_path / "a.csv", as_csv(labelled))
    splits = prepare(read_tables(str(path)), text=("text",)).splits
    source = {text: i // 3 for i, text in enumerate(texts)}
    sentences = [{source[e.text] for e in some} for some in splits.values()]
    assert sum(map(len, sentences)) == 60 == len(set().union(*sentences))


@pytest.mark.parametrize(
    "make",
    [
        lambda i: f"w{i}",
        lambda i: f"{i} {i * 3} {i * 7} 2",
        lambda i: f"item w{i} w{i * 3} and w{i * 7} or w{i * 9}",
    ],
)
def test_texts_with_different_numbers_and_few_words_are_different(tmp_path, make) -> None:
    """The digits of a text with few other words are compared. Without them, all texts here would be equal."""
    texts = [make(i) for i in range(60)]
    assert len(set(near_duplicates.groups(texts).tolist())) == 60
    labelled = [{"text": text, "label": "ab"[i % 2]} for i, text in enumerate(texts)]
    found = prepare(read_tables(str(put(tmp_path / "a.csv", as_csv(labelled)))), text=("text",))
    assert sum(map(len, found.splits.values())) == 60


def test_underscores_are_punctuation() -> None:
    assert near_duplicates.groups(["a _very_ good film", "a very good film"]).tolist() == [0, 0]


def test_values_of_numbers_in_sentences_are_ignored() -> None:
    texts = ["Your code is 1234", "your code is 9876!", "Your bill is 1234", "Code 1", "code 2"]
    assert near_duplicates.groups(texts).tolist() == [0, 0, 1, 2, 3]


class Examples(list):
    """Stands for a split of the Hugging Face data set team/mails, version abc123, that was read from the cache."""

    cache_files = ({"filename": "cache/team___mails/default/0.0.0/abc123/mails-train.arrow"},)

    @property
    def features(self) -> dict[str, SimpleNamespace]:
        return {"text": SimpleNamespace(), "label": SimpleNamespace(names=["spam", "ham"])}


def fake_datasets(monkeypatch, load) -> None:
    module = ModuleType("datasets")
    module.load_dataset = load
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")


def test_hugging_face_data_are_read_from_the_cache(monkeypatch, tmp_path) -> None:
    asked = []

    def load(name, revision):
        asked.append((name, revision, os.environ["HF_HUB_OFFLINE"]))
        return {"train": Examples({"text": r["text"], "label": i % 2} for i, r in enumerate(MANY))}

    fake_datasets(monkeypatch, load)
    assert examples("hf:team/mails@abc123") == WANTED
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert examples("hf:team/mails", download=True) == WANTED
    assert asked == [("team/mails", "abc123", "1"), ("team/mails", None, "0")]
    told = refused("hf:team/mails@v2")
    assert (
        "@v2: the newest version in the local cache is abc123; add --download to fetch v2" in told
    )
    assert examples("hf:team/mails@v2", download=True) == WANTED
    put(tmp_path / "datasets--team--mails" / "refs" / "v2", "abc123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert examples("hf:team/mails@v2") == WANTED


def test_hugging_face_errors(monkeypatch) -> None:
    def load(name, revision):
        raise ConnectionError("not in the\ncache")

    fake_datasets(monkeypatch, load)
    advice = "; or save the examples as a CSV file and give it by --data=FILE"
    assert (
        f"not in the cache; if the data set is not in the local cache, add --download to fetch it{advice}"
        in (refused("hf:team/mails"))
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert f"check the name, the network and the free disk space{advice}" in (
        refused("hf:team/mails", download=True)
    )
    # A read without `download` makes the process offline.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert (
        "HF_HUB_OFFLINE=1 forbids downloads in this process; unset it and start Python again"
        in (refused("hf:team/mails", download=True))
    )
    fake_datasets(monkeypatch, lambda name, revision: {"test": Examples()})
    assert "has no split train (its splits: test)" in refused("hf:team/mails")
    for module in (
        None,
        ModuleType("datasets"),
    ):  # a folder named "datasets" is a module without functions
        monkeypatch.setitem(sys.modules, "datasets", module)
        assert "needs the package datasets, which cannot be imported (" in refused("hf:team/mails")


@pytest.mark.parametrize("package", ["pyarrow", "pyarrow.parquet"])
def test_missing_pyarrow_is_named(tmp_path, monkeypatch, package) -> None:
    path = put(tmp_path / "a.parquet", as_parquet(MANY))
    monkeypatch.setitem(sys.modules, package, None)
    assert "a.parquet needs the package pyarrow, which cannot be imported" in refused(path)


CACHED = """
import sys
from pathlib import Path
import datasets
from datasets.arrow_writer import ArrowWriter
from common.errors import UserError
from perception.labelled_table import prepare
from perception.table_reader import read_tables

sys.path.insert(0, sys.argv[1])
from rows import MANY

names = ["spam", "ham"]
folder = Path(datasets.config.HF_DATASETS_CACHE, "team___mails", "default", "0.0.0", "a" * 40)
folder.mkdir(parents=True)
kinds = {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)}
features = datasets.Features(kinds)
with ArrowWriter(path=str(folder / "mails-train.arrow"), features=features) as writer:
    for row in MANY:
        writer.write({"text": row["text"], "label": names.index(row["label"])})
    count, size = writer.finalize()
given = {"name": "train", "num_bytes": size, "num_examples": count, "dataset_name": "mails"}
datasets.DatasetInfo(
    features=features, builder_name="parquet", dataset_name="mails", config_name="default",
    version="0.0.0", splits={"train": given},
).write_to_directory(str(folder))
found = prepare(read_tables("hf:team/mails@" + "a" * 40)).splits
assert sorted((e.text, e.label) for some in found.values() for e in some) == sorted(
    (row["text"], row["label"]) for row in MANY
)
for name in ("team/other", "team/mails@" + "b" * 40):
    try:
        read_tables("hf:" + name)
    except UserError as error:
        print(error)
"""
"""Program that writes a data set into the cache of the library `datasets`, and reads it without network access."""


def test_cache_of_the_datasets_library_is_read(tmp_path) -> None:
    pytest.importorskip("datasets")
    put(tmp_path / "rows.py", f"MANY = {MANY!r}")
    offline = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CACHED, tmp_path],
        env=os.environ | offline,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "cannot read --data=hf:team/other" in done.stdout
    assert f"the newest version in the local cache is {'a' * 40}; --download" in done.stdout


def test_note_on_contradictory_labels_names_rows_with_different_labels() -> None:
    labels = enumerate(("ham", "ham", "spam"), start=2)
    same = [table_splits.Example(f"line {n}", ("a text",), label) for n, label in labels]
    notes = table_splits.Notes()
    (kept,) = table_splits.without_copies("all", same, notes, strict=False)
    assert (kept.place, kept.label) == ("line 2", "ham")
    assert "(line 2 and line 4)" in notes.sentences[0] and len(notes.sentences) == 2
    assert notes.rows == [f"line {n}: same text as line 2" for n in (3, 4)]
