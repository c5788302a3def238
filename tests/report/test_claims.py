"""Tables of claims: reading claims.csv, verdicts, and error messages."""

import csv
import sys
from dataclasses import dataclass

import pytest

from common.errors import UserError
from common.experiments import ExperimentSuite, Side
from common.metrics.predictions import TEST_AGAIN
from common.report import claims
from common.report.claims import Claim, find, outcome, read, table
from common.report.runs import Run
from tests.report.helpers import made
from tests.train import toy

HEADER = "id,section,claim,metric,a,b,direction,printed,evidence"


@pytest.fixture
def paper(tmp_path, monkeypatch):
    """Returns a function that makes a package with the given rows of claims and returns the package's name."""

    def make(*rows: str, header: str = HEADER) -> str:
        name = f"paper_{len(list(tmp_path.iterdir()))}"
        folder = tmp_path / name
        folder.mkdir()
        (folder / "__init__.py").write_text("")
        (folder / "claims.csv").write_text("\n".join([header, *rows]) + "\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return name

    return make


RUNS = "c1,3.2 Table 1,Frozen layers cost nothing,best valid error,slow,fast,better,34.6,runs"


def test_read_claims(paper):
    (claim,) = read(paper(RUNS))
    assert (claim.a, claim.b, claim.kind, claim.source) == ("slow", "fast", "runs", "")
    name = paper('c2,2,x,,,,better,,"refuted: tests/a.py::test_b"')
    (claim,) = read(name)
    assert (claim.kind, claim.source) == ("refuted", "tests/a.py::test_b")


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("c1,3,x,m,a,b,faster,,runs", "line 2: direction"),
        ("c1,3,x,m,a,b,better,,hearsay", "line 2: evidence"),
        ("c1,3,x,m,a,,better,,runs", "line 2: the column b must not be empty"),
        ("c1,3,x,,,,better,,refuted", "line 2: the text after the colon of the evidence"),
        ("c1,3,,m,a,b,better,,runs", "line 2: the column claim must not be empty"),
        ("c1,3,x,m,a,b,better,runs", "line 2: the row must have 9 cells, got 8"),
        (f"{RUNS}\n{RUNS}", "line 3: the id c1 is used twice"),
    ],
)
def test_damaged_claim_error_names_the_line(row, complaint, paper):
    with pytest.raises(UserError, match=complaint):
        read(paper(row))


def test_wrong_columns_raise_user_error(paper):
    with pytest.raises(UserError, match=r"the columns must be id, section, .*, got id, claim$"):
        read(paper(header="id,claim"))


def runs(*values: float, **options) -> list[Run]:
    return [made([value - 1, value], seed=s, **options) for s, value in enumerate(values, 1)]


def claim(direction: str = "better", **fields) -> Claim:
    values = {
        **{"id": "c", "section": "3", "claim": "x", "metric": "best valid bleu"},
        **{"a": "a", "b": "b", "direction": direction, "printed": "", "evidence": "runs"},
    }
    return Claim(**values | fields)


GROUPS = {"a": runs(31.0, 31.1, 31.2), "b": runs(30.0, 30.1, 30.2), "one": runs(33.0)}


@pytest.mark.parametrize(
    ("direction", "sides", "expected"),
    [
        ("better", ("a", "b"), "holds"),
        ("worse", ("a", "b"), "does not hold: better"),
        ("better", ("b", "a"), "does not hold: worse"),
        ("worse", ("b", "a"), "holds"),
        ("equivalent", ("a", "b"), "does not hold: better"),
        ("equivalent", ("a", "a"), "holds"),
        ("better", ("a", "a"), "does not hold: equivalent within 0.5"),
        ("better", ("one", "b"), "undecided (at least 2 more seeds)"),
    ],
)
def test_claim_holds_if_the_verdict_matches_its_direction(direction, sides, expected):
    (found,) = find([claim(direction, a=sides[0], b=sides[1])], GROUPS, {})
    assert outcome(found, {}) == expected


