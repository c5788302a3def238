"""Simulates how often the intervals of `common.report.significance` contain the true difference of two systems.

    python -m benchmarks.interval_coverage --experiments=1000

Also counts false verdicts for equal systems. Each experiment tests two systems, each with n seeds, on the same E
examples. Examples differ in difficulty and seeds in quality. Right and wrong answers are drawn from a known
distribution, so the true difference is known. For comparison, also simulates the percentile interval of a bootstrap
that resamples seeds and test examples (`plain_interval`).

Shape letters of this module: B resamples, E examples, R runs.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from benchmarks.harness import machine, write_json
from common.arguments import int_arg
from common.config import parser_for
from common.metrics.curve import Curve, Point
from common.metrics.losses import Losses
from common.report.runs import Run
from common.report.significance import Comparison, compare
from common.report.table import publish
from common.runtime import program

SEEDS, EXAMPLES = (3, 5), (500, 5000)
QUALITY, BETTER = 0.8, 0.95
"""Mean qualities, over seeds, of two systems. Their expected accuracies are about 71 % and 75 %.

A run has its system's mean quality plus a normal deviation (SEED_DEVIATION). The run answers an example right if this
sum exceeds the example's difficulty plus standard normal noise.
"""
SEED_DEVIATION = 0.05
"""Standard deviation of the quality of a system's runs; 0.05 is about 1.2 points of accuracy."""
DIFFICULTY = 1.0
"""Standard deviation of the examples' difficulty, which has mean 0."""

_CURVE = Curve("accuracy", "max", [Point(1, 1.0, 1.0, 1.0)])


def true_difference(qualities: tuple[float, float]) -> float:
    """Returns the expected difference in accuracy, first system minus second, in points, for mean qualities."""
    scale = np.sqrt(1 + DIFFICULTY**2 + SEED_DEVIATION**2)
    first, second = (100 * stats.norm.cdf(quality / scale) for quality in qualities)
    return float(first - second)


def draw(
    qualities: tuple[float, float], seeds: int, examples: int, generator: np.random.Generator
) -> list[list[Run]]:
    """Returns the simulated runs of one experiment: a list of `seeds` runs for each system."""
    difficulty_E = generator.normal(0, DIFFICULTY, examples)
    return [
        [
            _run(quality + generator.normal(0, SEED_DEVIATION), difficulty_E, generator)
            for _ in range(seeds)
        ]
        for quality in qualities
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

    @property
    def predictions(self) -> Losses | None:
        return self.made


def _accuracy(runs: list[list[Run]]) -> Comparison:
    return next(one for one in compare(*runs) if one.metric == "accuracy")


def plain_interval(comparison: Comparison, generator: np.random.Generator) -> tuple[float, float]:
    """Returns the 95 % percentile interval of A - B from a bootstrap that resamples seeds and test examples."""
    means = []
    for sample in (comparison.a, comparison.b):
        runs, resamples = sample.resampled_RB.shape
        drawn_RB = generator.integers(0, runs, (runs, resamples))
        means.append(np.take_along_axis(sample.resampled_RB, drawn_RB, axis=0).mean(0))
    low, high = np.quantile(means[0] - means[1], [0.025, 0.975])
    return float(low), float(high)


def measure(qualities: tuple[float, float], seeds: int, examples: int, experiments: int) -> dict:
    """Simulates experiments. Returns a row of the table, {column: value}.

    "coverage" is the percentage of the experiments in which the interval of `compare` contains the true difference, and
    "coverage, plain bootstrap" the same for `plain_interval`. "better" and "worse" are the percentages of the
    experiments with this verdict. "difference" (the true difference) and "mean width" are in points of accuracy.
    """
    generator, truth = np.random.default_rng((0, seeds, examples)), true_difference(qualities)
    inside, plain, words, widths = [], [], [], []
    for _ in range(experiments):
        comparison = _accuracy(draw(qualities, seeds, examples, generator))
        inside.append(comparison.low <= truth <= comparison.high)
        low, high = plain_interval(comparison, generator)
        plain.append(low <= truth <= high)
        words.append(comparison.word)
        widths.append(2 * comparison.half_width)
    return {
        "seeds": seeds,
        "examples": examples,
        "difference": truth,
        "coverage": 100 * float(np.mean(inside)),
        "coverage, plain bootstrap": 100 * float(np.mean(plain)),
        **{word: 100 * words.count(word) / experiments for word in ("better", "worse")},
        "mean width": float(np.mean(widths)),
    }


def main() -> None:
    parser = parser_for("benchmarks.interval_coverage", __doc__)
    parser.add_argument("--experiments", type=int_arg("--experiments"), default=1000)
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/interval_coverage"))
    options = parser.parse_args()
    qualities = ((QUALITY, QUALITY), (BETTER, QUALITY))
    cases = itertools.product(qualities, SEEDS, EXAMPLES)
    results = [measure(*case, options.experiments) for case in cases]
    publish(options.out, tuple(results[0]), [tuple(one.values()) for one in results])
    record = {**machine(), "experiments": options.experiments, "cases": results}
    write_json(options.out.with_suffix(".json"), record)


if __name__ == "__main__":
    program.run(main)
