"""Tables and figures: which runs they need, what they write, and that nothing is run twice."""

import csv

import jax
import numpy as np
import pytest

from common.errors import UserError
from common.sharding import make_mesh
from explicit_opt import arithmetic, experiments
from explicit_opt.digits import Digits
from explicit_opt.experiments import PRINTED, Laboratory

QUICK = ["--config.train.epochs=2", "--config.train.batch=512", "--config.data.tokens=30000"]


@pytest.fixture
def lab(tmp_path, monkeypatch):
    monkeypatch.setattr(experiments, "CONTEXTS", (1, 2))
    fields = [*QUICK, f"--config.data.cache_dir={tmp_path}/cache"]
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    return Laboratory("tiny", 1, fields, tmp_path / "out", mesh)


def test_table_1_has_every_cell_beside_the_printed_one(lab):
    experiments.table1(lab)
    with (lab.out / "table1.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 2
    for measured, printed in zip(rows[::2], rows[1::2], strict=True):
        assert (measured[""], printed[""]) == ("measured", "printed")
        expected = PRINTED[printed["input"]][int(printed["K"])]
        cells = ("T-c", "D-c", "T-p", "D-p", "T-w", "D-w")
        assert tuple(float(printed[c]) for c in cells) == expected
        # What the formula promises on any text: no worse than a cold start of two epochs, and training helps.
        assert float(measured["T-p"]) < float(measured["T-c"])
        assert float(measured["D-w"]) <= float(measured["D-p"])
    # One model for K = 1, run once.
    assert rows[0]["T-p"] == rows[4]["T-p"]
    assert sorted(p.name for p in (lab.out / "runs").iterdir()) == sorted(
        f"{aggregate}_k{k}_{start}_seed1"
        for aggregate, k in (("sum", 1), ("sum", 2), ("cat", 2))
        for start in ("cold", "warm")
    )
    # The figures need no further run.
    before = {path: path.stat().st_mtime_ns for path in lab.out.glob("runs/*/checkpoints/latest/*")}
    experiments.fig3(lab)
    experiments.fig1(lab)
    after = {path: path.stat().st_mtime_ns for path in lab.out.glob("runs/*/checkpoints/latest/*")}
    assert before == after
    for name in ("fig1.png", "fig3.png"):
        assert (lab.out / name).stat().st_size > 10_000


def test_the_digits_figure_and_its_table(tmp_path):
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    lab = Laboratory("tiny", 2, ["--config.train.epochs=1"], tmp_path, mesh)
    experiments.fig2(lab)
    with (tmp_path / "fig2.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["layers"], r["start"]) for r in rows] == [
        (layers, start) for layers in "12" for start in ("explicit", "warm", "cold")
    ]
    assert all("±" in r["test accuracy %"] for r in rows)
    assert (tmp_path / "fig2.png").stat().st_size > 10_000


def test_the_weights_form_is_flat_in_k_and_starts_where_the_separate_intercept_does(tmp_path):
    """At K = 1 both are log F alone; beyond, the exponent (K - 1) / K hardly moves, while the intercept grows."""
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    lab = Laboratory("tiny", 1, [], tmp_path, mesh)
    scan, norm = experiments.priming_scan(Digits(lab.digits(1, "explicit", 1), mesh))
    primings, weights, intercept = map(np.array, zip(*scan, strict=True))
    assert primings[0] == 1 and weights[0] == intercept[0]
    far = primings > norm
    assert far.any() and np.ptp(weights[far]) < np.ptp(intercept[far])


def test_no_prior_beats_the_maximum_likelihood_bigram_and_eq_3_is_next_to_it(lab, monkeypatch):
    monkeypatch.setattr(arithmetic, "CONTEXTS", (1, 2))
    arithmetic.formula(lab)
    with (lab.out / "formula.csv").open() as file:
        rows = list(csv.DictReader(file))
    one = {r["prior"]: float(r["training"]) for r in rows if (r["input"], r["K"]) == ("sum", "1")}
    likeliest, third = one["maximum-likelihood bigram"], one["f^-(K-1)/K, eq. 3"]
    assert likeliest < third < 1.2 * likeliest
    assert third < 0.95 * one["f^-K/(K+1)"]
    assert one["printed"] == PRINTED["sum"][1][2]
    two = {r["prior"]: float(r["training"]) for r in rows if (r["input"], r["K"]) == ("cat", "2")}
    assert two["f^-(K-1)/K, eq. 3"] < two["f^+(K-1)/K, section 2.1"]


def test_the_bigram_of_maximum_likelihood_by_hand():
    """Token 0 is followed by 1 thrice and by 0 once, token 1 always by 0: 4 of 6 pairs have an entropy."""
    counts = np.array([[[1, 3], [2, 0]]])
    expected = np.exp(-(3 * np.log(3 / 4) + np.log(1 / 4)) / 6)
    assert arithmetic.bigram_perplexity(counts) == pytest.approx(expected)


def test_sensitivity_has_every_start_under_every_optimizer(tmp_path):
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    lab = Laboratory("tiny", 1, ["--config.train.epochs=1"], tmp_path, mesh)
    arithmetic.sensitivity(lab)
    with (tmp_path / "sensitivity.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["optimizer"], r["start"], r["drawn from"]) for r in rows] == [
        (optimizer, *start)
        for optimizer in ("adam", "adagrad")
        for start in (("warm", ""), ("cold", "N(0, 1)"), ("cold", "U(±1/√D)"))
    ]
    accuracy = [float(r["test accuracy %"]) for r in rows]
    # After one epoch the optimizer and the draw decide: that is the point of the table.
    assert accuracy[0] > accuracy[1] and len(set(accuracy)) > 4


def test_a_field_that_no_experiment_has_is_one_line(tmp_path):
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    lab = Laboratory("tiny", 1, ["--config.model.depth=2"], tmp_path, mesh)
    with pytest.raises(UserError, match=r"unknown option --config\.model\.depth"):
        experiments.table1(lab)
