"""Field names and splits of the paper's data sets, and user files."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from ml_collections import ConfigDict

from common.errors import UserError
from configs import perception as recipes
from perception import datasets
from perception.datasets import DATASETS


def config(**fields: object) -> ConfigDict:
    made = recipes.get_config()
    made.update_from_flattened_dict(fields)
    return made


def write(path: Path, count: int, fields: str, label: str, classes: int) -> None:
    names = [name.split("|")[0] for name in fields.split()]
    rows = [
        {**{name: f"{name} {i}" for name in names}, label: i % classes, "more": 1}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# (text fields, label field, number of classes) in the authors' program. TFDS's glue/sst2 names the text field
# "sentence".
PAPER = {
    "dbpedia": ("text", "l1", 9),
    "bias": ("context", "bias_type", 10),
    "bias_in_bios": ("hard_text", "profession", 28),
    "climate": ("text", "label", 3),
    "emotion": ("text", "label", 6),
    "imdb": ("text", "label", 2),
    "clickbait": ("title", "clickbait", 2),
    "rotten_tomatoes": ("text", "label", 2),
    "snli": ("premise hypothesis", "label", 3),
    "sst2": ("sentence", "label", 2),
    "wiki_toxic": ("comment_text", "label", 2),
    "yelp": ("text", "label", 5),
}


@pytest.mark.parametrize("name", PAPER)
def test_data_set_field_names(tmp_path, name):
    fields, label, classes = PAPER[name]
    for split in ("train", "validation", "test"):
        write(tmp_path / f"{split}.jsonl", 2 * classes, fields, label, classes)
    chosen = config(dataset=name, **{"data.source": f"files:{tmp_path}"})
    splits, found = datasets.load(chosen)
    assert len(found) == classes
    text = " ".join(f"{field} 0" for field in fields.split())
    assert splits["train"].texts.count((text,)) + splits["valid"].texts.count((text,)) >= 1


def test_twelve_data_sets_and_their_sources():
    assert set(DATASETS) == set(PAPER)
    native = {name: one.source for name, one in DATASETS.items() if one.source.startswith("tfds:")}
    assert native == {"imdb": "tfds:imdb_reviews", "snli": "tfds:snli", "sst2": "tfds:glue/sst2"}


def test_sst2_validation_split_is_used_as_the_test_split(tmp_path):
    write(tmp_path / "train.jsonl", 20, "sentence", "label", 2)
    write(tmp_path / "validation.jsonl", 6, "sentence", "label", 2)
    splits, _ = datasets.load(config(dataset="sst2", **{"data.source": f"files:{tmp_path}"}))
    assert {name: len(text) for name, text in splits.items()} == {
        "train": 18,
        "valid": 2,
        "test": 6,
    }


def test_missing_test_split_takes_30_percent_of_train(tmp_path):
    write(tmp_path / "train.jsonl", 20, "title", "clickbait", 2)
    chosen = config(dataset="clickbait", **{"data.source": f"files:{tmp_path}"})
    assert len(datasets.load(chosen)[0]["test"]) == 6
    # With eval.select=test, no validation split is taken from the training examples.
    chosen.eval.select = "test"
    splits, _ = datasets.load(chosen)
    assert {name: len(text) for name, text in splits.items()} == {"train": 14, "test": 6}


def test_missing_splits_are_cut_from_train(tmp_path, capsys):
    """The test split has the size that Hugging Face's train_test_split(0.3) gives. A fixed seed draws its examples."""
    write(tmp_path / "train.jsonl", 40, "text", "label", 2)
    splits, _ = datasets.load(config(**{"data.source": f"files:{tmp_path}"}))
    # 12 is 30 % of 40, and 3 is a tenth of the remaining 28, rounded up.
    assert [(name, len(text)) for name, text in splits.items()] == [
        ("train", 25),
        ("valid", 3),
        ("test", 12),
    ]
    order = np.random.default_rng(42).permutation(40)
    assert splits["test"].texts == [(f"text {i}",) for i in order[:12]]
    assert splits["test"].labels_E.tolist() == [i % 2 for i in order[:12]]
    assert len({text for split in splits.values() for text in split.texts}) == 40
    told = capsys.readouterr().out.splitlines()
    assert told == [
        f"files:{tmp_path} has no split 'test': using 12 of its 40 training examples, chosen with seed 42",
        f"files:{tmp_path} has no split 'valid': using 3 of its 28 training examples, chosen with seed 42",
    ]
    again, _ = datasets.load(config(**{"data.source": f"files:{tmp_path / 'train.jsonl'}"}))
    assert again["test"].texts == splits["test"].texts


