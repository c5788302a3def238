import itertools
import math

import pytest

from common.errors import UserError
from common.metrics.aucc import aucc, mean_outline, outline, reaching
from common.metrics.curve import Curve, Point

HOUR = 3600.0


def curve(mode, pairs, name="BLEU"):
    """Returns a curve of (seconds, value) pairs, with 10 steps and 1e12 FLOPs per second."""
    return Curve(name, mode, [Point(int(10 * s), s, 1e12 * s, v) for s, v in pairs])


def test_unit_matches_table_3():
    """AUCC 114.57 in Table 3 of Shen et al. (2021) is below 4 hours * the best BLEU, so its unit is BLEU * hours."""
    held = curve("max", [(0.0, 34.59), (4 * HOUR, 34.59)])
    assert aucc(held, "hours", 4.0) == pytest.approx(138.36)
    assert aucc(held, "seconds", 4 * HOUR) == pytest.approx(138.36 * 3600)
    rising = curve("max", [(HOUR, 30.0), (2 * HOUR, 34.59)])
    assert aucc(rising, "hours", 4.0) == pytest.approx(15 + (30 + 34.59) / 2 + 2 * 34.59)
    assert aucc(rising, "hours", 4.0) < 138.4


def test_area_starts_at_zero_and_is_trapezoidal():
    assert aucc(curve("max", [(2.0, 10.0), (4.0, 20.0)])) == pytest.approx(10 + 30)


def test_area_uses_the_best_value_so_far():
    dropped = curve("max", [(1.0, 10.0), (2.0, 2.0), (3.0, 10.0)])
    assert aucc(dropped) == pytest.approx(5 + 10 + 10)


def test_area_is_held_or_cut_at_the_horizon():
    short = curve("max", [(2.0, 10.0)])
    assert aucc(short, horizon=5.0) == pytest.approx(10 + 30)
    assert aucc(short, horizon=1.0) == pytest.approx(2.5)
    assert aucc(short, horizon=2.0) == aucc(short)
    assert outline(short, "seconds", 1.0) == [(0.0, 0.0), (1.0, 5.0)]


def test_horizon_between_two_points_is_interpolated():
    measured = curve("max", [(2.0, 10.0), (6.0, 30.0)])
    assert outline(measured, "seconds", 5.0) == [(0.0, 0.0), (2.0, 10.0), (5.0, 25.0)]
    assert aucc(measured, horizon=5.0) == pytest.approx(10 + 3 * (10 + 25) / 2)


def test_outline_ends_with_the_last_value_at_the_horizon():
    """If two points have the same coordinate, the later value counts.

    For example, all points are at 0 FLOPs if no FLOPs are counted.
    """
    points = [Point(1, 1.0, 0.0, 5.0), Point(2, 2.0, 0.0, 8.0), Point(3, 2.0, 0.0, 10.0)]
    measured = Curve("BLEU", "max", points)
    assert outline(measured, "seconds", 2.0)[-1] == (2.0, 10.0)


