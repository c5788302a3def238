"""Training, testing and use end to end, with and without pretrained weights."""

import contextlib
import io
import json
import shutil
import sys
from argparse import Namespace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from common.errors import UserError
from common.metrics.classes import weighted_f1
from common.metrics.predictions import PREDICTIONS
from common.metrics.predictions import load as load_predictions
from common.sharding import make_mesh
from common.track.tracker import read_metrics
from perception import adapter_commands, classify, datasets, run
from perception.backbones import BACKBONES
from perception.finetuning import make_shape, resolve
from perception.hugging_face import open_model
from perception.safetensor_files import TensorFiles
from perception.task import TextClassification
from tests.perception.conftest import LORA, SHAPE, TUNED


@pytest.fixture(scope="module")
def said() -> io.StringIO:
    """What `full` printed."""
    return io.StringIO()


@pytest.fixture(scope="module")
def full(make, mesh, said, tmp_path_factory) -> tuple[Path, dict]:
    """From random weights, by the authors' recipe."""
    workdir = tmp_path_factory.mktemp("runs") / "full"
    with contextlib.redirect_stderr(said):
        return workdir, run.fit(make("paper,tiny"), workdir, mesh)


@pytest.fixture(scope="module")
def lora(make, mesh, tmp_path_factory) -> tuple[Path, dict]:
    """By the repaired one."""
    workdir = tmp_path_factory.mktemp("runs") / "lora"
    return workdir, run.fit(make(**LORA), workdir, mesh)


def measured(workdir: Path, mesh) -> float:
    """Weighted F1 of the run in use, on the test examples."""
    trained = run.load(workdir, mesh)
    splits, classes = datasets.load(trained.config)
    assert trained.classes == classes
    found_MN = trained.probabilities([text for (text,) in splits["test"].texts], rows=16)
    np.testing.assert_allclose(found_MN.sum(1), 1, rtol=1e-5)
    return weighted_f1(splits["test"].labels_M, found_MN.argmax(1))


def test_a_run_in_use_gives_what_its_summary_says(full, lora, mesh):
    for workdir, summary in (full, lora):
        assert measured(workdir, mesh) == pytest.approx(summary["test"]["weighted_f1"])
        assert summary["objective"] == "weighted_f1"


def test_a_run_keeps_the_probabilities_of_every_test_example(lora, mesh):
    workdir, summary = lora
    kept = load_predictions(workdir / PREDICTIONS)
    assert kept.metrics() == pytest.approx(summary["test"], rel=1e-5)
    trained = run.load(workdir, mesh)
    splits, classes = datasets.load(trained.config)
    assert (kept.names, kept.examples) == (classes, splits["test"].fingerprint)
    found_MN = trained.probabilities([text for (text,) in splits["test"].texts], rows=16)
    np.testing.assert_allclose(kept.probabilities_MN, found_MN, atol=2e-3)


def test_the_authors_choose_by_the_test(full):
    """The curve has the test of the best step and that of the last one."""
    _, summary = full
    points = {point["step"]: point["value"] for point in summary["curve"]["points"]}
    assert points[summary["best_step"]] == pytest.approx(summary["test"]["weighted_f1"])
    assert points[4] == pytest.approx(summary["test_last"]["weighted_f1"])
    assert set(summary["test"]) == set(summary["test_last"]) == {"accuracy", "weighted_f1", "loss"}


def test_what_the_best_step_is_chosen_by_is_called_by_its_name(full, said):
    text = said.getvalue()
    assert "step 4: test accuracy" in text and "step 4: valid" not in text


def state(workdir: Path, kind: str = "latest") -> dict:
    folder = workdir.absolute() / "checkpoints" / kind
    step = max(int(path.name) for path in folder.iterdir())
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder / str(step) / "state")


