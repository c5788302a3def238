"""The paper's question on a user's data, and what one does with the adapters that come of it: programs, end to end."""

import csv
import io
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from common import variables
from common.config import load
from common.data.manual import python
from common.data.subword import Subword, build_subword
from common.data.tensor_files import TensorFiles
from common.errors import UserError
from common.report.runs import load_local
from common.sharding import make_mesh
from common.train.workdir import GROUPS
from perception import adapter_commands, adapters, classify, comparison, run, worth
from perception.backbones import bert
from perception.comparison import Laboratory, Reached, answer, noise
from perception.hugging_face import export, open_model
from perception.model import backbone
from tests.perception.helpers import states

SHAPE = bert(1, 16, 24, 2, vocabulary=300, longest=16)
ROWS = {"train": 120, "validation": 24, "test": 24}


def write_data(folder: Path) -> None:
    """Two topics of the manual of Python, a user's classes by their names."""
    folder.mkdir()
    wanted = ("string-methods", "types")
    kept = [{"text": t, "label": label} for (t,), label in python("train") if label in wanted]
    np.random.default_rng(0).shuffle(kept)
    start = 0
    for split, count in ROWS.items():
        lines = [json.dumps(row) for row in kept[start : start + count]]
        assert len(lines) == count
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
        start += count


def write_weights(folder: Path, seed: int) -> None:
    structure = variables.abstract(lambda: backbone(SHAPE, rngs=variables.Keys(0)))
    generator = np.random.default_rng(seed)
    values = {
        name: jax.numpy.asarray(generator.normal(0, 0.2, v.shape), np.float32)
        for name, v in structure.trainable.items()
    }
    lines = [text for (text,), _ in python("train")]
    export(folder, SHAPE, values, build_subword(300, lines, folder.parent).to_json())


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("worth")
    write_data(folder / "data")
    write_weights(folder / "model", 0)
    return folder


def call(program, *arguments: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["program", *map(str, arguments)])
        program.main()


def ask(folder: Path) -> None:
    """LoRA on a base in 4 bits, the head, all weights, the baseline: four steps each."""
    fields = {"data.max_length": 16, "data.buckets": "16,", "data.vocab_size": 290}
    fields |= {"train.steps": 4, "eval.steps": 2, "checkpoint.steps": 2, "quantize": "4bit"}
    fields |= {"data.source": f"files:{folder / 'data'}", "pretrained": folder / "model"}
    fields |= {"data.cache_dir": folder}
    given = [f"--config.{name}={value}" for name, value in fields.items()]
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    comparison.worth(Laboratory("", 1, given, folder / "out", mesh, "configs/perception.py:tiny"))


@pytest.fixture(scope="module")
def asked(folder) -> Path:
    ask(folder)
    return folder / "out"


