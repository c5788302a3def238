"""Several classes per text: tables, loss, thresholds, training, the head, the baseline, the report and classify."""

import csv
import io
import json
import math
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import expit
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, f1_score

from common.data.labelled import LabelledText
from common.errors import UserError
from common.metrics.kinds import load as load_predictions
from common.metrics.label_sets import LabelSets
from common.report.runs import load_local
from common.sharding import make_mesh
from common.track.tracker import read_metrics
from common.train.command import fit
from perception import (
    adapters,
    baseline,
    classify,
    comparison,
    conclusions,
    datasets,
    load_run,
    loading,
    run,
    worth,
)
from perception.comparison import ExperimentSuite
from perception.datasets import draw
from perception.head import UNSEEN, solve
from perception.labelled_table import prepare
from perception.objective import balanced_weights, loss
from perception.table_labels import label_reader
from perception.table_reader import read_tables
from perception.weighted_f1 import choose_thresholds, score

NAMES = ("fruit", "place", "sound")
WORDS = {"fruit": "apple pear", "place": "river street", "sound": "music noise"}


def rows(count: int, start: int = 0) -> list[tuple[str, tuple[str, ...]]]:
    """Returns `count` rows (text, its classes), which depend on the row numbers from `start` on.

    A text has one word for each of its classes, and five random letters. An eighth of the texts have no class.
    """
    made = []
    for i in range(start, start + count):
        generator = np.random.default_rng(i)
        own = tuple(name for bit, name in enumerate(NAMES) if i >> bit & 1)
        words = [generator.choice(WORDS[name].split()) for name in own]
        noise = generator.choice(list("abcdefgh"), 5)
        made.append((" ".join(generator.permutation([*words, *noise])), own))
    return made


def split(count: int, start: int = 0) -> LabelledText:
    made = rows(count, start)
    labels_EC = np.array([[name in own for name in NAMES] for _, own in made], np.int32)
    return LabelledText([(text,) for text, _ in made], labels_EC)


def test_loss_is_the_sigmoid_cross_entropy() -> None:
    """The reference is -(y log p + (1 - y) log (1 - p)), weighted, averaged over classes and summed over examples.

    Gradients are compared, too.
    """
    generator = np.random.default_rng(0)
    logits_BC = generator.normal(size=(6, 3)).astype(np.float32)
    labels_BC = jnp.asarray(generator.integers(0, 2, (6, 3)))
    weights_BC = jnp.asarray(generator.random((6, 3)), jnp.float32)

    def wanted(logits_BC):
        p = 1 / (1 + jnp.exp(-logits_BC))
        nats_BC = -(labels_BC * jnp.log(p) + (1 - labels_BC) * jnp.log(1 - p))
        return (weights_BC * nats_BC).mean(-1).sum()

    ours = jax.value_and_grad(lambda x: loss(x, labels_BC, weights_BC).sum())(logits_BC)
    for found, reference in zip(ours, jax.value_and_grad(wanted)(logits_BC), strict=True):
        np.testing.assert_allclose(found, reference, rtol=1e-5, atol=1e-6)


def test_balanced_weights_balance_presence_and_absence_of_each_class() -> None:
    labels_EC = np.array([[1, 0], [0, 0], [0, 1], [0, 1]])
    weights_EC = balanced_weights(labels_EC)
    np.testing.assert_allclose(weights_EC, [[2, 1], [2 / 3, 1], [2 / 3, 1], [2 / 3, 1]])


