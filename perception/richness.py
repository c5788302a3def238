"""Regression of Figure 1: F1 of LoRA minus F1 of full training, against the "richness" (tokens) of a data set.

The paper does not print the numbers of tokens. Here, the number of tokens is the number of training examples times the
mean number of tokens per example. A measured mean is computed from the real texts with BERT's WordPiece vocabulary
(30,522 pieces). An estimated mean is derived from published descriptions of the data. An estimate may be off by a
third, but the largest data set has about 1,200 times as many tokens as the smallest.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from perception import printed


class Size(NamedTuple):
    """Size of a training split: examples, mean tokens per example, and whether the mean was measured or estimated."""

    examples: int
    mean: float
    measured: bool

    @property
    def tokens(self) -> float:
        return self.examples * self.mean


SIZES = {
    "DBP": Size(240_942, 120, False),
    "Bias": Size(22_364, 30, False),
    "b-in-b": Size(257_478, 75, False),
    "climate": Size(1_000, 95, False),
    "emot.": Size(16_000, 20.3, True),
    "imdb": Size(25_000, 311.9, True),
    "c-bait": Size(22_400, 11.0, True),
    "rotten": Size(8_530, 25.4, True),
    # The authors' program reads hardly any hypotheses. The mean was measured on the premises of 18,000 pairs.
    "snli": Size(549_367, 14.6, True),
    "sst2": Size(67_349, 11.3, True),
    "w-tox": Size(127_656, 95, False),
    "yelp": Size(650_000, 175, False),
}
"""Column of Table 1 -> size of the training split. The training split of c-bait is 70 % of the 32,000 rows."""

TOKENS_PER_WORD = 1.2
"""Tokens per whitespace-separated word, measured on five of the data sets (1.06 to 1.33)."""

ARTEFACTS = (("arctic_l", "full"), "snli")
"""The invalid row and column of Table 1. Full training of arctic_l collapsed to one class in five columns. The models
of the column snli read hardly any hypotheses."""


class Line(NamedTuple):
    """The fitted line gap = intercept + slope ln(tokens). A gap is F1 of LoRA minus F1 of full training, in points.

    Attributes:
      r_squared: coefficient of determination.
      count: number of data sets.
      mean, variance: mean and variance of ln(tokens) over data sets.
      deviation: standard deviation of the residuals with count - 2 degrees of freedom; infinite for two data sets.
    """

    slope: float
    intercept: float
    r_squared: float
    count: int
    mean: float
    variance: float
    deviation: float

    def gap(self, tokens: float) -> float:
        return self.intercept + self.slope * float(np.log(tokens))

    def margin(self, tokens: float) -> float:
        """Returns half the width of the 95 % prediction interval for another data set; infinite if `count` is two."""
        from scipy import stats

        if not math.isfinite(self.deviation):
            return math.inf
        distance = float(np.log(tokens)) - self.mean
        share = 1 + (1 + distance**2 / self.variance) / self.count
        return float(stats.t.ppf(0.975, self.count - 2)) * self.deviation * math.sqrt(share)


def fit(points: Sequence[tuple[float, float]]) -> Line:
    """Fits a `Line` by least squares to points (tokens, gap) with at least two different numbers of tokens."""
    x, y = np.log([tokens for tokens, _ in points]), np.asarray([gap for _, gap in points])
    slope = float(np.cov(x, y, bias=True)[0, 1] / np.var(x))
    intercept = float(y.mean() - slope * x.mean())
    squares = float(np.sum((y - intercept - slope * x) ** 2))
    explained = 1 - squares / (len(y) * float(np.var(y))) if np.var(y) else 0.0
    deviation = math.sqrt(squares / (len(y) - 2)) if len(y) > 2 else math.inf
    return Line(slope, intercept, explained, len(y), float(x.mean()), float(np.var(x)), deviation)


def tokens(texts: Iterable[Sequence[str]]) -> float:
    """Estimates the number of tokens in a data set from its number of words. An example has one or two texts."""
    return TOKENS_PER_WORD * sum(len(part.split()) for parts in texts for part in parts)


def gaps(table: Mapping[tuple[str, str], Mapping[str, float]]) -> dict[tuple[str, str], float]:
    """Returns {(backbone, column): F1 of LoRA minus F1 of full training} for the cells with both F1."""
    return {
        (backbone, column): value - table[backbone, "full"][column]
        for (backbone, mode), row in table.items()
        if mode == "lora" and (backbone, "full") in table
        for column, value in row.items()
        if column in table[backbone, "full"]
    }


def means(found: Mapping[tuple[str, str], float]) -> dict[str, float]:
    """Averages F1 of LoRA minus F1 of full training over backbones. Returns {column of Table 1: mean difference}."""
    names = dict.fromkeys(column for _, column in found)
    return {name: float(np.mean([g for (_, c), g in found.items() if c == name])) for name in names}


def without_artefacts(found: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    """Returns the gaps without the backbone and the column in ARTEFACTS."""
    (collapsed, _), column = ARTEFACTS
    return {key: gap for key, gap in found.items() if collapsed != key[0] and column != key[1]}


def points(by_column: Mapping[str, float]) -> list[tuple[float, float]]:
    """Returns (tokens, gap) of each column of Table 1."""
    return [(SIZES[column].tokens, gap) for column, gap in by_column.items()]


def expectation() -> Line:
    """Fits the line of Figure 1 to the printed Table 1 without ARTEFACTS. Each data set is one point (see `means`)."""
    return fit(points(means(without_artefacts(gaps(printed.table1())))))
