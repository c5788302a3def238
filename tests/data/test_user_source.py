"""Data from a user's function."""

import ast
import json
import re
from pathlib import Path

import numpy as np
import pytest
from ml_collections import ConfigDict

from common.data.byte_text import load_bytes
from common.data.labelled import load_labelled
from common.data.records import open_records
from common.data.text import load_text
from common.data.user_source import user_examples
from common.errors import UserError
from common.train.finished import changed
from reservoir.parallel_text import load_parallel

TEXTS = {"train": ["ein Haus", "", "zwei Häuser"], "valid": ["drei"], "test": []}


def texts(split):
    return TEXTS[split]


def pairs(split):
    return ((text, text.upper()) for text in texts(split))


def rows(split):
    return [{"text": text, "label": len(text) % 2} for text in texts(split)]


def unlabelled(split):
    return [{"text": text, "label": -1} for text in texts(split)]


def returns_text(split):
    return "ein Haus"


def returns_none(split):
    pass


def takes_no_split():
    return ["ein Haus"]


def raises_os_error(split):
    raise OSError("no disk")


def no_text(split):
    raise OSError


def no_python(split):
    return ast.literal_eval("[1, 2")


def raises_json_error(split):
    return json.loads(split)


def data(function: str) -> ConfigDict:
    fields = {"source": f"import:{__name__}:{function}", "documents": "line", "splits": {}}
    return ConfigDict(fields | {"source_language": "de", "target_language": "en"})


def test_user_function_gives_documents_and_their_bytes(monkeypatch):
    assert load_text(data("texts"), "train") == ["ein Haus", "zwei Häuser"]
    monkeypatch.setitem(TEXTS, "test", ["vier"])
    found = load_bytes(data("texts"))
    assert found["train"].tobytes().decode() == "ein Haus\n\nzwei Häuser"
    assert found["train"].dtype == np.uint8 and set(found) == {"train", "valid", "test"}


def test_splits_of_blank_texts_raise_errors(monkeypatch):
    monkeypatch.setitem(TEXTS, "test", [""])
    with pytest.raises(UserError, match=r"import:.*:texts has only blank text in its test split"):
        load_text(data("texts"), "test")
    with pytest.raises(UserError, match=r"the test split of .*import:.*:texts has no bytes"):
        load_bytes(data("texts"))


def test_user_function_gives_sentence_pairs():
    text = load_parallel(data("pairs"), "train")
    assert (text.source, text.target) == (["ein Haus", "zwei Häuser"], ["EIN HAUS", "ZWEI HÄUSER"])


def test_optional_split_of_labelled_texts_may_be_missing():
    splits = dict.fromkeys(TEXTS, "")
    source = data("rows").source
    found, classes = open_records(source, splits, "text", "label", optional=("test",))
    assert set(found) == {"train", "valid"} and classes is None
    place, fields = list(found["train"])[2]
    assert place == f"{source} example 3 of train"
    assert fields == {"text": "zwei Häuser", "label": 1}


def test_error_of_an_empty_split_advises_no_option_without_effect(monkeypatch):
    monkeypatch.setitem(TEXTS, "valid", [""])
    monkeypatch.setitem(TEXTS, "test", ["vier"])
    config = data("unlabelled")
    config.update({"fields": "text", "tfds_dir": "", "splits": {"valid": "validation"}})
    with pytest.raises(UserError, match=r"no labelled examples in its valid split: add examples$"):
        load_labelled(config, splits=("valid",), unlabelled=True)


def test_errors_name_the_split_that_the_function_receives(monkeypatch):
    monkeypatch.setitem(TEXTS, "train", [""])
    config = data("pairs")
    config.splits = ConfigDict({"train": "training"})
    with pytest.raises(UserError, match=r"no de-en sentence pair .* in split train: add"):
        load_parallel(config, "train")


def test_time_of_change_is_read_from_the_file_of_the_module():
    config = ConfigDict({"data": {"source": f"import:{__name__}:texts"}})
    file = Path(__file__).stat()
    assert changed(config) == max(file.st_mtime, file.st_ctime)
    config.data.source = "import:removed.module:texts"
    assert changed(config) == 0


@pytest.mark.parametrize(
    "example", [(1, 2), ("ein", "Haus", "house"), ("Haus",), ("Haus", None)], ids=str
)
def test_examples_that_are_no_sentence_pairs_raise_one_line_errors(monkeypatch, example):
    monkeypatch.setitem(TEXTS, "valid", [("Haus", "house"), example])
    wrong = f"import:{__name__}:texts: example 2 of split 'valid' is {example!r} instead of a pair of sentences"
    with pytest.raises(UserError, match=re.escape(wrong)):
        load_parallel(data("texts"), "valid")


@pytest.mark.parametrize(
    "example", ["half \ud83d", ("ein Haus", "half \ud83d")], ids=["text", "pair"]
)
def test_lone_surrogate_raises_one_line_error(monkeypatch, example):
    monkeypatch.setitem(TEXTS, "train", [type(example)(), example])
    line = "example 2 of split 'train' contains a lone surrogate .*, such as .ud83d"
    with pytest.raises(UserError, match=line):
        user_examples(data("texts").source, "train", (str, tuple), "a text")


def test_source_without_a_function_raises_an_error():
    source = f"import:{__name__}"
    for wrong, right in ((source, f"{source}:NAME"), ("import:", "import:MODULE:NAME")):
        line = f"^--config.data.source={wrong} lacks the name of a function .*={right}$"
        with pytest.raises(UserError, match=line):
            user_examples(wrong, "train", str, "a text")


@pytest.mark.parametrize(
    ("function", "split", "line"),
    [
        (
            "missing",
            "train",
            "source=import:.*:missing cannot be imported: .* has no attribute 'missing'",
        ),
        (
            "raises_os_error",
            "train",
            "fails for split 'train': OSError in .*test_user_source.py, line .*: no disk",
        ),
        (
            "no_text",
            "train",
            r"fails for split 'train': OSError in no_text .*test_user_source.py, line [0-9]*\); correct this function$",
        ),
        (
            "no_python",
            "train",
            "fails for split 'train': SyntaxError in no_python .*test_user_source.py, line ",
        ),
        (
            "raises_json_error",
            "train",
            "fails for split 'train': JSONDecodeError in .*test_user_source.py, line ",
        ),
        (
            "texts",
            "other",
            "fails for split 'other': KeyError in .*test_user_source.py, line .*: 'other'",
        ),
        ("texts", "test", "returns no example for split 'test'"),
        ("rows", "train", "example 1 of split 'train' is of type dict instead of a text"),
        ("returns_text", "train", "returns a str for split 'train': return a list of examples"),
        (
            "returns_none",
            "train",
            "fails for split 'train': TypeError: 'NoneType' object is not iter",
        ),
        (
            "takes_no_split",
            "train",
            r"fails for split 'train': TypeError: takes_no_split\(\) takes 0",
        ),
    ],
)
def test_invalid_functions_raise_one_line_errors(function, split, line):
    with pytest.raises(UserError, match=line) as caught:
        user_examples(data(function).source, split, str, "a text")
    assert "\n" not in str(caught.value)
