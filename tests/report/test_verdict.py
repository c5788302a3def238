"""The rule of comparisons: what is said of groups of runs whose truth is known."""

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

from benchmarks.interval_coverage import BETTER, QUALITY, Truth, measure
from common.errors import UserError
from common.metrics.predictions import Classes, Losses
from common.report.runs import Run
from common.report.verdict import Comparison, Sample, compare, correct, resample
from tests.report.helpers import made


def comparison(a, b, margin=0.0, mode="max", shared=0.0, **options) -> Comparison:
    samples = [Sample(tuple(values), **options) for values in (a, b)]
    return Comparison("bleu", mode, *samples, margin, shared, "seeds")


A, B = (31.0, 31.5, 31.2, 31.4), (30.1, 30.4, 30.0, 30.2)


def test_interval_of_seeds_alone_is_welchs():
    found, expected = comparison(A, B), stats.ttest_ind(A, B, equal_var=False)
    low, high = expected.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((low, high))
    assert found.p_values[0] == pytest.approx(expected.pvalue)


def test_words_follow_direction_margin_and_interval():
    assert comparison(A, B).word == "better"
    assert comparison(B, A).word == "worse"
    assert comparison(A, B, mode="min").word == "worse"
    assert comparison(A, A).word == "undecided"
    assert comparison(A, A, margin=0.5).word == "equivalent"
    assert comparison(A, B, margin=2.0).word == "equivalent", "a difference that does not matter"
    assert comparison(A, B, margin=1.2).word == "better", "the interval reaches beyond the margin"
    assert comparison((30.0, 33.0, 27.0), B).word == "undecided"


def test_equivalence_begins_where_the_interval_lies_within_the_margin():
    found = comparison(A, B)
    outermost = max(abs(found.low), abs(found.high))
    assert comparison(A, B, margin=outermost * 1.001).word == "equivalent"
    assert comparison(A, B, margin=outermost * 0.999).word == "better"


@pytest.mark.parametrize("seeds", [1, 2])
def test_fewer_than_three_seeds_decide_nothing(seeds):
    found = comparison(A[:seeds], B, margin=5.0)
    assert found.word == "undecided"
    assert str(found) == f"undecided (at least {3 - seeds} more seed{'s' * (seeds == 1)})"


def test_runs_without_randomness_need_no_seeds_but_test_examples():
    solved = Sample((32.0,), seedless=True)
    trained = Sample(A)
    found = Comparison("bleu", "max", solved, trained, 0.0, 0.0, "seeds")
    expected = stats.ttest_1samp(A, 32.0)
    assert found.p_values[0] == pytest.approx(expected.pvalue)
    assert found.word == "better"
    noisy = Comparison("bleu", "max", solved, trained, 0.0, 1.0, "seeds, test examples")
    assert noisy.word == "undecided"


def test_variance_of_test_examples_widens_the_interval():
    narrow, wide = comparison(A, B), comparison(A, B, shared=0.3)
    assert wide.half_width > narrow.half_width
    assert wide.half_width == pytest.approx(1.96 * math.sqrt(0.3), rel=0.2)


def test_more_seeds_are_those_after_which_the_same_spread_decides():
    a, b = (30.0, 31.0, 32.0), (29.0, 30.0, 31.0)
    found = comparison(a, b)
    assert found.word == "undecided"
    more = found.more_seeds
    seeds = 3 + more
    spread = math.sqrt(2 * 1.0 / seeds)
    assert stats.t.ppf(0.975, 2 * seeds - 2) * spread < 1.0
    assert stats.t.ppf(0.975, 2 * seeds - 4) * math.sqrt(2 / (seeds - 1)) > 1.0
    assert str(found) == f"undecided (about {more} more seeds)"


def test_no_number_of_seeds_replaces_test_examples():
    found = comparison((30.0, 31.0, 32.0), (29.0, 30.0, 31.0), shared=1.0)
    assert found.more_seeds is None
    assert str(found) == "undecided (not with 100 seeds either)"


def test_holm_takes_back_what_one_of_many_comparisons_shows_by_chance():
    a, b = (30.2, 30.5, 30.8), (29.3, 29.6, 29.9)
    alone = comparison(a, b)
    assert alone.word == "better" and 0.01 < alone.p_values[0] < 0.05
    same = comparison((1.0, 2.0, 3.0), (1.1, 2.0, 2.9))
    many = correct([alone, *[same] * 4])
    assert many[0].word == "undecided"
    assert str(many[0]) == "undecided (after correction)"
    assert many[0].corrected[0] == pytest.approx(5 * alone.p_values[0])
    assert correct([alone, comparison(A[:1], B)])[0].word == "better", (
        "what cannot be decided does not count"
    )


