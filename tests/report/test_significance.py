"""Verdicts on groups of runs with known differences."""

import dataclasses
import math
import warnings

import numpy as np
import pytest
from scipy import stats

from benchmarks.interval_coverage import BETTER, QUALITY, measure
from common.errors import UserError
from common.metrics.classes import Classes
from common.metrics.losses import Losses
from common.metrics.translations import Translations
from common.report.runs import Run, check_distinct, run_of
from common.report.significance import (
    CONFIDENCE,
    Comparison,
    Sample,
    compare,
    correct,
    resample,
)
from tests.report.helpers import made, summary


def comparison(a, b, margin=0.0, mode="max", shared=0.0, **options) -> Comparison:
    samples = [Sample(tuple(values), **options) for values in (a, b)]
    return Comparison("bleu", mode, *samples, margin, shared)


A, B = (31.0, 31.5, 31.2, 31.4), (30.1, 30.4, 30.0, 30.2)


@pytest.mark.parametrize(("a", "b"), [(A, B), (A, B[:3]), (A[:2], B[:2])])
def test_seed_interval_matches_welchs_t_test(a, b):
    found, expected = comparison(a, b), stats.ttest_ind(a, b, equal_var=False)
    low, high = expected.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((low, high))
    assert found.p_values[0] == pytest.approx(expected.pvalue)


def test_verdict_follows_direction_margin_and_interval():
    assert comparison(A, B).word == "better"
    assert comparison(B, A).word == "worse"
    assert comparison(A, B, mode="min").word == "worse"
    assert comparison(A, A).word == "undecided"
    assert comparison(A, A, margin=0.5).word == "equivalent"
    assert comparison(A, B, margin=2.0).word == "equivalent", "the interval lies within the margin"
    assert comparison(A, B, margin=1.2).word == "better", "the interval reaches beyond the margin"
    assert comparison((30.0, 33.0, 27.0), B).word == "undecided"


def test_corrected_p_values_decide_below_5_percent():
    """A verdict uses corrected p-values. The uncorrected p-value of the difference is far below 5 %."""
    found, limit = comparison(A, B, margin=0.5), 1 - CONFIDENCE
    for corrected, word in (
        ((limit, 1.0), "undecided"),
        ((limit * 0.99, 1.0), "better"),
        ((limit, limit), "undecided"),
        ((1.0, limit * 0.99), "equivalent"),
        ((0.0, limit * 0.99), "equivalent"),
    ):
        assert dataclasses.replace(found, corrected=corrected).word == word


def test_equivalent_if_the_interval_lies_within_the_margin():
    found = comparison(A, B)
    outermost = max(abs(found.low), abs(found.high))
    assert comparison(A, B, margin=outermost * 1.001).word == "equivalent"
    assert comparison(A, B, margin=outermost * 0.999).word == "better"


def test_interval_within_the_margin_is_not_enough_after_holms_correction():
    found = comparison(A, B)
    inside = comparison(A, B, margin=max(abs(found.low), abs(found.high)) * 1.001)
    assert [one.word for one in correct([inside, inside])] == ["better"] * 2


@pytest.mark.parametrize("seeds", [1, 2])
def test_fewer_than_three_seeds_are_undecided(seeds):
    found = comparison(A[:seeds], B, margin=5.0)
    assert found.word == "undecided"
    assert str(found) == f"undecided (at least {3 - seeds} more seed{'s' * (seeds == 1)})"


def test_seedless_runs_have_no_noise_of_seeds():
    solved = Sample((32.0,), seedless=True)
    trained = Sample(A)
    found = Comparison("bleu", "max", solved, trained)
    expected = stats.ttest_1samp(A, 32.0)
    assert found.p_values[0] == pytest.approx(expected.pvalue)
    assert found.word == "better"
    noisy = Comparison("bleu", "max", solved, trained, 0.0, 1.0)
    assert noisy.word == "undecided"


@pytest.mark.parametrize(
    ("a", "margin", "word", "p_values"),
    [
        (30.0, 0.0, "undecided", (1.0, 1.0)),
        (30.0, 0.5, "equivalent", (1.0, 0.0)),
        (31.0, 0.5, "better", (0.0, 1.0)),
        (31.0, 1.0, "better", (0.0, 1.0)),
        (31.0, 2.0, "equivalent", (0.0, 0.0)),
    ],
)
def test_noiseless_groups_are_compared_by_value(a, margin, word, p_values):
    found = comparison((a,), (30.0,), margin=margin, seedless=True)
    assert found.word == word
    assert found.p_values == p_values
    assert found.half_width == 0


