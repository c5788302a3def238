"""Writes the report of a comparison as one self-contained HTML page.

The page is a tree of `xml.etree` elements, whose serializer escapes every attribute, and every text except the style
sheet. The page has no script and no reference to another file, and its content security policy forbids both.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from common.atomic import write_whole
from common.metrics.classes import Classes
from common.metrics.curve import Curve
from common.metrics.label_sets import LabelSets
from common.report.table import Table
from perception.conclusions import average_precisions
from perception.report_elements import BINS, Element, Line, chart, shortened, table, tag

MOST_SHADED = 20
"""Maximum number of classes of a confusion matrix. With more classes, the page lists the most frequent confusions."""

ERRORS = 20
"""Maximum number of entries in the list of errors and in the list of confusions."""


STYLE = """
:root { color-scheme: light dark; --ink: #222; --soft: #666; --line: #ddd; --page: #fff; --box: #f5f5f5; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --soft: #a5a5a5; --line: #444; --page: #16181b; --box: #22252a; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; color: var(--ink); background: var(--page);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; line-height: 1.25; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.answer { font-size: 1.15rem; border-left: .25rem solid #0072B2; padding-left: .75rem; }
.soft { color: var(--soft); font-size: .9rem; }
.wide { overflow-x: auto; max-height: 36rem; }
table { border-collapse: collapse; font-size: .9rem; overflow-wrap: normal; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.text { min-width: 14rem; overflow-wrap: anywhere; }
pre { background: var(--box); padding: .75rem; white-space: pre-wrap; }
svg { display: block; width: 100%; max-width: 40rem; height: auto; }
svg text { fill: var(--soft); font-size: 11px; } svg .axis { stroke: var(--line); fill: none; }
ul.legend { list-style: none; padding: 0; margin: 0; font-size: .9rem; }
.mark { display: inline-block; width: .8rem; height: .8rem; margin-right: .4rem; }
"""

POLICY = "default-src 'none'; style-src 'unsafe-inline'"


@dataclass(frozen=True)
class Report:
    """Content of the page.

    Attributes:
      title: heading of the page.
      lines: the lines of `perception.conclusions.answer`; the page emphasises the first line.
      results, verdicts: table of the training methods, and table of the compared pairs of methods.
      curves: name of a training method -> curves of its seeds on the split `eval.select`.
      best: name of the training method of the best classifier.
      predictions: test predictions of the best classifier.
      texts, places: text of each test example, and the location of its row, such as file and line. `places` may be
        empty.
      command: the command that classifies new texts.
      notes: sentences about the data, the plan for a time budget, and approximations of the TF-IDF baseline.
    """

    title: str
    lines: Sequence[str]
    results: Table
    verdicts: Table
    curves: Mapping[str, Sequence[Curve]]
    best: str
    predictions: Classes | LabelSets
    texts: Sequence[str]
    places: Sequence[str]
    command: str
    notes: Sequence[str]


def write(report: Report, path: Path) -> None:
    """Writes the page to `path`."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("title", report.title),
        tag("style", STYLE),
    )
    body = tag("body", *_body(report))
    page = ElementTree.tostring(
        tag("html", head, body, lang="en"), encoding="unicode", method="html"
    )
    write_whole(path, f"<!DOCTYPE html>\n{page}\n")


def _body(report: Report) -> Iterable[Element]:
    first, *others = report.lines
    yield tag("h1", report.title)
    yield tag("p", first, class_="answer")
    yield tag("ul", *(tag("li", line) for line in others))
    yield tag("h2", "Use it")
    yield tag("pre", report.command)
    yield tag("h2", "All training methods")
    yield table(*report.results)
    if report.verdicts.rows:
        yield tag("h2", "Differences")
        yield table(*report.verdicts)
    if any(len(curve.points) > 1 for seeds in report.curves.values() for curve in seeds):
        yield tag("h2", "Learning curves")
        yield from _learning_curves(report.curves)
    yield tag("h2", f"Classes, {report.best}")
    several = isinstance(report.predictions, LabelSets)
    yield from _sets(report.predictions) if several else _single(report.predictions)
    yield tag("h2", "Most confident errors")
    yield _errors(report)
    if report.notes:
        yield tag("h2", "Data and limits")
        yield tag("ul", *(tag("li", note) for note in report.notes))


def _learning_curves(curves: Mapping[str, Sequence[Curve]]) -> Iterable[Element]:
    """Yields the chart of `Report.curves`. A curve with a single point is drawn as a horizontal dashed line."""
    every = [curve for seeds in curves.values() for curve in seeds]
    end = max(point.step for curve in every for point in curve.points)
    lines = []
    for name, seeds in curves.items():
        for curve in seeds:
            points = [(point.step, point.value) for point in curve.points]
            flat = len(points) == 1
            if flat:
                points = [(step, points[0][1]) for step in (0, max(end, 1))]
            lines.append(Line(name, points, dashed=flat))
    label = f"{every[0].name.replace('_', ' ')} at each evaluation"
    yield from chart(lines, "training steps", label)


def _single(found: Classes) -> Iterable[Element]:
    """Yields the sections on classes, confusion and calibration of a classifier that predicts one class per text."""
    from sklearn.metrics import precision_recall_fscore_support

    numbers = np.arange(len(found.names))
    scores = precision_recall_fscore_support(
        found.labels_E, found.guesses_E, labels=numbers, zero_division=0.0
    )
    rows = [
        (name, *(f"{100 * score:.1f} %" for score in row[:3]), int(row[3]))
        for name, *row in zip(found.names, *scores, strict=True)
    ]
    yield table(("class", "precision", "recall", "F1", "test examples"), rows)
    yield tag("h2", "Confusion")
    yield from _confusion(found)
    yield tag("h2", "Calibration")
    confidence_E, right_E = _confidence(found), found.guesses_E == found.labels_E
    points, error = calibration(confidence_E, right_E)
    yield tag(
        "p",
        f"Mean confidence {100 * confidence_E.mean():.1f} %, accuracy {100 * right_E.mean():.1f} %. Expected"
        f" calibration error: {error:.1f} points. On the dashed line, confidence equals accuracy.",
    )
    lines = [
        Line("test examples in bins of confidence", points),
        Line("confidence equals accuracy", [(0, 0), (100, 100)], dashed=True),
    ]
    yield from chart(lines, "confidence (%)", "accuracy (%)")


def _sets(found: LabelSets) -> Iterable[Element]:
    """Yields the sections on classes and calibration of a multi-label classifier."""
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
    yield table((*columns, "test examples"), rows)
    yield tag("h2", "Calibration")
    yield tag(
        "p",
        "Each class of each test example is one decision. On the dashed line, the probability equals the share of"
        " decisions whose class is a label.",
    )
    points, _ = calibration(found.probabilities_EC.astype(float).ravel(), found.labels_EC.ravel())
    lines = [
        Line("decisions in bins of probability", points),
        Line("probability equals share", [(0, 0), (100, 100)], dashed=True),
    ]
    yield from chart(lines, "probability (%)", "share that have the class (%)")


def _confusion(found: Classes) -> Iterable[Element]:
    from sklearn.metrics import confusion_matrix

    count_CC = confusion_matrix(found.labels_E, found.guesses_E, labels=range(len(found.names)))
    if len(found.names) > MOST_SHADED:
        wrong_CC = count_CC * (1 - np.eye(len(count_CC), dtype=int))
        order = np.argsort(-wrong_CC, axis=None, kind="stable")[:ERRORS]
        pairs = zip(*np.unravel_index(order, wrong_CC.shape), strict=True)
        rows = [
            (found.names[i], found.names[j], int(wrong_CC[i, j]))
            for i, j in pairs
            if wrong_CC[i, j]
        ]
        yield tag("p", f"The most frequent confusions ({len(rows)}).", class_="soft")
        yield table(("label", "prediction", "test examples"), rows)
        return
    yield tag(
        "p",
        "Rows are labels and columns are predictions. The shade of a cell is its share of the row's test examples.",
        class_="soft",
    )
    rows = []
    for name, count_C in zip(found.names, count_CC, strict=True):
        shares = count_C / max(count_C.sum(), 1)
        shaded = (
            tag(
                "td",
                f"{count:,}",
                class_="number",
                style=f"background:rgba(0,114,178,{0.65 * share:.2f})",
            )
            for count, share in zip(count_C.tolist(), shares, strict=True)
        )
        rows.append((tag("th", name, scope="row"), *shaded))
    yield table(("", *found.names), rows)


def calibration(
    chances_E: np.ndarray, true_E: np.ndarray
) -> tuple[list[tuple[float, float]], float]:
    """Returns [(mean probability, share of true decisions)] of the non-empty bins, and the expected calibration error.

    Returns probabilities and shares in percent, and the error in percentage points. The error is the mean of
    |probability - share| over bins, weighted by the number of decisions in each bin (Guo et al., 2017).

    Args:
      chances_E: probability of each decision, from 0 to 1.
      true_E: whether each decision is true.
    """
    bin_E = np.minimum((chances_E * BINS).astype(int), BINS - 1)
    points, error = [], 0.0
    for number in np.unique(bin_E):
        inside_E = bin_E == number
        chance, share = 100 * chances_E[inside_E].mean(), 100 * true_E[inside_E].mean()
        points.append((float(chance), float(share)))
        error += inside_E.mean() * abs(chance - share)
    return points, float(error)


def _confidence(found: Classes) -> np.ndarray:
    """Returns the probability of the predicted class of each example, (E,)."""
    return found.probabilities_EC[np.arange(len(found)), found.guesses_E].astype(float)


def _errors(report: Report) -> Element:
    """Returns a table of at most ERRORS wrongly classified texts, most confident error first.

    Multi-label: a row names the wrong or missing class whose probability is farthest from its label, 0 or 1.
    """
    found = report.predictions
    if isinstance(found, LabelSets):
        wrong_EC = found.guesses_EC != found.labels_EC
        distance_EC = wrong_EC * abs(found.probabilities_EC.astype(float) - found.labels_EC)
        wrong = np.flatnonzero(wrong_EC.any(1))
        certainty_E, nothing = distance_EC.max(1), "No test example has a wrong or missing class."
    else:
        wrong = np.flatnonzero(found.guesses_E != found.labels_E)
        certainty_E, nothing = _confidence(found), "No test example is classified wrongly."
    if not len(wrong):
        return tag("p", nothing)

    def values(i: int) -> tuple[str, str, str]:
        if isinstance(found, LabelSets):
            worst = int(distance_EC[i].argmax())
            chance = f"{found.names[worst]} {100 * found.probabilities_EC[i, worst]:.1f} %"
            return chance, found.named(found.guesses_EC, i), found.named(found.labels_EC, i)
        names = (found.names[at[i]] for at in (found.guesses_E, found.labels_E))
        return f"{100 * certainty_E[i]:.1f} %", *names

    rows = []
    for i in wrong[np.argsort(-certainty_E[wrong], kind="stable")][:ERRORS].tolist():
        row = (*values(i), tag("td", shortened(report.texts[i]), class_="text"))
        rows.append((*row, report.places[i]) if report.places else row)
    first = "class and probability" if isinstance(found, LabelSets) else "confidence"
    columns = (first, "prediction", "label", "text")
    return table((*columns, "row") if report.places else columns, rows)
