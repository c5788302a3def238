"""perception.worth, perception.adapters and perception.classify end to end on user data."""

import csv
import html
import io
import json
import re
import shlex
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from common import variables
from common.config import load
from common.data.labelled import LabelledText
from common.data.manual import python
from common.errors import UserError
from common.metrics.classes import Classes
from common.metrics.curve import Curve, Point
from common.metrics.label_sets import LabelSets
from common.report.runs import Run, load_local, run_of
from common.sharding import make_mesh
from common.train.command import fit
from common.train.workdir import GROUPS
from perception import (
    adapters,
    budget,
    classifier_folder,
    classify,
    comparison,
    conclusions,
    loading,
    run,
    train,
    worth,
)
from perception.backbones import bert
from perception.budget import Cost, Plan, TimeLimitReached
from perception.comparison import ExperimentSuite
from perception.conclusions import answer, choose, example_interval, judge, triviality
from perception.hugging_face import export, open_model
from perception.model import backbone
from perception.safetensor_files import TensorFiles
from perception.subword import Subword, build_subword
from perception.ways import BASELINE, TRAINABLE, find
from tests.perception.helpers import states

SHAPE = replace(bert(1, 16, 24, 2), vocabulary=300, learned=16, longest=16)
WAYS = {way: find(way) for way in (*TRAINABLE, BASELINE)}
ROWS = {"train": 120, "validation": 24, "test": 24}