def predicted(rights: np.ndarray, examples: str = "test", **options) -> Run:
    """A run that gets these examples right."""
    count = len(rights)
    logs_MN = np.log(np.where(rights[:, None], (0.1, 0.9), (0.8, 0.2)))
    answers = Classes.of_log_probabilities(
        examples, np.ones(count, np.int32), logs_MN, ("no", "yes")
    )

    class Kept(Run):
        def predictions(self):
            return answers

    run = made([10, 20], metric="accuracy", **options)
    return Kept(run.name, run.summary, run.curve)


def test_examples_that_are_hard_for_all_runs_cancel_out():
    """Two groups that differ on 5 of 400 examples, always the same ones: pairing sees it."""
    generator = np.random.default_rng(0)
    hard_M = generator.random(400) < 0.4
    a = [predicted(~hard_M, seed=s) for s in (1, 2, 3)]
    worse_M = ~hard_M
    worse_M[np.flatnonzero(worse_M)[:40]] = False
    b = [predicted(worse_M, seed=s) for s in (1, 2, 3)]
    found = next(one for one in compare(a, b) if one.metric == "accuracy")
    assert found.difference == pytest.approx(10.0)
    unpaired = math.sqrt(0.6 * 0.4 / 400 + 0.5 * 0.5 / 400) * 100
    assert math.sqrt(found.example_variance) == pytest.approx(1.5, rel=0.1)
    assert math.sqrt(found.example_variance) < unpaired / 2
    assert found.word == "better" and found.noise == "seeds, test examples"


def test_disagreement_of_seeds_on_single_examples_counts_once():
    """Where each run errs at random, examples have no share in the variance beyond what is between seeds."""
    generator = np.random.default_rng(1)
    runs = [predicted(generator.random(500) < 0.8, seed=s) for s in range(40)]
    found = next(one for one in compare(runs[:20], runs[20:]) if one.metric == "accuracy")
    of_seeds = sum(s.seed_variance / 20 for s in (found.a, found.b))
    assert found.example_variance < 0.3 * of_seeds
    single = np.mean([s.idiosyncratic_variance for s in (found.a, found.b)])
    assert single == pytest.approx(100**2 * 0.16 / 500, rel=0.1)


def test_metrics_of_other_test_examples_are_not_compared():
    right_M = np.ones(10, bool)
    with pytest.raises(UserError, match="run2 and run1 were tested on different examples"):
        compare([predicted(right_M)], [predicted(right_M, "other", seed=2)])


def test_without_predictions_test_metrics_are_left_out():
    a, b = ([made([10, 20 + x], seed=s) for s, x in ((1, 0), (2, 1), (3, 2))] for _ in range(2))
    metrics = [one.metric for one in compare(a, b)]
    assert metrics == ["best valid bleu", "mean bleu over step", "mean bleu over flops"]


def test_negative_margins_are_refused():
    with pytest.raises(
        UserError, match="the margin of bleu must be a number of at least 0, got -1"
    ):
        compare([made([1.0])], [made([2.0])], {"bleu": -1})


def test_a_bootstrap_of_losses_has_the_standard_error_of_their_mean():
    nats_M = np.random.default_rng(0).gamma(2.0, size=400)
    one = Losses("w", nats_M, np.ones(400), np.zeros(0), np.zeros(0), "token")
    (found,) = resample([one])
    assert found["loss"].std() == pytest.approx(nats_M.std() / 20, rel=0.1)
    assert found["loss"].mean() == pytest.approx(nats_M.mean(), rel=0.01)


@pytest.mark.parametrize(("seeds", "examples"), [(3, 500), (5, 500)])
def test_intervals_cover_the_truth_and_equal_systems_stay_undecided(seeds, examples):
    """300 experiments; benchmarks.interval_coverage has 1,000 of each kind, 93 to 97 %."""
    equal = measure(Truth((QUALITY, QUALITY)), seeds, examples, 300)
    assert 92 <= equal["coverage"] <= 99
    assert equal["better"] <= 5
    unequal = measure(Truth((BETTER, QUALITY)), seeds, examples, 300)
    assert 92 <= unequal["coverage"] <= 99
    assert unequal["better"] > 5 * unequal["worse"]


def test_word_of_a_and_b_is_opposite_to_that_of_b_and_a():
    opposite = {"better": "worse", "worse": "better"}
    for shift in (0.0, 0.3, 2.0):
        moved = tuple(x + shift for x in A)
        one, other = comparison(moved, A), comparison(A, moved)
        assert other.word == opposite.get(one.word, one.word)
        assert dataclasses.replace(one).half_width == pytest.approx(other.half_width)
