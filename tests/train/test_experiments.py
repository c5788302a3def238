"""Runs of an `ExperimentSuite`: reuse of finished runs, resuming, kept runs, and sweeps."""

import json
import math
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from common.errors import UserError
from common.experiments import ExperimentSuite, evaluations, parse_sweep
from common.train.task import Task
from tests.train import toy


@dataclass(frozen=True)
class Toys(ExperimentSuite):
    """Experiments with the toy task. `opened` gets the element "one" each time a run is opened.

    With the seed 100 + N, the targets of batch N are NaN.
    """

    opened: list[str] = field(default_factory=list)

    def prepare(self, config: ConfigDict) -> tuple[ConfigDict, Task]:
        self.opened.append("one")
        return config, toy.Toy(poison=config.seed - 100)

    def fit(self, name: str, config: ConfigDict) -> tuple[dict, Path]:
        (run,) = self.fit_all({name: config})
        return run.summary, run.folder


@pytest.fixture
def suite(tmp_path: Path) -> Toys:
    return Toys("tiny", 1, [], tmp_path, toy.mesh())


def test_finished_run_is_not_opened_again(suite: Toys) -> None:
    first, workdir = suite.fit("one", toy.config())
    again, _ = suite.fit("one", toy.config())
    assert suite.opened == ["one"] and workdir == suite.out / "runs" / "one"
    assert again == json.loads(json.dumps(first))
    # Without its summary, a finished run is opened again, but no step is trained.
    (workdir / "summary.json").unlink()
    found, _ = suite.fit("one", toy.config())
    assert suite.opened == ["one"] * 2 and found["curve"] == again["curve"]


def test_finished_run_with_newer_data_is_opened_again(suite: Toys, tmp_path: Path) -> None:
    """Data are newer if a file at any depth changes, or if a symbolic link is set to an older folder."""
    old, data = tmp_path / "old", tmp_path / "data"
    for folder in (old, data):
        (folder / "train").mkdir(parents=True)
        (folder / "train" / "a.txt").write_text(folder.name)
    link = tmp_path / "link"
    link.symlink_to(data)
    config = toy.config(data={"source": f"files:{link}"})
    suite.fit("one", config)
    suite.fit("one", config)
    assert suite.opened == ["one"]
    (data / "train" / "a.txt").write_text("changed")
    suite.fit("one", config)
    suite.fit("one", config)  # not opened again: the run is now newer than the changed file
    assert suite.opened == ["one"] * 2
    link.unlink()
    link.symlink_to(old)
    suite.fit("one", config)
    assert suite.opened == ["one"] * 3


def test_other_configuration_is_refused_or_resumed(suite: Toys) -> None:
    suite.fit("one", toy.config(train__steps=10))
    with pytest.raises(UserError, match="belongs to a run with another configuration: seed"):
        suite.fit("one", toy.config(train__steps=10, seed=2))
    longer, _ = suite.fit("one", toy.config(train__steps=20))
    assert longer["steps"] == 20 and suite.opened == ["one"] * 3
    assert (
        suite.fit("one", toy.config(train__steps=20))[0]["steps"] == 20 and len(suite.opened) == 3
    )


def test_interrupted_run_is_resumed(suite: Toys) -> None:
    """A run of 5 steps was extended to 20 steps and failed. The summary of the 5 steps is not reused."""
    suite.fit("one", toy.config(train__steps=5, seed=110))
    with pytest.raises(UserError, match="the loss is nan"):
        suite.fit("one", toy.config(train__steps=20, seed=110))
    assert suite.fit("one", toy.config(train__steps=5, seed=110))[0]["steps"] >= 5
    assert suite.opened == ["one"] * 3


def test_kept_run_is_never_replaced(suite: Toys) -> None:
    """A kept run has a summary but no checkpoints."""
    _, workdir = suite.fit("one", toy.config(train__steps=5))
    shutil.rmtree(workdir / "checkpoints")
    kept = (workdir / "summary.json").read_text()
    with pytest.raises(UserError, match="lacks test results or an intact"):
        suite.fit("one", toy.config(train__steps=5, seed=2))
    assert (workdir / "summary.json").read_text() == kept
    suite.fit("one", toy.config(train__steps=5))
    assert suite.opened == ["one"]