def test_a_single_seed_has_no_interval():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = comparison(A[:1], B, margin=0.5)
        assert math.isnan(found.half_width) and math.isnan(found.low)
        assert math.isnan(found.p_values[0])
    assert Sample((1.0, 3.0)).seed_variance == 2
    assert Sample((1.0,)).idiosyncratic_variance == 0
    assert Sample((1.0,), seedless=True).seed_variance == 0


def test_equivalence_p_value_uses_the_nearer_margin():
    """The p-value is twice the one-sided p-value for the nearer margin, at most 1. Without a margin it is 1."""
    found = comparison(A, B, margin=1.5)
    freedom = stats.ttest_ind(A, B, equal_var=False).df
    error = math.sqrt((np.var(A, ddof=1) + np.var(B, ddof=1)) / 4)
    expected = 2 * stats.t.sf((1.5 - found.difference) / error, freedom)
    assert found.p_values[1] == pytest.approx(expected) and 0 < expected < 0.5
    assert comparison(B, A, margin=1.5).p_values[1] == pytest.approx(expected)
    assert comparison(A, B, margin=0.5).p_values[1] == 1
    assert comparison(A, A, margin=0.0).p_values[1] == 1


def test_idiosyncratic_variance_of_resamples():
    """The difference of two runs is 2, 0, -2 and 0 on four resamples."""
    resampled_RB = np.array([[11.0, 10.0, 9.0, 10.0], [9.0, 10.0, 11.0, 10.0]])
    deviations_RB = resampled_RB - 10.0
    expected = 2 * deviations_RB.var(axis=1, ddof=1).mean()
    assert Sample((10.0, 10.0), False, resampled_RB).idiosyncratic_variance == pytest.approx(
        expected
    )
    shifted_RB = resampled_RB + np.array([5.0, -3.0, 0.0, 7.0])  # a deviation that all runs share
    moved = Sample((10.0, 10.0), False, shifted_RB)
    assert moved.idiosyncratic_variance == pytest.approx(expected)
    assert Sample((10.0, 10.0), True, resampled_RB).idiosyncratic_variance == 0
    assert Sample((10.0,), False, resampled_RB[:1]).idiosyncratic_variance == 0
    assert Sample((10.0, 10.0)).idiosyncratic_variance == 0


def test_example_variance_widens_the_interval():
    narrow, wide = comparison(A, B), comparison(A, B, shared=0.3)
    assert wide.half_width > narrow.half_width
    assert wide.half_width == pytest.approx(1.96 * math.sqrt(0.3), rel=0.2)


def test_more_seeds_decide_at_the_same_deviation():
    a, b = (30.0, 31.0, 32.0), (29.0, 30.0, 31.0)
    found = comparison(a, b)
    assert found.word == "undecided"
    more = found.more_seeds
    seeds = 3 + more
    spread = math.sqrt(2 * 1.0 / seeds)
    assert stats.t.ppf(0.975, 2 * seeds - 2) * spread < 1.0
    assert stats.t.ppf(0.975, 2 * seeds - 4) * math.sqrt(2 / (seeds - 1)) > 1.0
    assert str(found) == f"undecided (about {more} more seeds)"


def half_width(seeds: int) -> float:
    """Returns half the width of the interval for two groups of `seeds` runs, each with variance 1 over the seeds."""
    return float(stats.t.ppf(0.975, 2 * seeds - 2) * math.sqrt(2 / seeds))


@pytest.mark.parametrize("needed", [4, 99, 100, 101])
def test_more_seeds_is_limited_to_100_per_group(needed):
    """The difference is significant with `needed` seeds per group, and not with fewer seeds."""
    difference = (half_width(needed) + half_width(needed - 1)) / 2
    values = (30.0, 31.0, 32.0)
    found = comparison(tuple(x + difference for x in values), values)
    if needed <= 100:
        assert found.more_seeds == needed - 3
        assert str(found) == f"undecided (about {needed - 3} more seed{'s' * (needed > 4)})"
    else:
        assert found.more_seeds is None