def test_everything_stands_side_by_side(asked) -> None:
    with (asked / "worth.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row[""] for row in rows] == [*comparison.WAYS.values(), comparison.BASELINE]
    for row, name in zip(rows, comparison.WAYS, strict=False):
        summary = json.loads((asked / "runs" / f"{name}_seed1" / "summary.json").read_text())
        assert row["F1, best step"] == f"{summary['test']['weighted_f1']:.2f}"
        assert row["F1, last step"] == f"{summary['test_last']['weighted_f1']:.2f}"
        assert int(row["parameters trained"]) == summary["params"]["trainable"]
        assert summary["config"]["quantize"] == ("none" if "full" in name else "4bit")
    sentence = (asked / "answer.txt").read_text()
    assert sentence.startswith("On these 120 training examples") and sentence.count("\n") == 1
    compared = load_local(str(asked / "runs"))  # what common.report takes
    assert {run.name for run in compared} == {f"{way}_seed1" for way in comparison.WAYS}


def test_a_second_call_trains_nothing(asked, folder) -> None:
    logs = {path: path.read_bytes() for path in asked.rglob("*.jsonl")}
    kept = (asked / "baseline.json").read_bytes()
    ask(folder)
    assert {path: path.read_bytes() for path in asked.rglob("*.jsonl")} == logs
    assert (asked / "baseline.json").read_bytes() == kept


def kernels(model: Path) -> dict[str, np.ndarray]:
    import safetensors.numpy

    return safetensors.numpy.load_file(model / "model.safetensors")


def test_adapters_from_the_command_line(asked, folder) -> None:
    """Merged weights and back; half of an adapter and half of it again; and its negative."""
    lora, base = asked / "runs" / "lora_seed1", kernels(folder / "model")
    call(adapters, "merge", f"--adapter={lora}", f"--out={folder / 'merged'}")
    merged = kernels(folder / "merged")
    trained = run.load(lora).values.trainable
    layer = "encoder/stack/blocks/0/residuals/1/function/up"
    change = np.asarray(trained[f"{layer}/lora_a"]) @ np.asarray(trained[f"{layer}/lora_b"])
    name = "encoder.layer.0.intermediate.dense.weight"
    np.testing.assert_allclose(merged[name], base[name] + change.T, atol=1e-6)
    assert abs(change).max() > 1e-5
    assert sum((merged[n] != base[n]).any() for n in base) == 3
    assert (folder / "merged" / "tokenizer.json").is_file()

    arguments = (f"--merged={folder / 'merged'}", f"--out={folder / 'back'}")
    call(adapters, "unmerge", f"--adapter={lora}", *arguments)
    back = kernels(folder / "back")
    for n, value in base.items():
        np.testing.assert_allclose(back[n], value, atol=1e-6)

    call(adapters, "add", "--adapters", f"{lora}:0.5", f"{lora}:0.5", f"--out={folder / 'sum'}")
    given = (f"--adapter={folder / 'sum'}", f"--pretrained={folder / 'model'}")
    call(adapters, "merge", *given, f"--out={folder / 'again'}")
    for n, value in kernels(folder / "again").items():
        np.testing.assert_allclose(value, merged[n], atol=1e-6)


def test_the_weights_need_not_be_where_a_run_had_them_from(
    asked, folder, monkeypatch, capsys
) -> None:
    """For `add` no weights are read at all, for `unmerge` the merged ones, and elsewhere those that are named."""
    lora, out = asked / "runs" / "lora_seed1", folder / "elsewhere"
    with monkeypatch.context() as patch:
        patch.setattr(TensorFiles, "read", None)
        call(adapters, "add", "--adapters", f"{lora}:1", f"--out={folder / 'unread'}")
    moved = (folder / "model").rename(folder / "moved")
    try:
        gone = "model is no folder any more: --pretrained=DIR says where it is now"
        assert gone in refused(adapters, "merge", f"--adapter={lora}", f"--out={out}")
        assert gone in refused(classify, f"--workdir={lora}")
        named = f"--pretrained={moved}"
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"a string\n")))
            call(classify, f"--workdir={lora}", named)
        *_, row = capsys.readouterr().out.splitlines()
        assert {*row.split("\t")[::2]} == {"string-methods", "types"}
        call(adapters, "merge", f"--adapter={lora}", named, f"--out={out}")
        call(adapters, "add", "--adapters", f"{lora}:1", named, f"--out={folder / 'unread_too'}")
        given = (f"--merged={out}", f"--out={folder / 'base'}")
        call(adapters, "unmerge", f"--adapter={lora}", *given)
    finally:
        moved.rename(folder / "model")
    for n, value in kernels(folder / "model").items():
        np.testing.assert_allclose(kernels(folder / "base")[n], value, atol=1e-6)


def test_weights_that_are_named_are_those_that_are_read(asked, folder, tmp_path) -> None:
    """Even where the run had others from is still there."""
    write_weights(tmp_path / "other", 1)
    named, out = f"--pretrained={tmp_path / 'other'}", f"--out={tmp_path / 'out'}"
    for name in ("lora", "head"):
        assert "was trained on other weights than those of" in refused(
            adapters, "export", f"--run={asked / 'runs' / f'{name}_seed1'}", named, out
        )
    workdir = tmp_path / "full"
    shutil.copytree(asked / "runs" / "full_seed1", workdir)
    config = json.loads((workdir / "config.json").read_text()) | {"backbone": "tiny_bert"}
    (workdir / "config.json").write_text(json.dumps(config))
    assert "would not be used: " in refused(adapters, "export", f"--run={workdir}", named, out)
    assert "nowhere is no folder" in refused(
        adapters, "export", f"--run={workdir}", "--pretrained=nowhere", out
    )