def test_kept_run_with_values_of_older_code_is_reused(suite: Toys) -> None:
    """Older runs store `model.remat` as a boolean, and lack fields that were added later."""
    config = toy.config(train__steps=5, model={"remat": "none"})
    _, workdir = suite.fit("one", config)
    shutil.rmtree(workdir / "checkpoints")
    path = workdir / "requested_config.json"
    stored = json.loads(path.read_text())
    stored["model"]["remat"] = False
    del stored["checkpoint"]["keep_best"]
    path.write_text(json.dumps(stored))
    suite.fit("one", config)
    assert suite.opened == ["one"]
    config.model.remat = "full"
    with pytest.raises(UserError, match="lacks test results or an intact"):
        suite.fit("one", config)


def test_damaged_summary_of_a_kept_run_is_named(suite: Toys) -> None:
    _, workdir = suite.fit("one_seed1", toy.config(train__steps=5))
    (workdir / "summary.json").write_text("{")
    with pytest.raises(UserError, match=r"summary.json is damaged"):
        suite.kept("one")
    (workdir / "summary.json").write_text("{}")
    with pytest.raises(UserError, match=r"one_seed1.summary\.json is not the summary of a run"):
        suite.kept("one")


def test_evaluations_include_values_that_are_not_finite(tmp_path: Path) -> None:
    toy.run(tmp_path, toy.Toy(scores=[3.0, math.nan, 1.0, math.inf]))
    found = evaluations(tmp_path, "valid/error")
    assert [m["step"] for m in found] == [5, 10, 15, 20]
    assert [m["valid/error"] for m in found] == pytest.approx(
        [3, math.nan, 1, math.nan], nan_ok=True
    )
    metrics = tmp_path / "metrics.jsonl"
    lines = [x for x in metrics.read_text().splitlines() if '"step": 15, "valid' not in x]
    metrics.write_text("\n".join(lines) + "\n")
    with pytest.raises(
        UserError,
        match=r"metrics\.jsonl and the validation curve in summary\.json have evaluations at",
    ):
        evaluations(tmp_path, "valid/error")


def test_kept_runs_of_a_sweep_may_have_digits_in_a_field_name(tmp_path: Path) -> None:
    suite = Toys("tiny", 1, [], tmp_path, toy.mesh(), sweep={"optimizer.beta2": ("0.9",)})
    suite.runs({"one": lambda seed: toy.config(seed=seed, train__steps=5)})
    assert [ran.name for ran in suite.kept("one")] == ["one_seed1_beta2=0.9"]


def test_kept_runs_have_the_tuned_value_with_the_most_seeds(tmp_path: Path) -> None:
    def train(value: str, seeds: int) -> None:
        grid = {"optimizer.beta2": (value,)}
        suite = Toys("tiny", seeds, [], tmp_path, toy.mesh(), sweep=grid)
        suite.runs({"one": lambda seed: toy.config(seed=seed, train__steps=5)})

    train("0.9", seeds=1)
    train("0.99", seeds=2)
    kept = Toys("tiny", 1, [], tmp_path, toy.mesh()).kept("one")
    assert [ran.name for ran in kept] == ["one_seed1_beta2=0.99", "one_seed2_beta2=0.99"]


def cases(**rates: float) -> dict:
    """Returns {name: function from the seed to a configuration}. The cases differ in the learning rate."""
    return {
        name: lambda seed, rate=rate: toy.config(seed=seed, optimizer__learning_rate=rate)
        for name, rate in rates.items()
    }


def tuned(tmp_path: Path, seeds: int = 2, **options) -> Toys:
    grid = {"optimizer.learning_rate": ("1e-5", "0.05")}
    return Toys("tiny", seeds, [], tmp_path, toy.mesh(), sweep=grid, **options)


@pytest.mark.medium
def test_sweep_uses_the_best_validation_point_for_all_seeds(tmp_path):
    found = tuned(tmp_path).runs(cases(one=1.0, two=2.0))
    for name in ("one", "two"):
        names = [ran.name for ran in found[name]]
        assert names == [f"{name}_seed{seed}_learning_rate=0.05" for seed in (1, 2)]
        assert all(ran.summary["test"] for ran in found[name])
    rows = (tmp_path / "sweep.csv").read_text().splitlines()
    assert len(rows) == 1 + 2 * 2 and sum(row.endswith("chosen") for row in rows) == 2


