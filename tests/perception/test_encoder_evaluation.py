"""Trained classifiers with changed encoders: accuracy after quantization, and task vectors of full fine-tunings."""

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from common.errors import UserError
from common.metrics.classes import Classes
from common.train.command import fit
from perception import bits, task_vectors
from perception.encoder_evaluation import EncoderEvaluation
from perception.quantized_files import FORMATS
from tests.perception.conftest import TUNED
from tests.perception.helpers import write_small_bert

pytestmark = pytest.mark.medium


@pytest.fixture(scope="module")
def runs(make, mesh, tmp_path_factory) -> tuple[Path, Path]:
    """Returns the workdirs of two short runs that fine-tune all weights, with different seeds."""
    folder = tmp_path_factory.mktemp("runs")
    for name, seed in (("one", 1), ("two", 2)):
        fit(make(**TUNED, seed=seed), folder / name, mesh)
    return folder / "one", folder / "two"


def accuracy(workdir: Path) -> float:
    return json.loads((workdir / "summary.json").read_text())["test"]["accuracy"]


def test_unchanged_encoder_reproduces_the_test_result_of_the_run(runs, mesh) -> None:
    evaluation = EncoderEvaluation(runs[0], mesh)
    assert evaluation(evaluation.encoder, "test").metrics()["accuracy"] == accuracy(runs[0])


def test_moved_pretrained_model_is_found_with_the_pretrained_option(runs, mesh, pretrained) -> None:
    """A run with --config.backbone=auto needs the pretrained directory, which gives the architecture."""
    moved = pretrained.rename(pretrained.with_name("moved"))
    try:
        with pytest.raises(
            UserError, match=r"but the run needs it: pass its new location as --pretrained=DIR"
        ):
            EncoderEvaluation(runs[0], mesh)
        evaluation = EncoderEvaluation(runs[0], mesh, pretrained=moved)
    finally:
        moved.rename(pretrained)
    assert evaluation.shape == EncoderEvaluation(runs[0], mesh).shape


def test_table_of_formats_has_accuracies_and_quantization_errors(
    runs, tmp_path, monkeypatch, capsys
) -> None:
    """The error rises from float32 to bfloat16, to int8, and to the 4-bit formats.

    The format float32 gives the result of the run.
    """
    evaluate, changes = EncoderEvaluation.__call__, []

    def watched(self: EncoderEvaluation, encoder: dict, split: str) -> Classes:
        changes.append(max(float(abs(x - self.encoder[n]).max()) for n, x in encoder.items()))
        return evaluate(self, encoder, split)

    monkeypatch.setattr(EncoderEvaluation, "__call__", watched)
    arguments = [
        "--runs",
        str(runs[0]),
        f"--out={tmp_path}",
        "--config.mesh.data=4",
        "--config.mesh.fsdp=2",
    ]
    monkeypatch.setattr(sys, "argv", ["bits", *arguments])
    bits.main()
    with (tmp_path / "bits.csv").open() as file:
        rows = {row["format"]: row for row in csv.DictReader(file)}
    assert tuple(rows) == FORMATS
    error = [float(row["error of kernels (% of the norm)"]) for row in rows.values()]
    assert error[0] == 0 < error[1] < error[2] < min(error[3:]) and max(error) < 20
    # The largest change of a weight rises in the same order as the error.
    assert changes[0] == 0 < changes[1] < changes[2] < min(changes[3:])
    plain = rows["float32"]
    assert float(plain["bits of a kernel's weight"]) == 32
    assert float(rows["bfloat16"]["bits of a kernel's weight"]) == 16
    assert float(plain["test accuracy"]) == pytest.approx(accuracy(runs[0]))
    assert {float(plain[n]) for n in ("minus float32", "95 % from", "to")} == {0}
    for row in rows.values():
        assert float(row["95 % from"]) <= float(row["minus float32"]) <= float(row["to"])
    assert [row["verdict"] for row in rows.values()] == [
        "",
        *["undecided (at least 2 more seeds)"] * 4,
    ]


def test_table_of_formats_averages_differences_within_each_run(runs, monkeypatch) -> None:
    """The table has the mean accuracy over runs, and the mean difference from float32, computed within each run.

    Here, a format changes the same predictions in every run. So its difference is the same in every run, although the
    accuracies of the runs differ.
    """
    labels_E = np.arange(400) % 2
    found = {"float32": 40, "bfloat16": 40, "4bit": 100}

    def quantize(run: Path, *_: object) -> list:
        seed = int(run.name)
        kinds = []
        for kind, wrong in found.items():
            guesses_E = labels_E.copy()
            # Wrong predictions: the first `wrong` examples, and the last 20 * seed examples.
            guesses_E[:wrong] ^= 1
            guesses_E[len(labels_E) - 20 * seed :] ^= 1
            logs_MN = np.log(np.where(guesses_E[:, None] == np.arange(2), 0.9, 0.1))
            examples = "others" if run.name == "9" else "examples"
            predicted = Classes.of_log_probabilities(examples, labels_E, logs_MN, ("a", "b"))
            kinds.append((kind, (32.0, 1.0, 0.0), predicted))
        return kinds

    monkeypatch.setattr(bits, "quantize", quantize)
    rows = {
        row[0]: dict(zip(bits.COLUMNS, row, strict=True))
        for row in bits.measure([Path("1"), Path("2"), Path("3")], None)
    }
    assert rows["float32"]["test accuracy"] == pytest.approx(80)
    assert rows["bfloat16"]["minus float32"] == 0
    assert rows["bfloat16"]["verdict"] == "equivalent within 1"
    changed = rows["4bit"]
    assert changed["minus float32"] == pytest.approx(-15)
    assert changed["verdict"] == "worse" and changed["changed predictions (%)"] == 15
    # The interval comes from 60 changed predictions of 400. The different accuracy of the runs does not widen it.
    half = (changed["to"] - changed["95 % from"]) / 2
    assert half == pytest.approx(1.96 * 100 * (0.15 * 0.85 / 400) ** 0.5, rel=0.1)
    with pytest.raises(UserError, match="--runs names a run more than once"):
        bits.measure([Path("1"), Path("1")], None)
    with pytest.raises(UserError, match="--runs 9 and 1 have different test examples"):
        bits.measure([Path("1"), Path("9")], None)


