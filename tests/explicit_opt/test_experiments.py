"""Tables and figures: the runs that they train, the files that they write, and the reuse of finished runs."""

import csv
import dataclasses
import json
from dataclasses import replace

import jax
import numpy as np
import pytest

from common.errors import UserError
from common.sharding import make_mesh
from explicit_opt import analysis, experiments
from explicit_opt.digits import Digits
from explicit_opt.experiments import PRINTED, ExperimentSuite
from explicit_opt.language import NextToken
from tests.programs import call

QUICK = ["--config.train.epochs=2", "--config.train.batch=512", "--config.data.tokens=5000"]


@pytest.fixture
def suite(tmp_path, monkeypatch):
    monkeypatch.setattr(experiments, "CONTEXTS", (1, 2))
    fields = [*QUICK, f"--config.data.cache_dir={tmp_path}/cache"]
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    return ExperimentSuite("tiny", 1, fields, tmp_path / "out", mesh)


@pytest.mark.medium
def test_table1_has_measured_and_printed_value_for_every_cell(suite):
    experiments.table1(suite)
    with (suite.out / "table1.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 2
    assert all(row["X-w"] for row in rows[::2]) and not any(row["X-w"] for row in rows[1::2])
    for measured, printed in zip(rows[::2], rows[1::2], strict=True):
        assert (measured[""], printed[""]) == ("measured", "printed")
        expected = PRINTED[printed["input"], int(printed["K"])]
        cells = ("T-c", "D-c", "T-p", "D-p", "T-w", "D-w")
        assert tuple(float(printed[c]) for c in cells) == expected
        # Eq. (3) without training has a lower training perplexity than the trained cold start. After training from
        # eq. (3), the best epoch has no higher development perplexity than eq. (3).
        assert float(measured["T-p"]) < float(measured["T-c"])
        assert float(measured["D-w"]) <= float(measured["D-p"])
        # The fitted factor minimises the training loss, so it cannot raise the training perplexity.
        assert float(measured["T-sp"]) <= float(measured["T-p"])
    # For one token of context, sum and concatenation are equal, so they share their runs.
    assert rows[0]["T-p"] == rows[4]["T-p"]
    assert sorted(p.name for p in (suite.out / "runs").iterdir()) == sorted(
        f"{aggregate}_k{k}_{start}_seed1"
        for aggregate, k in (("sum", 1), ("sum", 2), ("cat", 2))
        for start in ("cold", "scaled", "warm", "zero")
    )
    # The figures reuse the runs of Table 1.
    before = {
        path: path.stat().st_mtime_ns for path in suite.out.glob("runs/*/checkpoints/latest/*")
    }
    experiments.fig3(suite)
    experiments.fig1(suite)
    after = {
        path: path.stat().st_mtime_ns for path in suite.out.glob("runs/*/checkpoints/latest/*")
    }
    assert before == after
    for name in ("fig1.png", "fig3.png"):
        assert (suite.out / name).stat().st_size > 10_000


@pytest.mark.slow
def test_fig2_writes_table_scan_and_figure(tmp_path):
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    suite = ExperimentSuite("tiny", 2, ["--config.train.epochs=1"], tmp_path, mesh)
    experiments.fig2(suite)
    with (tmp_path / "fig2.csv").open() as file:
        rows = {(r["layers"], r["start"]): r for r in csv.DictReader(file)}
    untrained = ["explicit, no training", "scaled, no training"]
    starts = [start for layers, start in rows if layers == "1"]
    assert starts[:-2] == [*untrained, *experiments.TRAINED]
    lda, converged = (float(rows["1", name]["test cross-entropy"]) for name in starts[-2:])
    assert starts[-2] == "LDA, one pass" and starts[-1].startswith("logistic regression, conv")
    assert converged < lda
    assert ("2", "zero") not in rows
    for layers in "12":
        explicit, scaled = (rows[layers, start] for start in untrained)
        assert scaled["test cross-entropy"] != explicit["test cross-entropy"]
        assert "±" in rows[layers, "warm"]["test accuracy %"]
    # The factor of a single layer is positive, so it does not change the ranking of the outputs.
    assert len({rows["1", start]["test accuracy %"] for start in untrained}) == 1
    assert (tmp_path / "fig2.png").stat().st_size > 10_000
    with (tmp_path / "fig2_scan.csv").open() as file:
        assert [int(float(r["K"])) for r in csv.DictReader(file)] == list(range(1, 65))


def test_our_protocol_holds_out_data_and_printed_protocol_takes_last_value(
    tmp_path,
):
    mesh, found = make_mesh({"data": 1}, jax.devices()[:1]), {}
    fields = ["--config.optimizer.learning_rate=0.3", "--config.train.epochs=6"]
    for protocol in ("ours", "printed"):
        suite = ExperimentSuite("tiny", 1, fields, tmp_path, mesh, protocol)
        config = suite.digits(1, "warm", 1)
        task, name = Digits(config, mesh), suite.named("run")
        (ran,) = suite.fit_all({name: config})
        test, points = experiments.digits_result(suite, ran)
        summary = json.loads((tmp_path / "runs" / name / "summary.json").read_text())
        found[protocol] = (task, test, points, summary)
    task, test, points, summary = found["ours"]
    assert len(task.splits["valid"][1]) == 200 and test == summary["test"]
    rows = {row.tobytes() for row in task.splits["test"][0]}
    assert not rows & {row.tobytes() for row in task.splits["valid"][0]}
    task, test, points, summary = found["printed"]
    assert task.splits["valid"] is task.splits["test"]
    assert (test["accuracy"], test["loss"]) == points[-1][1:]
    # Training stopped after the loss rose, so the loss of the last epoch is not the best loss.
    assert test["loss"] > summary["best_valid"]
    language = {
        protocol: ExperimentSuite("tiny", 1, [], tmp_path, mesh, protocol).language(
            "cat", 2, "warm"
        )
        for protocol in ("ours", "printed")
    }
    assert [c.eval.patience for c in language.values()] == [1, 0]


@pytest.mark.slow
def test_printed_protocol_of_table1_reports_last_epoch(suite):
    """The learning rate is high enough for the development perplexity to rise again."""
    suite = dataclasses.replace(
        suite, protocol="printed", fields=[*suite.fields, "--config.optimizer.learning_rate=1.0"]
    )
    experiments.table1(suite)
    with (suite.out / "table1_printed.csv").open() as file:
        row = next(r for r in csv.DictReader(file) if (r["input"], r["K"]) == ("cat", "2"))
    points, _ = experiments.language_runs(suite)["cat", 2, "warm"][0]
    assert row["D-w"] == f"{points[-1][2]:.1f}" and points[-1][2] > min(p[2] for p in points)
    assert "X-w" not in row


def test_k_affects_eq_3_less_than_the_form_with_a_separate_intercept(tmp_path):
    """At the priming number K = 1, eq. (3) and the form with a separate intercept are equal.

    For K above the mean norm of the features, the accuracy of eq. (3) varies less than the accuracy of the other form:
    the exponent (K - 1) / K hardly changes, but the intercept grows.
    """
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    suite = ExperimentSuite("tiny", 1, [], tmp_path, mesh)
    scan, norm = experiments.priming_scan(Digits(suite.digits(1, "explicit", 1), mesh))
    primings, weights, intercept = map(np.array, zip(*scan, strict=True))
    assert primings[0] == 1 and weights[0] == intercept[0]
    far = primings > norm
    assert far.any() and np.ptp(weights[far]) < np.ptp(intercept[far])


@pytest.mark.slow
def test_eq_3_is_close_to_the_maximum_likelihood_bigram_bound(suite, monkeypatch):
    monkeypatch.setattr(analysis, "CONTEXTS", (1, 2))
    # `formula` reads all tokens, so it refuses an override of data.tokens.
    fields = [text for text in suite.fields if not text.startswith("--config.data.tokens=")]
    analysis.formula(replace(suite, fields=fields))
    with (suite.out / "formula.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = {
        (r["input"], r["K"], r["documents"], r["prior"]): (r["training"], r["development"])
        for r in rows
    }
    third = {}
    for documents in ("line", "file"):
        one = {key[-1]: float(v[0]) for key, v in found.items() if key[:3] == ("sum", "1", documents)}  # fmt: skip
        assert one[analysis.BOUND] > 1
        likeliest = one["the same on the measured tokens"]
        third[documents] = one["f^-(K-1)/K, eq. 3"] / likeliest
        assert 1 < third[documents] < 1.2
        assert one["f^-(K-1)/K, eq. 3"] < 0.95 * one["f^-K/(K+1)"]
        two = {key[-1]: float(v[0]) for key, v in found.items() if key[:3] == ("cat", "2", documents)}  # fmt: skip
        assert two["f^-(K-1)/K, eq. 3"] < two["f^+(K-1)/K, section 2.1"]
    # Eq. (3) is closer to the bound with documents=file, because fewer contexts are <pad>, whose embedding is nearly
    # uniform noise.
    assert third["file"] < third["line"]
    assert float(found["sum", "1", "", "printed, explicit"][0]) == PRINTED["sum", 1][2]
    assert found["cat", "2", "", "printed, warm"] == ("25.8", "33.0")


def test_sampled_bigram_perplexity_on_all_tokens_equals_bound(suite):
    config = suite.language("sum", 1, "explicit", **{"eval.train_tokens": 0})
    task = NextToken(config, suite.mesh)
    counts = task.counts()
    found = analysis.sampled_bigram_perplexity(counts, task)
    assert found == pytest.approx(analysis.bigram_perplexity(counts))


def test_bigram_perplexity_of_hand_computed_counts():
    """Token 0 is followed by 1 three times and by 0 once; token 1 is always followed by 0."""
    counts = np.array([[[1, 3], [2, 0]]])
    expected = np.exp(-(3 * np.log(3 / 4) + np.log(1 / 4)) / 6)
    assert analysis.bigram_perplexity(counts) == pytest.approx(expected)


@pytest.mark.slow
def test_sensitivity_covers_every_start_and_optimizer(tmp_path):
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    suite = ExperimentSuite("tiny", 1, ["--config.train.epochs=1"], tmp_path, mesh)
    analysis.sensitivity(suite)
    with (tmp_path / "sensitivity.csv").open() as file:
        rows = list(csv.DictReader(file))
    starts = [("warm", ""), ("scaled", ""), ("zero", ""), ("cold", "N(0, 1)"), ("cold", "U(±1/√D)")]
    assert [(r["optimizer"], r["start"], r["drawn from"]) for r in rows] == [
        (optimizer, *start) for optimizer in ("adam", "adagrad") for start in starts
    ]
    accuracy = [float(r["test accuracy %"]) for r in rows]
    assert accuracy[0] > accuracy[3] and len(set(accuracy)) > 4


@pytest.mark.slow
def test_fig2_sweeps_every_case_then_trains_in_turns(tmp_path):
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    fields = ["--config.train.epochs=1", "--config.train.batch=512"]
    sweep = {"optimizer.learning_rate": ("1e-3", "1e-1")}
    suite = ExperimentSuite("tiny", 2, fields, tmp_path, mesh, turns=2, sweep=sweep)
    experiments.fig2(suite)
    with (tmp_path / "sweep.csv").open() as file:
        tried = list(csv.DictReader(file))
    cases = {f"digits_{n}_{s}" for n in (1, 2) for s in experiments.TRAINED} - {"digits_2_zero"}
    assert {row["case"] for row in tried} == cases and len(tried) == 2 * len(cases)
    chosen = {row["case"]: row["optimizer.learning_rate"] for row in tried if row[""] == "chosen"}
    for case, rate in chosen.items():
        for seed in (1, 2):
            folder = tmp_path / "runs" / f"{case}_seed{seed}_learning_rate={rate}"
            summary = json.loads((folder / "summary.json").read_text())
            assert summary["test"] and summary["timing"]["kind"] == "turns"


def test_unknown_field_raises_one_line_error(tmp_path):
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    suite = ExperimentSuite("tiny", 1, ["--config.model.depth=2"], tmp_path, mesh)
    with pytest.raises(UserError, match=r"unknown option --config\.model\.depth"):
        experiments.table1(suite)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table1", "--protocol=paper"], "--protocol='paper': choose one of ours, printed"),
        (
            ["formula", "--protocol=printed"],
            "--protocol=printed cannot be used with the target formula",
        ),
        (
            ["claims", "--protocol=printed"],
            "--protocol=printed cannot be used with the target claims",
        ),
        (
            ["formula", "--turns=5"],
            "the target formula trains no model: leave out --turns\n",
        ),
        (
            ["fig2", "--protocol=printed", "--sweep=train.batch=32,64"],
            "with --protocol=printed, a sweep would choose settings by the metrics that are reported: leave out",
        ),
        (
            ["fig2", "--data=babylm=/tmp"],
            "--data=babylm=/tmp: the target fig2 does not read the corpus babylm",
        ),
        (["fig2", "--data=mnist=/nowhere"], "--data=mnist=/nowhere: /nowhere does not exist"),
        (["fig2", "--data=mnist"], "--data=mnist must be NAME=PATH"),
    ],
)
def test_invalid_options_exit_with_one_line_error(tmp_path, arguments, message):
    program = ["explicit_opt.reproduce", *arguments, f"--out={tmp_path}"]
    said = call(*program, code=2)
    assert said.startswith(f"error: {message}") and said.count("\n") == 1


@pytest.mark.parametrize("field", ["start=cold", "eval.start=false", "model.layers=3"])
def test_override_of_a_field_that_the_target_sets_raises_an_error(suite, field):
    given = replace(suite, fields=(*suite.fields, f"--config.{field}"))
    with pytest.raises(UserError, match=f"leave out --config.{field}, because the target"):
        given.digits(1, "explicit", 1)