@pytest.mark.medium
def test_table_of_a_sweep_keeps_the_cases_of_earlier_sweeps(tmp_path):
    tuned(tmp_path, seeds=1).runs(cases(one=1.0, two=2.0))
    (first, *earlier) = (tmp_path / "sweep.csv").read_text().splitlines()
    tuned(tmp_path, seeds=1).runs(cases(three=1.0))
    tuned(tmp_path, seeds=1).runs(cases(two=2.0))
    header, *rows = (tmp_path / "sweep.csv").read_text().splitlines()
    assert header == first == "case,optimizer.learning_rate,metric,best valid,steps,FLOPs,"
    assert rows[:2] == earlier[:2] and rows[4:] == earlier[2:]
    assert [row.split(",")[0] for row in rows] == ["one", "one", "three", "three", "two", "two"]
    # A sweep over another field needs other columns. The new table has only the runs of this sweep.
    other = Toys("tiny", 1, [], tmp_path, toy.mesh(), sweep={"optimizer.beta2": ("0.9",)})
    other.runs(cases(four=1.0))
    assert len((tmp_path / "sweep.csv").read_text().splitlines()) == 2


@pytest.mark.medium
def test_table_of_a_sweep_drops_cases_whose_runs_were_deleted(tmp_path):
    tuned(tmp_path, seeds=1).runs(cases(one=1.0, two=2.0))
    shutil.rmtree(tmp_path / "runs" / "one_seed1_learning_rate=0.05")
    tuned(tmp_path, seeds=1).runs(cases(three=1.0))
    rows = [line.split(",")[:2] for line in (tmp_path / "sweep.csv").read_text().splitlines()[1:]]
    assert rows == [
        ["one", "1e-5"],
        *(["three", rate] for rate in ("1e-5", "0.05")),
        *(["two", rate] for rate in ("1e-5", "0.05")),
    ]


@pytest.mark.medium
def test_sweep_never_touches_the_test_split(tmp_path):
    tasks: list[toy.Toy] = []

    class Watched(Toys):
        def prepare(self, config):
            tasks.append(toy.Toy())
            return config, tasks[-1]

    grid = {"optimizer.learning_rate": ("1e-5", "0.05")}
    suite = Watched("tiny", 1, [], tmp_path, toy.mesh(), sweep=grid)
    suite.runs(cases(one=1.0))
    assert [task.evaluated.count("test") for task in tasks] == [0, 0, 1]
    assert "test" not in tasks[0].evaluated + tasks[1].evaluated
    # The run of the chosen learning rate is not trained again. It is tested from its checkpoint.
    assert tasks[2].starts == [] and tasks[2].evaluated == ["test"]
    loser = tmp_path / "runs" / "one_seed1_learning_rate=1e-5" / "summary.json"
    assert json.loads(loser.read_text())["test"] == {}


@pytest.mark.medium
def test_sweep_of_kept_runs_does_not_train(tmp_path):
    tuned(tmp_path).runs(cases(one=1.0))
    for folder in tmp_path.glob("runs/*/checkpoints"):
        shutil.rmtree(folder)
    again = tuned(tmp_path)
    assert all(ran.summary["test"] for ran in again.runs(cases(one=1.0))["one"])
    assert again.opened == []


@pytest.mark.medium
def test_chosen_run_of_a_kept_sweep_is_trained_again_to_be_tested(tmp_path):
    """Another machine has the summaries of a sweep that ended before the chosen run was tested."""
    suite = tuned(tmp_path)
    trained = suite.runs(cases(one=1.0))["one"]
    chosen = trained[0].folder
    for folder in tmp_path.glob("runs/*/checkpoints"):
        shutil.rmtree(folder)
    for name, fields in {"summary": {"test": {}}, "requested_config": {}}.items():
        path = chosen / f"{name}.json"
        stored = json.loads(path.read_text()) | fields
        if name == "requested_config":
            stored["eval"]["test"] = False
        path.write_text(json.dumps(stored))
    again = tuned(tmp_path)
    found = again.runs(cases(one=1.0))["one"]
    assert again.opened == ["one"] and all(run.summary["test"] for run in found)
    assert [run.curve.best.value for run in found] == [run.curve.best.value for run in trained]
    assert len(evaluations(chosen, "valid/error")) == len(found[0].curve.points)