def test_thresholds_maximise_f1_of_each_class() -> None:
    """No threshold of a fine grid gives a class a better F1. A class without examples has the threshold 0.5."""
    generator = np.random.default_rng(0)
    labels_EC = (generator.random((200, 3)) < [0.5, 0.05, 0]).astype(int)
    chances_EC = expit(generator.normal(labels_EC - 1.5, 1))
    found = choose_thresholds(labels_EC, chances_EC)
    for c in range(2):
        tried = [
            f1_score(labels_EC[:, c], chances_EC[:, c] >= t, zero_division=0)
            for t in np.linspace(0, 1, 101)
        ]
        assert f1_score(labels_EC[:, c], chances_EC[:, c] >= found[c]) >= max(tried)
    assert found[2] == 0.5 and found[1] < 0.5
    logits_EC = np.log(chances_EC / (1 - chances_EC))
    guesses_EC = chances_EC >= np.array(found)
    wanted = f1_score(labels_EC, guesses_EC, average="weighted", zero_division=0)
    assert score(labels_EC, logits_EC) == pytest.approx(100 * wanted)


def test_head_solves_a_regression_for_each_class() -> None:
    generator = np.random.default_rng(0)
    labels_EC = split(60).labels_E
    labels_EC[:, 2] = 0
    rows_EM = generator.normal(size=(60, 2)) + labels_EC[:, :2]
    rows_EM = (rows_EM - rows_EM.mean(0)) / rows_EM.std(0)
    data = rows_EM, labels_EC
    for weights_EC, given in ((None, None), (balanced_weights(labels_EC), "balanced")):
        found = solve(data, data, 3, weights_EC)
        for c in range(2):
            one = LogisticRegression(C=found.inverse_penalty, class_weight=given, tol=1e-8)
            one.fit(rows_EM, labels_EC[:, c])
            np.testing.assert_allclose(found.kernel_MC[:, c], one.coef_[0], atol=1e-3)
        assert found.bias_C[2] == UNSEEN


def test_draw_has_examples_of_each_class() -> None:
    found = draw(split(80), 4, 1).labels_E
    assert (found.sum(0) >= 4).all() and (~found.any(1)).sum() == 4 and len(found) <= 16


def write_csv(path: Path, header: list[str], found: list[list]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *found])
    return path


WAYS = {
    "split": lambda own: "; ".join(own),
    "json": json.dumps,
    "python": lambda own: str(list(own)),
}


@pytest.mark.parametrize("way", [*WAYS, "marks", "lists"])
def test_label_sets_are_read_from_every_notation(tmp_path, way) -> None:
    """Several labels may be a text with separators, a list in JSON or Python notation, or columns of 0 and 1."""
    made, options = rows(80), {}
    if way == "lists":
        path = tmp_path / "a.jsonl"
        lines = [json.dumps({"text": text, "tags": own}) for text, own in made]
        path.write_text("\n".join(lines))
        options["label"] = ("tags",)
    elif way == "marks":
        marks = [[text, *(int(name in own) for name in NAMES)] for text, own in made]
        path = write_csv(tmp_path / "a.csv", ["text", *NAMES], marks)
        options["label"] = NAMES
    else:
        cells = [[text, WAYS[way](own)] for text, own in made]
        path = write_csv(tmp_path / "a.csv", ["text", "labels"], cells)
        if way == "split":
            options["separator"] = ";"
    found = prepare(read_tables(str(path)), **options)
    assert found.several and found.classes == list(NAMES)
    examples = {e.text: e.label for some in found.splits.values() for e in some}
    wanted = {text: tuple(sorted(own)) for text, own in made}
    assert examples.items() <= wanted.items() and len(examples) > 60
    assert "10 texts without any class." in found.notes.sentences
    for some in found.splits.values():
        assert {name for e in some for name in e.label} == set(NAMES)


