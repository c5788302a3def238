"""Bad input of perception.worth, perception.classify and perception.adapters gives an error of one clear line."""

import gzip
import json
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

from common.data.labelled import LabelledText
from common.errors import UserError
from configs import perception as recipes
from perception import adapters, baseline, classify, peft_format, worth
from perception.adapter_arithmetic import Adapter
from perception.adapter_commands import MARK
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

PROGRAMS = {"worth": worth, "classify": classify, "adapters": adapters}

Case = tuple[str, dict[str, str | bytes], str]
"""(command, {name: content} of the files in the current folder, part of the message)."""

FEW = as_csv(rows(20))

NEAR = [{"text": sentence(0) + mark, "label": label} for mark, label in ((" !", "a"), (" ?", "b"))]
"""Near-duplicates of `sentence(0)`, with the labels "a" and "b"."""

TWICE = as_parquet(MANY, ["text", "text"])


def data(content: str | bytes, message: str, options: str = "", name: str = "a.csv") -> Case:
    """Returns a case of perception.worth: a table with the given content, and a part of the error message."""
    return f"worth --data {name} {options}", {name: content}, message


def folder(files: dict[str, str | bytes], message: str) -> Case:
    """Returns a case of perception.worth: a folder with the given files, and a part of the error message."""
    return "worth --data data", {f"data/{name}": x for name, x in files.items()}, message


def strict(row: dict, message: str) -> Case:
    """Returns a case of perception.worth: a table whose row 41 is unusable, which is an error with --strict."""
    return data(as_lines([*MANY, row]), f"a.jsonl line 41: {message}", "--strict", "a.jsonl")


def new(content: str | bytes, message: str, options: str = "", name: str = "new.csv") -> Case:
    """Returns a case of perception.classify: a table with the given content, and a part of the error message."""
    return f"classify --run=tfidf_run --input={name} {options}", {name: content}, message