def test_kept_run_without_test_results_is_refused_and_kept(suite: Toys) -> None:
    """A kept run has no `config.json`, so `open_workdir` would refuse its folder."""
    _, workdir = suite.fit("one", toy.config(train__steps=5, eval__test=False))
    shutil.rmtree(workdir / "checkpoints")
    (workdir / "config.json").unlink()
    kept = {path.name: path.read_bytes() for path in workdir.iterdir()}
    with pytest.raises(UserError, match="lacks test results"):
        suite.fit("one", toy.config(train__steps=5))
    assert {path.name: path.read_bytes() for path in workdir.iterdir()} == kept


@pytest.mark.medium
def test_repeated_sweep_does_not_train_again(tmp_path):
    first, again = tuned(tmp_path), tuned(tmp_path)
    trained = first.runs(cases(one=1.0))
    found = again.runs(cases(one=1.0))
    assert first.opened and not again.opened
    for one, other in zip(trained["one"], found["one"], strict=True):
        assert one.summary["curve"] == other.summary["curve"]


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (["optimizer.learning_rate"], "must be FIELD=VALUE,VALUE"),
        (["=1,2"], "must be FIELD=VALUE,VALUE"),
        (["model.width=8,8"], "a value is given twice"),
        (["optimizer.learning_rate=1e-3,0.001"], "a value is given twice"),
        (["seed=1,2"], "leave out the seed, because --seeds sets the seeds of all cases"),
        (
            ["a.b=1", "a.b=2"],
            "--sweep a.b=2: a.b is given twice: give it once, as FIELD=VALUE,VALUE",
        ),
    ],
)
def test_malformed_sweeps_raise_user_errors(given, complaint):
    with pytest.raises(UserError, match=complaint):
        parse_sweep(given)


def test_sweep_over_an_unknown_field_raises_user_error(tmp_path):
    suite = Toys("tiny", 1, [], tmp_path, toy.mesh(), sweep={"optimizer.learning_rat": ("1",)})
    with pytest.raises(UserError, match=r"unknown option --sweep optimizer.learning_rat"):
        suite.runs(cases(one=1.0))
    assert not (tmp_path / "runs").exists()


@pytest.mark.medium
def test_runs_of_one_seed_take_turns(tmp_path):
    suite = Toys("tiny", 2, [], tmp_path, toy.mesh(), turns=4)
    found = suite.runs(cases(one=0.05, two=0.1))
    sessions = {
        (name, ran.summary["seed"]): tuple(ran.summary["timing"]["sessions"])
        for name, some in found.items()
        for ran in some
    }
    assert sessions["one", 1] == sessions["two", 1] != sessions["one", 2] == sessions["two", 2]
    assert all(ran.summary["timing"]["kind"] == "turns" for some in found.values() for ran in some)


def test_data_directory_does_not_identify_a_run(tmp_path):
    suite = Toys("tiny", 1, [], tmp_path, toy.mesh())
    places = [tmp_path / place / "words" for place in ("here", "there")]
    for place in places:
        place.mkdir(parents=True)
    for place in places:
        suite.fit("one", toy.config(data={"source": f"files:{place}"}))
    assert suite.opened == ["one"]


def test_kept_run_is_reused_with_newer_data(tmp_path):
    """A run in results/ has a summary and no checkpoints. Newer data files do not invalidate such a run."""
    suite = Toys("tiny", 1, [], tmp_path, toy.mesh())
    data = tmp_path / "words"
    data.mkdir()
    config = toy.config(data={"source": f"files:{data}"})
    _, workdir = suite.fit("one", config)
    shutil.rmtree(workdir / "checkpoints")
    (data / "train.txt").write_text("new")
    suite.fit("one", config)
    assert suite.opened == ["one"]
