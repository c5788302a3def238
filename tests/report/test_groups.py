from pathlib import Path

import pytest

from common.config import to_json
from common.errors import UserError
from common.report.groups import differences, groups
from common.report.runs import run_of
from configs import explicit
from reservoir.layers import layers_of
from tests.report.helpers import made, summary


def test_runs_that_differ_in_the_seed_are_one_group():
    runs = [
        made([1.0], "x", seed=3, reservoir="ffn"),
        made([1.0], "y", seed=2),
        made([1.0], "z", seed=1, reservoir="ffn"),
    ]
    ffn, plain = groups(runs)
    assert [run.name for run in ffn.runs] == ["z", "x"] and [run.name for run in plain.runs] == [
        "y"
    ]
    assert (ffn.name, plain.name) == ("FFN, 2 of 6", "transformer, 6 layers")
    assert (ffn.line, plain.line) == ("FFN, 2 frozen", "transformer")
    assert (ffn.layers.total, ffn.layers.frozen, ffn.layers.updatable) == (6, 2, 4)


def test_groups_of_different_depths_share_a_line_of_the_figure():
    deep = groups([made([1.0], reservoir="transformer", layers=n) for n in (6, 8)])
    assert [(g.name, g.line) for g in deep] == [
        ("T, 2 of 6", "T, 2 frozen"),
        ("T, 2 of 8", "T, 2 frozen"),
    ]


def test_digit_classifiers_are_named_by_their_softmax_layers():
    runs = []
    for layers in (1, 2):
        config = explicit.mnist()
        config.model.layers = layers
        runs.append(run_of(summary([1.0]) | {"config": to_json(config)}, f"run{layers}"))
    assert [group.name for group in groups(runs)] == ["softmax, 1 layer", "softmax, 2 layers"]


def test_names_are_minimal_and_differences_complete():
    runs = [made([1.0], rate=r, steps=s, schedule=n) for r, s, n in ((0.1, 5, "a"), (0.2, 6, "b"))]
    compared = groups(runs)
    assert [g.name for g in compared] == [
        "transformer, 6 layers, schedule a",
        "transformer, 6 layers, schedule b",
    ]
    assert differences(compared).rows == [
        ("train.rate", "0.1", "0.2"),
        ("train.schedule", "a", "b"),
        ("train.steps", "5", "6"),
    ]


def test_missing_field_is_a_difference():
    old, new = groups([made([1.0]), made([1.0], clip=0.0)])
    assert differences([old, new]).rows == [("train.clip", None, "0")]
    assert [old.name, new.name] == ["transformer, 6 layers", "transformer, 6 layers, clip 0"]


def test_integer_and_float_of_equal_value_are_no_difference():
    (one,) = groups([made([1.0], rate=1.0), made([1.0], rate=1, seed=2)])
    assert len(one.runs) == 2


def test_devices_make_groups():
    run = made([1.0], seed=2)
    run.summary["device"] = "8 x H100"
    assert [g.name for g in groups([made([1.0]), run])] == [
        "transformer, 6 layers, device 1 x cpu",
        "transformer, 6 layers, device 8 x H100",
    ]


def test_ignored_fields_do_not_make_groups():
    runs = [made([1.0], seed=s, steps=s) for s in (1, 2)]
    assert len(groups(runs)) == 2
    runs = [made([1.0], seed=s, log_steps=s) for s in (1, 2)]
    for run in runs:
        run.config["wandb"] = {"project": f"of seed {run.seed}"}
    assert len(groups(runs)) == 1
    runs[0].config["wandbs"] = {"project": "x"}
    assert len(groups(runs)) == 2


def test_incomparable_runs_raise_user_errors():
    with pytest.raises(UserError, match="no runs"):
        groups([])
    with pytest.raises(UserError, match=r"b measures bits \(min\), but a measures bleu \(max\)"):
        groups([made([1.0], "a"), made([1.0], "b", metric="bits", mode="min")])
    with pytest.raises(
        UserError, match="a and b are in one group and have the same seed 1: leave out"
    ):
        groups([made([1.0], "a"), made([2.0], "b")])
    twice = run_of(summary([1.0]), "a", folder=Path("runs/a"))
    with pytest.raises(
        UserError, match=r"^the run runs/a is given twice: give each run only once$"
    ):
        groups([twice, twice])


def test_group_names_are_distinct():
    runs = [made([1.0], "a"), made([1.0], "b", tag=""), made([1.0], "c", reservoir="none")]
    runs[2].config["model"]["reservoirs"] = 3
    names = [group.name for group in groups(runs)]
    assert names == [
        "transformer, 6 layers, reservoirs 2",
        "transformer, 6 layers, reservoirs 2 (b)",
        "transformer, 6 layers, reservoirs 3",
    ]
    near = groups([made([1.0], rate=rate) for rate in (0.12345678, 0.12345679)])
    assert near[0].name.endswith("rate 0.12345678")


def test_layers_of_other_models():
    gmlp = layers_of({"model": {"layers": 4, "kind": "gmlp"}})
    assert (str(gmlp), gmlp.updatable) == ("gmlp, 4 layers", 4)
    assert (
        str(layers_of({"model": {"encoder_layers": 8, "reservoir": "gru", "reservoirs": 3}}))
        == "gru, 3 of 8"
    )
    drop = {"encoder_layers": 8, "reservoir": "none", "reservoirs": 2, "layerdrop": 0.25}
    assert str(layers_of({"model": drop})) == "LayerDrop, 8 layers"
    skip = {"encoder_layers": 7, "reservoir": "ffn", "reservoirs": 2, "placement": "alternate"}
    assert str(layers_of({"model": skip | {"reservoir_trained": True}})) == "FFN, trained, 7 layers"
    skip["backskip"] = {"estimator": "policy"}
    assert str(layers_of({"model": skip})) == "FFN backskip, 2 of 7"
    assert str(layers_of({"model": skip | {"placement": "LRLRLRL"}})) == "FFN backskip, 3 of 7"
    assert layers_of({"model": {"width": 4}}) is None
    named = groups([made([1.0], "digits", layers=None)])
    assert named[0].name == "digits" and named[0].layers is None
