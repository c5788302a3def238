"""Folders of runs of another program: what `record` writes, common.report on them, and wrong arguments."""

import csv
import json
import re
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from common.errors import UserError
from common.metrics.aucc import aucc
from common.metrics.classes import Classes
from common.metrics.label_sets import LabelSets
from common.metrics.losses import Losses
from common.metrics.predictions import PREDICTIONS
from common.metrics.translations import Translations
from common.report.__main__ import main
from common.report.record import record
from common.report.runs import read_run
from tests.user_parts import python_of_readme

POINTS = [{"step": 10, "value": 1.0}, {"step": 20, "value": 3.0}]
LABELS_E, LOGS_EC = np.array([0, 1, 1]), np.log([[0.75, 0.25], [0.25, 0.75], [0.75, 0.25]])
CLASSES = Classes.of_log_probabilities("test", LABELS_E, LOGS_EC, ("no", "yes"))


def write(folder: Path, **changed):
    arguments = {"metric": "acc", "mode": "max", "points": POINTS, "seed": 1, "config": {}}
    return record(folder, **{**arguments, "test": {"acc": 2.0}, **changed})


def call(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["report", *arguments])
    main()


def test_example_of_the_page_has_the_printed_verdicts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = python_of_readme("common")
    exec(compile(code, "README.md", "exec"), {})
    page = (Path(__file__).parents[2] / "common" / "README.md").read_text()
    printed = "".join(f"    {line}\n" for line in capsys.readouterr().out.splitlines())
    assert printed in page
    (command,) = re.findall(r"`python -m common\.report (plain=.*?)`", page)
    call(monkeypatch, *command.replace('"', "").split())
    with (tmp_path / "runs/report/verdicts.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            cells = (row[name] for name in ("metric", "difference", "95% interval", "verdict"))
            assert f"| {' | '.join(cells)} |\n" in page
    assert "| accuracy | " in page and (tmp_path / "runs/report/curves.png").exists()


def test_read_run_is_the_recorded_run(tmp_path):
    run = write(
        tmp_path / "a",
        points=[{"step": np.int32(10), "value": jnp.float32(0.5), "flops": np.float64(1e12)}],
        seed=np.int64(3),
        config={"model": "ours", "rate": np.float32(0.5), "widths": (1, 2), "deep": {"x": None}},
        test={"acc": jnp.float32(0.25), "other": 1},
    )
    read = read_run(tmp_path / "a" / "summary.json")
    assert read == run and read.name == "a" and read.predictions is None
    assert read.seed == 3 and read.test == 0.25 and read.summary["test"]["other"] == 1
    expected = {"model": "ours", "rate": 0.5, "widths": [1, 2], "deep": {"x": None}, "paper": ""}
    assert read.config == expected
    assert aucc(read.curve, "flops") == 0.25e12
    with pytest.raises(UserError, match="ends at 0 seconds"):
        aucc(read.curve)


@pytest.mark.parametrize(
    ("predictions", "metric"),
    [
        (CLASSES, "accuracy"),
        (
            Classes.of_log_probabilities("test", [0, 1, 1], jnp.asarray(LOGS_EC), ["no", "yes"]),
            "weighted_f1",
        ),
        (
            LabelSets.of_logits("test", jnp.eye(2), [[1.0, -1.0], [2.0, 3.0]], (0.5, 0.5), "ab"),
            "micro_f1",
        ),
        (Losses("test", [3.0, 1.0], jnp.array([2, 4]), [], [], "token"), "perplexity"),
        (Translations("test", ["a b"], ["a c"], [3.0], [2], False, "13a"), "bleu"),
    ],
)
def test_predictions_give_the_test_metrics(tmp_path, predictions, metric):
    run = write(tmp_path / "a", metric=metric, test=None, predictions=predictions)
    read = read_run(tmp_path / "a" / "summary.json")
    assert read.test == run.test == pytest.approx(predictions.metrics()[metric])
    assert read.predictions.metrics() == pytest.approx(predictions.metrics())


@pytest.mark.medium
def test_runs_without_seconds_or_flops_have_areas_over_steps(tmp_path, monkeypatch, capsys):
    """A setting of any name may distinguish groups, also a name that configurations of this project use for groups."""
    monkeypatch.chdir(tmp_path)
    for model in ("a", "b"):
        for seed in (1, 2, 3):
            points = [{"step": 10 * n, "value": n + seed / 10 + (model == "b")} for n in (1, 2)]
            settings = {"model": model, "dataset": 7}
            write(tmp_path / f"{model}{seed}", seed=seed, points=points, config=settings)
    call(monkeypatch, "a*", "b*")
    told = capsys.readouterr().out
    assert "All curves end at 0 seconds: choose another --axis" in told
    assert "Runs without predictions.npz: a1, a2, a3 ..." in told
    call(monkeypatch, "a*", "b*", "--axis=step")
    assert "All curves end at 0" not in capsys.readouterr().out
    with (tmp_path / "runs/report/verdicts.csv").open(newline="") as file:
        found = {row["metric"]: row["verdict"] for row in csv.DictReader(file)}
    assert found == {"best valid acc": "better", "mean acc over step": "better"}


NAN = Classes.of_log_probabilities("test", LABELS_E, LOGS_EC * np.nan, ("no", "yes"))
SHORT = Classes("test", LABELS_E, np.exp(LOGS_EC), LABELS_E, [0.1], ("no", "yes"))
CERTAIN = Losses("test", [np.inf, 1.0], [2, 4], [], [], "token")


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"mode": "up"}, "the mode of the metric 'acc' must be 'max' or 'min', got 'up'"),
        ({"metric": 3}, "the test metric 3 must be a number, got None"),
        ({"points": [{"step": 1, "value": np.nan}]}, "points has no point with a finite acc"),
        ({"points": [{"step": 1}]}, 'each point must have "step" and "value"'),
        ({"points": [POINTS[0] | {"epoch": 1}]}, 'each point must have "step" and "value"'),
        ({"points": [POINTS[0], POINTS[1] | {"seconds": 1.0}]}, "if all points have them"),
        ({"points": [3]}, 'each point must have "step" and "value"'),
        ({"points": [*POINTS, POINTS[1]]}, "the acc curve has two points at step 20"),
        ({"seed": 1.0}, "seed must be a whole number of at least 0, got 1.0 of type float"),
        ({"config": "ours"}, "config and test must be dictionaries of finite numbers, texts,"),
        ({"config": {"rate": np.nan}}, "config and test must be dictionaries of finite numbers"),
        ({"config": {"f": print}}, "config and test must be dictionaries of finite numbers"),
        ({"test": 3}, "config and test must be dictionaries of finite numbers"),
        ({"test": {"loss": 1.0}}, "the test metric acc must be a number, got None"),
        ({"test": {"acc": "2"}}, "the test metric acc must be a number, got '2'"),
        ({"test": {"acc": np.inf}}, "config and test must be dictionaries of finite numbers"),
        ({"predictions": NAN}, "predictions has NaN or an infinite value: clip"),
        ({"predictions": SHORT}, "^predictions is wrong: not all .* 3 entries, .*wrong: nats.$"),
        ({"predictions": LOGS_EC}, "no predictions: array"),
        ({"predictions": CERTAIN}, "predictions has NaN or an infinite value: clip"),
    ],
)
def test_wrong_argument_writes_nothing(tmp_path, changed, complaint):
    with pytest.raises(UserError, match=complaint):
        write(tmp_path / "a", **changed)
    assert list(tmp_path.iterdir()) == []