def write_data(folder: Path) -> None:
    """Writes texts on two topics of the Python manual in three splits. Their classes are the names of the topics."""
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
    abstract_model = variables.abstract(lambda rngs: backbone(SHAPE, rngs=rngs))
    generator = np.random.default_rng(seed)
    values = {
        name: jax.numpy.asarray(generator.normal(0, 0.2, v.shape), np.float32)
        for name, v in abstract_model.trainable.items()
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


def fields_of(folder: Path) -> list[str]:
    fields = {"data.max_length": 16, "data.buckets": "16,", "data.vocab_size": 290}
    fields |= {"train.steps": 4, "eval.steps": 2, "checkpoint.steps": 2, "quantize": "4bit"}
    fields |= {"pretrained": folder / "model", "data.cache_dir": folder}
    return [f"--config.{name}={value}" for name, value in fields.items()]


def suite_of(fields: list[str], out: Path) -> ExperimentSuite:
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    return ExperimentSuite("", 1, fields, out, mesh, "configs/perception.py:tiny")


def ask(folder: Path) -> None:
    """Runs perception.worth with base weights quantized to 4 bits and four steps per run."""
    given = [*fields_of(folder), f"--config.data.source=files:{folder / 'data'}"]
    comparison.worth(suite_of(given, folder / "out"))


@pytest.fixture(scope="module")
def asked(folder) -> Path:
    ask(folder)
    return folder / "out"


def folder_of(way: str) -> str:
    """Returns the folder name of a training method's run with seed 1, or of its only run."""
    return f"{way}_seed1" if WAYS[way].random else way


@pytest.mark.medium
def test_worth_table_has_all_ways(asked) -> None:
    with (asked / "worth.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row[""] for row in rows] == [way.name for way in WAYS.values()]
    for row, way in zip(rows, WAYS, strict=True):
        summary = json.loads((asked / "runs" / folder_of(way) / "summary.json").read_text())
        assert row["weighted F1"] == f"{summary['test']['weighted_f1']:.2f}"
        assert row["weighted F1, last step"] == f"{summary['test_last']['weighted_f1']:.2f}"
        assert row["accuracy"] == f"{summary['test']['accuracy']:.2f}"
        assert int(row["parameters trained"]) == summary["params"]["trainable"]
        assert summary["seed"] == (1 if WAYS[way].random else None)
        if way != "tf_idf":
            assert summary["config"]["quantize"] == ("none" if "full" in way else "4bit")
    compared = load_local(str(asked / "runs"))  # loads the runs as common.report does
    assert {run.name for run in compared} == set(map(folder_of, WAYS))


@pytest.mark.medium
def test_one_seed_gives_no_verdict(asked) -> None:
    """With one seed, a comparison is undecided if the result of at least one of the two methods depends on the seed."""
    with (asked / "verdicts.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) in (4, 5)
    random = {way.name for way in WAYS.values() if way.random}
    seeded = [row for row in rows if random & {row["weighted F1 of"], row["against"]}]
    assert {row["verdict"] for row in seeded} == {"undecided (at least 2 more seeds)"}
    said = (asked / "answer.txt").read_text()
    first, trivial, second, *_ = said.splitlines()
    assert (
        first.startswith("Best classifier, selected on the validation examples: ")
        and "on 24 test examples (95% interval" in first
    )
    assert trivial.startswith("Always predicting '")
    assert second.startswith("Trained on 120 examples (about ") and "(one seed)" in second


@pytest.mark.medium
def test_report_names_the_best_run(asked) -> None:
    """The report's command for perception.classify names the run with the best validation F1."""
    runs = {run.name: run for run in load_local(asked / "runs")}
    page = (asked / "report.html").read_text()
    (name,) = re.findall(
        r"python -m perception.classify --run=\S*/runs/(\S+) --input=new.csv --output=labelled.csv<",
        page,
    )
    assert runs[name].curve.best.value == max(run.curve.best.value for run in runs.values())
    assert all(f"<td>{way.name}</td>" in page for way in WAYS.values())


@pytest.mark.medium
def test_cost_of_a_way_is_measured(folder, tmp_path) -> None:
    given = [*fields_of(folder), f"--config.data.source=files:{folder / 'data'}"]
    found = suite_of(given, tmp_path).measure(
        "lora", {"valid": range(24), "test": range(48)}, time.monotonic() + 600
    )
    assert min(found) > 0
    # The 48 test examples are two validation splits or three training batches of 16 rows. The shorter estimate counts.
    assert found.test == pytest.approx(min(2 * found.evaluation, 3 * found.step))
    assert not (tmp_path / "probe").exists()


@pytest.mark.medium
def test_budget_trains_only_ways_that_fit_and_reuses_them(folder, tmp_path, monkeypatch) -> None:
    """The budget is enough for TF-IDF, the head and LoRA only. A repeated call neither trains nor measures."""
    monkeypatch.setattr(budget, "LEARNING_RATES", ("1e-3",))
    monkeypatch.setattr(budget, "SEEDS", 1)
    monkeypatch.setattr(budget, "LEAST_STEPS", 600)
    cost = Cost(start=1.0, step=1.0, evaluation=0.01, test=0.01)
    measured = []
    monkeypatch.setattr(
        ExperimentSuite, "measure", lambda suite, way, *_: measured.append(way) or cost
    )
    given = [*fields_of(folder), f"--config.data.source=files:{folder / 'data'}"]
    given = [field for field in given if "max_length" not in field and "buckets" not in field]
    given.append("--config.data.max_length=16")
    suite = suite_of(given, tmp_path / "out")
    comparison.worth(suite, seconds=1000.0)
    assert measured == ["head", "lora"]
    names = {path.parent.name for path in (tmp_path / "out" / "runs").glob("*/summary.json")}
    assert names == {"tf_idf", "head", "lora_seed1_learning_rate=1e-3"}
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Left out: all weights, from random ones: 1 runs of 600 steps would take" in page
    assert "Only TF-IDF was trained" not in page
    made = [*(tmp_path / "out" / "runs").rglob("predictions.npz")]
    times = [path.stat().st_mtime_ns for path in made]
    comparison.worth(suite, seconds=1000.0)
    assert measured == ["head", "lora"] and len(made) == 3
    assert [path.stat().st_mtime_ns for path in made] == times


@pytest.mark.parametrize(("select", "name"), [("valid", "validation"), ("test", "test")])
def test_plan_names_the_examples_that_select_the_learning_rate(select, name) -> None:
    (found,) = conclusions.describe(Plan(["full"], 100, 3, {}), 600.0, select)
    assert f"is the best on the {name} examples among" in found


def test_head_is_tried_if_measuring_lora_takes_too_long(folder, tmp_path, monkeypatch) -> None:
    def measure(suite, way, *_):
        if way != "head":
            raise TimeLimitReached
        return Cost(start=1.0, step=0.01, evaluation=0.1, test=0.1)

    monkeypatch.setattr(ExperimentSuite, "measure", measure)
    given = [*fields_of(folder), f"--config.data.source=files:{folder / 'data'}"]
    splits = dict.fromkeys(("train", "valid", "test"), LabelledText([("a",)], np.zeros(1, int)))
    found = suite_of(given, tmp_path).afford(list(WAYS), splits, 60.0, time.monotonic())
    assert found.ways == ["head"]
    assert set(found.left_out) == {"lora", "full_pretrained", "full"}
    monkeypatch.setattr(ExperimentSuite, "measure", None)
    spent = suite_of(given, tmp_path / "spent").afford(
        list(WAYS), splits, 60.0, time.monotonic() - 61
    )
    assert spent.ways == [] and set(spent.left_out.values()) == {"no time is left"}


@pytest.mark.medium
def test_cost_of_the_head_is_measured(folder, tmp_path) -> None:
    """`measure` trains the head for a few steps instead of solving it, and leaves no files."""
    given = [*fields_of(folder), f"--config.data.source=files:{folder / 'data'}"]
    splits = {"valid": range(24), "test": range(48)}
    found = suite_of(given, tmp_path).measure("head", splits, time.monotonic() + 600)
    assert found.evaluation > 0 and found.step > 0 and not (tmp_path / "probe").exists()


def test_measuring_ends_with_half_of_the_budget(folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(ExperimentSuite, "fit_all", lambda *_: time.sleep(60))
    given = [*fields_of(folder), f"--config.data.source=files:{folder / 'data'}"]
    splits = dict.fromkeys(("train", "valid", "test"), LabelledText([("a",)], np.zeros(1, int)))
    begun = time.monotonic()
    found = suite_of(given, tmp_path).afford(list(WAYS), splits, 1.0, begun)
    assert 0.5 < time.monotonic() - begun < 10
    assert found.ways == [] and set(found.left_out) == set(WAYS) - {"tf_idf"}
    assert set(found.left_out.values()) == {
        "measuring 10 steps of head took half of the remaining time"
    }


def test_lengths_are_quantiles_of_the_texts(folder, tmp_path) -> None:
    """The buckets are the median (16) and the 95 % quantile (38) of the numbers of tokens, rounded up to 16 and 48."""
    texts = [(" ".join("a" * n),) for n in (*[16] * 60, *[38] * 36, *[98] * 4)]
    given = [field for field in fields_of(folder) if "max_length" not in field]
    suite = suite_of([f for f in given if "buckets" not in f], tmp_path)
    found = suite.lengths(LabelledText(texts, np.zeros(len(texts), np.int32)))
    assert found == ["--config.data.max_length=48", "--config.data.buckets=16,48,"]
    assert suite_of(fields_of(folder), tmp_path).lengths(LabelledText(texts, np.zeros(0))) == []


def test_worth_on_a_csv_file(tmp_path, capsys) -> None:
    """A budget of one second is enough for the baseline only.

    The notes and the splits name lines of the file.
    """
    shown = [(text, label) for (text,), label in python("train") if label in ("debugger", "types")]
    with (tmp_path / "mails.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("body", "queue"), *shown, ("", "types")])
    out = tmp_path / "out"
    given = (
        "--data",
        tmp_path / "mails.csv",
        "--config=configs/perception.py:tiny",
        f"--out={out}",
    )
    given = (*given, f"--config.data.cache_dir={tmp_path}", "--config.train.steps=1")
    call(worth, *given, "--budget=1s")
    said, lines = capsys.readouterr().out, (tmp_path / "mails.csv").read_text().splitlines()
    assert "Texts are in the column body, labels in the column queue." in said
    assert f"Skipped 1 row: mails.csv line {len(lines)}: no text in the column body." in said
    page = (out / "report.html").read_text()
    assert (
        "A classifier for mails.csv" in page and "Left out: all weights, from random ones" in page
    )
    test = [json.loads(line) for line in (out / "data" / "test.jsonl").read_text().splitlines()]
    answered = (out / "answer.txt").read_text()
    assert answered.startswith("Only TF-IDF was trained, because the budget of 1 s is too short")
    assert '<p class="answer">Only TF-IDF was trained, because' in page
    assert f"on {len(test)} test examples" in answered
    for row in test:  # the location of a row is its last line
        number = int(row["row"].removeprefix("mails.csv line "))
        assert row["text"].splitlines()[-1].replace('"', '""') in lines[number - 1]


@pytest.mark.medium
def test_command_of_the_report_labels_a_table_like_the_data(tmp_path, capsys) -> None:
    """Column names have spaces, the delimiter is a semicolon and the encoding is cp1252. TF-IDF is the best method."""
    topics = ("für immer", "gegen alles")
    rows = [f"{topics[i % 2]} {i} {'abcdefgh'[i // 8]};{'xy'[i % 2]}\n" for i in range(64)]
    (tmp_path / "mails.csv").write_text("the text;the queue\n" + "".join(rows), "cp1252")
    out = tmp_path / "out"
    given = ("--data", tmp_path / "mails.csv", "--encoding=cp1252", f"--out={out}", "--budget=1s")
    cache = f"--config.data.cache_dir={tmp_path}"
    call(worth, *given, cache, "--text=the text", "--label=the queue", "--config.train.steps=1")
    (use,) = re.findall(r"use it: python -m perception.classify (.*)", capsys.readouterr().out)
    assert html.escape(use, quote=False) in (out / "report.html").read_text()
    (tmp_path / "new.csv").write_text("the text;id\nfür a;1\ngegen b;2\n;3\n", "cp1252")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        call(classify, *shlex.split(use))
    assert "empty texts without a label: 1 of 3" in capsys.readouterr().err
    with (tmp_path / "labelled.csv").open() as file:
        found = list(csv.DictReader(file, delimiter=";"))
    assert [row["the queue"] for row in found] == ["x", "y", ""]
    assert [row["id"] for row in found] == ["1", "2", "3"]


def test_lengths_of_many_texts_come_from_a_sample(folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(comparison, "MEASURED_TEXTS", 10)
    texts = [(" ".join("a" * 16),), (" ".join("a" * 38),)] * 50
    given = [field for field in fields_of(folder) if "max_length" not in field]
    suite = suite_of([f for f in given if "buckets" not in f], tmp_path)
    seen, encode = [], Subword.encode_parts

    def counting(self, some, longest):
        seen.append(len(some))
        return encode(self, some, longest)

    monkeypatch.setattr(Subword, "encode_parts", counting)
    found = suite.lengths(LabelledText(texts, np.zeros(len(texts), np.int32)))
    assert seen == [10] and found[0] == "--config.data.max_length=48"


@pytest.mark.medium
def test_ways_option_trains_only_the_named_ways(folder, tmp_path) -> None:
    given = [*fields_of(folder), f"--config.data.source=files:{folder / 'data'}"]
    suite = suite_of(given, tmp_path)
    assert replace(suite, only=("lora", "head")).ways() == ["lora", "head", "tf_idf"]
    out = tmp_path / "out"
    call(worth, "--config=configs/perception.py:tiny", f"--out={out}", "--ways=head", *given)
    assert sorted(path.name for path in (out / "runs").iterdir()) == ["head", "tf_idf"]
    assert (
        "TF-IDF and logistic regression against the head alone" in (out / "answer.txt").read_text()
    )


def test_ways_option_can_name_the_baseline(folder, tmp_path) -> None:
    given = [*fields_of(folder), f"--config.data.source=files:{folder / 'data'}"]
    suite = suite_of(given, tmp_path)
    assert replace(suite, only=("tf_idf", "full")).ways() == ["full", "tf_idf"]
    out = f"--out={tmp_path / 'out'}"
    call(worth, "--config=configs/perception.py:tiny", out, "--ways=tf_idf", *given)
    assert [path.name for path in (tmp_path / "out" / "runs").iterdir()] == ["tf_idf"]


@pytest.mark.medium
def test_second_call_reuses_runs(asked, folder) -> None:
    logs = {path: path.read_bytes() for path in asked.rglob("*.jsonl")}
    kept = {path: path.stat().st_mtime_ns for path in asked.rglob("predictions.npz")}
    assert len(kept) == len(WAYS)
    ask(folder)
    assert {path: path.read_bytes() for path in asked.rglob("*.jsonl")} == logs
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


def kernels(model: Path) -> dict[str, np.ndarray]:
    import safetensors.numpy

    return safetensors.numpy.load_file(model / "model.safetensors")


QUANTIZED = "was trained on weights quantized to 4bit, but the unquantized weights are used here: 6"


@pytest.mark.medium
def test_merge_unmerge_and_add_commands(asked, folder, capsys) -> None:
    """Unmerging restores the base weights. The sum of half an adapter and half the same adapter equals the adapter."""
    lora, base = asked / "runs" / "lora_seed1", kernels(folder / "model")
    call(adapters, "merge", f"--adapter={lora}", f"--out={folder / 'merged'}")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: --adapter={lora} {QUANTIZED}")
    assert "write them with perception.adapters quantize --pretrained=/" in line
    mean, largest = map(float, re.findall(r"([\d.]+) %", line))
    assert 5 < mean < largest < 15  # the relative error of 4 bits in blocks of at most 24 inputs
    merged = kernels(folder / "merged")
    trained = loading.load(lora).values.trainable
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


@pytest.mark.medium
def test_moved_base_weights_are_found_with_pretrained_option(
    asked, folder, monkeypatch, capsys
) -> None:
    """`merge` and perception.classify read the base weights from --pretrained. `add` and `unmerge` read none."""
    lora, out = asked / "runs" / "lora_seed1", folder / "elsewhere"
    with monkeypatch.context() as patch:
        patch.setattr(TensorFiles, "read", None)
        call(adapters, "add", "--adapters", f"{lora}:1", f"--out={folder / 'unread'}")
    moved = (folder / "model").rename(folder / "moved")
    try:
        gone = "model is not a readable directory, but the run needs it: pass its new location as --pretrained=DIR"
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


@pytest.mark.medium
def test_pretrained_option_takes_precedence(asked, folder, tmp_path) -> None:
    """--pretrained takes precedence over the directory that the run used, even if that directory still exists."""
    write_weights(tmp_path / "other", 1)
    named, out = f"--pretrained={tmp_path / 'other'}", f"--out={tmp_path / 'out'}"
    for name in ("lora", "head"):
        assert "was not trained on the weights in" in refused(
            adapters, "export", f"--run={asked / 'runs' / folder_of(name)}", named, out
        )
    workdir = tmp_path / "full"
    shutil.copytree(asked / "runs" / "full_seed1", workdir)
    config = json.loads((workdir / "config.json").read_text()) | {"backbone": "tiny_bert"}
    (workdir / "config.json").write_text(json.dumps(config))
    assert "is not used: " in refused(adapters, "export", f"--run={workdir}", named, out)
    assert "nowhere is not a readable directory" in refused(
        adapters, "export", f"--run={workdir}", "--pretrained=nowhere", out
    )


def test_run_of_another_paper_raises_error(tmp_path) -> None:
    values = {name: {} for name in GROUPS}
    (tmp_path / "config.json").write_text(json.dumps(values | {"paper": "reservoir"}))
    out, what = f"--out={tmp_path / 'out'}", f"={tmp_path} is a run of"
    for option, program, *more in (
        ("--run", adapters, "export", out),
        ("--adapter", adapters, "merge", out),
        ("--workdir", classify),
    ):
        told = refused(program, *more, f"{option}={tmp_path}")
        assert told.startswith(f"{option}{what} reservoir, not of perception; ")
    told = refused(adapters, "add", "--adapters", f"{tmp_path}:1", out)
    assert told.startswith(f"--adapters{what} reservoir, not of perception; ")
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert (
        refused(classify, f"--workdir={tmp_path}")
        == f"--workdir{what} another program, not of perception; name a run of perception.train"
    )


@pytest.mark.medium
def test_export_of_full_run_reproduces_probabilities(asked, folder) -> None:
    """The exported files reproduce the probabilities of the run. No other file is needed."""
    workdir, out = asked / "runs" / "full_seed1", folder / "full"
    call(adapters, "export", f"--run={workdir}", f"--out={out}")
    lines = ["a string", "the debugger steps into a function", "types"]
    rows = Subword.load(out / "tokenizer.json").encode(lines, 16)
    lengths_B = np.asarray([len(row) for row in rows])
    tokens_BL = np.asarray([row + [0] * (max(lengths_B) - len(row)) for row in rows])
    states_BLD, head = states(open_model(out), tokens_BL, lengths_B), kernels(out / "classifier")
    wanted_BN = loading.load(workdir).probabilities(lines)
    for state_LD, length, wanted_N in zip(states_BLD, lengths_B, wanted_BN, strict=True):
        pooled = np.concatenate([state_LD[:length].mean(0), state_LD[length - 1]])
        chances_N = np.exp(head["weight"] @ pooled + head["bias"])
        np.testing.assert_allclose(chances_N / chances_N.sum(), wanted_N, rtol=1e-4)
    said = json.loads((out / "classifier" / "config.json").read_text())
    assert said.pop("pad") == Subword.load(out / "tokenizer.json").pad
    classes = ["string-methods", "types"]
    assert said == {"pool": "masked", "max_length": 16, "classes": classes}


@pytest.mark.medium
def test_failed_classifier_export_leaves_no_directory(asked, tmp_path, monkeypatch) -> None:
    def fails(folder: Path, tensors: dict) -> None:
        assert (tmp_path / "out").exists() is False
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(classifier_folder, "write", fails)
    arguments = (f"--run={asked / 'runs' / 'full_seed1'}", f"--out={tmp_path / 'out'}")
    assert "No space left on device" in refused(adapters, "export", *arguments)
    assert not any(tmp_path.iterdir())


@pytest.mark.medium
def test_export_of_head_lora_and_full_pretrained_runs(asked, folder, capsys) -> None:
    base = kernels(folder / "model")
    for name, changed in (("head", 0), ("lora", 3), ("full_pretrained", len(base))):
        workdir, out = asked / "runs" / folder_of(name), folder / f"exported_{name}"
        capsys.readouterr()
        call(adapters, "export", f"--run={workdir}", f"--out={out}")
        assert (QUANTIZED in capsys.readouterr().err) == (name != "full_pretrained")
        found, head = kernels(out), loading.load(workdir).values.trainable["head/kernel"]
        assert sum((found[n] != base[n]).any() for n in base) == changed
        np.testing.assert_array_equal(kernels(out / "classifier")["weight"], head.T)


@pytest.mark.medium
def test_export_includes_reinitialised_tables(folder, tmp_path) -> None:
    """The export reproduces the probabilities of a run whose position table has more rows than the base model's.

    The run's pooling also averages over padding.
    """
    config = load("configs/perception.py:tiny")
    fields = {"finetune": "lora", "reinitialize": "authors", "train.steps": 0, "eval.start": True}
    fields |= {"data.max_length": 32, "data.buckets": (32,), "wandb.mode": "disabled"}
    fields |= {"backbone": "auto", "pretrained": str(folder / "model"), "pool": "authors"}
    config.update_from_flattened_dict(fields)
    workdir, out = tmp_path / "run", tmp_path / "out"
    fit(config, workdir, make_mesh({"data": 1}, jax.devices()[:1]))
    assert "its adapter needs the run's own embedding tables (embed/positions/table)" in refused(
        adapters, "merge", f"--adapter={workdir}", f"--out={out}"
    )
    call(adapters, "export", f"--run={workdir}", f"--out={out}")
    base, found, name = kernels(folder / "model"), kernels(out), "position_embeddings.weight"
    table = found.pop(f"embeddings.{name}")
    np.testing.assert_array_equal(
        table, loading.load(workdir).values.frozen["encoder/embed/positions/table"]
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
    wanted_BN = loading.load(workdir).probabilities(lines)
    np.testing.assert_allclose(jax.nn.softmax(logits_BN), wanted_BN, rtol=1e-4)


def test_quantize_command_writes_cost_table(folder, capsys) -> None:
    call(adapters, "quantize", f"--pretrained={folder / 'model'}", f"--out={folder / 'cost'}")
    with (folder / "cost" / "quantize_4bit.csv").open() as file:
        rows = list(csv.reader(file))
    assert len(rows) == 1 + 6 + 2 and rows[1][0].startswith("stack/blocks/0/")
    said = capsys.readouterr().out
    assert (
        "No weights were written: a run with --config.quantize=4bit quantizes the kernels" in said
    )


def refused(program, *arguments: object) -> str:
    with pytest.raises(UserError) as caught:
        call(program, *arguments)
    return str(caught.value)


@pytest.mark.medium
def test_invalid_adapter_arguments_raise_errors(asked, folder, tmp_path, monkeypatch) -> None:
    lora, out = asked / "runs" / "lora_seed1", f"--out={tmp_path / 'out'}"
    with monkeypatch.context() as patch:
        patch.setattr("perception.loading.begun_from", lambda *_: None)
        assert "its adapter has no base model" in refused(
            adapters, "merge", f"--adapter={lora}", out
        )
    write_weights(tmp_path / "other", 1)
    assert "was not trained on the weights in" in refused(
        adapters, "merge", f"--adapter={lora}", f"--pretrained={tmp_path / 'other'}", out
    )
    full = asked / "runs" / "full_seed1"
    assert "has no adapter: the run used --config.finetune=full" in (
        refused(adapters, "merge", f"--adapter={full}", out)
    )
    assert "holds no run" in refused(adapters, "merge", f"--adapter={tmp_path}", out)
    assert "must be ADAPTER:WEIGHT" in refused(adapters, "add", "--adapters", lora, out)
    assert "must be a finite number, got 'x'" in refused(
        adapters, "add", "--adapters", f"{lora}:x", out
    )
    assert f"--out={folder / 'data'} is not empty" in refused(
        adapters, "add", "--adapters", f"{lora}:1", f"--out={folder / 'data'}"
    )
    assert f"--save={folder / 'data'} is not empty" in refused(
        adapters, "quantize", f"--pretrained={folder / 'model'}", f"--save={folder / 'data'}"
    )
    assert "the following arguments are required: --merged" in refused(
        adapters, "unmerge", f"--adapter={lora}", out
    )
    assert "without a merged adapter" in refused(
        adapters, "unmerge", f"--adapter={lora}", f"--merged={folder / 'model'}", out
    )
    assert "README.md is not a folder" in refused(
        adapters, "quantize", f"--pretrained={folder / 'model'}", "--out=README.md/x"
    )
    (tmp_path / "sum").mkdir()
    (tmp_path / "sum" / "adapter.json").write_text("{")
    damaged = f"--adapter={tmp_path / 'sum'}"
    assert "adapter.json is damaged" in refused(adapters, "merge", damaged, out)
    (tmp_path / "sum" / "adapter.json").write_text('{"base": "", "family": "brt"}')
    (tmp_path / "sum" / "adapter_config.json").write_text("{}")
    assert "adapter.json: family='brt': choose one of bert" in refused(
        adapters, "merge", damaged, out
    )
    assert not (tmp_path / "out").exists()
    assert open_model(tmp_path / "other").shape == SHAPE


def test_kept_refuses_runs_of_another_program(tmp_path) -> None:
    """The message names three of the experiments."""
    for name in "abcd":
        folder = tmp_path / "runs" / f"sst2_{name}_lora_seed1"
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text("{}")
    told = refused(worth, "--kept", f"--out={tmp_path}")
    names = "sst2_a_lora, sst2_b_lora, sst2_c_lora"
    assert f"has runs of another program ({tmp_path / 'runs'} has {names}): name" in told


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            [],
            "--data and --config are missing: use --data=FILE, or --config=configs/perception.py",
        ),
        (["--text=body"], "--text cannot be used without --data=FILE"),
        (["--label=x", "--strict"], "--label and --strict cannot be used without"),
        (["--data=a.csv", "--config.data.source=files:b"], "cannot be combined with --data"),
        (
            ["--kept", "--out=a", "--seeds=3", "--config.seed=1"],
            "--kept trains nothing: remove --seeds and --config.seed=1",
        ),
        (["--kept"], "--kept needs --out=DIR"),
        (
            ["--kept", "--out=nowhere"],
            "--out=nowhere has no finished runs of perception.worth: name the folder of a finished",
        ),
        (["--data=a.csv", "--config.dataset=imdb"], "cannot be combined with --data"),
        (
            ["--data=a.csv", "--config.data.label=x", "--config.data.source=y"],
            "remove --data, or remove --config.data.label=x and --config.data.source=y",
        ),
        (["--data=a.csv", "--budget=10"], "--budget=10 must be a positive decimal number"),
        (["--data=a.csv", "--budget=1m", "--seeds=3"], "cannot be combined with --seeds: remove"),
        (["--data=a.csv", "--budget=1m", "--sweep=seed=1"], "cannot be combined with --sweep"),
        (["--data=a.csv", "--budget=1m", "--ways=lora"], "cannot be combined with --ways: remove"),
        (["--data=a.csv", "--download"], "--download needs --config.pretrained=NAME"),
        (["--data=gone.csv"], "--data=gone.csv: no such file or folder"),
        (["--data=a.csv", "--out=README.md"], "cannot write to --out=README.md"),
        (["--data=a.csv", "--config=gone.py"], "gone.py"),
        (["--data=a.csv", "--config.no=1"], "unknown option --config.no"),
        (
            ["--config=configs/enwik8_gmlp.py:tiny"],
            "is a configuration for gmlp_lm, not for perception.worth: choose a configuration for perception",
        ),
    ],
)
def test_contradictory_worth_options_raise_errors(given, message) -> None:
    assert message in refused(worth, *given)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("proj/data", "--data=proj/data lies where this program writes the results of --out=proj"),
        ("proj/data/train.csv", "writes the results of --out=proj"),
        ("proj/runs/a.csv", "writes the results of --out=proj"),
        ("proj", "writes the results of --out=proj"),
        ("link/data", "writes the results of --out=proj"),
        (
            "proj/worth.csv",
            "--out=proj has worth.csv, which this program would replace, but no run of this program",
        ),
        (
            "proj/probe/a.csv",
            "--out=proj has probe, which this program would replace, but no run of this program",
        ),
    ],
)
def test_data_and_files_of_the_user_are_not_replaced(data, message, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("data/train.csv", "runs/a.csv", *(["worth.csv"] * ("worth" in data))):
        (tmp_path / "proj" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "proj" / name).write_text("text,label\na,b\n")
    if "probe" in data:
        (tmp_path / "proj" / "probe").mkdir()
    (tmp_path / "link").symlink_to("proj")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert message in refused(worth, f"--data={data}", "--out=proj")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_configuration_without_a_field_of_worth_raises_an_error(tmp_path) -> None:
    file = tmp_path / "mine.py"
    lines = "from ml_collections import ConfigDict", "get_config = lambda: ConfigDict({'data': {}})"
    file.write_text("\n".join(lines))
    message = f"--config={file} is not a configuration of this program: the field shots is missing;"
    assert refused(worth, f"--config={file}").startswith(message)
    assert "--download needs --config.pretrained" in refused(
        worth, f"--config={file}", "--download"
    )
    assert "--download needs --config.pretrained" in refused(
        train, f"--config={file}", "--download"
    )


def test_invalid_worth_options_fail_before_training(folder, tmp_path) -> None:
    def told(*more: str) -> str:
        out = f"--out={tmp_path / 'out'}"
        return refused(worth, "--config=configs/perception.py:tiny", out, *more)

    assert (
        "leave out --config.finetune=lora, because perception.worth sets this field itself; choose methods with --ways"
        in (told("--config.finetune=lora"))
    )
    assert "nowhere is not a readable directory" in told(f"--config.pretrained={tmp_path}/nowhere")
    assert "no directory" in told(f"--config.data.source=files:{tmp_path}/nowhere")
    assert "--seeds must be a whole number" in told("--seeds=0")
    assert "--ways='rola': choose one of lora, full_pretrained, head, full, tf_idf" in told(
        "--ways=rola"
    )
    assert "--ways=head needs --config.pretrained=DIR" in told("--ways=full,head")
    data = f"--data={tmp_path / 'gone.csv'}"
    for wrong, message in (
        ("--ways=rola", "choose one of lora"),
        ("--ways=head", "--ways=head needs --config.pretrained=DIR"),
        (f"--config.pretrained={tmp_path}/nowhere", "nowhere is not a readable directory"),
        ("--config.finetune=lora", "leave out --config.finetune=lora"),
        ("--sweep=x", "--sweep"),
        ("--config.train.steps=0", "--config.train.steps"),
        ("--config.train.steps=1", "gone.csv: no such file"),
    ):
        assert message in told(data, wrong)
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").write_text("a file")
    assert f"cannot write to --out={tmp_path / 'out'}: " in told("--config.train.steps=1")


def test_full_training_of_named_backbone_ignores_pretrained(tmp_path) -> None:
    """`full` starts from random weights.

    With --config.backbone=NAME, it reads at most the tokenizer in the folder --config.pretrained.
    """

    def pretrained(way: str, *more: str) -> tuple[str, str]:
        fields = ["--config.pretrained=DIR", *more]
        mesh = make_mesh({"data": 1}, jax.devices()[:1])
        suite = ExperimentSuite("", 1, fields, tmp_path, mesh, "configs/perception.py:tiny")
        config = suite.configuration(way, 1)
        run.validate(config)
        return config.backbone, config.pretrained

    assert pretrained("full") == pretrained("lora") == ("auto", "DIR")
    named = "--config.backbone=arctic_xs"
    assert pretrained("full", named) == ("arctic_xs", "")
    assert pretrained("lora", named) == ("arctic_xs", "DIR")
    tokenizer = "--config.data.tokenizer=pretrained"
    assert pretrained("full", named, tokenizer) == ("arctic_xs", "DIR")


LABELS_M = np.arange(1000) % 2


def runs_of(folder: Path, valid: float, *shares: float, seedless: bool = False) -> list[Run]:
    """Writes and returns a run for each accuracy in `shares` (%), on the same 1,000 test examples.

    The positions of half of the errors depend on the seed. `valid` is the F1 on validation.
    """
    made = []
    for seed, share in enumerate(shares, start=1):
        wrong = round(10 * (100 - share))
        missed = np.concatenate(
            [np.arange(wrong // 2), 500 + 100 * seed + np.arange(wrong - wrong // 2)]
        )
        guesses_E = LABELS_M.copy()
        guesses_E[missed % 1000] ^= 1
        logs_MN = np.log(np.where(np.eye(2)[guesses_E] == 1, 0.9, 0.1))
        found = Classes.of_log_probabilities("examples", LABELS_M, logs_MN, ("no", "yes"))
        workdir = folder / f"{valid}_{seed}"
        workdir.mkdir(parents=True, exist_ok=True)
        found.save(workdir / "predictions.npz")
        curve = Curve("weighted_f1", "max", [Point(1, 1.0, 1.0, valid)])
        summary = {
            "test": found.metrics(),
            "curve": curve.to_json(),
            "params": {"trainable": 1, "total": 2},
            "config": {},
        }
        summary["seed"] = None if seedless else seed
        made.append(run_of(summary, workdir.name, folder=workdir))
    return made


def words(found: dict[str, list[Run]], margin: float = 1.0) -> dict[tuple[str, str], str]:
    verdicts = judge(found, margin)
    return {pair: one.word for pair, one in verdicts.items()}


def test_choose_selects_pretrained_way_on_validation(tmp_path) -> None:
    found = {
        "lora": runs_of(tmp_path / "lora", 80.0, 90.0),
        "head": runs_of(tmp_path / "head", 85.0, 70.0, seedless=True),
        "full": runs_of(tmp_path / "full", 95.0, 75.0),
    }
    assert choose(found) == "head"
    assert choose({"full": found["full"]}) is None


@pytest.mark.medium
def test_difference_of_0_1_points_is_undecided(tmp_path) -> None:
    """TF-IDF at 80.4 is undecided against a network at 80.3, and the network at 80.3 is better than one at 65."""
    found = {
        "lora": runs_of(tmp_path / "lora", 81.0, 79.3, 80.3, 81.3),
        "full_pretrained": runs_of(tmp_path / "tuned", 80.0, 79.0, 80.0, 80.6),
        "full": runs_of(tmp_path / "full", 75.0, 64.0, 65.0, 66.0),
        "tf_idf": runs_of(tmp_path / "tf_idf", 80.0, 80.4, seedless=True),
    }
    said = words(found)
    assert said["tf_idf", "lora"] == "undecided"
    assert said["lora", "full"] == said["full_pretrained", "full"] == "better"
    assert words(found, margin=5.0)["tf_idf", "lora"] == "equivalent"
    size = 1000, 25_000, 1000
    text = answer(found, judge(found, 1.0), size, "valid")
    assert "beats" not in text and "worth" not in text
    against = "TF-IDF and logistic regression against LoRA on pretrained weights: +0.1 ("
    (line,) = [line for line in text.splitlines() if line.startswith(against)]
    assert line.rpartition(": ")[2].startswith("undecided")
    assert text.startswith("Best classifier, selected on the validation examples: LoRA")
    assert "selected on the test examples, as in the recipe" in answer(
        found, judge(found, 1.0), size, "test"
    )


def test_answer_notes_that_validation_and_test_disagree(tmp_path) -> None:
    found = {
        "lora": runs_of(tmp_path / "lora", 84.0, 89.5, 90.0, 90.5),
        "tf_idf": runs_of(tmp_path / "tf_idf", 85.0, 80.0, seedless=True),
    }
    verdicts = judge(found, 1.0)
    said = "Validation and test disagree: on the test examples LoRA on pretrained weights is better"
    text = answer(found, verdicts, (1000, 25_000, 1000), "valid")
    assert "Best classifier, selected on the validation examples: TF-IDF" in text and said in text
    found["lora"] = runs_of(tmp_path / "other", 86.0, 89.5, 90.0, 90.5)
    assert said not in answer(found, verdicts, (1000, 25_000, 1000), "valid")


def test_interval_of_one_classifier_matches_the_binomial(tmp_path) -> None:
    """On balanced classes, weighted F1 is close to accuracy, whose standard error is binomial."""
    (run,) = runs_of(tmp_path, 80.0, 90.0)
    low, high = example_interval(run.predictions)
    assert (low + high) / 2 == pytest.approx(90, abs=0.05)
    assert (high - low) / 2 == pytest.approx(100 * 1.96 * (0.9 * 0.1 / 1000) ** 0.5, rel=0.1)


@pytest.mark.parametrize("several", [False, True])
def test_useless_classifier_is_compared_with_the_most_frequent_class(several) -> None:
    names, labels_E = ("spam", "ham"), np.array([1] * 99 + [0])
    logs_EN = np.log(np.tile([0.1, 0.9], (100, 1)))
    one_hot_EN = np.eye(2, dtype=np.uint8)[labels_E]
    made = {
        False: lambda x: Classes.of_log_probabilities("examples", labels_E, x, names),
        True: lambda x: LabelSets.of_logits("examples", one_hot_EN, x + 0.5, (0.5, 0.5), names),
    }[several]
    useless, better = made(logs_EN), made(np.log(np.where(one_hot_EN == 1, 0.9, 0.1)))
    score = useless.metrics()["weighted_f1"]
    first = (
        "Always predicting 'ham', the most frequent class, has a weighted F1 of 98.5 on the same"
    )
    assert score == pytest.approx(98.5, abs=0.05)
    said = triviality(useless, score)
    assert (
        said.startswith(first)
        and "The best classifier is not better than always predicting this class." in said
    )
    assert said.endswith("the best classifier never predicts 'spam'.")
    said = triviality(better, 100.0)
    assert said.startswith(first) and said.count(".") == 2


def test_interval_without_errors_is_the_exact_bound(tmp_path) -> None:
    from scipy.stats import binomtest

    (run,) = runs_of(tmp_path, 80.0, 100.0)
    bound = binomtest(1000, 1000).proportion_ci()
    assert example_interval(run.predictions) == pytest.approx((100 * bound.low, 100 * bound.high))


def test_without_pretrained_weights_only_baseline_is_compared(tmp_path) -> None:
    found = {
        "full": runs_of(tmp_path / "full", 75.0, 64.0, 65.0, 66.0),
        "tf_idf": runs_of(tmp_path / "tf_idf", 80.0, 80.4, seedless=True),
    }
    verdicts = judge(found, 1.0)
    assert {pair: one.word for pair, one in verdicts.items()} == {("tf_idf", "full"): "better"}
    text = answer(found, verdicts, (8530, 217_000, 1000), "valid")
    assert "pretrained weights were not tried here" in text
    named = answer(found, verdicts, (8530, 217_000, 1000), "valid", pretrained=True)
    assert "no method here used the pretrained weights" in named and "not tried" not in named
    assert "+3.6 ± 6.8 (95% prediction interval)" in text


def test_worth_uses_mesh_of_command_line(folder, tmp_path, monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(comparison, "worth", lambda suite, *_: seen.append(dict(suite.mesh.shape)))
    given = ("--config=configs/perception.py:tiny", f"--out={tmp_path}")
    call(worth, *given, "--config.mesh.data=2", "--config.mesh.fsdp=2", "--config.mesh.tensor=2")
    assert seen == [{"data": 2, "fsdp": 2, "tensor": 2}]
