"""Labelled examples: formats, class names, error messages."""

import gzip
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from ml_collections import ConfigDict

from common.data.labelled import LabelledText, load_labelled
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


def test_json_lines_csv_and_gzip_give_the_same_examples(folder):
    (folder / "validation.jsonl").unlink()
    with gzip.open(folder / "validation.jsonl.gz", "wt") as file:
        file.write(lines(GOOD))
    (folder / "test.jsonl").unlink()
    (folder / "test.csv").write_text('label,sentence\n1,a good film\n0,"größer"\n')
    splits, classes = load_labelled(data(f"files:{folder}"))
    assert classes == ("0", "1")
    for text in splits.values():
        assert text.texts == [("a good film",), ("größer",)]
        assert text.labels_E.tolist() == [1, 0]


def test_fingerprint_depends_on_texts_boundaries_labels_and_order():
    texts, labels = [("a", "b"), ("c",)], np.asarray([0, 1], np.int32)
    one = LabelledText(texts, labels)
    assert one.fingerprint == LabelledText(list(texts), labels.astype(np.int64)).fingerprint
    others = (
        LabelledText(texts, 1 - labels),
        LabelledText(texts[::-1], labels),
        LabelledText(texts[::-1], labels[::-1]),
        LabelledText([("a",), ("b", "c")], labels),
        LabelledText([("ab",), ("c",)], labels),
    )
    assert len({one.fingerprint, *(other.fingerprint for other in others)}) == 6


def test_csv_quoted_field_with_lines_and_commas(folder):
    (folder / "train.jsonl").unlink()
    (folder / "train.csv").write_text('text,label\n"one, two\nthree",0\nfour,1\n')
    assert load_labelled(data(f"files:{folder}"))[0]["train"].texts[0] == ("one, two\nthree",)


def test_csv_field_length_is_unlimited(folder):
    """By default, Python's csv module rejects a field of more than 131,072 characters."""
    (folder / "train.jsonl").unlink()
    (folder / "train.csv").write_text(f"text,label\n{'long ' * 40_000},0\nfour,1\n")
    (text,) = load_labelled(data(f"files:{folder}"))[0]["train"].texts[0]
    assert len(text) == 200_000


def test_pairs_have_two_fields(folder):
    for path in folder.iterdir():
        path.write_text(lines([{"a": "x", "b": "y", "label": k} for k in (0, 1)]))
    splits, _ = load_labelled(data(f"files:{folder}", fields="a b"))
    assert splits["train"].texts == [("x", "y"), ("x", "y")]


def test_class_names_from_labels_json(folder):
    (folder / "labels.json").write_text('["neg", "pos", "none"]')
    (folder / "test.jsonl").write_text(lines([{"text": "x", "label": "pos"}]))
    splits, classes = load_labelled(data(f"files:{folder}"))
    assert classes == ("neg", "pos", "none")
    assert splits["test"].labels_E.tolist() == [1] and splits["train"].labels_E.tolist() == [1, 0]


def test_class_names_are_sorted_words(folder):
    for path in folder.iterdir():
        path.write_text(lines([{"text": "x", "label": "spam"}, {"text": "y", "label": "ham"}]))
    splits, classes = load_labelled(data(f"files:{folder}"))
    assert classes == ("ham", "spam") and splits["train"].labels_E.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"text": " ", "label": 0}', "the field text or sentence is empty"),
        ('{"text": 5, "label": 0}', "the field text or sentence is 5 instead of a text"),
        ('{"words": "x", "label": 0}', "no field text or sentence; its fields: words, label"),
        ('{"text": "x"}', "no field label; its fields: text"),
        (
            '{"text": "x", "label": 2}',
            "the label 2 is not one of the 2 classes 0, 1; correct the label or remove",
        ),
        ('{"text": "x", "label": -1}', "the label -1 is not one of the 2 classes"),
        ('{"text": "x", "label": "good"}', "the label 'good' is not one of the 2 classes"),
        ('{"text": "x", "label": NaN}', "the field 'label' has an empty label"),
        ('{"text": "x", "label": ["a", "b"]}', "label must be a text or a number, got \\['a', 'b"),
        ("x", "is not JSON: Expecting value: column 1; correct"),
        ('{"text": "x', "is not JSON: Unterminated string starting at: column 10; correct"),
        ("[" * 100_000, "is not JSON: its brackets are nested too deeply"),
        ("[1]", "is not a JSON object"),
    ],
)
def test_damaged_example_error_names_the_line(folder, line, told):
    path = folder / "validation.jsonl"
    path.write_text(lines(GOOD) + line + "\n")
    with pytest.raises(UserError, match=rf"^{path} line 3.*{told}"):
        load_labelled(data(f"files:{folder}"))


