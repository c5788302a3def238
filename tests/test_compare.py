"""common.compare trains and tunes the cases of an experiment, and compares each case with the first case."""

import csv
from pathlib import Path

import pytest

from common import compare
from common.errors import UserError
from tests.programs import call

DIGITS = ("--config=configs/mnist_explicit.py:tiny", "--config.train.epochs=2")


def rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.open()))


@pytest.mark.medium
def test_cases_are_tuned_trained_with_all_seeds_and_compared_with_the_first(tmp_path: Path) -> None:
    command = (
        *(
            "common.compare",
            *DIGITS,
            "--case",
            "cold",
            "start=cold",
            "--case",
            "zero",
            "start=zero",
        ),
        *("--sweep", "optimizer.learning_rate=1e-3,1e-2", "--seeds=2", f"--out={tmp_path}"),
    )
    output = call(*command)
    assert "against cold" in output and "curves.png" in output
    tried = rows(tmp_path / "sweep.csv")
    assert [(r["case"], r["optimizer.learning_rate"]) for r in tried] == [
        *(("cold", "1e-3"), ("cold", "1e-2"), ("zero", "1e-3"), ("zero", "1e-2")),
    ]
    chosen = {r["case"]: r["optimizer.learning_rate"] for r in tried if r[""] == "chosen"}
    runs = sorted(path.parent.name for path in tmp_path.glob("runs/*_seed2_*/summary.json"))
    assert runs == [f"{case}_seed2_learning_rate={rate}" for case, rate in chosen.items()]
    verdicts = rows(tmp_path / "verdicts.csv")
    assert {r["model"] for r in verdicts} == {"zero"}
    # Two seeds are too few for a verdict.
    assert all(r["verdict"].startswith("undecided") for r in verdicts if "n=2" in r["mean ± sd"])
    # The repeated command does not train, and writes the same verdicts.
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/summary.json")}
    assert "step 1/" not in call(*command) and rows(tmp_path / "verdicts.csv") == verdicts
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_case_has_its_own_file_and_fields(tmp_path: Path) -> None:
    (tmp_path / "gpt_3.py").write_text("from configs.enwik8_gpt import get_config\n")
    cases = compare.parse_cases(
        [
            ["a", f"config={tmp_path}/gpt_{{seed}}.py:fixed,tiny"],
            ["b", "--config.head_start=mine_{seed}:f", "config.train.steps=7"],
        ]
    )
    suite = compare.Cases(
        *("", 1, ["--config.train.steps=5"], Path("out"), None),
        spec="configs/enwik8_gmlp.py:fixed,tiny",
        overrides=cases,
    )
    a, b = suite.configuration("a", 3), suite.configuration("b", 3)
    assert (a.model.kind, a.train.steps, a.seed) == ("gpt", 5, 3)
    # A value for one case overrides the value for all cases.
    assert (b.model.kind, b.train.steps, b.head_start) == ("gmlp", 7, "mine_3:f")


@pytest.mark.parametrize(
    ("cases", "message"),
    [
        ([], "at least two cases"),
        ([["a"]], "at least two cases"),
        ([["a"], ["a"]], "two cases have this name"),
        ([["a/b"], ["c"]], "the name becomes part of a folder name"),
        ([["model.width=3"], ["c"]], "the name becomes part of a folder name"),
        ([["a", "width"], ["b"]], "--case a width must be FIELD=VALUE"),
        ([["a", "=3"], ["b"]], "must be FIELD=VALUE"),
        (
            [["a", "seed=3"], ["b"]],
            "leave out the seed, because --seeds sets the seeds of all cases",
        ),
        ([["a", "x=1", "config.x=2"], ["b"]], "x is given twice"),
    ],
)
def test_malformed_cases_are_refused(cases: list, message: str) -> None:
    with pytest.raises(UserError, match=message):
        compare.parse_cases(cases)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--case", "a", "--case", "b", "widht=3"), "unknown option --case b widht"),
        (("--case", "a", "--case", "b", "seeds=3"), "did you mean --case b seed"),
        (("--case", "a", "--case", "b", "config=missing.py"), "no configuration file missing.py"),
        (("--case", "a", "--case", "b", "--sweep", "rate"), "--sweep rate must be FIELD=VALUE"),
        (
            ("--case", "a", "--case", "b", "--margin=accuracy"),
            "--margin=accuracy must be METRIC=NUMBER",
        ),
        (("--case", "a", "--case", "b", "--config.seed=2"), "leave out --config.seed=2, because"),
    ],
)
def test_wrong_fields_are_refused_before_training(
    tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    output = call("common.compare", *DIGITS, *options, f"--out={tmp_path / 'out'}", code=2)
    assert message in output and output.count("\n") == 1
    assert not (tmp_path / "out").exists()