def test_mean_outline_has_the_mean_area():
    """The shorter curve holds its best value up to the end of the longer curve."""
    curves = [curve("max", [(1.0, 4.0), (2.0, 8.0)]), curve("max", [(2.0, 4.0), (4.0, 2.0)])]
    line = mean_outline(curves, "seconds")
    assert line == [(0.0, 0.0), (1.0, 3.0), (2.0, 6.0), (4.0, 6.0)]
    area = sum((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in itertools.pairwise(line))
    assert area == pytest.approx(sum(aucc(c, horizon=4.0) for c in curves) / 2)
    assert mean_outline(curves, "seconds", 1.5)[-1] == (1.5, 4.5)
    assert mean_outline(curves, "step")[-1] == (40.0, 6.0)
    assert mean_outline(curves[1:], "seconds", 3.0) == outline(curves[1], "seconds", 3.0)
    assert mean_outline(curves[:1], "seconds") == outline(curves[0], "seconds")


def test_held_value_is_the_best_value():
    assert aucc(curve("max", [(1.0, 8.0), (2.0, 4.0)]), horizon=3.0) == pytest.approx(4 + 8 + 8)


def test_min_metric_starts_with_its_first_value():
    falling = curve("min", [(2.0, 4.0), (4.0, 2.0), (5.0, 3.0)])
    assert aucc(falling) == pytest.approx(8 + 6 + 2)


def test_step_and_flops_axes_ignore_seconds():
    slow = Curve("BLEU", "max", [Point(10, 1.0, 1e3, 5.0), Point(20, 9.0, 2e3, 5.0)])
    fast = Curve("BLEU", "max", [Point(10, 0.5, 1e3, 5.0), Point(20, 1.0, 2e3, 5.0)])
    assert aucc(slow, "step") == aucc(fast, "step") == pytest.approx(25 + 50)
    assert aucc(slow, "flops") == aucc(fast, "flops") == pytest.approx(2500 + 5000)
    assert aucc(slow) != aucc(fast)


@pytest.mark.parametrize("horizon", [0.0, -1.0, math.nan, math.inf])
def test_horizon_must_be_positive(horizon):
    with pytest.raises(UserError, match="horizon"):
        aucc(curve("max", [(1.0, 1.0)]), horizon=horizon)


def test_area_of_an_axis_without_values_raises_user_error():
    untimed = Curve("BLEU", "max", [Point(10, 0.0, 0.0, 5.0), Point(20, 0.0, 0.0, 7.0)])
    for axis in ("seconds", "hours", "flops"):
        with pytest.raises(
            UserError, match=f"the BLEU curve ends at 0 {axis}: choose another axis"
        ):
            aucc(untimed, axis)
    assert aucc(untimed, "step") == 25 + 60
    # A value that needs no training, such as that of a closed form, is held up to the horizon.
    assert aucc(untimed, "seconds", 2.0) == 2 * 7.0


def test_empty_curve_raises_user_error():
    with pytest.raises(UserError, match="no validation points"):
        aucc(Curve("BLEU", "max"))


def test_reaching_is_the_first_validation_point_that_reaches_the_value():
    measured = curve("max", [(1.0, 50.0), (2.0, 94.9), (3.0, 95.0), (4.0, 100.0), (5.0, 99.0)])
    assert reaching(measured, 0.95).seconds == 3.0
    assert reaching(measured, 0.99).seconds == 4.0
    assert reaching(measured, 1.0).at("step") == 40.0
    assert reaching(measured, 1.0).at("hours") == pytest.approx(4 / 3600)


def test_reaching_of_a_min_metric_divides_by_the_fraction():
    measured = curve("min", [(1.0, 3.0), (2.0, 2.1), (3.0, 2.0), (4.0, 2.5)])
    assert reaching(measured, 0.95).seconds == 2.0  # the value to reach is 2.0 / 0.95 = 2.105
    assert reaching(measured, 0.99).seconds == 3.0


def test_reaching_of_a_metric_between_0_and_1():
    measured = curve("max", [(1.0, 0.7), (2.0, 0.77), (3.0, 0.8)])
    assert reaching(measured, 0.95).seconds == 2.0  # the value to reach is 0.95 * 0.8 = 0.76
    assert reaching(measured, 0.99).seconds == 3.0


def test_reaching_of_negative_values_divides_by_the_fraction():
    assert reaching(curve("max", [(1.0, -3.0), (2.0, -2.1), (3.0, -2.0)]), 0.95).seconds == 2.0


@pytest.mark.parametrize("fraction", [0.0, 1.1, math.nan])
def test_fraction_must_be_in_0_1(fraction):
    with pytest.raises(UserError, match="fraction"):
        reaching(curve("max", [(1.0, 1.0)]), fraction)


def test_reaching_another_best_value_may_return_none():
    measured = curve("max", [(1.0, 80.0), (2.0, 95.0)])
    assert reaching(measured, 0.95, best=100.0).seconds == 2.0
    assert reaching(measured, 0.99, best=100.0) is None
    falling = curve("min", [(1.0, 3.0), (2.0, 2.1)])
    # The value to reach is 2.0 / 0.95 = 2.105.
    assert reaching(falling, 0.95, best=2.0).seconds == 2.0
    assert reaching(falling, 0.99, best=2.0) is None


def test_measured_area_decreases_with_the_values():
    """Eq. (1) of Shen et al. (2021) integrates the measured values (held=False), so a collapse lowers this AUCC."""
    collapsed = Curve(
        "bleu", "max", [Point(s, s, s, v) for s, v in ((1, 10.0), (2, 2.0), (3, 1.0))]
    )
    assert aucc(collapsed, "step") == 5 + 10 + 10
    assert aucc(collapsed, "step", held=False) == 5 + 6 + 1.5
    assert aucc(collapsed, "step", 2.0, held=False) == 5 + 6
    rising = Curve("bleu", "max", [Point(s, s, s, v) for s, v in ((1, 1.0), (2, 3.0))])
    assert aucc(rising, "step", held=False) == aucc(rising, "step")
