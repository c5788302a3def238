"""Significance tests on two groups of runs. The verdict is better, worse, equivalent or undecided.

The difference of two groups in a metric is the difference of their means over seeds. Its variance has two parts:

- Seeds: s²/n for each group, where n is the number of seeds and s² the sample variance over seeds, with n - 1 degrees
  of freedom (Welch).
- Test examples: the variance of the difference over bootstrap resamples of the test set. All runs share the resamples.
  A part of this variance is independent between runs and already contained in s²/n. So only the other part is added.

The interval is the difference ± t * sqrt(variance), with Satterthwaite's degrees of freedom. Percentile intervals of a
two-level bootstrap are not used, because for three seeds they are too narrow with 5,000 examples and too wide with 500
(`benchmarks.interval_coverage`).

Shape letters of this module: B resamples, E examples, R runs, S statistics of an example.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from scipy import stats

from common.config import check_number
from common.errors import check
from common.metrics.aucc import aucc
from common.metrics.kinds import MODES
from common.metrics.predictions import Predictions
from common.metrics.translations import Translations
from common.report.runs import Run, runs_alternated

CONFIDENCE = 0.95
LEAST_SEEDS = 3
"""Minimum number of seeds per group, except for runs without randomness. A comparison with fewer seeds is undecided."""

RESAMPLES = 1000  # bootstrap resamples of the test set
_AT_ONCE = 100  # resamples in one matrix product; limits the memory for the float copy of `_counts`
MOST_SEEDS = 100
"""Maximum number of seeds, in the group with fewer seeds, that `Comparison.more_seeds` considers."""

MARGINS = {
    "bleu": 0.5,
    "accuracy": 1.0,
    "weighted_f1": 1.0,
    "bits_per_byte": 0.01,
    "loss": 0.01,
}
"""Metric -> default margin of equivalence, in units of the metric."""


@dataclass(frozen=True)
class Sample:
    """Values of one metric for the runs of one group.

    Attributes:
      values: one value for each run. For a count without noise, such as the number of parameters, a single value: the
        mean over runs.
      seedless: whether the seed variance is 0, because the values are counts, or because the runs have no randomness,
        such as an exactly solved logistic regression.
      resampled_RB: the metric of each of R runs on B resampled test sets. None for a metric without test examples.
    """

    values: tuple[float, ...]
    seedless: bool = False
    resampled_RB: np.ndarray | None = None

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    @property
    def seed_variance(self) -> float:
        """Sample variance of `values`, s²; 0 if `seedless`, NaN for a single seed."""
        if self.seedless:
            return 0.0
        return float(np.var(self.values, ddof=1)) if len(self.values) > 1 else math.nan

    @property
    def idiosyncratic_variance(self) -> float:
        """The part of `seed_variance` that the finite test set causes.

        This is the mean over runs of the bootstrap variance of (metric of the run - mean metric of all runs), times
        R / (R - 1) for R runs. The value is 0 without `resampled_RB`, for a single run, and if `seedless`.
        """
        if self.resampled_RB is None or len(self.values) < 2 or self.seedless:
            return 0.0
        deviations_RB = self.resampled_RB - self.resampled_RB.mean(0)
        # Deviations from the mean of R runs have only (R - 1) / R of the variance.
        share = len(self.values) / (len(self.values) - 1)
        return float(share * deviations_RB.var(axis=1, ddof=1).mean())


@dataclass(frozen=True)
class Comparison:
    """The comparison of two groups, A - B, in a metric.

    Attributes:
      mode: "max" if larger values are better, "min" if smaller values are better.
      a, b: values of the two groups.
      margin: margin of equivalence in units of the metric. 0 means no margin.
      example_variance: variance of A - B due to the finite test set, without the part that `seed_variance` contains.
      corrected: the two `p_values` after Holm's correction; None if `correct` has not corrected them.
      together: number of comparisons that were corrected together.
    """

    metric: str
    mode: str
    a: Sample
    b: Sample
    margin: float = 0.0
    example_variance: float = 0.0
    corrected: tuple[float, float] | None = None
    together: int = 1

    @property
    def difference(self) -> float:
        return self.a.mean - self.b.mean

    @property
    def noise(self) -> str:
        """The sources of noise that the interval covers, such as "seeds, test examples"; "nothing" without noise."""
        sources = [] if self.a.seedless and self.b.seedless else ["seeds"]
        sources += [] if self.a.resampled_RB is None else ["test examples"]
        return ", ".join(sources) or "nothing"

    def _spread(self, more: int = 0) -> tuple[float, float]:
        """Returns the standard error and the degrees of freedom of A - B.

        Predicts both for `more` additional seeds in each group with randomness, if the seed variances stay the same.
        """
        variance, weight = self.example_variance, 0.0
        for sample in (self.a, self.b):
            if sample.seedless:
                continue
            seeds = len(sample.values) + more
            part = sample.seed_variance / seeds
            variance += part
            weight += part**2 / (seeds - 1) if seeds > 1 else math.nan
        freedom = math.inf if weight == 0 else variance**2 / weight
        return math.sqrt(variance), freedom

    @property
    def half_width(self) -> float:
        """Half of the width of the 95 % interval.

        NaN if a group with randomness has a single seed, or for a test metric if the test set has a single example.
        """
        error, freedom = self._spread()
        return float(stats.t.ppf(0.5 + CONFIDENCE / 2, freedom) * error)

    @property
    def low(self) -> float:
        return self.difference - self.half_width

    @property
    def high(self) -> float:
        return self.difference + self.half_width

    @property
    def p_values(self) -> tuple[float, float]:
        """Uncorrected p-values of two null hypotheses: A - B is 0, and |A - B| is at least the margin.

        The first p-value is below 0.05 if and only if the interval excludes 0. The second is below 0.05 if and only if
        the interval lies within the margin. Both are NaN if `half_width` is NaN.
        """
        error, freedom = self._spread()
        distance = abs(self.difference)
        if error == 0:
            return float(distance == 0), float(distance >= self.margin)
        different = 2 * stats.t.sf(distance / error, freedom)
        beyond = 2 * stats.t.sf((self.margin - distance) / error, freedom)
        return float(different), float(min(beyond, 1.0))

    @property
    def decidable(self) -> bool:
        """Whether each group has at least LEAST_SEEDS seeds or no randomness."""
        return all(s.seedless or len(s.values) >= LEAST_SEEDS for s in (self.a, self.b))

    @property
    def word(self) -> str:
        """The verdict on A against B: "equivalent", "better", "worse" or "undecided".

        "equivalent" if the second p-value is below 0.05, else "better" or "worse" if the first p-value is below 0.05.
        Uses the corrected p-values if they exist, else `p_values`. If `decidable` is False, always "undecided".
        """
        if not self.decidable:
            return "undecided"
        different, beyond = self.corrected or self.p_values
        if beyond < 1 - CONFIDENCE:
            return "equivalent"
        if different < 1 - CONFIDENCE:
            return "better" if (self.difference > 0) == (self.mode == "max") else "worse"
        return "undecided"

    @property
    def more_seeds(self) -> int | None:
        """Number of additional seeds per group that would decide the comparison; None if MOST_SEEDS seeds would not.

        Assumes that means and variances stay the same. Applies Holm's correction of the smallest p-value, which is the
        largest correction. If the variance is unknown (`half_width` is NaN), the value is the largest number of seeds
        that a group with randomness lacks to reach LEAST_SEEDS, or None if no group lacks seeds.
        """
        lacking = [0 if s.seedless else LEAST_SEEDS - len(s.values) for s in (self.a, self.b)]
        if math.isnan(self._spread()[0]):
            return max(lacking) if max(lacking) > 0 else None
        fewest = min(len(s.values) for s in (self.a, self.b))
        for more in range(max(0, *lacking), MOST_SEEDS - fewest + 1):
            error, freedom = self._spread(more)
            half = stats.t.ppf(1 - (1 - CONFIDENCE) / 2 / self.together, freedom) * error
            distance = abs(self.difference)
            if half < distance or half + distance < self.margin:
                return more
        return None

    def __str__(self) -> str:
        """Returns the verdict, with the margin or the number of missing seeds: "undecided (about 2 more seeds)"."""
        if self.word == "equivalent":
            return f"equivalent within {self.margin:g}"
        if self.word != "undecided":
            return self.word
        if self.a.seedless and self.b.seedless:
            # Without any noise, a verdict is undecided only if the values are equal and the margin is 0.
            if self.a.resampled_RB is None:
                return "undecided (equal values)"
            return "undecided (no seeds: only more test examples may decide)"
        more = self.more_seeds
        if more is None:
            return f"undecided (not with {MOST_SEEDS} seeds either)"
        about = "about" if self.decidable else "at least"
        return f"undecided ({about} {more} more seed{'s' * (more != 1)})"


def correct(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Returns the comparisons with p-values corrected together by Holm's method.

    Comparisons with too few seeds are neither corrected nor counted.
    """
    from statsmodels.stats.multitest import multipletests

    decidable = [one for one in comparisons if one.decidable]
    if len(decidable) < 2:
        return list(comparisons)
    raw = np.array([one.p_values for one in decidable])
    corrected = [multipletests(raw[:, kind], method="holm")[1] for kind in (0, 1)]
    pairs = iter(zip(*corrected, strict=True))
    return [
        replace(one, corrected=tuple(map(float, next(pairs))), together=len(decidable))
        if one.decidable
        else one
        for one in comparisons
    ]


