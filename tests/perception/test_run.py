"""Training, evaluation and inference end to end, with and without pretrained weights."""

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
from common.metrics.kinds import load as load_predictions
from common.metrics.predictions import PREDICTIONS
from common.sharding import make_mesh
from common.track.tracker import read_metrics
from common.train.command import fit
from perception import adapter_commands, adapters, classify, datasets, loading, run, task
from perception.backbones import BACKBONES
from perception.finetuning import make_shape, resolve
from perception.hugging_face import open_model
from perception.safetensor_files import TensorFiles
from perception.task import TextClassification
from perception.weighted_f1 import weighted_f1
from tests.perception.conftest import LORA, TUNED
from tests.perception.helpers import SHAPE


@pytest.fixture(scope="module")
def captured_stderr() -> io.StringIO:
    """Returns the stream to which the fixture `full` redirects standard error."""
    return io.StringIO()


@pytest.fixture(scope="module")
def full(make, mesh, captured_stderr, tmp_path_factory) -> tuple[Path, dict]:
    """Returns the workdir and the summary of full training from random weights with the recipe "paper"."""
    workdir = tmp_path_factory.mktemp("runs") / "full"
    with contextlib.redirect_stderr(captured_stderr):
        return workdir, fit(make("paper,tiny"), workdir, mesh)


@pytest.fixture(scope="module")
def lora(make, mesh, tmp_path_factory) -> tuple[Path, dict]:
    """Returns the workdir and the summary of a LoRA run with the recipe "fixed"."""
    workdir = tmp_path_factory.mktemp("runs") / "lora"
    return workdir, fit(make(**LORA), workdir, mesh)


def measured(workdir: Path, mesh) -> float:
    """Loads the run in `workdir`, and returns the weighted F1 of its predictions for the test split."""
    trained = loading.load(workdir, mesh)
    splits, classes = datasets.load(trained.config)
    assert trained.classes == classes
    found_MN = trained.probabilities([text for (text,) in splits["test"].texts], rows=16)
    np.testing.assert_allclose(found_MN.sum(1), 1, rtol=1e-5)
    return weighted_f1(splits["test"].labels_E, found_MN.argmax(1))


def test_loaded_run_reproduces_its_test_f1(full, lora, mesh):
    for workdir, summary in (full, lora):
        assert measured(workdir, mesh) == pytest.approx(summary["test"]["weighted_f1"])
        assert summary["objective"] == "weighted_f1"


def test_run_without_later_fields_is_loaded(lora, tmp_path):
    """An older run lacks fields of config.data. Loading adds them, with values that keep the old behaviour."""
    shutil.copytree(lora[0], tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    config = json.loads(path.read_text())
    for field in ("balance", "multi_label", "pair", "shots"):
        del config["data"][field]
    path.write_text(json.dumps(config))
    lines = ["a string", "the debugger"]
    found, wanted = (loading.load(place) for place in (tmp_path / "run", lora[0]))
    np.testing.assert_array_equal(found.probabilities(lines), wanted.probabilities(lines))


def test_unfinished_run_is_used_with_a_warning(lora, tmp_path, monkeypatch, capsys):
    workdir, lines = tmp_path / "run", tmp_path / "new.txt"
    shutil.copytree(lora[0], workdir)
    lines.write_text("a string\n")
    commands = (
        (classify, f"--run={workdir}", f"--input={lines}"),
        (adapters, "peft", f"--run={workdir}", f"--out={tmp_path / 'NAME_peft'}"),
        (adapters, "export", f"--run={workdir}", f"--out={tmp_path / 'NAME_export'}"),
    )
    for name in ("finished", "unfinished"):
        for program, *given in commands:
            monkeypatch.setattr(sys, "argv", ["program", *(x.replace("NAME", name) for x in given)])
            program.main()
            told = [x for x in capsys.readouterr().err.splitlines() if "has not ended" in x]
            warning = f"warning: {workdir} has no summary.json, so its training has not ended: its"
            assert [x.startswith(warning) for x in told] == [True] * (name == "unfinished")
        (workdir / "summary.json").unlink(missing_ok=True)


def test_predictions_hold_test_probabilities(lora, mesh):
    workdir, summary = lora
    kept = load_predictions(workdir / PREDICTIONS)
    assert kept.metrics() == pytest.approx(summary["test"], rel=1e-5)
    trained = loading.load(workdir, mesh)
    splits, classes = datasets.load(trained.config)
    assert (kept.names, kept.examples) == (classes, splits["test"].fingerprint)
    found_MN = trained.probabilities([text for (text,) in splits["test"].texts], rows=16)
    np.testing.assert_allclose(kept.probabilities_EC, found_MN, atol=2e-3)


def test_paper_recipe_selects_on_test(full):
    """The recipe validates on the test split, so the curve has the test F1 at the best and at the last step."""
    _, summary = full
    points = {point["step"]: point["value"] for point in summary["curve"]["points"]}
    assert points[summary["best_step"]] == pytest.approx(summary["test"]["weighted_f1"])
    assert points[4] == pytest.approx(summary["test_last"]["weighted_f1"])
    assert set(summary["test"]) == set(summary["test_last"]) == {"accuracy", "weighted_f1", "loss"}


def test_log_names_the_selection_split(full, captured_stderr):
    text = captured_stderr.getvalue()
    assert "step 4: test accuracy" in text and "step 4: valid" not in text


def state(workdir: Path, kind: str = "latest") -> dict:
    folder = workdir.absolute() / "checkpoints" / kind
    step = max(int(path.name) for path in folder.iterdir())
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder / str(step) / "state")