def test_of_a_lora_run_adapters_and_head_are_trained_and_stored(lora, mesh, weights):
    workdir, summary = lora
    stored = state(workdir)
    assert not stored.get("frozen")
    assert all("lora_" in n or n.startswith("head/") for n in stored["trainable"])
    # Rank 32 beside the attention's output and both layers of the feed-forward; a head of two means and a bias for 6.
    adapters = 32 * ((16 + 16) + (16 + 24) + (24 + 16))
    assert summary["params"]["trainable"] == adapters + 2 * 16 * 6 + 6
    values = run.load(workdir, mesh).values
    for name, value in values.frozen.items():
        np.testing.assert_array_equal(value, weights[name.removeprefix("encoder/")], err_msg=name)
    assert len(values.frozen) == len(weights)
    moved = [n for n, x in values.trainable.items() if n.endswith("lora_b") and np.any(x != 0)]
    assert len(moved) == 3


@pytest.fixture(scope="module")
def tuned(make, mesh, tmp_path_factory) -> tuple[Path, dict]:
    """All weights trained, from the pretrained ones."""
    workdir = tmp_path_factory.mktemp("runs") / "tuned"
    return workdir, run.fit(make(**TUNED, **{"eval.start": True}), workdir, mesh)


def test_full_fine_tuning_starts_from_the_pretrained_weights(make, mesh, weights, tmp_path):
    run.fit(make(**TUNED, **{"train.steps": 0, "eval.start": True}), tmp_path / "run", mesh)
    values = run.load(tmp_path / "run", mesh).values
    assert not values.frozen
    for name, value in weights.items():
        np.testing.assert_array_equal(values.trainable[f"encoder/{name}"], value, err_msg=name)


def test_full_fine_tuning_trains_and_stores_every_weight(tuned, mesh, weights):
    workdir, summary = tuned
    stored = state(workdir)
    assert not stored.get("frozen")
    head = {"head/kernel", "head/bias"}
    assert set(stored["trainable"]) == {f"encoder/{name}" for name in weights} | head
    assert summary["params"]["frozen"] == 0
    for name, value in weights.items():
        assert np.any(stored["trainable"][f"encoder/{name}"] != value), name
    assert (
        summary["config"]["optimizer"]["learning_rate"] == TUNED["learning_rates.full_pretrained"]
    )


def test_full_fine_tuning_resumes_bit_exactly(tuned, make, mesh, tmp_path):
    workdir, fields = tmp_path / "parts", TUNED | {"eval.start": True}
    run.fit(make(**fields, **{"train.steps": 2}), workdir, mesh)
    run.fit(make(**fields), workdir, mesh)
    assert losses(workdir) == losses(tuned[0])
    one, other = (jax.tree.leaves(state(folder)) for folder in (workdir, tuned[0]))
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_fully_fine_tuned_run_is_used_and_exported_without_the_pretrained_values(
    tuned, mesh, monkeypatch, tmp_path
):
    workdir, summary = tuned
    monkeypatch.setattr(TensorFiles, "read", None)
    assert measured(workdir, mesh) == pytest.approx(summary["test"]["weighted_f1"])
    out = tmp_path / "out"
    adapter_commands.export(Namespace(run=workdir, pretrained=None, out=out))
    monkeypatch.undo()
    exported, trained = open_model(out), run.load(workdir, mesh).values.trainable
    wanted = {
        name.removeprefix("encoder/"): jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        for name, x in trained.items()
        if name.startswith("encoder/")
    }
    for name, value in exported.load(wanted).items():
        np.testing.assert_array_equal(value, trained[f"encoder/{name}"], err_msg=name)
    assert (out / "tokenizer.json").read_text() == (workdir / "tokenizer.json").read_text()