def compare(
    a: Sequence[Run], b: Sequence[Run], margins: Mapping[str, float] = MARGINS
) -> list[Comparison]:
    """Returns an uncorrected comparison A - B for each metric that both groups have.

    Omits test metrics if a run has no predictions, because their noise is then unknown. Omits the test loss and
    perplexity of translations if the runs split the references into different numbers of tokens. The metric "mean
    METRIC over AXIS" is the AUCC up to the end of the shortest curve, divided by this end. Compares seconds only if the
    runs took turns (`runs_alternated`). Intervals cover the noise of seeds, and for test metrics also the noise of test
    examples.

    Args:
      margins: metric -> margin of equivalence.

    Raises:
      UserError: all runs have predictions, but of different test examples or metrics; a run's predictions are damaged;
        or a margin is not a finite number of at least 0.
    """
    for name, margin in margins.items():
        check_number(f"the margin of {name}", margin)
    found = _on_examples(a, b, margins)
    objective, mode = a[0].curve.name, a[0].curve.mode
    margin = margins.get(objective, 0.0)
    best = [sample_of(group, [run.curve.best.value for run in group]) for group in (a, b)]
    found.append(Comparison(f"best valid {objective}", mode, *best, margin))
    timed = runs_alternated([a, b])
    if timed:
        seconds = [sample_of(g, [r.curve.points[-1].seconds for r in g]) for g in (a, b)]
        found.append(Comparison("training seconds", "min", *seconds))
    for axis in ("step", "flops", "seconds") if timed else ("step", "flops"):
        end = min(run.curve.end(axis) for run in (*a, *b))
        if end > 0:
            areas = [sample_of(g, [aucc(r.curve, axis, end) / end for r in g]) for g in (a, b)]
            found.append(Comparison(f"mean {objective} over {axis}", mode, *areas, margin))
    return found