def test_more_seeds_is_the_smallest_sufficient_number():
    values = (30.0, 31.0, 32.0)
    for difference, margin, width in ((0.3, 0.5, 0.3), (0.1, 0.5, 0.4)):
        found = comparison(tuple(x + difference for x in values), values, margin=margin)
        seeds = 3 + found.more_seeds
        assert half_width(seeds) < width <= half_width(seeds - 1)


def test_equal_noiseless_values_are_undecided():
    found = comparison((30.0,), (30.0,), seedless=True)
    assert str(found) == "undecided (equal values)"
    assert found.more_seeds is None, "a half width of 0 is not below a difference of 0"


def test_more_seeds_of_one_group_may_decide_against_a_seedless_group():
    found = comparison((30.0, 31.0, 32.0), (30.0, 30.5, 31.0))
    mixed = dataclasses.replace(found, b=Sample((30.5,), seedless=True))
    assert str(mixed).startswith("undecided (about ")


def test_more_seeds_may_also_decide_for_equivalence():
    a, b = (30.0, 30.5, 31.0), (30.1, 30.5, 30.9)
    found = comparison(a, b, margin=0.5)
    assert found.word == "undecided" and 0 < found.more_seeds < 20
    wider = comparison(a * 10, b * 10, margin=0.5)
    assert wider.word == "equivalent" and wider.more_seeds == 0
    assert comparison(a, b).more_seeds is None, "no number of seeds separates equal means"


def test_seedless_runs_need_no_more_seeds():
    solved, one = Sample((32.0,), seedless=True), Sample(A[:1])
    for pair in ((solved, one), (one, solved)):
        found = Comparison("bleu", "max", *pair)
        assert found.more_seeds == 2 and not found.decidable
        assert str(found) == "undecided (at least 2 more seeds)"
    trained = Comparison("bleu", "max", solved, Sample(A))
    assert trained.decidable and trained.more_seeds == 0


@pytest.mark.parametrize(
    ("a", "b", "margin", "text"),
    [
        (A, B, 0.0, "better"),
        (B, A, 0.0, "worse"),
        (A, A, 0.5, "equivalent within 0.5"),
        (A[:2], B, 0.0, "undecided (at least 1 more seed)"),
        (A[:2], A[:2], 0.0, "undecided (not with 100 seeds either)"),
    ],
)
def test_verdicts_in_words(a, b, margin, text):
    assert str(comparison(a, b, margin=margin)) == text


def test_more_seeds_is_none_if_example_variance_dominates():
    found = comparison((30.0, 31.0, 32.0), (29.0, 30.0, 31.0), shared=1.0)
    assert found.more_seeds is None
    assert str(found) == "undecided (not with 100 seeds either)"


def test_holm_corrects_chance_findings():
    a, b = (30.2, 30.5, 30.8), (29.3, 29.6, 29.9)
    alone = comparison(a, b)
    assert alone.word == "better" and 0.01 < alone.p_values[0] < 0.05
    same = comparison((1.0, 2.0, 3.0), (1.1, 2.0, 2.9))
    many = correct([alone, *[same] * 4])
    assert many[0].word == "undecided"
    assert many[0].together == 5 and many[0].more_seeds > alone.more_seeds == 0
    assert many[0].corrected[0] == pytest.approx(5 * alone.p_values[0])
    assert correct([alone, comparison(A[:1], B)])[0].word == "better", (
        "Holm does not count undecidable comparisons"
    )


def test_holm_counts_decidable_comparisons_only():
    """The smaller of two p-values is doubled. Undecidable comparisons are not counted."""
    strong, weak = comparison(A, B, margin=0.5), comparison((30.2, 30.5, 30.8), (29.4, 29.9, 30.2))
    first, second, third = correct([strong, comparison(A[:1], B), weak])
    assert second.corrected is None
    assert strong.p_values[0] < weak.p_values[0] < 0.5
    assert first.corrected == pytest.approx((2 * strong.p_values[0], 1.0))
    assert third.corrected == pytest.approx((weak.p_values[0], 1.0))
    assert [type(p) for p in first.corrected] == [float, float]
    assert correct([strong])[0].corrected is None