def test_lora_trains_and_stores_adapters_and_head(lora, mesh, weights):
    workdir, summary = lora
    stored = state(workdir)
    assert not stored.get("frozen")
    assert all("lora_" in n or n.startswith("head/") for n in stored["trainable"])
    # Adapters of rank 32 on the attention output and both feed-forward layers. The head maps 2 * 16 features to 6
    # classes.
    adapters = 32 * ((16 + 16) + (16 + 24) + (24 + 16))
    assert summary["params"]["trainable"] == adapters + 2 * 16 * 6 + 6
    values = loading.load(workdir, mesh).values
    for name, value in values.frozen.items():
        np.testing.assert_array_equal(value, weights[name.removeprefix("encoder/")], err_msg=name)
    assert len(values.frozen) == len(weights)
    moved = [n for n, x in values.trainable.items() if n.endswith("lora_b") and np.any(x != 0)]
    assert len(moved) == 3


def test_peft_folder_merges_like_the_run_on_any_mesh(lora, pretrained, tmp_path, monkeypatch):
    """The adapter is written in PEFT's format on a mesh of eight devices, and merged on the default mesh."""

    def call(*arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", ["adapters", *map(str, arguments)])
        adapters.main()

    folder, meshes = tmp_path / "peft", ("data=2", "fsdp=2", "tensor=2")
    call("peft", f"--run={lora[0]}", f"--out={folder}", *(f"--config.mesh.{m}" for m in meshes))
    names = {"adapter.json", "adapter_config.json", "adapter_model.safetensors", "classifier"}
    assert {path.name for path in folder.iterdir()} == {*names, "tokenizer.json", "README.md"}
    readme = (folder / "README.md").read_text()
    assert "path of the base model below and in `adapter_config.json` does not exist" in readme
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert f'from_pretrained("{settings["base_model_name_or_path"]}")' in readme
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (32, 32, 0.05)
    assert config["base_model_name_or_path"] == str(pretrained)
    for adapter in (lora[0], folder):
        call("merge", f"--adapter={adapter}", f"--out={tmp_path / f'merged_{adapter.name}'}")
    one, other = (TensorFiles(tmp_path / f"merged_{name}") for name in ("lora", "peft"))
    for name in one.names:
        np.testing.assert_allclose(one.read(name, ()), other.read(name, ()), atol=1e-7)
    monkeypatch.setattr(sys, "argv", ["adapters", "merge", "--config.mesh.data=3"])
    with pytest.raises(UserError, match="required: --adapter, --out"):
        adapters.main()
    with pytest.raises(UserError, match="needs 3 devices, but there are 8"):
        call(
            "merge",
            f"--adapter={folder}",
            f"--out={tmp_path}/x",
            "--config.mesh.data=3",
            "--config.mesh.fsdp=1",
        )


@pytest.fixture(scope="module")
def tuned(make, mesh, tmp_path_factory) -> tuple[Path, dict]:
    """Returns the workdir and the summary of full training from the pretrained weights."""
    workdir = tmp_path_factory.mktemp("runs") / "tuned"
    return workdir, fit(make(**TUNED, **{"eval.start": True}), workdir, mesh)


@pytest.mark.medium
def test_full_pretrained_starts_from_pretrained_weights(make, mesh, weights, tmp_path):
    fit(make(**TUNED, **{"train.steps": 0, "eval.start": True}), tmp_path / "run", mesh)
    values = loading.load(tmp_path / "run", mesh).values
    assert not values.frozen
    for name, value in weights.items():
        np.testing.assert_array_equal(values.trainable[f"encoder/{name}"], value, err_msg=name)


@pytest.mark.medium
def test_full_pretrained_trains_and_stores_every_weight(tuned, mesh, weights):
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


@pytest.mark.medium
def test_full_pretrained_resume_is_bit_exact(tuned, make, mesh, tmp_path):
    workdir, fields = tmp_path / "parts", TUNED | {"eval.start": True}
    fit(make(**fields, **{"train.steps": 2}), workdir, mesh)
    fit(make(**fields), workdir, mesh)
    assert losses(workdir) == losses(tuned[0])
    one, other = (jax.tree.leaves(state(folder)) for folder in (workdir, tuned[0]))
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.medium
def test_full_pretrained_run_is_used_without_reading_base_weights(
    tuned, mesh, monkeypatch, tmp_path
):
    workdir, summary = tuned
    monkeypatch.setattr(TensorFiles, "read", None)
    assert measured(workdir, mesh) == pytest.approx(summary["test"]["weighted_f1"])
    out = tmp_path / "out"
    adapter_commands.export(Namespace(run=workdir, pretrained=None, out=out, mesh=mesh))
    monkeypatch.undo()
    exported, trained = open_model(out), loading.load(workdir, mesh).values.trainable
    wanted = {
        name.removeprefix("encoder/"): jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        for name, x in trained.items()
        if name.startswith("encoder/")
    }
    for name, value in exported.load(wanted).items():
        np.testing.assert_array_equal(value, trained[f"encoder/{name}"], err_msg=name)
    assert (out / "tokenizer.json").read_text() == (workdir / "tokenizer.json").read_text()


@pytest.mark.medium
def test_full_pretrained_run_of_named_backbone_needs_no_base_directory(
    tuned, mesh, tmp_path, monkeypatch
):
    monkeypatch.setitem(BACKBONES, "tiny_bert", SHAPE)
    workdir = shutil.copytree(tuned[0], tmp_path / "run")
    config = json.loads((workdir / "config.json").read_text())
    config |= {"backbone": "tiny_bert", "pretrained": str(tmp_path / "gone")}
    (workdir / "config.json").write_text(json.dumps(config))
    wanted = loading.load(tuned[0], mesh).probabilities(["a string"])
    np.testing.assert_array_equal(loading.load(workdir, mesh).probabilities(["a string"]), wanted)


def test_default_learning_rate_depends_on_finetune(make):
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


@pytest.mark.medium
def test_lora_resume_is_bit_exact(lora, make, mesh, tmp_path):
    workdir = tmp_path / "parts"
    fit(make(**LORA, **{"train.steps": 2}), workdir, mesh)
    fit(make(**LORA), workdir, mesh)
    assert losses(workdir) == losses(lora[0])
    one, other = (jax.tree.leaves(state(folder)) for folder in (workdir, lora[0]))
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_sharded_lora_matches_one_device(lora, make, tmp_path):
    """Training on eight devices with sharded base weights gives the same losses as on one device."""
    wide = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    fit(make(**LORA, **{"eval.steps": 4}), tmp_path / "eight", wide)
    np.testing.assert_allclose(losses(tmp_path / "eight"), losses(lora[0]), rtol=1e-4)


def test_full_training_uses_trained_or_pretrained_tokenizer(full, make, mesh):
    """Full training learns its own tokenizer or, as in the paper's ablation, uses the pretrained tokenizer."""
    own = loading.load(full[0], mesh)
    assert own.shape.vocabulary == own.tokenizer.size == 290
    config = make(**{"data.tokenizer": "pretrained"})
    tokenizer = run.make_tokenizer(config, None)
    assert make_shape(config, SimpleNamespace(shape=SHAPE), tokenizer.size).vocabulary == 300


def classified(monkeypatch, capsys, workdir: Path, text: bytes, *options: str) -> list[list[str]]:
    monkeypatch.setattr(sys, "argv", ["classify", f"--workdir={workdir}", *options])
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text)))
    classify.main()
    out = capsys.readouterr().out
    return [line.split("\t") for line in out.splitlines()]