BAD = {
    # Files
    "missing file": ("worth --data gone.csv", {}, "--data=gone.csv: no such file or folder"),
    "unknown ending": data(
        b"PK",
        "--data=a.xlsx has a name that ends with none of .csv, .tsv, .jsonl, .parquet",
        name="a.xlsx",
    ),
    "empty file": data(b"", "a.csv is empty"),
    "white space alone": data(b"\n\n", "a.csv is empty"),
    "header alone": data("text,label\n", "--data=a.csv has no row: add rows"),
    "broken gz": data(b"no gzip", "is damaged or truncated", name="a.csv.gz"),
    "truncated gz": data(
        gzip.compress(as_csv(rows(300)).encode(), mtime=0)[:-20],
        "is damaged or truncated",
        name="a.csv.gz",
    ),
    "empty parquet": data(
        b"", "a.parquet is damaged: Parquet file size is 0 bytes", name="a.parquet"
    ),
    "empty gz": data(gzip.compress(b"", mtime=0), "is empty", name="a.csv.gz"),
    "gzip named CSV": data(
        gzip.compress(as_csv(MANY).encode(), mtime=0),
        "a.csv is compressed with gzip: unpack it, or add .gz to its name",
    ),
    "gzip named JSON lines": data(
        gzip.compress(as_lines(MANY).encode(), mtime=0),
        "a.jsonl is compressed with gzip",
        name="a.jsonl",
    ),
    "xlsx named CSV": data(
        b"PK\x03\x04\x14\x00\x06\x00[Content_Types].xml\xff",
        "a.csv is an Excel file or another zip archive: save the table as CSV",
        "--encoding=cp1252",
    ),
    "xls named CSV": data(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "a.csv is an Excel file"),
    "broken parquet": data(b"PAR1 broken", "a.parquet is damaged", name="a.parquet"),
    # Encodings
    "not UTF-8": data(b"text,label\nf\xfcr,a\n", "line 2 is not UTF-8: name the encoding"),
    "UTF-16 without mark": data(as_csv(MANY).encode("utf-16-le"), "contains NUL bytes"),
    "truncated UTF-16": data(as_csv(MANY).encode("utf-16")[:-1], "is not UTF-16"),
    "wrong encoding": data("text,label\nfür,a\n", "line 2 is not ASCII", "--encoding=ascii"),
    "unknown encoding": data(
        as_csv(MANY), "--encoding=klingon is not the name of a text encoding", "--encoding=klingon"
    ),
    "encoding of bytes": data(
        as_csv(MANY), "--encoding=base64 is not the name of a text encoding", "--encoding=base64"
    ),
    "encoding of nothing": data(
        as_csv(MANY), "--encoding=undefined is not the name", "--encoding=undefined"
    ),
    # Rows
    "open quote": data(
        as_csv(MANY[:5]) + '"open,spam\n' + as_csv(MANY[5:]),
        "line 7 or a later line opens a quote that is never closed",
    ),
    "open quote before a million characters": data(
        'text,label\n"' + "word " * 200_000, "line 2 or a later line opens a quote"
    ),
    "ragged throughout": data("text,label\na\nb\n", "a different number of columns"),
    "ragged row": data(
        as_csv(MANY) + "a,b,c\n", "line 42 has a different number of columns", "--strict"
    ),
    "repeated column": data("text,text,label\n1,2,3\n", "repeats the column 'text'"),
    "two repeated columns": data(
        "text,text,label,label\n1,2,3,4\n", "repeats the columns 'label' and 'text'"
    ),
    "two columns without a name": data(
        "text,label,,\n1,2,,\n",
        "repeats the column '': give each column its own name, or remove the repetitions",
    ),
    "repeated column in parquet": data(
        TWICE, "a.parquet repeats the column 'text': give", name="a.parquet"
    ),
    "JSON list": data(json.dumps(MANY), "line 1 is not a JSON object", name="a.jsonl"),
    "indented JSON": data(json.dumps(MANY, indent=1), "is not JSON", name="a.jsonl"),
    "deep JSON": data("[" * 100_000, "is not JSON", name="a.jsonl"),
    "text null": strict({"text": None, "label": "spam"}, "no text in the column text"),
    "text blank": strict({"text": " \t ", "label": "spam"}, "no text in the column text"),
    "text number": strict(
        {"text": 7, "label": "spam"},
        "the column text has a value of the type int instead of text",
    ),
    "text NaN": strict(
        {"text": float("nan"), "label": "spam"}, "the column text has a value of the type float"
    ),
    "text surrogate": strict(
        {"text": "\ud800", "label": "spam"}, "the column text contains half of a surrogate pair"
    ),
    "label null": strict({"text": "x", "label": None}, "the label in column label is missing"),
    "label NaN": strict(
        {"text": "x", "label": float("nan")}, "the label in column label is missing"
    ),
    "label absent": strict({"text": "x"}, "the label in column label is missing"),
    "label list": strict(
        {"text": "x", "label": ["a", "b"]},
        "the label in column label is of the type list: write one class in each row, or a list of classes in each",
    ),
    "labels that are dictionaries": data(
        as_lines([{**row, "label": {"name": row["label"]}} for row in MANY]),
        "a.jsonl line 1: the label in column label is of the type dict: write one class in each row",
        name="a.jsonl",
    ),
    "labels that are lists, and a separator": data(
        as_lines([{**row, "label": [row["label"]]} for row in MANY]),
        "the label in column label is of the type list, but --separator needs text",
        "--separator=;",
        "a.jsonl",
    ),
    "text as a column of 0 and 1": data(
        as_csv([{"text": "x", "a": 1, "b": sentence(i, 100)} for i in range(9)]),
        "with several --label columns, the column b must have one of 1, 1.0, true, 0, 0.0, false, got 'seven",
        "--text=text --label=a --label=b",
    ),
    "label surrogate": strict(
        {"text": "x", "label": "\ud800"}, "the label '\\ud800' contains half of a surrogate pair"
    ),
    # Columns
    "missing text column": data(as_csv(MANY), "did you mean text?", "--text=txt"),
    "missing label column": data(as_csv(MANY), "did you mean label?", "--label=labl"),
    "text column twice": data(
        as_csv(MANY), "--text=text is given more than once", "--text=text --text=text"
    ),
    "text as label": data(
        as_csv(MANY), "--label=text is also a column of --text", "--text=text --label=text"
    ),
    "one column": data(
        "text\nhello\nworld\n", "--data has only 1 column ('text'), but needs 2: a column of texts"
    ),
    "commas in a TSV file": data(
        as_csv(MANY),
        "has only 1 column ('text,label'), but needs 2: a column of texts and a column of labels; add the missing"
        " columns, or separate the columns in a .tsv file by tabs",
        name="a.tsv",
    ),
    "no label column": data(
        as_csv([{"text": sentence(i), "id": i} for i in range(20)]),
        "the column of --label cannot be recognised: name it with --label=NAME; the columns are",
    ),
    "two text columns": data(
        as_csv(
            [{"a": sentence(i), "b": sentence(i + 99), "label": "xy"[i % 2]} for i in range(20)]
        ),
        "the column of --text could be a or b: name it with --text=NAME; the columns are a, b, label",
    ),
    "two label columns": data(
        as_csv([{"text": sentence(i), "x": i % 2, "y": i % 3} for i in range(60)]),
        "the column of --label could be x or y",
    ),
    "no header, known label": data(
        "".join(f"{'spam' if i % 2 else 'ham'}\t{i}, hello you\n" for i in range(60)),
        "the first row of --data looks like an example ('ham'), not like names of columns:"
        " add a header with the names of the columns, such as text and label; if this row is the header, name its"
        " columns with both",
        name="a.tsv",
    ),
    "no header, long text": data(
        "I did not like this one,rare\n" + "".join(f"{sentence(i)},{i % 2}\n" for i in range(60)),
        "looks like an example ('I did not like this one'), not like names of columns: add a header",
    ),
    "no header, the label column named": data(
        "".join(f"{sentence(i)},{i % 2}\n" for i in range(60)),
        "looks like an example ('seven green table stone cloud apple a'), not like names of columns: add a header",
        "--label=0",
    ),
    "no header, a label that is a common name": data(
        "".join(f"{'claim' if i % 2 else 'question'},{sentence(i)}\n" for i in range(60)),
        "not like names of columns: add a header with the names of the columns, such as text and label; if",
    ),
    # Labels
    "one class": data(number_rows(lambda i: "same"), "has a single class, 'same'"),
    "labels that are ids": data(number_rows(lambda i: f"id{i}"), "occur only once, like ids"),
    "whole numbers as ids": data(number_rows(lambda i: 10_000 + i), "occur only once, like ids"),
    "few texts": data(
        as_csv(rows(5, 4)),
        "more than half of its labels (3 of 5) occur only once, like ids or texts; name a column of classes, or add",
        "--label=label",
    ),
    "regression target": data(
        number_rows(lambda i: f"{i / 7:.2f}"),
        "--label=label has 60 different numbers (0.00, 0.14, 0.29, ...) among 60 labels and looks like a regression"
        " target: predicting a number is regression, which this program does not do; write the classes as words",
    ),
    "score from 0 to 100": data(
        number_rows(lambda i: i * 37 % 101, 400),
        "--label=label has 101 different numbers (0, 37, 74, ...) among 400 labels and looks like a regression target",
        "--label=label",
    ),
    "ten thousand classes": data(
        number_rows(lambda i: f"class {i % 10_000}", 20_000),
        "has 10,000 classes, more than 1,000",
        "--label=label",
    ),
    "labels all missing": data(number_rows(lambda i: ""), "--data has no usable row (a.csv line 2"),
    # Too few texts, and texts with contradictory labels
    "too few texts": data(as_csv(rows(4)), "too few", "--text=text --label=label"),
    "one text of each class": data(as_csv(rows(2)), "too few", "--text=text --label=label"),
    "two texts of each class": data(
        number_rows(lambda i: f"class {i % 30:02}"),
        "no class has 3 or more different texts, where nearly equal texts count once: add texts until at"
        " least two classes",
        "--text=text --label=label",
    ),
    "texts of one class, nearly equal to all others": data(
        as_csv([*({"text": sentence(i), "label": "a"} for i in range(9)), *NEAR]),
        "only the class 'a' has 3 or more different texts, where nearly equal texts count once: add texts",
        "--text=text",
    ),
    "the same classes in all texts": data(
        as_lines([{"text": sentence(i), "label": ["a", "b"]} for i in range(9)]),
        "only the class 'a' has 3 or more different texts, where nearly equal texts count once, and a text only for its"
        " rarest class: add texts",
        name="a.jsonl",
    ),
    "one text with all labels": data(
        "text,label\n" + "same text,a\nSame  text,b\n" * 9,
        "every text occurs equally often with different labels",
        "--text=text",
    ),
    "contradictory labels": data(
        as_csv([*MANY, {"text": MANY[0]["text"].upper(), "label": "ham"}]),
        "--strict refuses 1 text, each in several rows with different labels",
        "--strict",
    ),
    # Folders
    "no table": folder(
        {"notes.txt": "hello"},
        "no table (.csv, .tsv, .jsonl, .parquet) in this folder; its files: notes.txt; name another",
    ),
    "mixed formats": folder(
        {"a.csv": FEW, "b.jsonl": as_lines(MANY)}, "mixes .csv and .jsonl files"
    ),
    "same tables twice": folder(
        {
            name: gzip.compress(FEW.encode()) if name.endswith(".gz") else FEW
            for name in ("a.csv", "a.csv.gz", "b.csv", "b.csv.gz")
        },
        "names differ only in .gz or in case (a.csv and a.csv.gz; b.csv and b.csv.gz)",
    ),
    "two validation splits": folder(
        {"train.csv": FEW, "dev.csv": FEW, "validation.csv": FEW},
        "several files for the split valid: validation.csv and dev.csv; keep one",
    ),
    "test alone": folder(
        {"test.csv": FEW},
        "has test.csv, but no train.csv or train.csv.gz with the training examples: add such a file",
    ),
    "test and other files": folder(
        {"test.csv": FEW, "mails.csv.gz": gzip.compress(FEW.encode())},
        "has test.csv, but no train.csv or train.csv.gz with the training examples: replace mails.csv.gz by such",
    ),
    "splits and more": folder(
        {"train.csv": FEW, "old.csv": FEW},
        "has train.csv, so every table must have the name of a split (train, validation or test): rename old.csv, or",
    ),
    "unusable split": folder(
        {"train.csv": FEW + "a text,\n", "test.csv": "text,label\n,ham\n"},
        "--data has no usable row of the split test (test.csv line 2: no text in the column text): correct the rows",
    ),
    "labels only in the test": folder(
        {
            "train.csv": FEW,
            "test.csv": as_csv([*rows(8, start=50), {"text": "x y", "label": "new"}]),
        },
        "the label 'new' of 1 example of the split test occurs in no training example, apart from texts nearly equal"
        " to validation or test texts; add training examples",
    ),
    "duplicates across splits": folder(
        {"train.csv": FEW, "test.csv": FEW},
        "no usable example of the split train, because all are equal or nearly equal to examples of test:",
    ),
    "damaged labels.json": folder({"a.csv": FEW, "labels.json": "{"}, "labels.json is damaged"),
    # Tables for classify
    "new: ragged": new("text,x\none,1\ntwo\n", "new.csv line 3 has a different number of columns"),
    "new: open quote": new('text\n"one\n', "new.csv line 2 or a later line opens a quote"),
    "new: not UTF-8": new(b"text\none\ntw\xff\n", "new.csv line 3 is not UTF-8: name the encoding"),
    "new: missing column": new(
        "body\none\n",
        "no column text or sentence; its columns: 'body'; add the column, or name the text column with --text=NAME",
    ),
    "new: label exists": new(
        "text,label\none,a\n",
        "line 1: the input already has the column label, which the output adds: choose another name for the label",
    ),
    "new: probabilities exist": new(
        "text,probability,label\none,1,a\n",
        "already has the columns label and probability, which the output adds: rename these columns of the input",
    ),
    "new: missing file": (
        "classify --run=tfidf_run --input=gone.csv",
        {},
        "--input=gone.csv is not a file that can be read: give the path of a",
    ),
    "new: folder": (
        "classify --run=tfidf_run --input=new",
        {"new/a.csv": "text\n"},
        "--input=new is not a file that can be read: give the path of a",
    ),
    "new: empty": new(b"", "new.csv is empty"),
    "new: repeated column": new("text,text\none,two\n", "line 1 repeats the column 'text'"),
    "new: label exists in parquet": new(
        as_parquet([{"text": "a", "label": "b"}]),
        "new.parquet: the input already has the column label, which the output adds",
        name="new.parquet",
    ),
    "new: JSON list": new('{"text": "a"}\n[1]\n', "line 2 is not a JSON object", name="new.jsonl"),
    "new: broken JSON": new('{"text": "a"}\n{\n', "line 2 is not JSON", name="new.jsonl"),
    "new: deep JSON": new("[" * 100_000, "line 1 is not JSON", name="new.jsonl"),
    "new: number": new('{"text": 3}\n', "the column text must have text, got 3", name="new.jsonl"),
    "new: surrogate": new(
        '{"text": "\\ud800"}\n',
        "the column text contains half of a surrogate pair",
        name="new.jsonl",
    ),
    "new: broken parquet": new(b"no", "new.parquet is damaged", name="new.parquet"),
    "new: truncated gz": new(
        gzip.compress(b"text\none\n", mtime=0)[:-4],
        "new.csv.gz is damaged or truncated",
        name="new.csv.gz",
    ),
    "new: gzip named CSV": new(gzip.compress(b"text\none\n", mtime=0), "is compressed with gzip"),
    "new: xlsx named CSV": new(b"PK\x03\x04\xff", "is an Excel file or another zip archive"),
    "new: unknown ending": new(
        b"",
        "--input=new.xlsx has a name that ends with none of .csv, .tsv, .jsonl, .parquet, .txt",
        name="new.xlsx",
    ),
    # Weights
    "weights of another family": (
        "worth --data a.csv --config.pretrained=weights",
        {"a.csv": as_csv(MANY), "weights/config.json": '{"model_type": "t5"}'},
        "model_type",
    ),
    "adapter of another base": (
        "adapters merge --adapter=adapter --pretrained=base --out=merged",
        {},
        "--adapter=adapter was not trained on the weights in base",
    ),
    "adapter of a deeper base": (
        "adapters merge --adapter=deep --out=merged",
        {},
        "up, which is missing in the weights in /",
    ),
}


