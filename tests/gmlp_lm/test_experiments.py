"""The paper's tables and figure: their content, and the reuse of the runs that they share."""

import csv
import json
import math
from pathlib import Path

import jax
import pytest

from common.errors import UserError
from common.metrics.curve import Curve, Point
from common.report.runs import run_of
from common.sharding import make_mesh
from gmlp_lm import experiments, settings
from gmlp_lm.experiments import KINDS, ExperimentSuite
from tests.programs import call

QUICK = [
    "--config.model.width=32",
    "--config.model.layers=1",
    "--config.model.hidden=64",
    "--config.model.length=24",
    "--config.train.steps=20",
    "--config.eval.steps=10",
    "--config.eval.stride=12",
    "--config.eval.tokens=1000",
    "--config.data.batch=8",
]


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def suite(tmp_path_factory) -> ExperimentSuite:
    """Returns a suite with a trained run of each kind of model, after it has written Table 3."""
    folder = tmp_path_factory.mktemp("lab")
    text = b"the cat sat on the mat and the dog sat on the log .\n" * 200
    (folder / "data").mkdir()
    for split in ("train", "valid", "test"):
        (folder / "data" / f"{split}.txt").write_bytes(text)
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    data_paths = {"wikitext2": folder / "data"}
    made = ExperimentSuite(
        "tiny", 1, QUICK, folder / "out", mesh, "fixed", ("wikitext2",), data_paths
    )
    experiments.table3(made)
    return made


@pytest.mark.medium
def test_table_3_units(suite):
    rows = read(suite.out / "table3.csv")
    assert [row["model"] for row in rows[::2]] == list(KINDS.values())
    for row in rows[::2]:
        run = suite.out / "runs" / f"wikitext2_{kind_of(row)}_fixed_seed1"
        summary = json.loads((run / "summary.json").read_text())
        whole = json.loads((run / experiments.WHOLE).read_text())["value"]
        assert float(row["best bits/byte"]) == pytest.approx(summary["best_valid"], abs=1e-3)
        assert float(row["test bits/byte"]) == pytest.approx(
            summary["test"]["bits_per_byte"], abs=1e-3
        )
        assert float(row["valid bits/byte"]) == pytest.approx(whole["bits_per_byte"], abs=1e-3)
        # The curve is measured on the first 1,000 of the 10,400 validation bytes, so it differs from `whole`.
        assert whole["bits_per_byte"] != summary["best_valid"]
        assert float(row["best nats/byte"]) == pytest.approx(
            summary["best_valid"] * math.log(2), abs=1e-3
        )
    printed = rows[3]
    assert (printed["best nats/byte"], printed["best bits/byte"]) == ("1.02", "1.47")
    assert (printed["final nats/byte"], printed["s/100 steps"]) == ("2.39", "34.89")


def kind_of(row: dict[str, str]) -> str:
    return next(kind for kind, name in KINDS.items() if name == row["model"])


@pytest.mark.medium
def test_finished_runs_are_not_trained_or_measured_again(suite):
    files = [
        path
        for n in ("checkpoints/latest/*", "summary.json", experiments.WHOLE)
        for path in suite.out.glob(f"runs/*/{n}")
    ]
    before = {path: path.stat().st_mtime_ns for path in files}
    assert any(path.name == experiments.WHOLE for path in before)
    experiments.table3(suite)
    experiments.table4(suite)
    experiments.fig4(suite)
    assert before == {path: path.stat().st_mtime_ns for path in files}


@pytest.mark.medium
def test_figure_4_and_table_4_share_runs(suite):
    experiments.fig4(suite)
    experiments.table4(suite)
    assert (suite.out / "fig4.png").stat().st_size > 10_000
    rows = read(suite.out / "fig4.csv")
    assert [float(row["printed rise"]) for row in rows] == [0, *(
        pytest.approx(rise / math.log(2)) for rise in (1.37, 1.29)
    )]  # fmt: skip
    assert all(float(row["rise"]) >= 0 for row in rows)
    assert len(read(suite.out / "fig4_curves.csv")) == 3 * 2
    samples = read(suite.out / "table4.csv")
    assert [row["step"] for row in samples] == ["10", "20"]
    assert all(row[name].startswith("The") for row in samples for name in KINDS.values())


def summary_of(points: list[tuple[int, float, float, float]], parameters: int = 1000) -> dict:
    curve = Curve("bits_per_byte", "min", [Point(*p) for p in points])
    config = {"data": {"source": "files:data/wikitext2"}}
    timing = {"kind": "turns", "sessions": ["turns of all"]}
    record = {"curve": curve.to_json(), "config": config, "timing": timing, "seed": 1, "test": {}}
    return record | {"params": {"total": parameters, "trainable": parameters}}