def test_blank_lines_of_json_lines_are_skipped(folder):
    wanted, _ = load_labelled(data(f"files:{folder}"))
    path = folder / "validation.jsonl"
    path.write_text("\n" + path.read_text().replace("\n", "\n \n"))
    found, _ = load_labelled(data(f"files:{folder}"))
    assert found["valid"].texts == wanted["valid"].texts


@pytest.mark.parametrize("row", ["x", "x,0,more"])
def test_csv_row_with_wrong_columns_raises_user_error(folder, row):
    (folder / "test.jsonl").unlink()
    for blank in (0, 2):
        (folder / "test.csv").write_text("\n" * blank + f"text,label\nx,0\n{row}\n")
        wrong = f"line {3 + blank} has a different number of columns than line {1 + blank}"
        with pytest.raises(UserError, match=wrong):
            load_labelled(data(f"files:{folder}"))


@pytest.mark.parametrize("names", ["neg", '{"neg": 0}', '["neg", "neg"]', "[]", ""])
def test_damaged_labels_json_raises_user_error(folder, names):
    (folder / "labels.json").write_text(names)
    with pytest.raises(UserError, match=r"labels\.json .*; correct or (delete|restore) the file$"):
        load_labelled(data(f"files:{folder}"))


def test_missing_files_fields_and_splits_raise_user_errors(folder):
    with pytest.raises(UserError, match="no directory"):
        load_labelled(data("files:nowhere"))
    with pytest.raises(
        UserError,
        match=r"must be files:DIR, files:FILE, tfds:NAME, hf:NAME, embedded:NAME or import:",
    ):
        load_labelled(data("file:sst2"))
    with pytest.raises(UserError, match=r"choose one of embedded:python, embedded:python_pairs"):
        load_labelled(data("embedded:java"))
    with pytest.raises(UserError, match="has 2 text fields"):
        load_labelled(data("embedded:python_pairs"))
    (folder / "test.jsonl").unlink()
    with pytest.raises(UserError, match=r"no file test\.jsonl or .* its files: train, valid"):
        load_labelled(data(f"files:{folder}"))


def test_single_class_raises_user_error(folder):
    (folder / "train.jsonl").write_text(lines([{"text": "x", "label": 0}]))
    with pytest.raises(UserError, match="a single class"):
        load_labelled(data(f"files:{folder}"))


def named(count: int) -> list[dict]:
    return [{"text": f"text {i}", "label": i % 2} for i in range(count)]


def test_missing_optional_splits_are_not_returned(folder):
    for name in ("validation", "test"):
        (folder / f"{name}.jsonl").unlink()
    for source in (folder, folder / "train.jsonl"):
        assert list(load_labelled(data(f"files:{source}"), optional=("valid", "test"))[0]) == [
            "train"
        ]
    with pytest.raises(UserError, match="no directory"):
        load_labelled(data(f"files:{folder / 'train.jsonl'}"))


def test_file_that_is_neither_json_lines_nor_csv_raises_user_error(folder):
    (folder / "train.tsv").write_text("text\tlabel\nx\t0\n")
    told = r"train.tsv line 1 is not JSON: .*; correct the line, or .* ends in .jsonl or .*.csv.gz$"
    with pytest.raises(UserError, match=told):
        load_labelled(data(f"files:{folder}/train.tsv"), optional=("valid", "test"))


def test_alternative_split_names(folder):
    (folder / "validation.jsonl").rename(folder / "dev.jsonl")
    settings = data(f"files:{folder}")
    settings.splits.valid = "valid|dev"
    assert len(load_labelled(settings)[0]["valid"]) == 2
    settings.splits.valid = "valid|validation"
    with pytest.raises(UserError, match=r"no file valid\.jsonl or .* or validation\.csv\.gz in"):
        load_labelled(settings)


def test_only_requested_splits_are_read(folder):
    (folder / "validation.jsonl").unlink()
    found, _ = load_labelled(data(f"files:{folder}"), splits=("train", "test"))
    assert set(found) == {"train", "test"}


