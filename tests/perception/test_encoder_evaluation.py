"""Trained classifiers with changed encoders: quality against bits, and task vectors of full fine-tunings."""

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from common.errors import UserError
from common.metrics.classes import Classes
from perception import bits, run, task_vectors
from perception.encoder_evaluation import EncoderEvaluation
from perception.quantized_files import FORMATS
from tests.perception.conftest import TUNED


@pytest.fixture(scope="module")
def runs(make, mesh, tmp_path_factory) -> tuple[Path, Path]:
    """Returns two short runs that fine-tune all weights, with different seeds."""
    folder = tmp_path_factory.mktemp("runs")
    for name, seed in (("one", 1), ("two", 2)):
        run.fit(make(**TUNED, seed=seed), folder / name, mesh)
    return folder / "one", folder / "two"


def accuracy(workdir: Path) -> float:
    return json.loads((workdir / "summary.json").read_text())["test"]["accuracy"]


def test_evaluation_of_the_own_encoder_is_the_test_of_the_run(runs, mesh) -> None:
    evaluation = EncoderEvaluation(runs[0], mesh)
    assert evaluation(evaluation.encoder, "test").metrics()["accuracy"] == accuracy(runs[0])


def test_bits_of_every_format_with_their_errors(runs, tmp_path, monkeypatch, capsys) -> None:
    """Fewer bits give larger errors. The format float32 gives exactly the result of the run."""
    evaluate, changes = EncoderEvaluation.__call__, []

    def watched(self: EncoderEvaluation, encoder: dict, split: str) -> Classes:
        changes.append(max(float(abs(x - self.encoder[n]).max()) for n, x in encoder.items()))
        return evaluate(self, encoder, split)

    monkeypatch.setattr(EncoderEvaluation, "__call__", watched)
    arguments = [f"--run={runs[0]}", f"--out={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["bits", *arguments])
    bits.main()
    with (tmp_path / "bits.csv").open() as file:
        rows = {row["format"]: row for row in csv.DictReader(file)}
    assert tuple(rows) == FORMATS
    error = [float(row["error of kernels (% of the norm)"]) for row in rows.values()]
    assert error[0] == 0 < error[1] < error[2] < min(error[3:]) and max(error) < 20
    # The evaluation uses the encoders that were read from the files.
    assert changes[0] == 0 < changes[1] < changes[2] < min(changes[3:])
    plain = rows["float32"]
    assert float(plain["bits of a kernel's weight"]) == 32
    assert float(rows["bfloat16"]["bits of a kernel's weight"]) == 16
    assert float(plain["test accuracy"]) == pytest.approx(accuracy(runs[0]))
    assert {float(plain[n]) for n in ("minus float32", "95 % from", "to")} == {0}
    for row in rows.values():
        assert float(row["95 % from"]) <= float(row["minus float32"]) <= float(row["to"])


def test_vectors_are_differences_and_add_up() -> None:
    rng = np.random.default_rng(0)
    base, tuned = ({"a": rng.standard_normal((3, 2)), "b": rng.standard_normal(2)} for _ in "ab")
    found = task_vectors.vector(tuned, base)
    for name, value in task_vectors.moved(base, [(found, 1.0), (found, -0.5)]).items():
        np.testing.assert_allclose(value, (base[name] + tuned[name]) / 2)
    with pytest.raises(UserError, match="pretrained model: b differ"):
        task_vectors.vector({**tuned, "b": np.zeros(3)}, base)
    with pytest.raises(ValueError, match="other parameters"):
        task_vectors.moved(base, [({"a": found["a"]}, 1.0)])


def test_task_vectors_rows_are_the_runs_and_their_sums(runs) -> None:
    columns, rows = task_vectors.measure(runs)
    table = {row[0]: dict(zip(columns, row, strict=True)) for row in rows}
    assert table["+ one"]["test accuracy, one"] == pytest.approx(accuracy(runs[0]))
    assert table["+ two"]["test accuracy, two"] == pytest.approx(accuracy(runs[1]))
    both = table["+ one + two"]
    assert both["weight of one"] == both["weight of two"] in task_vectors.SUMS
    assert {row[1] for row in rows} >= {0.0, 1.0, *task_vectors.NEGATIONS}


def test_runs_without_an_own_encoder_are_refused(runs, mesh, tmp_path) -> None:
    workdir = tmp_path / "lora"
    workdir.mkdir()
    fields = json.loads((runs[0] / "config.json").read_text())
    (workdir / "config.json").write_text(json.dumps(fields | {"finetune": "lora"}))
    with pytest.raises(UserError, match=r"lora has no encoder in its checkpoint"):
        EncoderEvaluation(workdir, mesh)
    with pytest.raises(UserError, match="a task vector needs full_pretrained"):
        task_vectors.measure([workdir, workdir])
