"""Simulates how often the intervals of `common.report.verdict` contain the true difference of two systems.

    python -m benchmarks.interval_coverage --experiments=1000

Also counts false verdicts for equal systems. Each experiment tests two systems with n seeds on the same E examples.
Examples differ in difficulty and seeds in quality. Right and wrong answers are drawn from a known distribution, so the
true difference is known. For comparison, the percentile interval of a plain two-level bootstrap is measured as well.
"""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

from benchmarks.harness import machine
from common.config import int_arg, parser_for
from common.metrics.curve import Curve, Point
from common.metrics.losses import Losses
from common.report.runs import Run
from common.report.table import publish
from common.report.verdict import Comparison, compare
from common.runtime import program

SEEDS, EXAMPLES = (3, 5), (500, 5000)
QUALITY, BETTER = 0.8, 0.95
"""Mean qualities of two systems with about 71 % and 75 % accuracy. Qualities have the unit of `Truth.difficulty`."""

_CURVE = Curve("accuracy", "max", [Point(1, 1.0, 1.0, 1.0)])


class Truth(NamedTuple):
    """The distribution of simulated experiments. A system is right if its quality exceeds difficulty plus noise.

    Attributes:
      qualities: mean qualities of the two systems.
      seed_deviation: standard deviation of the quality over seeds; 0.05 is about 1.2 points of accuracy.
      difficulty: standard deviation of the difficulty over examples.
    """

    qualities: tuple[float, float]
    seed_deviation: float = 0.05
    difficulty: float = 1.0

    @property
    def difference(self) -> float:
        """Expected difference of the accuracies of the two systems, in points."""
        scale = np.sqrt(1 + self.difficulty**2 + self.seed_deviation**2)
        first, second = (100 * stats.norm.cdf(quality / scale) for quality in self.qualities)
        return float(first - second)

    def draw(self, seeds: int, examples: int, generator: np.random.Generator) -> list[list[Run]]:
        """Draws the runs of both systems of one experiment."""
        difficulty_E = generator.normal(0, self.difficulty, examples)
        return [
            [
                _run(quality + generator.normal(0, self.seed_deviation), difficulty_E, generator)
                for _ in range(seeds)
            ]
            for quality in self.qualities
        ]


def _run(quality: float, difficulty_E: np.ndarray, generator: np.random.Generator) -> Run:
    right_E = difficulty_E + generator.normal(size=len(difficulty_E)) < quality
    ones_E, none = np.ones(len(right_E)), np.zeros(0)
    made = Losses("simulated", ones_E, ones_E, right_E.astype(float), none, "token")
    return _Simulated("simulated", {"seed": 0}, _CURVE, made=made)


@dataclass(frozen=True)
class _Simulated(Run):
    """A run whose predictions, `made`, are in memory instead of a file."""

    made: Losses | None = None

    def predictions(self) -> Losses | None:
        return self.made


def _accuracy(runs: list[list[Run]]) -> Comparison:
    return next(one for one in compare(*runs, axes=()) if one.metric == "accuracy")


def plain_interval(comparison: Comparison, generator: np.random.Generator) -> tuple[float, float]:
    """Returns the 95 % percentile interval of a bootstrap that resamples seeds and test examples."""
    means = []
    for sample in (comparison.a, comparison.b):
        runs, resamples = sample.resampled_RB.shape
        drawn_RB = generator.integers(0, runs, (runs, resamples))
        means.append(np.take_along_axis(sample.resampled_RB, drawn_RB, axis=0).mean(0))
    low, high = np.quantile(means[0] - means[1], [0.025, 0.975])
    return float(low), float(high)


def measure(truth: Truth, seeds: int, examples: int, experiments: int, seed: int = 0) -> dict:
    """Returns statistics of simulated experiments: coverage, verdicts and the mean width of the interval.

    "coverage" is the % of the experiments in which the interval of `compare` contains the true difference, "coverage,
    plain bootstrap" the same for `plain_interval`. "better" and "worse" are the % of the experiments with this verdict.
    """
    generator = np.random.default_rng((seed, seeds, examples))
    inside, plain, words, widths = [], [], [], []
    for _ in range(experiments):
        comparison = _accuracy(truth.draw(seeds, examples, generator))
        inside.append(comparison.low <= truth.difference <= comparison.high)
        low, high = plain_interval(comparison, generator)
        plain.append(low <= truth.difference <= high)
        words.append(comparison.word)
        widths.append(2 * comparison.half_width)
    return {
        "seeds": seeds,
        "examples": examples,
        "difference": truth.difference,
        "coverage": 100 * float(np.mean(inside)),
        "coverage, plain bootstrap": 100 * float(np.mean(plain)),
        **{word: 100 * words.count(word) / experiments for word in ("better", "worse")},
        "mean width": float(np.mean(widths)),
    }


def main() -> None:
    parser = parser_for("benchmarks.interval_coverage")
    parser.add_argument("--experiments", type=int_arg("--experiments"), default=1000)
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/interval_coverage"))
    options = parser.parse_args()
    truths = (Truth((QUALITY, QUALITY)), Truth((BETTER, QUALITY)))
    cases = itertools.product(truths, SEEDS, EXAMPLES)
    results = [measure(*case, options.experiments) for case in cases]
    publish(options.out, tuple(results[0]), [tuple(one.values()) for one in results])
    record = {**machine(), "experiments": options.experiments, "cases": results}
    options.out.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    program.run(main)