def test_label_field_name(folder):
    for path in folder.iterdir():
        path.write_text(lines([{"text": "x", "stars": 0}, {"text": "y", "stars": 1}]))
    splits, _ = load_labelled(data(f"files:{folder}", label="stars"))
    assert splits["train"].labels_E.tolist() == [0, 1]
    with pytest.raises(UserError, match="no field mark; its fields: text, stars"):
        load_labelled(data(f"files:{folder}", label="mark"))


def test_given_number_of_classes(folder):
    """Training examples need not have all classes. A label at or above the number of classes is an error."""
    _, classes = load_labelled(data(f"files:{folder}"), classes=3)
    assert classes == ("0", "1", "2")
    (folder / "train.jsonl").write_text(lines([*GOOD, {"text": "x", "label": 3}]))
    with pytest.raises(
        UserError, match=r"train\.jsonl line 3: the label 3 is not one of the 3 classes"
    ):
        load_labelled(data(f"files:{folder}"), classes=3)
    (folder / "train.jsonl").write_text(lines([*GOOD, {"text": "x", "label": 12}]))
    with pytest.raises(
        UserError, match=r"the 12 classes 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, \.\.\.; correct"
    ):
        load_labelled(data(f"files:{folder}"), classes=12)
    (folder / "train.jsonl").write_text(lines([{"text": "x", "label": name} for name in "abc"]))
    with pytest.raises(UserError, match=r"have 3 classes \(a, b, c\) instead of 2"):
        load_labelled(data(f"files:{folder}"), classes=2)
    many = [{"text": "x", "label": name} for name in "abcdefghijk"]
    (folder / "train.jsonl").write_text(lines(many))
    with pytest.raises(UserError, match=r"have 11 classes \(a, .*, j, \.\.\.\) instead of 2"):
        load_labelled(data(f"files:{folder}"), classes=2)


def test_unlabelled_examples_are_skipped(folder):
    (folder / "test.jsonl").write_text(lines([{"text": "x", "label": -1}, *GOOD]))
    assert len(load_labelled(data(f"files:{folder}"), unlabelled=True)[0]["test"]) == 2


def test_hugging_face_data_sets(monkeypatch):
    class Split(list):
        @property
        def features(self) -> dict:
            return {"text": "string", "label": SimpleNamespace(names=["no", "yes"])}

    hub = ModuleType("datasets")
    hub.load_dataset = lambda name: {"train": Split(named(20)), "test": Split(named(4))}
    monkeypatch.setitem(sys.modules, "datasets", hub)
    splits, classes = load_labelled(data("hf:some/name"), optional=("valid", "test"))
    assert classes == ("no", "yes")
    assert {name: len(text) for name, text in splits.items()} == {"train": 20, "test": 4}
    with pytest.raises(
        UserError,
        match=r"splits.valid=validation is not a split of hf:some/name: choose one of train, test",
    ):
        load_labelled(data("hf:some/name"))
    settings = data("hf:some/name")
    settings.splits.valid = "valid|dev"
    with pytest.raises(UserError, match=r"splits.valid=valid\|dev is not a split of hf:some/name"):
        load_labelled(settings)

    def unknown(name: str) -> None:
        raise FileNotFoundError(f"no {name}\non the hub")

    hub.load_dataset = unknown
    with pytest.raises(
        UserError, match=r"cannot read --config.data.source=hf:some/name: no some/name on the hub"
    ):
        load_labelled(data("hf:some/name"))
    monkeypatch.setitem(
        sys.modules, "datasets", None
    )  # Makes the import fail, as if the package were not installed.
    told = r"datasets, which cannot be imported \(import of datasets halted.*\): pip install -U datasets;"
    with pytest.raises(UserError, match=told):
        load_labelled(data("hf:some/name"))


def test_python_manual_has_all_classes_and_distinct_paragraphs():
    splits, classes = load_labelled(data("embedded:python"))
    assert classes == TOPICS
    texts = {name: set(split.texts) for name, split in splits.items()}
    assert not texts["train"] & texts["valid"] and not texts["train"] & texts["test"]
    for split in splits.values():
        assert set(split.labels_E.tolist()) == set(range(len(TOPICS)))
    pairs, classes = load_labelled(data("embedded:python_pairs", fields="premise hypothesis"))
    assert classes == SAME
    assert pairs["train"].labels_E.mean() == 0.5