def test_a_run_of_another_paper_is_refused_in_a_line(tmp_path) -> None:
    values = {name: {} for name in GROUPS}
    (tmp_path / "config.json").write_text(json.dumps(values | {"paper": "reservoir"}))
    out, what = f"--out={tmp_path / 'out'}", f"={tmp_path} is a run of another program"
    for option, program, *more in (
        ("--run", adapters, "export", out),
        ("--adapter", adapters, "merge", out),
        ("--workdir", classify),
    ):
        told = refused(program, *more, f"{option}={tmp_path}")
        assert told == f"{option}{what}: of reservoir"
    told = refused(adapters, "add", "--adapters", f"{tmp_path}:1", out)
    assert told == f"--adapters{what}: of reservoir"
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert refused(classify, f"--workdir={tmp_path}") == f"--workdir{what}"


def test_a_run_in_full_is_exported_with_all_that_it_needs(asked, folder) -> None:
    """Its probabilities come out of the exported files alone."""
    workdir, out = asked / "runs" / "full_seed1", folder / "full"
    call(adapters, "export", f"--run={workdir}", f"--out={out}")
    lines = ["a string", "the debugger steps into a function", "types"]
    rows = Subword.load(out / "tokenizer.json").encode(lines, 16)
    lengths_B = np.asarray([len(row) for row in rows])
    tokens_BL = np.asarray([row + [0] * (max(lengths_B) - len(row)) for row in rows])
    states_BLD, head = states(open_model(out), tokens_BL, lengths_B), kernels(out / "classifier")
    wanted_BN = run.load(workdir).probabilities(lines)
    for state_LD, length, wanted_N in zip(states_BLD, lengths_B, wanted_BN, strict=True):
        pooled = np.concatenate([state_LD[:length].mean(0), state_LD[length - 1]])
        chances_N = np.exp(head["weight"] @ pooled + head["bias"])
        np.testing.assert_allclose(chances_N / chances_N.sum(), wanted_N, rtol=1e-4)
    said = json.loads((out / "classifier" / "config.json").read_text())
    assert said.pop("pad") == Subword.load(out / "tokenizer.json").pad
    classes = ["string-methods", "types"]
    assert said == {"pool": "masked", "max_length": 16, "classes": classes}


def test_an_export_without_its_classifier_does_not_appear(asked, tmp_path, monkeypatch) -> None:
    def fails(folder: Path, tensors: dict) -> None:
        assert (tmp_path / "out").exists() is False
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(adapter_commands, "write", fails)
    arguments = (f"--run={asked / 'runs' / 'full_seed1'}", f"--out={tmp_path / 'out'}")
    assert "No space left on device" in refused(adapters, "export", *arguments)
    assert not any(tmp_path.iterdir())


def test_other_runs_are_exported_with_what_they_began_from(asked, folder) -> None:
    base = kernels(folder / "model")
    for name, changed in (("head", 0), ("lora", 3), ("full_pretrained", len(base))):
        workdir, out = asked / "runs" / f"{name}_seed1", folder / f"exported_{name}"
        call(adapters, "export", f"--run={workdir}", f"--out={out}")
        found, head = kernels(out), run.load(workdir).values.trainable["head/kernel"]
        assert sum((found[n] != base[n]).any() for n in base) == changed
        np.testing.assert_array_equal(kernels(out / "classifier")["weight"], head.T)