def test_run_loads_if_its_unused_weights_are_missing(full, mesh, tmp_path, monkeypatch):
    """A run of an older version may name a folder of weights that it does not use. In a new run, this is an error."""
    monkeypatch.setitem(BACKBONES, "tiny_bert", SHAPE)
    workdir = shutil.copytree(full[0], tmp_path / "run")
    config = json.loads((workdir / "config.json").read_text())
    config |= {"backbone": "tiny_bert", "pretrained": str(tmp_path / "gone")}
    (workdir / "config.json").write_text(json.dumps(config))
    trained = loading.load(workdir, mesh)
    wanted = loading.load(full[0], mesh).probabilities(["a string"])
    np.testing.assert_array_equal(trained.probabilities(["a string"]), wanted)
    with pytest.raises(UserError, match="gone is not used"):
        run.prepare(trained.config, mesh)


def test_classify_prints_classes_and_probabilities(full, mesh, monkeypatch, capsys):
    texts = ["a string", "the debugger steps into a function", "x"]
    rows = classified(monkeypatch, capsys, full[0], "\n".join(texts).encode(), "--batch=2")
    trained = loading.load(full[0], mesh)
    assert len(rows) == 3
    wanted = trained.probabilities_of(trained.windows(texts))
    for row, chances in zip(rows, wanted, strict=True):
        found = dict(zip(row[::2], map(float, row[1::2]), strict=True))
        assert list(found.values()) == sorted(found.values(), reverse=True)
        assert [found[name] for name in trained.classes] == pytest.approx(
            chances.tolist(), abs=1e-4
        )
    (top,) = classified(monkeypatch, capsys, full[0], b"a string\r\n", "--top=2")
    assert top == rows[0][:4]
    assert classified(monkeypatch, capsys, full[0], b"") == []