def test_a_fully_fine_tuned_run_of_a_named_backbone_needs_no_folder(
    tuned, mesh, tmp_path, monkeypatch
):
    monkeypatch.setitem(BACKBONES, "tiny_bert", SHAPE)
    workdir = shutil.copytree(tuned[0], tmp_path / "run")
    config = json.loads((workdir / "config.json").read_text())
    config |= {"backbone": "tiny_bert", "pretrained": str(tmp_path / "gone")}
    (workdir / "config.json").write_text(json.dumps(config))
    wanted = run.load(tuned[0], mesh).probabilities(["a string"])
    np.testing.assert_array_equal(run.load(workdir, mesh).probabilities(["a string"]), wanted)


def test_each_way_has_the_learning_rate_of_its_field(make):
    rates = {"full": 1e-3, "full_pretrained": 2e-3, "lora": 3e-3, "head": 4e-3}
    fields = {f"learning_rates.{way}": rate for way, rate in rates.items()}
    for way, rate in rates.items():
        config = make(**fields, finetune=way, **{"optimizer.learning_rate": 0.0})
        assert resolve(config).optimizer.learning_rate == rate
        config.optimizer.learning_rate = 0.5
        assert resolve(config).optimizer.learning_rate == 0.5
    assert "learning_rates" not in resolve(config)


def losses(workdir: Path) -> list[float]:
    return [m["train/loss"] for m in read_metrics(workdir) if "train/loss" in m]


def test_a_lora_run_in_two_parts_is_the_same_to_the_bit(lora, make, mesh, tmp_path):
    workdir = tmp_path / "parts"
    run.fit(make(**LORA, **{"train.steps": 2}), workdir, mesh)
    run.fit(make(**LORA), workdir, mesh)
    assert losses(workdir) == losses(lora[0])
    one, other = (jax.tree.leaves(state(folder)) for folder in (workdir, lora[0]))
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def test_all_devices_train_what_one_trains(lora, make, tmp_path):
    """Adapters on pretrained weights that lie in parts on all of them; Adafactor's sums among what they share."""
    wide = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    run.fit(make(**LORA, **{"eval.steps": 4}), tmp_path / "eight", wide)
    np.testing.assert_allclose(losses(tmp_path / "eight"), losses(lora[0]), rtol=1e-4)


def test_full_training_has_the_trained_tokenizer_or_the_pretrained_one(full, make, mesh):
    """The paper's ablation: random weights read either."""
    own = run.load(full[0], mesh)
    assert own.shape.vocabulary == own.tokenizer.size == 290
    config = make(**{"data.tokenizer": "pretrained"})
    tokenizer = run.make_tokenizer(config, None)
    assert make_shape(config, SimpleNamespace(shape=SHAPE), tokenizer.size).vocabulary == 300


def classified(monkeypatch, capsys, workdir: Path, text: bytes, *options: str) -> list[list[str]]:
    monkeypatch.setattr(sys, "argv", ["classify", f"--workdir={workdir}", *options])
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text)))
    try:
        classify.main()
    finally:
        out = capsys.readouterr().out
    return [line.split("\t") for line in out.splitlines()]


def test_weights_that_a_run_never_used_do_not_keep_it_from_being_used(
    full, mesh, tmp_path, monkeypatch
):
    """Such runs were made before this was refused; now none is prepared."""
    monkeypatch.setitem(BACKBONES, "tiny_bert", SHAPE)
    workdir = shutil.copytree(full[0], tmp_path / "run")
    config = json.loads((workdir / "config.json").read_text())
    config |= {"backbone": "tiny_bert", "pretrained": str(tmp_path / "gone")}
    (workdir / "config.json").write_text(json.dumps(config))
    trained = run.load(workdir, mesh)
    wanted = run.load(full[0], mesh).probabilities(["a string"])
    np.testing.assert_array_equal(trained.probabilities(["a string"]), wanted)
    with pytest.raises(UserError, match="gone would not be used"):
        run.prepare(trained.config, mesh)