def test_an_adapter_beside_tables_of_its_own_is_exported_with_them(folder, tmp_path) -> None:
    """No weights have them. Here there are more positions than those that are pretrained, and the head reads rows with
    their padding: its probabilities come out of the exported files alone."""
    config = load("configs/perception.py:tiny")
    fields = {"finetune": "lora", "reinitialize": "authors", "train.steps": 0, "eval.start": True}
    fields |= {"data.max_length": 32, "data.buckets": (32,), "wandb.mode": "disabled"}
    fields |= {"backbone": "auto", "pretrained": str(folder / "model"), "pool": "authors"}
    config.update_from_flattened_dict(fields)
    workdir, out = tmp_path / "run", tmp_path / "out"
    run.fit(config, workdir, make_mesh({"data": 1}, jax.devices()[:1]))
    assert "adapter is for weights with another embed/positions/table, drawn" in refused(
        adapters, "merge", f"--adapter={workdir}", f"--out={out}"
    )
    call(adapters, "export", f"--run={workdir}", f"--out={out}")
    base, found, name = kernels(folder / "model"), kernels(out), "position_embeddings.weight"
    table = found.pop(f"embeddings.{name}")
    np.testing.assert_array_equal(
        table, run.load(workdir).values.frozen["encoder/embed/positions/table"]
    )
    assert table.shape == (32, 16) and open_model(out).shape.learned == 32
    for n, value in found.items():
        np.testing.assert_array_equal(value, base[n], err_msg=n)
    said, lines = json.loads((out / "classifier" / "config.json").read_text()), ["a string", "x"]
    assert said["pool"] == "authors"
    rows, length = Subword.load(out / "tokenizer.json").encode(lines, 32), said["max_length"]
    tokens_BL = np.asarray([row + [said["pad"]] * (length - len(row)) for row in rows])
    states_BLD = states(open_model(out), tokens_BL, np.asarray([len(row) for row in rows]))
    pooled_BE = np.concatenate([states_BLD.mean(1), states_BLD[:, -1]], axis=1)
    head = kernels(out / "classifier")
    logits_BN = pooled_BE @ head["weight"].T + head["bias"]
    wanted_BN = run.load(workdir).probabilities(lines)
    np.testing.assert_allclose(jax.nn.softmax(logits_BN), wanted_BN, rtol=1e-4)


def test_the_cost_of_quantization_is_shown(folder, capsys) -> None:
    call(adapters, "quantize", f"--pretrained={folder / 'model'}", f"--out={folder / 'cost'}")
    with (folder / "cost" / "quantize_4bit.csv").open() as file:
        rows = list(csv.reader(file))
    assert len(rows) == 1 + 6 + 2 and rows[1][0].startswith("stack/blocks/0/")
    said = capsys.readouterr().out
    assert "No weights were written: a run with --config.quantize=4bit quantizes them" in said


def refused(program, *arguments: object) -> str:
    with pytest.raises(UserError) as caught:
        call(program, *arguments)
    return str(caught.value)


def test_wrong_adapters_are_refused_in_a_line(asked, folder, tmp_path) -> None:
    lora, out = asked / "runs" / "lora_seed1", f"--out={tmp_path / 'out'}"
    write_weights(tmp_path / "other", 1)
    assert "was trained on other weights than those of" in refused(
        adapters, "merge", f"--adapter={lora}", f"--pretrained={tmp_path / 'other'}", out
    )
    full = asked / "runs" / "full_seed1"
    assert "has no adapter: it is a run with --config.finetune=full" in (
        refused(adapters, "merge", f"--adapter={full}", out)
    )
    assert "holds no run" in refused(adapters, "merge", f"--adapter={tmp_path}", out)
    assert "it is ADAPTER:WEIGHT" in refused(adapters, "add", "--adapters", lora, out)
    assert "must be a number, got 'x'" in refused(adapters, "add", "--adapters", f"{lora}:x", out)
    assert "is not empty" in refused(
        adapters, "add", "--adapters", f"{lora}:1", f"--out={folder / 'data'}"
    )
    assert "the following arguments are required: --merged" in refused(
        adapters, "unmerge", f"--adapter={lora}", out
    )
    assert "nothing is merged into them" in refused(
        adapters, "unmerge", f"--adapter={lora}", f"--merged={folder / 'model'}", out
    )
    assert "README.md is no folder" in refused(
        adapters, "quantize", f"--pretrained={folder / 'model'}", "--out=README.md/x"
    )
    (tmp_path / "sum").mkdir()
    (tmp_path / "sum" / "adapter.json").write_text("{")
    damaged = f"--adapter={tmp_path / 'sum'}"
    assert "adapter.json is damaged" in refused(adapters, "merge", damaged, out)
    assert not (tmp_path / "out").exists()
    assert open_model(tmp_path / "other").shape == SHAPE


