"""The rule of every comparison: better, worse, equivalent or undecided, from seeds and test examples.

Two groups of runs differ in a metric by the difference of their means over seeds. Two sources of noise make its
variance:

- *Seeds*: s²/n of each group, with n - 1 degrees of freedom (Welch).
- *Test examples*: the variance of the difference when the examples, the same ones for all runs, are drawn again with
  replacement (a bootstrap). How much single runs move against each other under that is already in s²/n, so only what
  moves all runs of a group alike is added.

The interval is the difference ± t * sqrt(variance), with Satterthwaite's degrees of freedom. A percentile interval of a
two-level bootstrap is too narrow for three seeds: `benchmarks.interval_coverage` measures both.

B resamples, M examples, R runs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
from scipy import stats

from common.config import check
from common.metrics.aucc import aucc
from common.metrics.curve import Axis
from common.metrics.predictions import MODES, Predictions, Translations
from common.report.runs import Run, same_minutes

Word = Literal["better", "worse", "equivalent", "undecided"]

CONFIDENCE = 0.95
LEAST_SEEDS = 3
"""With fewer in a group nothing is decided."""

_PER_TOKEN = ("loss", "perplexity")  # of translations

RESAMPLES = 1000
_AT_ONCE = 100  # bounds the memory of the weights
MOST_SEEDS = 100
"""The most seeds of a group that `Comparison.more_seeds` considers."""

MARGINS = {
    "bleu": 0.5,
    "accuracy": 1.0,
    "weighted_f1": 1.0,
    "bits_per_byte": 0.01,
    "loss": 0.01,
}
"""Differences that do not matter, in units of the metric."""


@dataclass(frozen=True)
class Sample:
    """One metric of one group of runs.

    Attributes:
      values: one for each seed; a single one where nothing is random.
      seedless: the runs have no randomness, as a logistic regression that is solved exactly.
      resampled_RB: the metric of each run on B resampled test sets; None where test examples are no source of noise.
    """

    values: tuple[float, ...]
    seedless: bool = False
    resampled_RB: np.ndarray | None = None

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    @property
    def seed_variance(self) -> float:
        """s²: 0 where nothing is random, NaN for a single seed."""
        if self.seedless:
            return 0.0
        return float(np.var(self.values, ddof=1)) if len(self.values) > 1 else math.nan

    @property
    def idiosyncratic_variance(self) -> float:
        """The part of s² that comes from the finite test set: what the metric of a single run varies by, beyond what
        it shares with the other runs of the group."""
        if self.resampled_RB is None or len(self.values) < 2 or self.seedless:
            return 0.0
        deviations_RB = self.resampled_RB - self.resampled_RB.mean(0)
        # Deviations from a mean of R runs have (R - 1) / R of the variance.
        share = len(self.values) / (len(self.values) - 1)
        return float(share * deviations_RB.var(axis=1, ddof=1).mean())


@dataclass(frozen=True)
class Comparison:
    """One metric of two groups, A - B.

    Attributes:
      mode: "max" where more is better.
      margin: the largest difference that does not matter; 0 where none is named.
      example_variance: of the difference, from the choice of test examples that all runs share.
      noise: the sources of noise that the interval has, for people to read.
      corrected: p-values of a difference and of equivalence after Holm's correction; see `correct`.
    """

    metric: str
    mode: str
    a: Sample
    b: Sample
    margin: float
    example_variance: float
    noise: str
    corrected: tuple[float, float] | None = None

    @property
    def difference(self) -> float:
        return self.a.mean - self.b.mean

    def _spread(self, more: int = 0) -> tuple[float, float]:
        """(standard error, degrees of freedom) with `more` seeds in each group."""
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
        """Of the 95 % interval; NaN where a group has a single seed."""
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
        """(of no difference, of a difference beyond the margin), before any correction.

        Each is below 0.05 exactly where the interval excludes 0, and where it lies within the margin. NaN for a single
        seed.
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
        """Whether both groups have enough seeds."""
        return all(s.seedless or len(s.values) >= LEAST_SEEDS for s in (self.a, self.b))

    @property
    def word(self) -> Word:
        """Of A against B."""
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
        """How many more seeds in each group would be expected to decide, if means and deviations stay as they are.

        None where that many (`MOST_SEEDS`) would not: another test set, or a wider margin, is needed.
        """
        lacking = [0 if s.seedless else LEAST_SEEDS - len(s.values) for s in (self.a, self.b)]
        if math.isnan(self._spread()[0]):
            return max(lacking) if max(lacking) > 0 else None
        fewest = min(len(s.values) for s in (self.a, self.b))
        for more in range(max(0, *lacking), MOST_SEEDS - fewest + 1):
            error, freedom = self._spread(more)
            half = stats.t.ppf(0.5 + CONFIDENCE / 2, freedom) * error
            distance = abs(self.difference)
            if half < distance or half + distance < self.margin:
                return more
        return None

    def __str__(self) -> str:
        """The verdict in words."""
        if self.word == "equivalent":
            return f"equivalent within {self.margin:g}"
        if self.word != "undecided":
            return self.word
        if self.corrected and min(self.p_values) < 1 - CONFIDENCE and self.decidable:
            return "undecided (after correction)"
        more = self.more_seeds
        if not self.decidable:
            return f"undecided (at least {_more(more)})"
        if more is None:
            return f"undecided (not with {MOST_SEEDS} seeds either)"
        return f"undecided (about {_more(more)})"