def test_invalid_label_sets_raise_errors(tmp_path) -> None:
    made = [[text, int("fruit" in own), int("place" in own)] for text, own in rows(80)]
    made[3][2] = "yes"
    path = write_csv(tmp_path / "a.csv", ["text", "fruit", "place"], made)
    found = prepare(read_tables(str(path)), label=("fruit", "place"))
    fault = "a.csv line 5: with several --label columns, the column place must have one of 1, 1.0, true, 0, 0.0, fal"
    assert any(fault in note for note in found.notes.sentences)
    with pytest.raises(UserError, match="--separator=; is for one --label column, but there are 2"):
        prepare(read_tables(str(path)), label=("fruit", "place"), separator=";")
    cells = [[text, json.dumps(own)] for text, own in rows(80)]
    cells[2][1] = "fruit"
    path = write_csv(tmp_path / "b.csv", ["text", "label"], cells)
    (note,) = [
        n for n in prepare(read_tables(str(path))).notes.sentences if n.startswith("Skipped")
    ]
    assert "the label 'fruit' in column label is not a list, unlike most" in note
    cells = [
        [text, "a" if i < 2 else "a;b" if i % 2 else "a;c"] for i, (text, _) in enumerate(rows(80))
    ]
    rare = write_csv(tmp_path / "d.csv", ["text", "label"], cells)
    assert (
        "1 of 3 classes, with fewer than 3 different texts each (a text counts only for its rarest class), is only in"
        " training, except in texts that count for another class: a."
        in prepare(read_tables(str(rare)), separator=";").notes.sentences
    )
    bare = write_csv(tmp_path / "c.csv", ["text", "label"], [[t, ""] for t, _ in rows(20)])
    with pytest.raises(UserError, match="no text has a class"):
        prepare(read_tables(str(bare)), separator=";")
    for missing in (None, math.nan):
        with pytest.raises(ValueError, match="the label in column label is missing"):
            label_reader("split", ("label",), None, ";")({"label": missing})


def splits() -> dict[str, LabelledText]:
    return {"train": split(160), "valid": split(40, 160), "test": split(80, 200)}


def test_baseline_predicts_sets(tmp_path) -> None:
    found = baseline.fit(splits(), NAMES)
    assert isinstance(found.predictions, LabelSets)
    assert found.predictions.metrics()["micro_f1"] > 90
    found.model.save(tmp_path / "model.npz")
    again = baseline.Model.load(tmp_path / "model.npz")
    assert again.thresholds == found.predictions.thresholds
    texts = [text for (text,) in splits()["test"].texts]
    chances_EC = found.predictions.probabilities_EC.astype(float)
    np.testing.assert_allclose(again.probabilities(texts), chances_EC, atol=1e-3)


def test_thresholds_of_the_baseline_do_not_depend_on_the_test() -> None:
    """Changed test labels do not change thresholds or predictions. Changed validation labels change the thresholds."""
    given = splits()
    found = baseline.fit(given, NAMES).predictions
    turned = LabelledText(given["test"].texts, 1 - given["test"].labels_E)
    other = baseline.fit({**given, "test": turned}, NAMES).predictions
    assert other.thresholds == found.thresholds
    np.testing.assert_array_equal(other.guesses_EC, found.guesses_EC)
    turned = LabelledText(given["valid"].texts, 1 - given["valid"].labels_E)
    assert (
        baseline.fit({**given, "valid": turned}, NAMES).predictions.thresholds != found.thresholds
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    for name, count, start in (("train", 64, 0), ("validation", 24, 64), ("test", 32, 88)):
        lines = [json.dumps({"text": text, "label": own}) for text, own in rows(count, start)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def trained(make, mesh, data) -> Path:
    """Returns the workdir of a run without training steps, whose head is solved."""
    fields = {"data.source": f"files:{data}", "data.multi_label": True, "data.balance": True}
    fit(make(**fields, finetune="head", **{"train.steps": 0}), data / "head", mesh)
    return data / "head"


def test_thresholds_of_a_run_do_not_depend_on_the_test(make, mesh, trained) -> None:
    """The task predicts the test classes with thresholds that are chosen on validation. Test labels have no effect."""
    kept = load_predictions(trained / "predictions.npz")
    found = loading.load(trained, mesh)
    _, task = run.prepare(found.config, mesh)
    given, wanted = task.splits["test"], task.splits["valid"].labels_E
    tokens = found.tokenizer.encode([t for (t,) in task.splits["valid"].texts], 16)
    valid_EC = found.probabilities_of([[ids] for ids in tokens])
    assert kept.thresholds == pytest.approx(choose_thresholds(wanted, valid_EC), abs=1e-4)
    task.splits["test"] = LabelledText(given.texts, 1 - given.labels_E)
    turned = task.predict(found.values, "test")
    assert turned.thresholds == pytest.approx(kept.thresholds)
    np.testing.assert_array_equal(turned.guesses_EC, kept.guesses_EC)
    np.testing.assert_array_equal(kept.labels_EC, given.labels_E)


@pytest.mark.medium
def test_multi_label_training_lowers_the_loss(make, mesh, data) -> None:
    """The training loss falls. `batch_spec` describes the training batches."""
    fields = {"data.source": f"files:{data}", "data.multi_label": True, "data.balance": True}
    config = make(**fields, finetune="full", **{"train.steps": 30, "eval.steps": 30})
    config.optimizer.learning_rate = 1e-2
    _, task = run.prepare(config, mesh)
    batch, _ = next(task.batches(None))
    spec = task.batch_spec(1).arrays
    assert {n: (x.shape, x.dtype) for n, x in batch.items()} == {
        n: (x.shape, x.dtype) for n, x in spec.items()
    }
    summary = fit(config, data / "full", mesh)
    losses = [m["train/loss"] for m in read_metrics(data / "full") if "train/loss" in m]
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])
    assert {"micro_f1", "macro_f1", "weighted_f1", "accuracy"} <= summary["test"].keys()


