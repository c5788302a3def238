import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from common.errors import UserError
from common.metrics.curve import Curve, Point


def curve(mode, *values):
    points = [Point(10 * i, 60.0 * i, 1e9 * i, v) for i, v in enumerate(values, start=1)]
    return Curve("metric", mode, points)


def test_best_is_the_first_best_point():
    assert curve("max", 1.0, 3.0, 2.0, 3.0).best.step == 20
    assert curve("min", 3.0, 1.0, 2.0, 1.0).best.step == 20


@pytest.mark.parametrize(("mode", "improved"), [("max", 2.5), ("min", 1.5)])
def test_only_a_strict_improvement_is_better(mode, improved):
    measured = curve(mode, 2.0)
    assert measured.better(improved, than=2.0)
    assert not measured.better(2.0, than=2.0)
    assert not measured.better(2.0, than=improved)


def test_running_best_keeps_coordinates_and_never_gets_worse():
    rising = curve("max", 1.0, 3.0, 2.0, 4.0, 2.0).running_best()
    assert [p.value for p in rising] == [1.0, 3.0, 3.0, 4.0, 4.0]
    assert [p.step for p in rising] == [10, 20, 30, 40, 50]
    assert [p.value for p in curve("min", 3.0, 1.0, 2.0).running_best()] == [3.0, 1.0, 1.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_value_is_ignored(value):
    measured = curve("min", 2.0)
    assert not measured.add(Point(20, 120.0, 2e9, value))
    assert measured.add(Point(30, 180.0, 3e9, 1.0))
    assert [p.value for p in measured.points] == [2.0, 1.0]


@pytest.mark.parametrize(
    "point",
    [
        Point(9, 60.0, 1e9, 1.0),
        Point(11, 59.0, 1e9, 1.0),
        Point(11, 60.0, 9e8, 1.0),
        Point(20, math.nan, 2e9, 1.0),
        Point(20, 120.0, math.inf, 1.0),
    ],
)
def test_point_out_of_order_raises_value_error(point):
    measured = curve("max", 1.0)
    with pytest.raises(ValueError, match="must not decrease"):
        measured.add(point)
    assert len(measured.points) == 1


def test_coordinates_may_be_zero_or_repeat():
    """A validation before the first step has the coordinates 0. Seconds and FLOPs of later ones may be equal."""
    measured = Curve("metric", "max")
    assert measured.add(Point(0, 0.0, 0.0, 1.0))
    assert measured.add(Point(1, 0.0, 0.0, 2.0))
    assert [p.value for p in measured.points] == [1.0, 2.0]
    with pytest.raises(UserError, match="the metric curve has two points at step 1: omit one"):
        measured.add(Point(1, 1.0, 1.0, 3.0))
    assert len(measured.points) == 2


@pytest.mark.parametrize("make", [np.float32, np.float64, jnp.float32, lambda x: np.array([x])])
def test_scalar_arrays_become_python_numbers(make):
    measured = Curve("metric", "max", [Point(np.int64(3), make(2.0), jnp.float32(1e9), make(0.5))])
    assert measured.points == [Point(3, 2.0, 1e9, 0.5)]
    assert {type(x) for x in vars(measured.points[0]).values()} == {int, float}
    assert Curve.from_json(json.loads(json.dumps(measured.to_json()))) == measured


@pytest.mark.parametrize("value", ["0.5", None, True, [0.5], np.ones(2)])
def test_value_that_is_not_a_number_raises_user_error(value):
    measured = Curve("metric", "max")
    with pytest.raises(UserError, match=r"^value of the metric curve must be a number, got "):
        measured.add(Point(1, 1.0, 1.0, value))
    assert not measured.points


def test_end_is_the_last_position_on_an_axis():
    measured = curve("min", 3.0, 2.0)
    assert [measured.end(axis) for axis in ("step", "seconds", "hours")] == [20, 120, 120 / 3600]
    assert Curve("metric", "min").end("step") == 0


@pytest.mark.parametrize(("axis", "end"), [("step", 20), ("seconds", 120.0), ("flops", 2e9)])
def test_until_keeps_the_points_up_to_the_end(axis, end):
    measured = curve("min", 3.0, 2.0, 1.0)
    cut = measured.until(axis, end)
    assert (cut.name, cut.mode) == ("metric", "min")
    assert cut.points == measured.points[:2]
    assert len(measured.points) == 3


def test_negative_time_raises_value_error():
    with pytest.raises(ValueError, match="seconds"):
        Curve("metric", "max").add(Point(1, -1.0, 0.0, 1.0))


def test_json_round_trip():
    measured = curve("min", 2.0, 1.5)
    assert Curve.from_json(json.loads(json.dumps(measured.to_json()))) == measured


def test_points_may_lack_seconds_and_flops():
    points = [{"step": 10, "value": 0.5}, {"step": 20, "value": 0.75, "seconds": 3}]
    found = Curve.from_json({"name": "x", "mode": "max", "points": points})
    assert found.points == [Point(10, 0.0, 0.0, 0.5), Point(20, 3, 0.0, 0.75)]


@pytest.mark.parametrize(
    ("point", "message"),
    [
        ({"step": 1}, "the validation curve lacks the field 'value'"),
        ({"step": 1, "value": 2.0, "second": 3.0}, "unexpected keyword argument 'second'"),
    ],
)
def test_wrong_fields_of_a_point_are_named(point, message):
    with pytest.raises(UserError, match=message):
        Curve.from_json({"name": "x", "mode": "max", "points": [point]})


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"name": "x", "mode": "max", "points": [{"step": 1}]},
        {"name": "x", "mode": "up", "points": []},
        {"name": "x", "mode": "max", "points": None},
        [],
    ],
)
def test_damaged_record_raises_user_error(record):
    with pytest.raises(UserError):
        Curve.from_json(record)


def test_best_of_an_empty_curve_raises_user_error():
    with pytest.raises(UserError, match="no validation points"):
        _ = Curve("BLEU", "max").best


def test_axes():
    point = Point(7, 5400.0, 2e9, 1.0)
    positions = [point.at(axis) for axis in ("step", "seconds", "hours", "flops")]
    assert positions == [7.0, 5400.0, 1.5, 2e9]
    with pytest.raises(UserError, match="unknown axis 'days'"):
        point.at("days")
