"""Report sections about a multi-label classifier, which may predict several classes for a text.

Shape letters of this module: E test examples, C classes.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from common.metrics.label_sets import LabelSets
from perception.objective import average_precisions
from perception.report_elements import BINS, Element, Line, chart, shortened, table, tag

ERRORS = 20
"""Maximum number of examples in the report's list of most confident errors."""


def sections(found: LabelSets, texts: Sequence[str], places: Sequence[str]) -> Iterable[Element]:
    """Yields the report sections about classes, calibration and errors.

    Args:
      texts, places: text of each test example, and its file and line. `places` may be empty.
    """
    yield _per_class(found)
    yield tag("h2", "Calibration")
    yield from _calibration(found)
    yield tag("h2", "Most confident errors")
    yield _errors(found, texts, places)


def _per_class(found: LabelSets) -> Element:
    from sklearn.metrics import precision_recall_fscore_support

    scores = precision_recall_fscore_support(found.labels_EC, found.guesses_EC, zero_division=0.0)
    averages_C = average_precisions(found.labels_EC, found.probabilities_EC)
    given = found.names, *scores, averages_C, found.thresholds
    rows = [
        (
            name,
            *(f"{100 * score:.1f} %" for score in (precision, recall, f1)),
            "" if np.isnan(average) else f"{average:.1f} %",
            f"{threshold:.3f}",
            int(count),
        )
        for name, precision, recall, f1, count, average, threshold in zip(*given, strict=True)
    ]
    columns = ("class", "precision", "recall", "F1", "average precision", "threshold")
    return table((*columns, "test examples"), rows)


def calibration(found: LabelSets) -> list[tuple[float, float]]:
    """Returns (mean probability, share of decisions whose class is a label) for each non-empty bin of probability.

    Both are in percent. Each class of each example is one decision.
    """
    chances, truth = found.probabilities_EC.astype(float).ravel(), found.labels_EC.ravel()
    bins = np.minimum((chances * BINS).astype(int), BINS - 1)
    inside = [bins == number for number in np.unique(bins)]
    return [(100 * float(chances[i].mean()), 100 * float(truth[i].mean())) for i in inside]


def _calibration(found: LabelSets) -> Iterable[Element]:
    yield tag(
        "p",
        "Each class of each test example is one decision. On the dashed line, the probability equals the share of"
        " decisions whose class is a label.",
    )
    lines = [
        Line("decisions in bins of probability", calibration(found)),
        Line("probability equals share", [(0, 0), (100, 100)], dashed=True, marked=False),
    ]
    yield from chart(lines, "probability (%)", "share that have the class (%)")


def _errors(found: LabelSets, texts: Sequence[str], places: Sequence[str]) -> Element:
    """Lists at most ERRORS texts with a wrong decision, and of each text the wrong decision farthest from the label."""
    wrong_EC = found.guesses_EC != found.labels_EC
    if not wrong_EC.any():
        return tag("p", "No test example has a wrong class.")
    distance_EC = wrong_EC * abs(found.probabilities_EC.astype(float) - found.labels_EC)
    order = np.argsort(-distance_EC.max(1), kind="stable")[:ERRORS]
    rows = []
    for i in order[distance_EC.max(1)[order] > 0].tolist():
        worst = int(distance_EC[i].argmax())
        row = (
            f"{found.names[worst]} {100 * found.probabilities_EC[i, worst]:.1f} %",
            found.named(found.guesses_EC, i),
            found.named(found.labels_EC, i),
            tag("td", shortened(texts[i]), class_="text"),
        )
        rows.append((*row, places[i]) if places else row)
    columns = ("class and probability", "prediction", "label", "text")
    return table((*columns, "row") if places else columns, rows)