@pytest.fixture(scope="module")
def tfidf_run(tmp_path_factory) -> Path:
    """Returns the workdir of a run of the TF-IDF baseline."""
    texts = LabelledText([("a b",), ("c d",)] * 9, np.tile(np.int32([0, 1]), 9))
    workdir = tmp_path_factory.mktemp("tfidf_run")
    baseline.run(recipes.get_config("tiny"), {"train": texts, "test": texts}, ("x", "y"), workdir)
    return workdir


def write_adapter(adapter: Path, base: Path, layer: int = 0) -> None:
    """Writes a PEFT adapter of a layer of BERT, with a fingerprint that is not the fingerprint of `base`."""
    adapter.mkdir()
    values = np.ones((16, 1), np.float32), np.ones((1, 24), np.float32)
    layers = {f"stack/blocks/{layer}/residuals/1/function/up": values}
    peft_format.write(adapter, Adapter("0" * 64, layers), "bert", None, base)
    (adapter / MARK).write_text(json.dumps({"base": "0" * 64, "family": "bert"}))


@pytest.mark.parametrize("case", BAD)
def test_bad_input_raises_one_line_errors(case, tmp_path, tfidf_run, request, monkeypatch) -> None:
    command, files, message = BAD[case]
    for name, content in files.items():
        put(tmp_path / name, content)
    monkeypatch.chdir(tmp_path)
    program, *options = shlex.split(command)
    if program == "classify":
        (tmp_path / "tfidf_run").symlink_to(tfidf_run)
    if program == "adapters":
        (tmp_path / "base").symlink_to(request.getfixturevalue("pretrained"))
        write_adapter(tmp_path / "adapter", tmp_path / "base")
        write_adapter(tmp_path / "deep", tmp_path / "base", layer=1)
        (tmp_path / "deep" / MARK).unlink()  # as in an adapter that PEFT has trained
    monkeypatch.setattr(sys, "argv", [program, *options])
    with pytest.raises(UserError) as caught:
        PROGRAMS[program].main()
    told = str(caught.value)
    assert message in told and "\n" not in told and len(told) < 700
    assert not list(tmp_path.rglob("runs/*/runs"))  # training would have written these folders