def test_classify_prints_classes_and_probabilities(full, mesh, monkeypatch, capsys):
    texts = ["a string", "the debugger steps into a function", "x"]
    rows = classified(monkeypatch, capsys, full[0], "\n".join(texts).encode(), "--batch=2")
    trained = run.load(full[0], mesh)
    assert len(rows) == 3
    for row, chances in zip(rows, trained.probabilities(texts), strict=True):
        found = dict(zip(row[::2], map(float, row[1::2]), strict=True))
        assert list(found.values()) == sorted(found.values(), reverse=True)
        assert [found[name] for name in trained.classes] == pytest.approx(
            chances.tolist(), abs=1e-4
        )
    (top,) = classified(monkeypatch, capsys, full[0], b"a string\r\n", "--top=2")
    assert top == rows[0][:4]
    assert classified(monkeypatch, capsys, full[0], b"") == []


def test_classify_labels_what_comes_before_a_fault():
    found = classify.batches([b"one\n", b"two\n", b"three\n", b" \n"], 2)
    assert next(found) == ["one", "two"] and next(found) == ["three"]
    with pytest.raises(UserError, match="standard input, line 4 is empty"):
        next(found)
    with pytest.raises(UserError, match="standard input, line 1 is not UTF-8"):
        list(classify.batches([b"\xff\n"], 2))
    with pytest.raises(UserError, match="nowhere holds no run"):
        run.load(Path("nowhere"))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"backbone": "openelm_27m"}, "did you mean openelm_270m"),
        ({"dataset": "rotten_tomato"}, "did you mean rotten_tomatoes"),
        ({"data.source": ""}, r"--config.dataset=NAME for one of .* or --config.data.source"),
        ({"finetune": "lora", "pretrained": ""}, "--config.pretrained=DIR is missing, a folder"),
        ({"pretrained": ""}, "--config.backbone=auto means that of --config.pretrained"),
        ({"finetune": "lora", "pretrained": "nowhere"}, "--config.pretrained=nowhere is no folder"),
        ({"finetune": "lora", "data.tokenizer": "trained"}, "tokenizer=trained is for .*=full"),
        ({"finetune": "lora", "backbone": "arctic_xs"}, "is not --config.backbone=arctic_xs"),
        ({"finetune": "lora", "data.max_length": 17}, "longer than the 16 positions of the model"),
        (
            {"finetune": "lora", "lora.targets": "out qkv"},
            "targets: 'qkv' names no layer; there are, .*: query, key, value, out, up, down",
        ),
        ({"backbone": "tiny_bert"}, "--config.pretrained=.* would not be used: .*finetune=full"),
        (
            {"finetune": "full_pretrained", "pretrained": ""},
            "--config.pretrained=DIR is missing, a",
        ),
        (
            {"finetune": "full_pretrained", "quantize": "int8"},
            "quantize=int8 is of frozen weights; --config.finetune=full_pretrained trains them all",
        ),
        (
            {"finetune": "full_pretrained", "data.tokenizer": "trained"},
            "tokenizer=trained is for --config.finetune=full$",
        ),
        (
            {"optimizer.learning_rate": 0.0, "learning_rates.full": -1.0},
            "--config.learning_rates.full must be above 0, got -1.0",
        ),
        ({"finetune": "lora", "lora.rank": 0}, "lora.rank must be at least 1"),
        ({"finetune": "lora", "reinitialize": "embed"}, "did you mean embed/table"),
        ({"pool": "max"}, "choose one of masked, authors"),
        ({"model.dropout": -0.5}, "must be from 0 to 0.99"),
        ({"eval.select": "train"}, "choose one of valid, test"),
        ({"data.vocab_size": 100}, "vocab_size=100 must be at least"),
        ({"data.max_length": 0}, "max_length must be at least 1, got 0"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    make, mesh, tmp_path, fields, told
):
    workdir = tmp_path / "run"
    with pytest.raises(UserError, match=told) as caught:
        run.fit(make(**fields), workdir, mesh)
    assert not workdir.exists() and "\n" not in str(caught.value)