def test_outcome_of_arithmetic_and_plan_claims():
    cases = {
        "confirmed: tests/x.py::test_y": "holds by arithmetic (tests/x.py::test_y)",
        "refuted: tests/x.py::test_y": "refuted by arithmetic (tests/x.py::test_y)",
        "observed: tests/x.py::test_y": "observed in a test, no verdict (tests/x.py::test_y)",
        "plan: --config=configs/a.py": "not run: 12.5 chip-hours",
        "plan: --config=c.py --topology=v5e:4x4": "not run: 3 chip-hours on v5e",
        "plan: --config=c.py --topology=2xv5p:2x2x1": "not run: 4 chip-hours on v5p",
        "plan: --topology h100:8 --config=c.py": "not run: 5 chip-hours on h100",
        "plan: --config=configs/b.py": "not run: estimate its cost with launch.plan",
    }
    hours = {
        "--config=configs/a.py": "12.5",
        "--config=c.py --topology=v5e:4x4": "3",
        "--config=c.py --topology=2xv5p:2x2x1": "4",
        "--topology h100:8 --config=c.py": "5",
    }
    for evidence, expected in cases.items():
        (found,) = find([claim(evidence=evidence)], {}, {})
        assert outcome(found, hours) == expected


def test_missing_runs_are_explained():
    (found,) = find([claim(a="gone")], GROUPS, {"gone": "--data=wmt=DIR"})
    assert outcome(found, {}) == "not run: --data=wmt=DIR"


def test_holm_correction_over_all_claims():
    close = {"a": runs(30.5, 31.1, 31.7), "b": runs(29.7, 30.1, 30.4)}
    (alone,) = find([claim()], close, {})
    assert alone.comparison.corrected is None
    many = find([claim(id=str(i), a="a" if i == 0 else "b") for i in range(9)], close, {})
    assert many[0].comparison.corrected[0] == pytest.approx(9 * alone.comparison.p_values[0])


def test_unknown_metric_error_lists_known_metrics():
    with pytest.raises(
        UserError,
        match=r"claim c in claims.csv: its runs cannot be compared by rouge; choose one of best valid",
    ):
        find([claim(metric="rouge")], GROUPS, {})
    with pytest.raises(
        UserError,
        match=rf"claim c: run1 has no predictions.npz, from which bleu is computed: restore this file, or {TEST_AGAIN}",
    ):
        find([claim(metric="bleu")], GROUPS, {})


def test_duplicate_seed_raises_user_error():
    """A duplicate occurs if two sweeps keep their runs in one folder."""
    one, other = runs(30.0, 30.1, 30.2), runs(31.0, 31.1, 31.2)
    for metric in ("best valid bleu", "flops"):
        with pytest.raises(
            UserError, match="run1 and run1 are in one group and have the same seed 1"
        ):
            find([claim(metric=metric)], {"a": [*one, *runs(30.3)], "b": other}, {})


def test_counted_resources_need_no_interval():
    cheap, dear = runs(30.0), runs(31.0)
    cheap[0].summary["params"]["trainable"], dear[0].summary["params"]["trainable"] = 5, 10
    groups = {"a": cheap, "b": dear}
    (found,) = find([claim(metric="parameters")], groups, {})
    assert outcome(found, {}) == "holds"
    row = table([found], {}, "tiny").rows[0]
    assert row[7] == "-5.00" and row[8] == ""


def test_flops_of_runs_that_stopped_early_have_the_noise_of_seeds():
    def stopped(*flops: float) -> list[Run]:
        made = runs(*(30.0 for _ in flops))
        for run, number in zip(made, flops, strict=True):
            run.summary.update(stopped_by="patience", flops=number)
        return made

    few, many = stopped(1.0e9, 1.1e9, 1.2e9), stopped(4.0e9, 4.1e9, 4.2e9)
    (found,) = find([claim(metric="flops")], {"a": few, "b": many}, {})
    assert outcome(found, {}) == "holds"
    row = table([found], {}, "tiny").rows[0]
    assert row[7] == "-73.2 %" and row[8].startswith("-78.7 to -67.6 %")
    (found,) = find([claim(metric="flops")], {"a": few[:1], "b": many[:1]}, {})
    assert outcome(found, {}) == "undecided (at least 2 more seeds)"