def test_more_seeds_decide_after_correction():
    """Holm's method requires that the smallest of five p-values is below 0.01."""
    found = comparison((30.0, 31.0, 32.0), (29.0, 30.0, 31.0))
    many = correct([found] * 5)[0]
    seeds = 3 + many.more_seeds
    assert seeds > 3 + found.more_seeds
    for number, decided in ((seeds, True), (seeds - 1, False)):
        half = stats.t.ppf(0.995, 2 * number - 2) * math.sqrt(2 / number)
        assert (half < 1.0) == decided
    assert str(many) == f"undecided (about {many.more_seeds} more seeds)"


def predicted(rights: np.ndarray, examples: str = "test", **options) -> Run:
    """Returns a run whose predictions are correct where `rights` is true."""
    count = len(rights)
    logs_EC = np.log(np.where(rights[:, None], (0.1, 0.9), (0.8, 0.2)))
    answers = Classes.of_log_probabilities(
        examples, np.ones(count, np.int32), logs_EC, ("no", "yes")
    )

    class Kept(Run):
        predictions = answers

    run = made([10, 20], metric="accuracy", **options)
    return Kept(run.name, run.summary, run.curve)


def test_shared_hard_examples_cancel_out():
    """The groups differ on 40 of 400 examples. Pairing removes the noise of hard examples, where both groups fail."""
    generator = np.random.default_rng(0)
    hard_E = generator.random(400) < 0.4
    a = [predicted(~hard_E, seed=s) for s in (1, 2, 3)]
    worse_E = ~hard_E
    worse_E[np.flatnonzero(worse_E)[:40]] = False
    b = [predicted(worse_E, seed=s) for s in (1, 2, 3)]
    found = next(one for one in compare(a, b) if one.metric == "accuracy")
    assert found.difference == pytest.approx(10.0)
    unpaired = math.sqrt(0.6 * 0.4 / 400 + 0.5 * 0.5 / 400) * 100
    assert math.sqrt(found.example_variance) == pytest.approx(1.5, rel=0.1)
    assert math.sqrt(found.example_variance) < unpaired / 2
    assert found.word == "better" and found.noise == "seeds, test examples"


def test_seed_disagreement_on_examples_counts_once():
    """If runs err on independent examples, the variance of accuracy over seeds includes the noise of test examples.

    The variance over examples then has little of this noise, which would otherwise count twice.
    """
    generator = np.random.default_rng(1)
    runs = [predicted(generator.random(500) < 0.8, seed=s) for s in range(40)]
    found = next(one for one in compare(runs[:20], runs[20:]) if one.metric == "accuracy")
    of_seeds = sum(s.seed_variance / 20 for s in (found.a, found.b))
    assert found.example_variance < 0.3 * of_seeds
    single = np.mean([s.idiosyncratic_variance for s in (found.a, found.b)])
    assert single == pytest.approx(100**2 * 0.16 / 500, rel=0.1)


def test_different_test_examples_raise_user_error():
    right_E = np.ones(10, bool)
    with pytest.raises(UserError, match="run2 and run1 have different test examples or metrics"):
        compare([predicted(right_E)], [predicted(right_E, "other", seed=2)])


def test_without_predictions_test_metrics_are_left_out():
    a, b = ([made([10, 20 + x], seed=s) for s, x in ((1, 0), (2, 1), (3, 2))] for _ in range(2))
    metrics = [one.metric for one in compare(a, b)]
    assert metrics == ["best valid bleu", "mean bleu over step", "mean bleu over flops"]


def test_areas_are_compared_up_to_the_shortest_curve():
    """The shortest curve in steps ends at step 30, the shortest curve in seconds at 1.5 seconds."""
    a, b = in_turns([10, 20, 30], 0.5, "one"), in_turns([10, 30, 20, 40], 1.0, "one")
    best, _, steps, _, seconds = compare(a, b, {"bleu": 0.25})
    assert (best.metric, best.mode) == ("best valid bleu", "max")
    assert best.a.values == (30.0,) * 3 and best.b.values == (40.0,) * 3
    assert steps.metric == "mean bleu over step"
    assert steps.a.values == pytest.approx(((5 + 15 + 25) / 3,) * 3)
    assert steps.b.values == pytest.approx(((5 + 20 + 30) / 3,) * 3)
    assert seconds.metric == "mean bleu over seconds"
    assert seconds.a.values == pytest.approx(((5 + 15 + 25) / 3,) * 3)
    assert seconds.b.values == pytest.approx(((5 + (10 + 20) / 2 / 2) / 1.5,) * 3)
    for found in (best, steps, seconds):
        assert (found.margin, found.example_variance, found.noise) == (0.25, 0.0, "seeds")
        assert found.mode == "max"
    assert compare(a, b)[0].margin == 0.5, "the default"
    assert compare(a, b, {})[0].margin == 0