def test_wrong_questions_are_refused_before_anything_is_trained(folder, tmp_path) -> None:
    def told(*more: str) -> str:
        out = f"--out={tmp_path / 'out'}"
        return refused(worth, "--config=configs/perception.py:tiny", out, *more)

    assert "--config.finetune=lora: the comparison sets this itself" in told(
        "--config.finetune=lora"
    )
    assert "nowhere is no folder" in told(f"--config.pretrained={tmp_path}/nowhere")
    assert "no directory" in told(f"--config.data.source=files:{tmp_path}/nowhere")
    assert "--seeds must be a whole number" in told("--seeds=0")
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").write_text("a file")
    assert f"cannot write to --out={tmp_path / 'out'}: " in told("--config.train.steps=1")


def test_full_training_of_another_backbone_has_nothing_of_the_weights(tmp_path) -> None:
    """They are for the other ways; of a backbone by name it has neither shape nor tokenizer from them."""

    def pretrained(way: str, *more: str) -> tuple[str, str]:
        fields = ["--config.pretrained=DIR", *more]
        mesh = make_mesh({"data": 1}, jax.devices()[:1])
        lab = Laboratory("", 1, fields, tmp_path, mesh, "configs/perception.py:tiny")
        config = lab.configuration(way, 1)
        run.validate(config)
        return config.backbone, config.pretrained

    assert pretrained("full") == pretrained("lora") == ("auto", "DIR")
    named = "--config.backbone=arctic_xs"
    assert pretrained("full", named) == ("arctic_xs", "")
    assert pretrained("lora", named) == ("arctic_xs", "DIR")
    tokenizer = "--config.data.tokenizer=pretrained"
    assert pretrained("full", named, tokenizer) == ("arctic_xs", "DIR")


def reached(*values: float) -> Reached:
    """At the best step; at the last one half of it."""
    return Reached([value / 2 for value in values], list(values), 1, 1.0, [1.0])


def test_the_answer_is_a_verdict_only_beyond_the_noise() -> None:
    """At the best steps, and of as many test examples and seeds as there are, whatever was trained on."""
    found = {"lora": reached(90.0), "head": reached(80.0), "full": reached(75.0)}
    found["baseline"] = reached(70.0)
    sentence = answer(found, 1000, 25_000, 10_000)
    assert "so pretraining is worth +15.0 points" in sentence and "counting" not in sentence
    assert f"(give or take {noise([90.0], [75.0], 10_000):.1f})" in sentence
    worse = answer(found | {"full": reached(95.0)}, 1000, 25_000, 10_000)
    assert "so pretraining costs -5.0 points" in worse
    few = answer(found | {"full": reached(89.0), "baseline": reached(91.0)}, 1000, 25_000, 100)
    assert "no worth beyond the noise, +1.0 points" in few and "beats every network." in few
    alone = answer({"full": found["full"], "baseline": found["baseline"]}, 1000, 25_000, 100)
    assert "pretrained weights were not tried" in alone


def test_noise_is_that_of_shares_and_of_seeds() -> None:
    """Two shares of a half measured on 5,000 examples differ by 1 % (standard error); seeds come on top."""
    assert noise([50.0], [50.0], 5000) == pytest.approx(2 * 1.0)
    seeds = [49.0, 51.0]
    assert noise(seeds, [50.0], 5000) == pytest.approx(2 * np.sqrt(1 + 2 / 2))
    assert noise([50.0], seeds, 5000) == pytest.approx(2 * np.sqrt(1 + 2 / 2))
    assert noise(seeds, seeds, 5000) == pytest.approx(2 * np.sqrt(1 + 2 / 2 + 2 / 2))