@dataclass(frozen=True)
class Toys(ExperimentSuite):
    def prepare(self, config):
        return config, toy.Toy()

    def side(self, text: str) -> Side:
        if text == "absent":
            return Side("absent", lambda seed: toy.config(), "--data=DIR")
        if text not in ("slow", "fast"):
            raise UserError(f"there is no experiment {text}")
        rate = {"slow": 0.001, "fast": 0.05}[text]
        return Side(
            text, lambda seed: toy.config(seed=seed, optimizer__learning_rate=rate, train__steps=5)
        )


def kept(suite: ExperimentSuite) -> list[dict]:
    with (suite.out / "claims.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.medium
def test_claims_train_their_sides_and_write_the_table(paper, tmp_path, capsys):
    suite = Toys("tiny", 3, [], tmp_path / "out", toy.mesh())
    absent = "c2,3,With data,best valid error,absent,fast,better,,runs"
    suite.claims(paper(RUNS, absent))
    first, second = kept(suite)
    assert (first["scale"], first["seeds"], first["printed"]) == ("tiny", "3 and 3", "34.6")
    assert first["verdict"].startswith(("does not hold: worse", "undecided"))
    assert second["verdict"] == "not run: --data=DIR"
    assert "corrected together by Holm" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.medium
def test_kept_claims_do_not_train(paper, tmp_path):
    suite = Toys("tiny", 3, [], tmp_path / "out", toy.mesh())
    name = paper(RUNS)
    suite.claims(name, only_kept=True)
    assert kept(suite)[0]["verdict"] == "not run: no finished run"
    assert not (suite.out / "runs").exists()
    suite.claims(name)
    trained = kept(suite)
    (suite.out / "claims.csv").unlink()
    suite.claims(name, only_kept=True)
    assert kept(suite) == trained


def test_kept_runs_need_no_data(paper, tmp_path):
    """The table of kept runs does not depend on the data of the machine."""
    suite = Toys("tiny", 1, [], tmp_path / "out", toy.mesh())
    name = paper("c,3,x,best valid error,absent,fast,better,,runs")
    suite.claims(name, only_kept=True)
    assert kept(suite)[0]["verdict"] == "not run: no finished run"
    suite.runs({name: suite.side(name).experiment for name in ("absent", "fast")})
    suite.claims(name, only_kept=True)
    assert kept(suite)[0]["verdict"] == "undecided (at least 2 more seeds)"


def test_claims_without_runs_are_written(paper, tmp_path):
    suite = Toys("tiny", 1, [], tmp_path / "out", toy.mesh(), sweep={"seed": ("1", "2")})
    suite.claims(paper("c,3,x,best valid error,absent,fast,better,,runs"))
    assert kept(suite)[0]["verdict"] == "not run: --data=DIR"


def test_unknown_experiment_raises_user_error(paper, tmp_path):
    suite = Toys("tiny", 1, [], tmp_path / "out", toy.mesh())
    with pytest.raises(UserError, match="there is no experiment nobody"):
        suite.claims(paper("c,3,x,best valid error,nobody,fast,better,,runs"))
    assert not suite.out.exists()


def test_chip_hours_are_read_by_the_options_of_the_plan(paper, tmp_path):
    name = paper(RUNS)
    assert claims.chip_hours(name) == {}
    (tmp_path / name / "claims_plans.csv").write_text(
        "plan,chip_hours,binds\n--config=a,12.5,memory\n"
    )
    assert claims.chip_hours(name) == {"--config=a": "12.5"}