def in_turns(values: list[float], seconds: float, session: str) -> list[Run]:
    """Returns runs of three seeds, which alternated with the other runs of the same session."""
    timing = {"kind": "turns", "sessions": [session]}
    return [made(values, seed=s, seconds=seconds, timing=timing) for s in (1, 2, 3)]


def test_seconds_of_alternating_runs_have_no_margin():
    a, b = in_turns([10, 20, 30], 0.5, "one"), in_turns([10, 20, 30], 1.0, "one")
    found = {one.metric: one for one in compare(a, b, {"bleu": 0.25})}
    areas = [f"mean bleu over {axis}" for axis in ("step", "flops", "seconds")]
    assert list(found) == ["best valid bleu", "training seconds", *areas]
    seconds = found["training seconds"]
    assert (seconds.mode, seconds.margin, seconds.example_variance) == ("min", 0.0, 0.0)
    assert (seconds.noise, seconds.word) == ("seeds", "better")
    assert seconds.a.values == (1.5,) * 3 and seconds.b.values == (3.0,) * 3
    other = in_turns([10, 20, 30], 1.0, "another")
    assert [one.metric for one in compare(a, other)] == ["best valid bleu", *areas[:2]]


def test_runs_without_seed_are_seedless():
    fixed, seeded = [made([10, 20], seed=None)], [made([10, 20], seed=s) for s in (1, 2)]
    best = compare(fixed, seeded)[0]
    assert best.a.seedless and not best.b.seedless
    assert not compare([*fixed, *seeded], seeded)[0].a.seedless


def test_an_axis_without_extent_is_left_out():
    """Curves are compared up to the end of the shorter curve. One run has no counted FLOPs, so it ends at 0 FLOPs."""
    run = made([10, 20])
    points = [dataclasses.replace(point, flops=0.0) for point in run.curve.points]
    flat = Run(run.name, run.summary, dataclasses.replace(run.curve, points=points))
    metrics = [one.metric for one in compare([flat], [run])]
    assert metrics == ["best valid bleu", "mean bleu over step"]


def kept(predictions, **options) -> Run:
    """Returns a run with the predictions `predictions`."""
    run = made([3.0, 2.0], **options)
    return type("Kept", (Run,), {"predictions": predictions})(run.name, run.summary, run.curve)


def test_metrics_missing_in_a_run_are_left_out():
    """Losses without counts of correct predictions have no accuracy."""
    ones_E = np.ones(4)
    hits, none = (Losses("w", ones_E, ones_E, x, ones_E, "byte") for x in (ones_E, np.zeros(0)))
    a, b = ([kept(x, metric="loss", mode="min", seed=s) for s in (1, 2)] for x in (hits, none))
    words = ["bits_per_byte", "nats_per_byte", "perplexity_per_word"]
    assert [one.metric for one in compare(a, a)][:4] == [*words[:2], "accuracy", words[2]]
    for groups in ((a, b), (b, a), (b, b)):
        found = compare(*groups)
        assert [one.metric for one in found][:4] == [*words, "best valid loss"]
        assert [one.mode for one in found][:4] == ["min"] * 4
        assert [one.margin for one in found][:4] == [0.01, 0.0, 0.0, 0.01]


def test_different_kinds_of_predictions_raise_user_error():
    losses = Losses("test", np.ones(10), np.ones(10), np.zeros(0), np.zeros(0), "token")
    classes = predicted(np.ones(10, bool), seed=2)
    with pytest.raises(UserError, match="run2 and run1 have different test examples or metrics"):
        compare([kept(losses)], [classes])
    with pytest.raises(UserError, match="run1 and run2 have different test examples or metrics"):
        compare([classes], [kept(losses)])


