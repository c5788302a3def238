"""Examples with classes: three formats, the names of classes, and what is wrong with a file, by its line."""

import gzip
import json
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from common.data.labelled import load_labelled
from common.data.manual import SAME, TOPICS
from common.errors import UserError

GOOD = [{"text": "a good film", "label": 1}, {"text": "größer", "label": 0}]


def data(source: object, **fields: object) -> ConfigDict:
    splits = {"train": "train", "valid": "validation", "test": "test"}
    return ConfigDict(
        {"source": str(source), "splits": splits, "fields": "text|sentence", "tfds_dir": ""}
        | fields
    )


def lines(examples: list[dict]) -> str:
    return "".join(json.dumps(example) + "\n" for example in examples)


@pytest.fixture
def folder(tmp_path) -> Path:
    for split in ("train", "validation", "test"):
        (tmp_path / f"{split}.jsonl").write_text(lines(GOOD))
    return tmp_path


def test_json_lines_csv_and_gzip_are_read_alike(folder):
    (folder / "validation.jsonl").unlink()
    with gzip.open(folder / "validation.jsonl.gz", "wt") as file:
        file.write(lines(GOOD))
    (folder / "test.jsonl").unlink()
    (folder / "test.csv").write_text('label,sentence\n1,a good film\n0,"größer"\n')
    splits, classes = load_labelled(data(f"files:{folder}"))
    assert classes == ("0", "1")
    for text in splits.values():
        assert text.texts == [("a good film",), ("größer",)]
        assert text.labels_M.tolist() == [1, 0]


def test_a_quoted_field_of_a_csv_may_have_lines_and_commas(folder):
    (folder / "train.jsonl").unlink()
    (folder / "train.csv").write_text('text,label\n"one, two\nthree",0\nfour,1\n')
    assert load_labelled(data(f"files:{folder}"))[0]["train"].texts[0] == ("one, two\nthree",)


def test_pairs_have_two_fields(folder):
    for path in folder.iterdir():
        path.write_text(lines([{"a": "x", "b": "y", "label": k} for k in (0, 1)]))
    splits, _ = load_labelled(data(f"files:{folder}", fields="a b"))
    assert splits["train"].texts == [("x", "y"), ("x", "y")]


def test_names_come_from_labels_json_and_labels_may_be_names(folder):
    (folder / "labels.json").write_text('["neg", "pos", "none"]')
    (folder / "test.jsonl").write_text(lines([{"text": "x", "label": "pos"}]))
    splits, classes = load_labelled(data(f"files:{folder}"))
    assert classes == ("neg", "pos", "none")
    assert splits["test"].labels_M.tolist() == [1] and splits["train"].labels_M.tolist() == [1, 0]


def test_without_names_words_are_sorted(folder):
    for path in folder.iterdir():
        path.write_text(lines([{"text": "x", "label": "spam"}, {"text": "y", "label": "ham"}]))
    splits, classes = load_labelled(data(f"files:{folder}"))
    assert classes == ("ham", "spam") and splits["train"].labels_M.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"text": " ", "label": 0}', "the field text or sentence is empty"),
        ('{"text": 5, "label": 0}', "the field text or sentence is no text but 5"),
        ('{"words": "x", "label": 0}', "no field text or sentence; there are: words, label"),
        ('{"text": "x"}', "no field label; there are: text"),
        ('{"text": "x", "label": 2}', r"the label 2 is none of the 2 classes \(0 to 1: 0, 1\)"),
        ('{"text": "x", "label": -1}', "the label -1 is none of the 2 classes"),
        ('{"text": "x", "label": "good"}', "the label 'good' is none of the 2 classes"),
        ("x", "is no JSON"),
        ("[1]", "is no JSON object"),
        ("", "is no JSON"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(folder, line, told):
    path = folder / "validation.jsonl"
    path.write_text(lines(GOOD) + line + "\n")
    with pytest.raises(UserError, match=rf"^{path} line 3.*{told}"):
        load_labelled(data(f"files:{folder}"))


@pytest.mark.parametrize("row", ["x", "x,0,more"])
def test_a_row_of_a_csv_has_the_columns_of_its_header(folder, row):
    (folder / "test.jsonl").unlink()
    (folder / "test.csv").write_text(f"text,label\nx,0\n{row}\n")
    with pytest.raises(UserError, match="line 3 has other columns than line 1"):
        load_labelled(data(f"files:{folder}"))


@pytest.mark.parametrize("names", ["neg", '{"neg": 0}', '["neg", "neg"]', "[]"])
def test_damaged_names(folder, names):
    (folder / "labels.json").write_text(names)
    with pytest.raises(UserError, match=r"labels\.json"):
        load_labelled(data(f"files:{folder}"))


def test_what_is_not_there(folder):
    with pytest.raises(UserError, match="no directory"):
        load_labelled(data("files:nowhere"))
    with pytest.raises(UserError, match=r"it must be files:DIR, tfds:NAME or embedded:NAME"):
        load_labelled(data("hf:sst2"))
    with pytest.raises(UserError, match=r"there are: python, python_pairs"):
        load_labelled(data("embedded:java"))
    with pytest.raises(UserError, match="has examples of 2 texts"):
        load_labelled(data("embedded:python_pairs"))
    (folder / "test.jsonl").unlink()
    with pytest.raises(UserError, match=r"no test\.jsonl or .* there are: train\.jsonl, valid"):
        load_labelled(data(f"files:{folder}"))


def test_a_single_class_is_no_task(folder):
    (folder / "train.jsonl").write_text(lines([{"text": "x", "label": 0}]))
    with pytest.raises(UserError, match="a single class"):
        load_labelled(data(f"files:{folder}"))


def test_the_manual_has_all_classes_in_all_splits_and_no_paragraph_twice():
    splits, classes = load_labelled(data("embedded:python"))
    assert classes == TOPICS
    texts = {name: set(split.texts) for name, split in splits.items()}
    assert not texts["train"] & texts["valid"] and not texts["train"] & texts["test"]
    for split in splits.values():
        assert set(split.labels_M.tolist()) == set(range(len(TOPICS)))
    pairs, classes = load_labelled(data("embedded:python_pairs", fields="premise hypothesis"))
    assert classes == SAME
    assert pairs["train"].labels_M.mean() == 0.5


def test_tfds(tmp_path):
    """A set as GLUE's are: bytes, and classes with names."""
    import tensorflow_datasets as tfds

    class TinySentences(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        __module__ = "tiny_sentences"
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            label = tfds.features.ClassLabel(names=["negative", "positive"])
            features = {"sentence": tfds.features.Text(), "label": label}
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, _):
            return {"train": self._generate_examples(5), "hidden": self._generate_examples(2, -1)}

        def _generate_examples(self, count, label=None):
            for i in range(count):
                yield i, {"sentence": f"größer {i}", "label": i % 2 if label is None else label}

    TinySentences(data_dir=tmp_path, file_format="array_record").download_and_prepare()
    settings = data("tfds:tiny_sentences", tfds_dir=str(tmp_path))
    settings.splits = {"train": "train", "valid": "train", "test": "train"}
    splits, classes = load_labelled(settings)
    assert classes == ("negative", "positive")
    assert sorted(splits["train"].texts) == [(f"größer {i}",) for i in range(5)]
    for (text,), label in zip(splits["train"].texts, splits["train"].labels_M, strict=True):
        assert int(text[-1]) % 2 == label
    settings.splits.test = "hidden"
    with pytest.raises(UserError, match="split hidden, example 0: the label -1 is none of the 2"):
        load_labelled(settings)