def sample_of(
    group: Sequence[Run], values: Sequence[float], resampled_RB: np.ndarray | None = None
) -> Sample:
    """Returns the `Sample` of one value for each run of `group`. The sample is seedless if no run has a seed."""
    return Sample(tuple(values), all(run.seed is None for run in group), resampled_RB)


def paired_predictions(runs: Sequence[Run]) -> list[Predictions]:
    """Returns the test predictions of the runs; [] if a run has no predictions.

    Raises a UserError if predictions are damaged, or if the test examples or the metrics of two runs differ.
    """
    predicted = [run.predictions for run in runs]
    if any(one is None for one in predicted):
        return []
    for run, one in zip(runs, predicted, strict=True):
        check(
            one.pairing == predicted[0].pairing,
            f"{run.place} and {runs[0].place} have different test examples or metrics:"
            " choose runs with the same test set and metrics",
        )
    return predicted


def _on_examples(
    a: Sequence[Run], b: Sequence[Run], margins: Mapping[str, float]
) -> list[Comparison]:
    """Returns a comparison for each test metric; [] if a run has no predictions."""
    predicted = paired_predictions([*a, *b])
    if not predicted:
        return []
    points, resampled = [one.metrics() for one in predicted], resample(predicted)
    found = []
    for metric in points[0]:
        if not all(metric in point for point in points):
            continue
        if metric in ("loss", "perplexity") and not _same_tokens(predicted):
            continue
        values = [point[metric] for point in points]
        moved_RB = np.stack([one[metric] for one in resampled])
        of_a = sample_of(a, values[: len(a)], moved_RB[: len(a)])
        of_b = sample_of(b, values[len(a) :], moved_RB[len(a) :])
        shared = shared_variance(of_a, of_b, len(predicted[0]))
        margin = margins.get(metric, 0.0)
        found.append(Comparison(metric, MODES[metric], of_a, of_b, margin, shared))
    return found


def _same_tokens(predicted: Sequence[Predictions]) -> bool:
    """Returns whether all runs split each reference into the same number of tokens; True without translations.

    If the numbers differ, the runs use different vocabularies, and nats per token cannot be compared.
    """
    counts = [one.tokens_E for one in predicted if isinstance(one, Translations)]
    return all(np.array_equal(tokens_E, counts[0]) for tokens_E in counts)


def shared_variance(a: Sample, b: Sample, examples: int) -> float:
    """Returns `Comparison.example_variance`; NaN for a single example.

    This is the bootstrap variance of A - B, minus the part that the seed variances already contain, and at least 0.
    """
    if examples < 2:
        return math.nan
    difference_B = a.resampled_RB.mean(0) - b.resampled_RB.mean(0)
    own = sum(s.idiosyncratic_variance / len(s.values) for s in (a, b))
    return max(float(difference_B.var(ddof=1)) - own, 0.0)


def resample(
    predicted: Sequence[Predictions], resamples: int = RESAMPLES
) -> list[dict[str, np.ndarray]]:
    """Returns for each run {metric: values (B,) on B bootstrap resamples}. All runs share the resamples."""
    counts_BE = _counts(len(predicted[0]), resamples)
    found = []
    for one in predicted:
        statistics_ES = one.statistics
        starts = range(0, resamples, _AT_ONCE)
        sums = [counts_BE[n : n + _AT_ONCE].astype(float) @ statistics_ES for n in starts]
        found.append(one.measure(np.concatenate(sums)))
    return found


@lru_cache(maxsize=1)
def _counts(examples: int, resamples: int) -> np.ndarray:
    """Returns how often each resample contains each example, (B, E) uint16. The random seed is fixed."""
    generator = np.random.default_rng(0)
    counts_BE = np.empty((resamples, examples), np.uint16)
    for counts_E in counts_BE:
        counts_E[:] = np.bincount(generator.integers(0, examples, examples), minlength=examples)
    return counts_BE