def test_classify_answers_lines_before_an_invalid_line(full, monkeypatch, capsys):
    with pytest.raises(UserError, match="standard input line 3 is not UTF-8"):
        classified(monkeypatch, capsys, full[0], b"one\ntwo\n\xff\n", "--batch=3")
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_loading_a_folder_without_a_run_raises_an_error():
    with pytest.raises(UserError, match="nowhere holds no run"):
        loading.load(Path("nowhere"))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"backbone": "openelm_27m"}, "did you mean openelm_270m"),
        ({"data.cache_dir": "gs://a/b"}, "cache_dir=gs://a/b must be a folder on this machine"),
        ({"dataset": "rotten_tomato"}, "did you mean rotten_tomatoes"),
        ({"data.source": ""}, r"set --config.dataset=NAME to one of .* or --config.data.source"),
        ({"finetune": "lora", "pretrained": ""}, "set --config.pretrained=DIR to a directory"),
        (
            {"pretrained": ""},
            "--config.backbone=auto needs a pretrained model: set --config.pretrained=DIR",
        ),
        (
            {"finetune": "lora", "pretrained": "nowhere"},
            "--config.pretrained=nowhere is not a readable directory",
        ),
        (
            {"finetune": "lora", "data.tokenizer": "trained"},
            "tokenizer=trained is set: use .*=auto or .*=full",
        ),
        ({"finetune": "lora", "backbone": "arctic_xs"}, "is not --config.backbone=arctic_xs"),
        ({"finetune": "lora", "data.max_length": 17}, "exceeds the 16 positions of the model"),
        (
            {"finetune": "lora", "lora.targets": "out qkv"},
            "targets=out qkv: 'qkv' matches no layer of .* choose among query, key, value, out, up, down",
        ),
        ({"backbone": "tiny_bert"}, "--config.pretrained=.* is not used, because .*finetune=full"),
        (
            {"finetune": "full_pretrained", "pretrained": ""},
            "set --config.pretrained=DIR to a directory",
        ),
        (
            {"finetune": "full_pretrained", "quantize": "int8"},
            "quantize=int8 needs frozen weights, but --config.finetune=full_pretrained trains all",
        ),
        (
            {"finetune": "full_pretrained", "data.tokenizer": "trained"},
            "tokenizer=trained is set: use --config.data.tokenizer=auto or --config.finetune=full$",
        ),
        (
            {"optimizer.learning_rate": 0.0, "learning_rates.full": -1.0},
            "--config.learning_rates.full must be positive, got -1.0",
        ),
        ({"finetune": "lora", "lora.rank": 0}, "lora.rank must be a number of at least 1"),
        ({"finetune": "lora", "reinitialize": "embed"}, "did you mean embed/table"),
        ({"pool": "max"}, "choose one of masked, authors"),
        ({"model.dropout": -0.5}, "must be a number from 0 to 0.99"),
        ({"eval.select": "train"}, "choose one of valid, test"),
        ({"data.vocab_size": 100}, "vocab_size=100 must be at least"),
        ({"data.max_length": 0}, "max_length must be a whole number of at least 1, got 0"),
    ],
)
def test_invalid_config_raises_error_before_writing(make, mesh, tmp_path, fields, told):
    workdir = tmp_path / "run"
    with pytest.raises(UserError, match=told) as caught:
        fit(make(**fields), workdir, mesh)
    assert not workdir.exists() and "\n" not in str(caught.value)