def test_finished_run_is_not_overwritten(tmp_path):
    write(tmp_path / "a", predictions=CLASSES)
    before = {path: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert {path.name for path in before} == {"summary.json", PREDICTIONS}
    for name in ("summary.json", PREDICTIONS):
        with pytest.raises(UserError, match=f"a/{name} already exists: choose another folder"):
            write(tmp_path / "a", seed=2)
        assert {path: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before
        del before[tmp_path / "a" / name]
        (tmp_path / "a" / name).unlink()
    with pytest.raises(UserError, match="folder must be on this machine, got gs://lab/a"):
        write("gs://lab/a")


def test_damaged_parameter_counts_are_still_refused(tmp_path):
    write(tmp_path / "a")
    path = tmp_path / "a" / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"params": {"total": None}}))
    with pytest.raises(UserError, match="without the numbers trainable and total"):
        read_run(path)


@pytest.mark.parametrize(
    ("labels", "names", "complaint"),
    [
        (
            [0, 1, 2],
            ("no", "yes"),
            "labels must be integers from 0 to 1, each with a row of 2 log-pro",
        ),
        ([0, -1, 1], ("no", "yes"), "labels must be integers from 0 to 1"),
        ([0.0, 1.0, 1.0], ("no", "yes"), "labels must be integers from 0 to 1"),
        ([0, 1, 1], ("a", "b", "c"), "from 0 to 2, each with a row of 3 log-probabilities"),
        ([0, 1], ("no", "yes"), "from 0 to 1, each with a row of 2 log-probabilities"),
    ],
)
def test_labels_that_do_not_match_raise_user_error(labels, names, complaint):
    with pytest.raises(UserError, match=complaint):
        Classes.of_log_probabilities("test", labels, LOGS_EC, names)