def test_example_variance_is_the_shared_variance():
    """A is right with probability 0.9 on one half of the examples and 0.5 on the other half, B with 0.5 and 0.9.

    So the expected difference of an example is 0.4 or -0.4. Its variance over the examples is 0.4 ** 2, without the
    randomness of single runs.
    """
    generator, count = np.random.default_rng(2), 2000
    first_E = np.arange(count) < count // 2
    chances = np.where(first_E, 0.9, 0.5), np.where(first_E, 0.5, 0.9)
    a, b = ([predicted(generator.random(count) < p, seed=s) for s in (1, 2, 3)] for p in chances)
    found = next(one for one in compare(a, b) if one.metric == "accuracy")
    assert found.example_variance == pytest.approx(100**2 * 0.4**2 / count, rel=0.2)


def test_seedless_runs_have_only_example_noise():
    rights = np.arange(50) % 3 > 0
    fixed = [predicted(rights, seed=None)]
    found = compare(fixed, [predicted(~rights, seed=None)])[0]
    assert found.noise == "test examples" and found.example_variance > 0
    same = compare(fixed, [predicted(np.roll(rights, 1), seed=None)])[0]
    assert str(same) == "undecided (no seeds: only more test examples may decide)"
    assert len(found.a.values) == len(found.b.values) == 1
    mixed = compare(fixed, [predicted(~rights, seed=s) for s in (1, 2, 3)])[0]
    assert mixed.noise == "seeds, test examples"
    assert mixed.a.values == pytest.approx((66,)) and mixed.b.values == pytest.approx((34,) * 3)


def test_resamples_are_deterministic_and_shared():
    nats_E = np.arange(30.0)
    one, other = (
        Losses("w", x, np.ones(30), np.zeros(0), np.zeros(0), "token")
        for x in (nats_E, 30 - nats_E)
    )
    first, second = resample([one, other], 250)
    assert first["loss"].shape == (250,)
    np.testing.assert_allclose(first["loss"] + second["loss"], 30.0)
    assert len(np.unique(first["loss"])) > 100
    (again,) = resample([one], 250)
    np.testing.assert_array_equal(again["loss"], first["loss"])
    (fewer,) = resample([one], 100)
    np.testing.assert_array_equal(fewer["loss"], first["loss"][:100])


@pytest.mark.parametrize("margin", [math.nan, math.inf])
def test_non_finite_margins_raise_user_errors(margin):
    with pytest.raises(UserError, match="the margin of bleu must be a finite number of at least 0"):
        compare([made([1.0])], [made([2.0])], {"loss": 0.0, "bleu": margin})


def test_negative_margins_raise_user_errors():
    with pytest.raises(
        UserError, match="the margin of bleu must be a finite number of at least 0, got -1"
    ):
        compare([made([1.0])], [made([2.0])], {"bleu": -1})


def test_resamples_include_every_example():
    for number in (0, 9):
        nats_E = (np.arange(10) == number).astype(float)
        one = Losses("w", nats_E, np.ones(10), np.zeros(0), np.zeros(0), "token")
        (found,) = resample([one])
        assert found["loss"].mean() == pytest.approx(0.1, rel=0.1)


def test_bootstrap_deviation_is_the_standard_error_of_the_mean():
    nats_E = np.random.default_rng(0).gamma(2.0, size=400)
    one = Losses("w", nats_E, np.ones(400), np.zeros(0), np.zeros(0), "token")
    (found,) = resample([one])
    assert found["loss"].std() == pytest.approx(nats_E.std() / 20, rel=0.1)
    assert found["loss"].mean() == pytest.approx(nats_E.mean(), rel=0.01)


@pytest.mark.parametrize(
    ("seeds", "experiments"),
    [
        pytest.param(3, 60, marks=pytest.mark.medium),
        pytest.param(3, 300, marks=pytest.mark.slow),
        pytest.param(5, 300, marks=pytest.mark.slow),
    ],
)
def test_intervals_cover_the_truth_and_equal_systems_stay_undecided(seeds, experiments):
    """A small version of benchmarks.interval_coverage, which has 1,000 experiments of each of 8 kinds."""
    slack = 5 * math.sqrt(0.05 * 0.95 / experiments) * 100
    equal = measure((QUALITY, QUALITY), seeds, 500, experiments)
    assert abs(equal["coverage"] - 95) < slack
    assert equal["better"] <= 2.5 + slack / 2
    unequal = measure((BETTER, QUALITY), seeds, 500, experiments)
    assert abs(unequal["coverage"] - 95) < slack
    assert unequal["better"] > unequal["worse"]


