"""The AUCC, and times to a share of the best value, for curves of two or three points, computed by hand."""

import math

import pytest

from common.errors import UserError
from common.metrics.curve import Axis, Point
from common.report.convergence import Convergence, run_table
from common.report.groups import groups
from common.report.runs import run_of
from common.report.significance import compare
from tests.report.helpers import made, summary

HOUR = 3600.0


@pytest.fixture
def two():
    """Returns a group of two seeds that end at 3 s, and a group of one run that ends at 4 s."""
    return groups(
        [
            made([10.0, 20.0, 40.0], seed=1),
            made([20.0, 10.0, 38.0], seed=2),
            made([8.0, 30.0], reservoir="ffn", seconds=2.0),
        ]
    )


def test_longest_horizon_holds_the_best_value(two):
    convergence = Convergence(two)
    # The best values so far are 0, 10, 20, 40 on one curve and 0, 20, 20, 38 on the other. Both curves are constant
    # from 3 s to 4 s.
    assert convergence.areas() == [[5 + 15 + 30 + 40, 10 + 20 + 29 + 38], [8 + 38]]
    plain, ffn = convergence.normalised_areas()
    assert plain == pytest.approx([90 / 97, 1.0])
    assert ffn == pytest.approx([46 / 97])
    assert convergence.best() == [[40.0, 38.0], [30.0]]


def test_shortest_and_numeric_horizons_cut_curves(two):
    shortest = Convergence(two, "seconds", "shortest")
    assert shortest.end == 3.0
    # At 3 s the line is halfway from 8 to 30. The best measured value up to 3 s is 8.
    assert shortest.areas() == [[50.0, 59.0], [8 + (8 + 19) / 2]]
    assert shortest.best()[1] == [8.0]
    assert Convergence(two, "seconds", 2.0).areas()[0] == [20.0, 30.0]


def test_step_and_flops_axes(two):
    shortest = Convergence(two, "step", "shortest")
    assert Convergence(two, "step").end == 30 and shortest.end == 20
    assert shortest.areas() == [[200.0, 300.0], [40 + 190]]
    assert Convergence(two, "flops", "shortest").areas()[0] == [20e12, 30e12]
    assert Convergence(two, "hours").areas()[0] == pytest.approx([90 / HOUR, 97 / HOUR])


def test_paper_units_and_table_layout():
    compared = groups(
        [made([30.0, v], seed=s, seconds=HOUR) for s, v in ((1, 34.0), (2, 35.0), (3, 36.0))]
    )
    columns, rows = Convergence(compared, "hours", 4.0).aucc_table()
    assert columns == (
        "model",
        "seeds",
        "best BLEU",
        "AUCC, BLEU·h",
        "AUCC / largest",
        "as measured, BLEU·h",
    )
    # The AUCC of seed 1 is 15 + 32 + 2 * 34 = 115. Each further seed has 1 BLEU more, and an AUCC larger by 2.5.
    assert rows == [
        ("transformer, 6 layers", 3, "35.00 ± 1.00", "117.50 ± 2.50", "", "117.50 ± 2.50"),
    ]


def at(points: list[Point | None], axis: Axis) -> list[float | None]:
    return [point and point.at(axis) for point in points]


def values(points: list[Point | None]) -> list[float | None]:
    return [point and point.value for point in points]


def test_times_to_percentages_of_each_runs_best_value(two):
    (p50, p100), (f50, f100) = Convergence(two).times((50, 100))
    assert at(p50, "seconds") == [2.0, 1.0] and values(p50) == [20.0, 20.0]
    assert at(p100, "step") == [30, 30] and values(p100) == [40.0, 38.0]
    assert at(f50, "seconds") == at(f100, "seconds") == [4.0]


def test_unreached_percentage_of_the_overall_best_is_printed_as_never(two):
    (half, p95, p100), (f50, f95, f100) = Convergence(two).times((50, 95, 100), "all")
    assert at(half, "seconds") == [2.0, 1.0] and at(f50, "seconds") == [4.0]
    assert at(p95, "seconds") == [3.0, 3.0]  # 38 is 95 % of 40
    assert at(p100, "seconds") == [3.0, None]
    assert f95 == f100 == [None]
    columns, (plain, ffn) = Convergence(two).time_table("all")
    assert columns == (
        *("model", "95 % (s)", "BLEU there", "99 % (s)", "BLEU there", "100 % (s)", "BLEU there"),
    )
    one_of_two = ("3.000 (1 of 2)", "40.00")  # 38 is less than 99 % of 40
    assert plain[1:] == ("3.000 ± 0.000", "39.00 ± 1.41", *one_of_two, *one_of_two)
    assert ffn[1:] == ("never", "") * 3