def test_class_with_a_single_example_is_kept(tmp_path):
    rows = [{"text": str(i), "label": "ab"[i % 2]} for i in range(40)]
    rows.append({"text": "x", "label": "rare"})
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    splits, classes = datasets.load(config(**{"data.source": f"files:{tmp_path}"}))
    assert classes == ("a", "b", "rare") and sum(map(len, splits.values())) == 41


def test_premise_only_drops_hypotheses(tmp_path):
    for split in ("train", "validation", "test"):
        write(tmp_path / f"{split}.jsonl", 6, "premise hypothesis", "label", 3)
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write('{"premise": "x", "hypothesis": "y", "label": -1}\n')
    chosen = config(dataset="snli", **{"data.source": f"files:{tmp_path}"})
    splits, _ = datasets.load(chosen)
    assert splits["train"].texts[0] == ("premise 0 hypothesis 0",)
    # The seventh example is left out: the label -1 means that the annotators did not agree.
    assert len(splits["train"]) == 6
    chosen.data.premise_only = True
    assert datasets.load(chosen)[0]["train"].texts[0] == ("premise 0",)
    chosen.data.fields = " "
    with pytest.raises(UserError, match=r"--config\.data\.fields=' ' must name one or two"):
        datasets.load(chosen)
    # premise_only drops hypotheses of SNLI only, as the authors' program does. Pairs in a user's files keep both texts.
    own = {"data.premise_only": True, "data.fields": "premise hypothesis"}
    (tmp_path / "train.jsonl").write_text((tmp_path / "test.jsonl").read_text())
    chosen = config(**own, **{"data.source": f"files:{tmp_path}"})
    assert datasets.load(chosen)[0]["train"].texts[0] == ("premise 0 hypothesis 0",)


def test_user_files_with_custom_field_names(tmp_path):
    """A single file with custom field names is split into train, valid and test.

    Unknown names of splits and fields raise errors.
    """
    path = tmp_path / "mails.csv"
    path.write_text(
        "body,kind\n" + "".join(f"mail {i},{'spam' if i % 2 else 'ham'}\n" for i in range(20))
    )
    chosen = config(**{"data.source": f"files:{path}", "data.fields": "body", "data.label": "kind"})
    splits, classes = datasets.load(chosen)
    assert classes == ("ham", "spam")
    assert {n: len(text) for n, text in splits.items()} == {"train": 12, "valid": 2, "test": 6}
    chosen.data.splits.test = "held_out"
    with pytest.raises(
        UserError, match=r"test=held_out names no split of .*, a single file: leave out"
    ):
        datasets.load(chosen)
    chosen.data.label = "class"
    chosen.data.splits.test = ""
    with pytest.raises(
        UserError, match=r"mails\.csv line \d+ has no field class; its fields: body, kind"
    ):
        datasets.load(chosen)


def test_label_out_of_range_raises_error(tmp_path):
    for split in ("train", "test"):
        write(tmp_path / f"{split}.jsonl", 20, "text", "label", 3)
    chosen = config(dataset="rotten_tomatoes", **{"data.source": f"files:{tmp_path}"})
    with pytest.raises(UserError, match=r"train\.jsonl line \d+: the label 2 is not one of the 2"):
        datasets.load(chosen)


# Data set -> (number of training examples without the validation split, number of test examples) of the real files.
COMPLETE = {
    "rotten_tomatoes": (8530, 1066),
    "emotion": (16_000, 2000),
    "imdb": (22_500, 25_000),
    "sst2": (60_614, 872),
}


@pytest.mark.medium
@pytest.mark.parametrize("name", COMPLETE)
def test_real_files_have_expected_number_of_examples(name):
    """If a data set has no validation split, a tenth of the training examples become the validation split."""
    folder = Path(os.environ.get("TRAINLESS_DATA", "")) / name
    if not os.environ.get("TRAINLESS_DATA") or not folder.is_dir():
        pytest.skip(f"no directory {name} in TRAINLESS_DATA")
    splits, classes = datasets.load(config(dataset=name, **{"data.source": f"files:{folder}"}))
    assert (len(splits["train"]), len(splits["test"])) == COMPLETE[name]
    assert len(classes) == DATASETS[name].classes
    assert set(splits["train"].labels_E.tolist()) == set(range(len(classes)))