def test_verdict_is_antisymmetric():
    opposite = {"better": "worse", "worse": "better"}
    for shift in (0.0, 0.3, 2.0):
        moved = tuple(x + shift for x in A)
        one, other = comparison(moved, A), comparison(A, moved)
        assert other.word == opposite.get(one.word, one.word)
        assert dataclasses.replace(one).half_width == pytest.approx(other.half_width)


def test_duplicate_seed_raises_user_error():
    runs = [made([10], seed=1), made([10], seed=2), made([10], "other", seed=1)]
    with pytest.raises(
        UserError,
        match=r"^run1 and other are in one group and have the same seed 1: leave out one of them$",
    ):
        check_distinct(runs, [])
    with pytest.raises(UserError, match="have the same seed 1"):
        check_distinct([], runs)
    check_distinct(runs[:2], runs[1:])
    without = [run_of(summary([10], seed=None), name) for name in "ab"]
    check_distinct(without, without)


def test_run_in_both_groups_raises_user_error(tmp_path):
    one, two = (run_of(summary([10], seed=s), f"run{s}", folder=tmp_path / f"{s}") for s in (1, 2))
    check_distinct([one], [two, made([10], seed=3)])
    again = run_of(summary([10], seed=1), "again", folder=tmp_path / "2" / ".." / "1")
    with pytest.raises(
        UserError, match=r"^the run .*2/\.\./1 is given twice: give each run only once$"
    ):
        check_distinct([one], [two, again])


def translated(tokens_E, seed: int) -> Run:
    """Returns a run whose references have `tokens_E` tokens."""
    texts, tokens_E = ("a b c d e", "f g h i j"), np.array(tokens_E, float)
    return kept(Translations("test", texts, texts, tokens_E / 2, tokens_E, False, "13a"), seed=seed)


def test_losses_per_token_need_equal_vocabularies():
    def metrics(*tokens):
        runs = [translated(t, seed) for seed, t in enumerate(tokens)]
        found = [one.metric for one in compare(runs[:1], runs[1:])]
        return found[: found.index("best valid bleu")]

    assert metrics((5, 6), (5, 6)) == ["bleu", "loss", "perplexity"]
    assert metrics((5, 6), (5, 7)) == ["bleu"]
    assert metrics((5, 6), (5, 6), (4, 6)) == ["bleu"]


def test_byte_losses_ignore_the_number_of_bytes_per_window():
    """Bits per byte do not depend on the vocabulary, unlike nats per token."""
    none = np.zeros(0)
    runs = [
        kept(Losses("text", np.array([8.0, 2.0]), weights_E, none, none, "byte"), seed=seed)
        for seed, weights_E in enumerate((np.array([4.0, 4.0]), np.array([5.0, 3.0])))
    ]
    metrics = [one.metric for one in compare(runs[:1], runs[1:])]
    assert metrics[:3] == ["bits_per_byte", "nats_per_byte", "best valid bleu"]


def test_variance_needs_two_test_examples():
    def variance(count: int) -> float:
        right_E = np.arange(count) % 2 == 0
        runs = [[predicted(right_E, seed=s)] for s in (1, 2)]
        return compare(*runs)[0].example_variance

    assert math.isnan(variance(1))
    assert variance(2) == 0, "both runs agree"


def test_different_examples_error_message():
    right_E = np.ones(10, bool)
    with pytest.raises(
        UserError,
        match=r"different test examples or metrics: choose runs with the same test set and metrics$",
    ):
        compare([predicted(right_E)], [predicted(right_E, "other", seed=2)])


def test_more_seeds_of_an_unknown_variance_is_the_minimum():
    assert comparison(A, B, shared=math.nan).more_seeds is None
    assert comparison(A[:3], B[:3], shared=math.nan).more_seeds is None
    assert comparison(A[:2], B, shared=math.nan).more_seeds == 1