def test_comparison_ends_with_the_shortest_curve():
    """The table compares the best losses up to the end of the shortest curve.

    In these curves, gpt has the lowest loss at equal steps and at equal FLOPs, and gmlp at equal seconds.
    """
    cases = {
        "gpt": [run_of(summary_of([(0, 0, 0, 4.0), (10, 20.0, 10.0, 2.0)]), "gpt")],
        "gmlp": [run_of(summary_of([(0, 0, 0, 4.0), (10, 10.0, 10.0, 2.5)]), "gmlp")],
        "gmlp_attn": [run_of(summary_of([(0, 0, 0, 4.0), (10, 10.0, 20.0, 2.8)]), "gmlp_attn")],
    }
    rows = {row[1]: row for row in experiments._comparison("wikitext2", cases)}
    equal = "parameters and data"
    assert rows[equal][3:6] == ("2.000", "2.500", "2.800")
    # The curve of gpt is interpolated at 10 s, and the curve of gmlp_attn at 10 FLOPs.
    assert rows["wall-clock"][3:6] == ("3.000", "2.500", "2.800")
    assert rows["FLOPs"][3:6] == ("2.000", "2.500", "3.400")
    # The mean over the curve of gpt, which falls linearly from 4 to 2.
    assert rows[equal][6] == "3.000"
    # With unequal parameter counts, the row of equal data is called "data", not "parameters and data".
    cases["gmlp"][0].summary["params"]["total"] = 500
    assert next(iter(experiments._comparison("wikitext2", cases)))[1] == "data"


@pytest.mark.medium
def test_damaged_cache_is_measured_again(suite):
    path = next(suite.out.glob(f"runs/*/{experiments.WHOLE}"))
    before = path.read_text()
    path.write_text(before[:20])
    experiments.table3(suite)
    assert path.read_text() == before


def test_table_1_has_the_authors_counts(tmp_path):
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    settings.table1(ExperimentSuite("tiny", 1, [], tmp_path, mesh))
    rows = {row["model"]: row for row in read(tmp_path / "table1.csv")}
    code = {name: int(row["code"].replace(",", "")) for name, row in rows.items()}
    unused = int(rows["GPT"]["unused in code"].replace(",", ""))
    assert code["gMLP"] == 7_178_864
    assert code["gMLP + attention"] == 7_203_440
    assert code["GPT"] + unused == 6_593_792
    fixed = [int(row["fixed"].replace(",", "")) for row in rows.values()]
    assert max(fixed) / min(fixed) < 1.002


def test_invalid_fields_write_no_table(tmp_path):
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    suite = ExperimentSuite("tiny", 1, ["--config.model.gate_heads=3"], tmp_path, mesh)
    for table in (settings.table1, settings.table2):
        with pytest.raises(UserError, match="gate_heads=3"):
            table(suite)
    assert not list(tmp_path.iterdir())


def test_table_2_has_the_printed_settings_of_the_paper_recipe(tmp_path):
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    settings.table2(ExperimentSuite("tiny", 1, [], tmp_path, mesh))
    rows = [row for row in read(tmp_path / "table2.csv") if row["printed"]]
    assert len(rows) == len(settings.PRINTED_SETTINGS)
    assert all(row["paper"] == row["printed"] for row in rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--recipe=best"], "--recipe='best': choose one of paper, code, fixed"),
        (["--corpora=enwik7"], "--corpora='enwik7': choose one of"),
        (["--data=wikitext2"], "--data=wikitext2 must be NAME=PATH"),
        (["--data=wikitext2=/nowhere"], "/nowhere does not exist"),
        (
            ["--data=enwik8=/tmp"],
            "uses only wikitext2: leave out --data=enwik8=PATH, or set --corpora=wikitext2,enwik8",
        ),
        (["--config.model.wdith=3"], "unknown option --config.model.wdith; did you mean"),
    ],
)
def test_invalid_options_are_one_line_errors(tmp_path, options, message):
    program = ["gmlp_lm.reproduce", "table3", f"--out={tmp_path}"]
    said = call(*program, *options, code=2)
    assert said.startswith("error: ") and message in said and said.count("\n") == 1


@pytest.mark.parametrize("option", ["--turns=3", "--sweep=optimizer.learning_rate=1e-3,2e-3"])
def test_tables_1_and_2_reject_training_options(tmp_path, option):
    program = ["gmlp_lm.reproduce", "table1", f"--out={tmp_path}", option]
    said = call(*program, code=2)
    name = option.partition("=")[0]
    assert said == f"error: table1 trains nothing and reads no data: leave out {name}\n"


@pytest.mark.parametrize("option", ["--turns=3", "--sweep=optimizer.learning_rate=1e-3,2e-3"])
def test_kept_claims_reject_training_options(tmp_path, option):
    said = call("gmlp_lm.reproduce", "claims", "--kept", f"--out={tmp_path}", option, code=2)
    name = option.partition("=")[0]
    assert said == f"error: --kept trains nothing: leave out {name}\n"


def test_missing_corpus_is_reported(tmp_path):
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    suite = ExperimentSuite("laptop", 1, [], tmp_path, mesh, "fixed", ("enwik9",))
    with pytest.raises(UserError, match="no directory data/enwik9"):
        experiments.table3(suite)