def test_tfds_data_sets(tmp_path):
    """As in GLUE's data sets, texts are bytes, and classes have names."""
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
    settings.splits = {"train": "training|train", "valid": "valid|train", "test": "train"}
    splits, classes = load_labelled(settings)
    assert classes == ("negative", "positive")
    assert sorted(splits["train"].texts) == [(f"größer {i}",) for i in range(5)]
    for (text,), label in zip(splits["train"].texts, splits["train"].labels_E, strict=True):
        assert int(text[-1]) % 2 == label
    settings.splits.test = "hidden"
    wrong = "the label -1 is not one of the 2 classes negative, positive or an index from 0 to 1"
    with pytest.raises(UserError, match=f"split hidden, example 1: {wrong}"):
        load_labelled(settings)
    settings.splits.test = "other"
    with pytest.raises(
        UserError, match=r"cannot read split other of --config\.data\.source=tfds:tiny"
    ):
        load_labelled(settings)
    with pytest.raises(
        UserError, match=r"cannot read --config\.data\.source=tfds:Tiny Sentences: "
    ):
        load_labelled(data("tfds:Tiny Sentences"))


def written(folder: Path, labels: list, ending: str = "jsonl") -> ConfigDict:
    """Writes one text per label to each split. Returns the data configuration."""
    for split in ("train", "valid", "test"):
        lines = [json.dumps({"text": f"text {i}", "label": x}) for i, x in enumerate(labels)]
        if ending == "csv":
            lines = ["text,label", *(f"text {i},{x}" for i, x in enumerate(labels))]
        (folder / f"{split}.{ending}").write_text("\n".join(lines) + "\n")
    splits = {name: name for name in ("train", "valid", "test")}
    fields = {"source": f"files:{folder}", "splits": splits, "fields": "text", "tfds_dir": ""}
    return ConfigDict(fields)


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
@pytest.mark.parametrize(
    ("labels", "classes", "found"),
    [
        ([0, 2, 1], ["0", "1", "2"], [0, 2, 1]),
        (
            [1, 5, 3],
            ["0", "1", "2", "3", "4", "5"],
            [1, 5, 3],
        ),  # up to half of the class indices may be missing
        ([-1, 1, -1], ["-1", "1"], [0, 1, 0]),
        ([20231, 7, 20231], ["7", "20231"], [1, 0, 1]),  # numbers too sparse for indices
    ],
)
def test_numeric_labels_are_indices_or_names(tmp_path, ending, labels, classes, found) -> None:
    splits, names = load_labelled(written(tmp_path, labels, ending))
    assert list(names) == classes
    assert splits["test"].labels_E.tolist() == found


def test_numeric_labels_of_named_classes_are_indices(tmp_path) -> None:
    """Yelp reviews have class names "1" and "2" and labels 0 and 1."""
    data = written(tmp_path, [0, 1, 1])
    (tmp_path / "labels.json").write_text('["1", "2"]')
    splits, names = load_labelled(data)
    assert names == ("1", "2") and splits["train"].labels_E.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["a", None, "b"], "line 2: the field 'label' has an empty label"),
        (["a", " ", "b"], "line 2: the field 'label' has an empty label"),
    ],
)
def test_missing_label_raises_user_error(tmp_path, labels, message) -> None:
    with pytest.raises(UserError, match=message):
        load_labelled(written(tmp_path, labels))


def test_lone_surrogate_raises_user_error(tmp_path) -> None:
    data = written(tmp_path, ["a", "b"])
    line = '{"text": "cut \\ud83d", "label": "a"}'
    (tmp_path / "valid.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match=r"valid.jsonl line 1: .* lone surrogate"):
        load_labelled(data)


def test_wrong_number_of_classes_raises_user_error(tmp_path) -> None:
    data = written(tmp_path, [0, 1])
    (tmp_path / "labels.json").write_text('["no", "yes"]')
    with pytest.raises(UserError, match="has 2 classes instead of 5"):
        load_labelled(data, classes=5)


def test_lists_of_labels_are_read_from_the_first_existing_field(tmp_path) -> None:
    data = written(tmp_path, [["a"], ["b", "a"], []])
    data.label, data.multi_label = "tags|label", True
    splits, names = load_labelled(data)
    assert names == ("a", "b")
    assert splits["train"].labels_E.tolist() == [[1, 0], [1, 1], [0, 0]]