def _more(seeds: int) -> str:
    return f"{seeds} more seed{'s' * (seeds != 1)}"


def correct(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The comparisons with p-values corrected for their number by Holm's method; those that cannot be decided do not
    count."""
    from statsmodels.stats.multitest import multipletests

    decidable = [one for one in comparisons if one.decidable]
    if len(decidable) < 2:
        return list(comparisons)
    raw = np.array([one.p_values for one in decidable])
    corrected = [multipletests(raw[:, kind], method="holm")[1] for kind in (0, 1)]
    pairs = iter(zip(*corrected, strict=True))
    return [
        replace(one, corrected=tuple(map(float, next(pairs)))) if one.decidable else one
        for one in comparisons
    ]


def compare(
    a: Sequence[Run],
    b: Sequence[Run],
    margins: Mapping[str, float] = MARGINS,
    axes: Sequence[Axis] = ("step", "flops"),
) -> list[Comparison]:
    """Every metric that both groups have, A - B, not corrected for their number.

    Metrics on test examples come from predictions; without them they are left out, since their noise is unknown. The
    best validation value and the areas under the curves have the noise of seeds alone. Seconds are compared where the
    runs took turns.

    Raises:
      UserError: the groups were tested on different examples or measured differently, or a margin is negative.
    """
    check_margins(margins)
    found = _on_examples(a, b, margins)
    objective, mode = a[0].curve.name, a[0].curve.mode
    best = [_seeds(group, [run.curve.best.value for run in group]) for group in (a, b)]
    margin = margins.get(objective, 0.0)
    found.append(Comparison(f"best valid {objective}", mode, *best, margin, 0.0, "seeds"))
    timed = same_minutes([a, b])
    if timed:
        seconds = [_seeds(g, [r.curve.points[-1].seconds for r in g]) for g in (a, b)]
        found.append(Comparison("training seconds", "min", *seconds, 0.0, 0.0, "seeds"))
    for axis in (*axes, "seconds") if timed and axes else axes:
        end = min(run.curve.points[-1].at(axis) for run in (*a, *b))
        if end > 0:
            areas = [_seeds(g, [aucc(r.curve, axis, end) / end for r in g]) for g in (a, b)]
            name = f"mean {objective} over {axis}"
            found.append(Comparison(name, mode, *areas, margin, 0.0, "seeds"))
    return found


def check_runs(a: Sequence[Run], b: Sequence[Run]) -> None:
    """Raises:
    UserError: a group has a seed twice, or one run is in both groups.
    """
    for group in (a, b):
        seen: dict[int, Run] = {}
        for run in group:
            if run.seed is not None:
                other = seen.setdefault(run.seed, run)
                check(
                    other is run,
                    f"{other.place} and {run.place} have the same seed {run.seed}: leave one out of the group",
                )
    places = {run.folder.resolve() for run in a if run.folder}
    for run in b:
        check(
            run.folder is None or run.folder.resolve() not in places,
            f"the run {run.place} is in both groups",
        )


def check_margins(margins: Mapping[str, float]) -> None:
    """Raises:
    UserError: one is negative or not finite.
    """
    for name, margin in margins.items():
        check(
            math.isfinite(margin) and margin >= 0,
            f"the margin of {name} must be a number of at least 0, got {margin}",
        )


def _seeds(group: Sequence[Run], values: Sequence[float]) -> Sample:
    return Sample(tuple(values), seedless=all(run.seed is None for run in group))


def _on_examples(
    a: Sequence[Run], b: Sequence[Run], margins: Mapping[str, float]
) -> list[Comparison]:
    """The metrics of the test examples."""
    runs = [*a, *b]
    predicted = [run.predictions() for run in runs]
    if any(one is None for one in predicted):
        return []
    for run, one in zip(runs, predicted, strict=True):
        check(
            one.pairing == predicted[0].pairing,
            f"{run.place} and {runs[0].place} were tested on different examples, or measured differently:"
            " they cannot be compared",
        )
    points, resampled = [one.metrics() for one in predicted], resample(predicted)
    found = []
    for metric in points[0]:
        if not all(metric in point for point in points):
            continue
        if metric in _PER_TOKEN and not _same_tokens(predicted):
            continue
        values = [point[metric] for point in points]
        moved_RB = np.stack([one[metric] for one in resampled])
        of_a, of_b = (
            replace(_seeds(group, values[part]), resampled_RB=moved_RB[part])
            for group, part in ((a, slice(len(a))), (b, slice(len(a), None)))
        )
        noise = "test examples" if of_a.seedless and of_b.seedless else "seeds, test examples"
        shared = _shared_variance(of_a, of_b, len(predicted[0]))
        margin = margins.get(metric, 0.0)
        found.append(Comparison(metric, MODES[metric], of_a, of_b, margin, shared, noise))
    return found


def _same_tokens(predicted: Sequence[Predictions]) -> bool:
    """Whether references have the same tokens: nats per token of two vocabularies cannot be compared."""
    counts = [one.tokens_M for one in predicted if isinstance(one, Translations)]
    return all(np.array_equal(tokens_M, counts[0]) for tokens_M in counts)


def _shared_variance(a: Sample, b: Sample, examples: int) -> float:
    """The variance of the difference of the means under resampled test sets, less what s²/n of the groups has of it.
    NaN for a single example."""
    if examples < 2:
        return math.nan
    difference_B = a.resampled_RB.mean(0) - b.resampled_RB.mean(0)
    own = sum(s.idiosyncratic_variance / len(s.values) for s in (a, b))
    return max(float(difference_B.var(ddof=1)) - own, 0.0)


def resample(
    predicted: Sequence[Predictions], resamples: int = RESAMPLES
) -> list[dict[str, np.ndarray]]:
    """Each metric of each run, (B,), on test sets that are drawn with replacement, the same ones for all runs."""
    statistics = [one.statistics for one in predicted]
    weights_BM = _weights(len(predicted[0]), resamples)
    sums = [[] for _ in predicted]
    for start in range(0, resamples, _AT_ONCE):
        part_BM = weights_BM[start : start + _AT_ONCE].astype(float)
        for some, parts in zip(statistics, sums, strict=True):
            parts.append(part_BM @ some)
    return [one.measure(np.concatenate(parts)) for one, parts in zip(predicted, sums, strict=True)]


@lru_cache(maxsize=1)
def _weights(count: int, resamples: int) -> np.ndarray:
    """How often each of M examples is drawn, (B, M) uint16; the same whenever it is asked for."""
    generator = np.random.default_rng(0)
    weights_BM = np.empty((resamples, count), np.uint16)
    for weights_M in weights_BM:
        weights_M[:] = np.bincount(generator.integers(0, count, count), minlength=count)
    return weights_BM