def test_fractional_length_of_a_configuration_file_raises_error(make) -> None:
    config = make()
    with config.ignore_type():
        config.data.max_length = 1.5
    with pytest.raises(UserError, match=r"at least 1, got 1\.5 of type float"):
        task.validate(config)


def test_finished_run_needs_neither_data_nor_weights(lora, make, mesh, pretrained, monkeypatch):
    """A finished run returns its summary without reading data or weights. More steps need the weights again.

    A run does not count as finished if the pretrained weights are newer than its summary, for example because their
    folder was moved after the run.
    """
    workdir, summary = lora
    assert run.ended(make(**LORA), workdir)["test"] == summary["test"]
    assert run.ended(make(**LORA, seed=2), workdir) is None
    assert run.ended(make(**LORA), workdir / "other") is None
    with monkeypatch.context() as patch:
        patch.setattr(datasets, "load", None)
        moved = pretrained.rename(pretrained.with_name("moved"))
        try:
            assert fit(make(**LORA), workdir, mesh) == json.loads(
                (workdir / "summary.json").read_text()
            )
            with pytest.raises(UserError, match="model is not a readable directory"):
                fit(make(**LORA, **{"train.steps": 5}), workdir, mesh)
        finally:
            moved.rename(pretrained)
    assert run.ended(make(**LORA), workdir) is None


def test_resume_with_other_classes_fails(full, make, mesh):
    """The trained head has one output for each class in classes.json."""
    path = full[0] / "classes.json"
    names = path.read_text()
    path.write_text(json.dumps([*json.loads(names)[:-1], "other"]))
    with pytest.raises(UserError, match=r"have other classes than .*classes\.json"):
        fit(make("paper,tiny", **{"train.steps": 6}), full[0], mesh)
    path.write_text(names)


def test_resume_with_other_examples_fails(full, make, mesh):
    """Tokenizer and classes do not change, but the validation curve would mix F1 values of two test splits."""
    path = full[0] / "examples.json"
    kept = json.loads(path.read_text())
    assert kept["train"] != kept["test"]
    path.write_text(json.dumps({**kept, "test": kept["train"]}, indent=2) + "\n")
    with pytest.raises(UserError, match=r"examples differ from .*examples\.json: the data have"):
        fit(make("paper,tiny", **{"train.steps": 6}), full[0], mesh)
    path.write_text(json.dumps(kept, indent=2) + "\n")


def test_missing_or_damaged_classes_json_raises_error(full, mesh, tmp_path):
    workdir = shutil.copytree(full[0], tmp_path / "run")
    (workdir / "classes.json").write_text("3")
    with pytest.raises(UserError, match=r"classes\.json is damaged: "):
        loading.load(workdir, mesh)
    (workdir / "classes.json").unlink()
    with pytest.raises(UserError, match=r"cannot read .*run/classes\.json: No such file"):
        loading.load(workdir, mesh)


def test_missing_tokenizer_error_names_remedies(make, mesh, pretrained, tmp_path):
    shutil.copytree(pretrained, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    config = make(finetune="head", pretrained=str(tmp_path / "model"))
    with pytest.raises(
        UserError, match=r"model has no tokenizer\.json: .*without .*save_pretrained.*Llama 2"
    ):
        run.prepare(config, mesh)


@pytest.mark.medium
def test_authors_pool_pads_all_rows_to_max_length(make, mesh):
    """The pool "authors" pads all rows to max_length. The pool "masked" pads rows to their bucket."""
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


def test_task_without_data_starts_from_the_given_parameters(make, mesh):
    _, task = run.prepare(make("tiny"), mesh, read_data=False)
    parameters = {"head/kernel": np.ones(2)}
    assert task.start(parameters, {}) is parameters