def test_task_vectors_are_weight_differences_and_can_be_added() -> None:
    rng = np.random.default_rng(0)
    base, tuned = ({"a": rng.standard_normal((3, 2)), "b": rng.standard_normal(2)} for _ in "ab")
    found = task_vectors.vector(tuned, base)
    for name, value in task_vectors.moved(base, [(found, 1.0), (found, -0.5)]).items():
        np.testing.assert_allclose(value, (base[name] + tuned[name]) / 2)
    with pytest.raises(
        UserError,
        match=r"model \(parameters with another name or shape: b\): set .* or name a run without --config.reinitialize",
    ):
        task_vectors.vector({**tuned, "b": np.zeros(3)}, base)


def test_task_vectors_rows_are_the_runs_and_their_sums(runs, mesh) -> None:
    columns, rows = task_vectors.measure([runs], mesh)
    table = {row[0]: dict(zip(columns, row, strict=True)) for row in rows}
    assert table["+ one"]["test accuracy, one"] == pytest.approx(accuracy(runs[0]))
    assert table["+ two"]["test accuracy, two"] == pytest.approx(accuracy(runs[1]))
    both = table["+ one + two"]
    assert both["weight of one"] == both["weight of two"] in task_vectors.SUMS
    assert {row[1] for row in rows} >= {0.0, 1.0, *task_vectors.NEGATIONS}
    assert {"pretrained", "- one", "- two"} <= set(table)


def test_task_vectors_of_different_pretrained_weights_are_refused(
    make, mesh, weights, pretrained, tmp_path
) -> None:
    moved = {name: x + 0.1 for name, x in weights.items()}
    (tmp_path / "models").mkdir()
    other = write_small_bert(tmp_path / "models" / "other", moved)
    for name, model in (("a", pretrained), ("b", other)):
        (tmp_path / name).mkdir()
        fields = make(**TUNED, pretrained=str(model)).to_json()
        (tmp_path / name / "config.json").write_text(fields)
    with pytest.raises(
        UserError, match=r"a started from the weights in .*, and .*b from other weights"
    ):
        task_vectors.measure([[tmp_path / "a", tmp_path / "b"]], mesh)


def test_task_vectors_of_several_pairs_have_means_and_deviations(monkeypatch) -> None:
    found = {"a": (60.0, 70.0), "b": (62.0, 71.0), "c": (64.0, 72.0)}

    def pair(runs: tuple[Path, Path], *_) -> tuple:
        seed = runs[0].name[-1]
        tasks = ["films", "news"] if seed != "x" else ["news", "films"]
        return tasks, [
            (("", ""), (0.0, 0.0), found["a"]),
            (("+", "+"), (0.4, 0.4), found.get(seed, ())),
        ]

    monkeypatch.setattr(task_vectors, "_pair", pair)
    pairs = [(Path(f"one_seed1/{seed}"), Path("two_seed1")) for seed in "abc"]
    columns, rows = task_vectors.measure(pairs, None)
    assert columns[2:4] == ("weight of two", "test accuracy, a")
    assert rows[0] == ("pretrained", "0", "0", "60.0 ± 0.0", "70.0 ± 0.0")
    assert rows[1] == ("+ a + two", "0.4", "0.4", "62.0 ± 2.0", "71.0 ± 1.0")
    with pytest.raises(UserError, match="and the first --runs have different test examples"):
        task_vectors.measure([*pairs, (Path("x"), Path("y"))], None)


def test_runs_without_an_encoder_or_with_label_sets_are_refused(runs, mesh, tmp_path) -> None:
    workdir = tmp_path / "lora"
    workdir.mkdir()
    fields = json.loads((runs[0] / "config.json").read_text())
    (workdir / "config.json").write_text(json.dumps(fields | {"finetune": "lora"}))
    with pytest.raises(UserError, match=r"^--runs .*lora did not train all weights"):
        EncoderEvaluation(workdir, mesh)
    with pytest.raises(
        UserError, match=r"a task vector needs a run with --config.finetune=full_pretrained"
    ):
        task_vectors.measure([[workdir, workdir]], mesh)
    selected_on_test = fields | {"eval": fields["eval"] | {"select": "test"}}
    (workdir / "config.json").write_text(json.dumps(selected_on_test))
    with pytest.raises(
        UserError, match="the weight of the sum of task vectors is chosen on validation examples"
    ):
        task_vectors.measure([[workdir, workdir]], mesh)
    fields["data"]["multi_label"] = True
    (workdir / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match=r"^--runs .*lora has several classes per text"):
        EncoderEvaluation(workdir, mesh)