def test_a_run_that_has_ended_needs_neither_data_nor_weights(
    lora, make, mesh, pretrained, monkeypatch
):
    """Its summary is there. What has changed since, or more steps, need everything again."""
    workdir, summary = lora
    assert run.ended(make(**LORA), workdir)["test"] == summary["test"]
    assert run.ended(make(**LORA, seed=2), workdir) is None
    assert run.ended(make(**LORA), workdir / "other") is None
    with monkeypatch.context() as patch:
        patch.setattr(datasets, "load", None)
        moved = pretrained.rename(pretrained.with_name("moved"))
        try:
            assert run.fit(make(**LORA), workdir, mesh) == json.loads(
                (workdir / "summary.json").read_text()
            )
            with pytest.raises(UserError, match="model is no folder"):
                run.fit(make(**LORA, **{"train.steps": 5}), workdir, mesh)
        finally:
            moved.rename(pretrained)
    assert run.ended(make(**LORA), workdir) is None


def test_other_classes_than_a_run_began_with_are_refused(full, make, mesh):
    """The examples have changed since; the trained head is about others."""
    path = full[0] / "classes.json"
    names = path.read_text()
    path.write_text(json.dumps([*json.loads(names)[:-1], "other"]))
    with pytest.raises(UserError, match=r"have other classes than .*classes\.json"):
        run.fit(make("paper,tiny", **{"train.steps": 6}), full[0], mesh)
    path.write_text(names)


def test_other_examples_than_a_run_began_with_are_refused(full, make, mesh):
    """Even where tokenizer and classes are the same: its curve would be of two tests."""
    path = full[0] / "examples.json"
    kept = json.loads(path.read_text())
    assert kept["train"] != kept["test"]
    path.write_text(json.dumps({**kept, "test": kept["train"]}, indent=2) + "\n")
    with pytest.raises(UserError, match=r"examples are not those of .*examples\.json: they have"):
        run.fit(make("paper,tiny", **{"train.steps": 6}), full[0], mesh)
    path.write_text(json.dumps(kept, indent=2) + "\n")


def test_a_run_without_its_classes_is_not_used(full, mesh, tmp_path):
    workdir = shutil.copytree(full[0], tmp_path / "run")
    (workdir / "classes.json").write_text("3")
    with pytest.raises(UserError, match=r"classes\.json is damaged: "):
        run.load(workdir, mesh)
    (workdir / "classes.json").unlink()
    with pytest.raises(UserError, match=r"run has no classes\.json to read: No such file"):
        run.load(workdir, mesh)


def test_weights_without_a_tokenizer_say_where_it_comes_from(make, mesh, pretrained, tmp_path):
    shutil.copytree(pretrained, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    config = make(finetune="head", pretrained=str(tmp_path / "model"))
    with pytest.raises(UserError, match=r"model has no tokenizer\.json: .*OpenELM.*Llama 2"):
        run.prepare(config, mesh)


def test_rows_of_the_authors_are_all_as_long_as_the_longest(make, mesh):
    """Filled up with the end of text, which "masked" rows, of the length of their bucket, do not see."""
    config = make("paper,tiny", **{"data.buckets": (16, 32), "data.max_length": 64})
    labelled = datasets.load(config)
    tokenizer = run.make_tokenizer(config, labelled[0]["train"])

    def found(pool: str) -> TextClassification:
        config.pool = pool
        return TextClassification(config, tokenizer, None, mesh, labelled)

    lengths = {pool: set() for pool in ("masked", "authors")}
    for pool, seen in lengths.items():
        task = found(pool)
        for batch, _ in islice(task.batches(None), 40):
            seen.add(batch["tokens"].shape[1])
            there = batch["ids"] >= 0
            assert (batch["lengths"] > 0).tolist() == there.tolist()
            for row, length in zip(batch["tokens"][there], batch["lengths"][there], strict=True):
                assert (row[length:] == tokenizer.pad).all()
                assert (row[:length] != tokenizer.pad).all()
    assert lengths == {"masked": {32, 64}, "authors": {64}}