def call(program, *arguments: object, stdin: bytes = b"") -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["program", *map(str, arguments)])
        patch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(stdin)))
        program.main()


def test_classify_writes_sets_of_classes(trained, tmp_path, capsys) -> None:
    """The labelled table has JSON lists, which perception.worth can read.

    Without --top, output lines have the classes that reach their thresholds.
    """
    texts = [text for text, _ in rows(12, 300)]
    given = write_csv(tmp_path / "a.csv", ["text"], [[t] for t in [*texts, " "]])
    call(classify, f"--workdir={trained}", f"--input={given}", f"--output={tmp_path / 'b.csv'}")
    with (tmp_path / "b.csv").open() as file:
        *labelled, empty = csv.DictReader(file)
    assert list(labelled[0]) == ["text", "label", *(f"probability_{name}" for name in NAMES)]
    thresholds = dict(
        zip(NAMES, load_predictions(trained / "predictions.npz").thresholds, strict=True)
    )
    for row in labelled:
        above = {n for n in NAMES if float(row[f"probability_{n}"]) >= thresholds[n]}
        assert set(json.loads(row["label"])) == above
    assert empty["label"] == "" and len({row["label"] for row in labelled}) > 1
    capsys.readouterr()
    call(classify, f"--workdir={trained}", stdin="\n".join(texts).encode())
    for line, row in zip(capsys.readouterr().out.splitlines(), labelled, strict=True):
        assert [name for name in line.split("\t")[::2] if name] == json.loads(row["label"])
    call(classify, f"--workdir={trained}", "--top=2", stdin=texts[0].encode())
    assert len(capsys.readouterr().out.split("\t")) == 4
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    call(classify, f"--workdir={trained}", f"--input={lines}", f"--output={tmp_path / 'b.jsonl'}")
    found = [json.loads(line)["label"] for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    assert found == [json.loads(row["label"]) for row in labelled]
    *answers, blank = load_run(str(trained)).label([*texts, ""])
    assert [row["label"] for row in answers] == found and blank["label"] is None


def test_exported_classifier_has_thresholds(trained, tmp_path) -> None:
    call(adapters, "export", f"--run={trained}", f"--out={tmp_path / 'out'}")
    settings = json.loads((tmp_path / "out/classifier/config.json").read_text())
    assert len(settings["thresholds"]) == 3
    assert 'settings["thresholds"]' in (tmp_path / "out/README.md").read_text()


def test_worth_reports_sets_of_classes(trained, data, tmp_path, capsys) -> None:
    """Micro F1, macro F1 and average precision in the table equal scikit-learn's. Exact match equals NumPy's."""
    fields = [f"--config.data.source=files:{data}", "--config.data.multi_label=true"]
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    suite = ExperimentSuite("", 1, fields, tmp_path, mesh, "configs/perception.py:tiny")
    given, classes = datasets.load(suite.configuration("full", 1))
    runs = {"tf_idf": suite.baseline(given, classes), "head": load_local(trained)}
    comparison.publish(suite, runs, given, comparison.About())
    with (tmp_path / "worth.csv").open() as file:
        row, head = csv.DictReader(file)
    found = runs["tf_idf"][0].predictions
    truth, chances = found.labels_EC, found.probabilities_EC.astype(float)
    wanted = {
        "micro F1": f1_score(truth, found.guesses_EC, average="micro"),
        "macro F1": f1_score(truth, found.guesses_EC, average="macro"),
        "average precision": average_precision_score(truth, chances, average="macro"),
        "exact match": (truth == found.guesses_EC).all(1).mean(),
    }
    for name, value in wanted.items():
        assert float(row[name]) == pytest.approx(100 * value, abs=0.006), name
    assert head["weighted F1"] and conclusions.scores(found).keys() == wanted.keys()
    page = (tmp_path / "report.html").read_text()
    assert "threshold" in page and "average precision" in page and "Confusion" not in page
    said = capsys.readouterr().out
    assert "TF-IDF and logistic regression against the head alone" in said


def test_worth_reads_a_table_of_label_sets(tmp_path, capsys) -> None:
    """A budget of one second is enough for the baseline only.

    worth prints a command for new texts. This command finds all three classes of a text that has a word for each class.
    """
    cells = [[text, "|".join(own)] for text, own in rows(160)]
    path, out = write_csv(tmp_path / "a.csv", ["text", "label"], cells), tmp_path / "out"
    given = ("--data", path, "--separator=|", "--config=configs/perception.py:tiny")
    cache = f"--config.data.cache_dir={tmp_path}"
    call(worth, *given, cache, f"--out={out}", "--budget=1s", "--config.train.steps=1")
    assert isinstance(load_predictions(out / "runs/tf_idf/predictions.npz"), LabelSets)
    assert isinstance(
        json.loads((out / "data/test.jsonl").read_text().splitlines()[0])["label"], list
    )
    said = capsys.readouterr().out
    (use,) = re.findall(r"use it: python -m perception.classify (.*)", said)
    new, labelled = (
        write_csv(tmp_path / "new.csv", ["text"], [[rows(1, 7)[0][0]], ["nothing"]]),
        "b.csv",
    )
    given = [word for word in shlex.split(use) if not word.startswith(("--input", "--output"))]
    call(classify, *given, f"--input={new}", f"--output={tmp_path / labelled}")
    with (tmp_path / labelled).open() as file:
        found = [json.loads(row["label"]) for row in csv.DictReader(file)]
    assert set(found[0]) == set(NAMES) and len(found[1]) < 3


def test_multi_label_data_and_options_must_fit(make, data) -> None:
    config = make("paper,tiny", **{"data.source": f"files:{data}", "data.multi_label": True})
    with pytest.raises(UserError, match=r"set --config\.eval\.select=valid instead of test"):
        run.validate(config)
    config = make(**{"data.source": "embedded:python", "data.multi_label": True})
    with pytest.raises(UserError, match="the label must be a list of classes"):
        datasets.load(config)
    config = make(**{"data.source": f"files:{data}"})
    with pytest.raises(UserError, match=r"got \[.*; set --config\.data\.multi_label=true if an"):
        datasets.load(config)