def test_times_ignore_points_after_the_horizon(two):
    (plain,), _ = Convergence(two, "seconds", 2.0).times((100,))
    assert at(plain, "seconds") == [2.0, 1.0] and values(plain) == [20.0, 20.0]


def test_min_metrics():
    low = {"metric": "bits_per_byte", "mode": "min"}
    compared = groups([made([4.0, 2.0, 3.0], **low), made([3.0, 2.5, 2.1], steps=9, **low)])
    convergence = Convergence(compared)
    first, second = convergence.areas()
    assert first == [4 + 3 + 2] and second == pytest.approx([3 + 2.75 + 2.3])
    first, second = convergence.normalised_areas()
    assert first == [1.0] and second == pytest.approx([8.05 / 9])
    assert convergence.best() == [[2.0], [2.1]]
    own = [at(rows[0], "seconds") for rows in convergence.times((80,))]
    assert own == [[2.0], [2.0]]  # the values to reach are 2 / 0.8 = 2.5 and 2.1 / 0.8 = 2.625
    of_all = convergence.times((95, 99), "all")
    assert [[at(row, "seconds") for row in rows] for rows in of_all] == [
        [[2.0], [2.0]],
        [[3.0], [None]],  # the values to reach are 2 / 0.95 = 2.105 and 2 / 0.99 = 2.02
    ]
    assert convergence.aucc_table().columns[3] == "AUCC, (bits per byte)·s"


def test_invalid_arguments_raise_user_errors(two):
    for wrong in (0.0, -1.0, math.nan, math.inf, "middle"):
        with pytest.raises(UserError, match=r"--horizon must be a finite number above 0, longest"):
            Convergence(two, horizon=wrong).areas()
    with pytest.raises(
        UserError, match=r"horizon 1.5 \(seconds\) is before the first validation of run1, at 2"
    ):
        Convergence(two, horizon=1.5).times()
    with pytest.raises(UserError, match="own or all"):
        Convergence(two).times(reference="best")
    with pytest.raises(UserError, match="fraction"):
        Convergence(two).times((101,))


def test_runs_without_flops_have_no_flops_area(two):
    without = summary([1.0, 2.0])
    for point in without["curve"]["points"]:
        point["flops"] = 0.0
    uncounted = groups([run_of(without, "x")])
    convergence = Convergence(uncounted, "flops")
    assert convergence.end == 0 and convergence.areas() == [[0.0]]
    assert math.isnan(convergence.normalised_areas()[0][0])
    for horizon in ("shortest", "longest", 1e13):
        with pytest.raises(
            UserError,
            match=r"^the runs .* axis flops, because the curves of x\S* end at 0 flops: choose another --axis",
        ):
            _ = Convergence([*two, *uncounted], "flops", horizon).end


def test_tables_of_single_runs(two):
    table = Convergence(two).seed_table()
    assert len(table.rows) == 3
    first = dict(zip(table.columns, table.rows[0], strict=True))
    assert (first["AUCC (seconds)"], first["seconds to 99 % of own"]) == (90.0, 3.0)
    assert table.rows[2][-1] is None
    assert "transformer, 6 layers | run2" in run_table(two)._repr_markdown_()


def in_turns(one: tuple[str, ...], other: tuple[str, ...]) -> list:
    """Returns two groups of runs with the seeds 1 and 2. Runs with the same timing session took turns.

    Args:
      one: timing session of each run of the first group.
      other: timing session of each run of the second group.
    """
    runs = [
        made([10.0, 20.0], seed=seed, reservoir=kind, timing={"kind": "turns", "sessions": [name]})
        for kind, names in (("none", one), ("ffn", other))
        for seed, name in enumerate(names, 1)
    ]
    return groups(runs)


def test_ratios_of_seconds_need_alternating_runs():
    together = in_turns(("turns a", "turns b"), ("turns b", "turns a"))
    assert [row[4] for row in Convergence(together, "seconds").aucc_table().rows] == [
        "1.000 ± 0.000"
    ] * 2
    apart = in_turns(("turns a", "turns b"), ("turns c", "turns d"))
    assert [row[4] for row in Convergence(apart, "seconds").aucc_table().rows] == [""] * 2
    assert [row[4] for row in Convergence(apart, "step").aucc_table().rows] == ["1.000 ± 0.000"] * 2
    assert {row[5] for row in run_table(apart).rows} == {"turns"}


def test_seconds_are_compared_if_runs_alternated():
    together = in_turns(("turns a", "turns b"), ("turns a", "turns b"))
    metrics = [one.metric for one in compare(*(group.runs for group in together))]
    assert metrics[1:] == [
        "training seconds",
        *(f"mean bleu over {axis}" for axis in ("step", "flops", "seconds")),
    ]
