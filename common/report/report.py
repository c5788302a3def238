"""Writes the report on groups of runs: tables, figures, and verdicts on each group against the first group.

`write` reports on groups of one data set. `write_verdicts` writes only the verdicts, for several data sets.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from common.arguments import parse_pairs
from common.config import check_choice, check_number, flatten, float_or_text
from common.errors import check
from common.metrics.kinds import MODES
from common.metrics.predictions import TEST_AGAIN
from common.metrics.translations import Translations
from common.report import figures
from common.report.convergence import Convergence, run_table
from common.report.groups import Group, differences
from common.report.runs import Run, check_distinct, portable_source, runs_alternated
from common.report.significance import CONFIDENCE, MARGINS, Comparison, compare, correct
from common.report.table import Table, digits_for, mean_std, publish
from common.storage.addresses import shown
from common.storage.folders import output


def parse_margins(options: Sequence[str]) -> dict[str, float]:
    """Parses the values of --margin, METRIC=NUMBER, to {metric: margin}. Raises a UserError for an invalid value."""
    texts = parse_pairs("--margin=", options, "METRIC=NUMBER, such as bleu=0.5")
    margins = {metric: float_or_text(text) for metric, text in texts.items()}
    for metric, margin in margins.items():
        check_choice("--margin: metric", metric, MODES)
        check_number(f"--margin={metric}: the margin", margin)
    return margins


class Verdict(NamedTuple):
    """The comparison of `group` with `first` on the data set `data`, which is "" in a report on one data set."""

    data: str
    first: Group
    group: Group
    comparison: Comparison


def write(
    compared: Sequence[Group],
    out: Path,
    *,
    margins: Mapping[str, float],
    metrics: Sequence[str] = (),
    axis: str = "seconds",
    horizon: float | str = "longest",
    reference: str = "own",
) -> None:
    """Prints tables that compare groups of runs, and writes the tables and figures to `out`.

    Verdicts compare each group with the first group. Figures over depth are drawn only if the layers of all groups are
    known and the groups have different depths.

    Args:
      margins, metrics: see `against_first`.
      axis, horizon: see `Convergence`.
      reference: see `Convergence.times`.

    Raises the errors of `against_first`, `Convergence` and `Run.test`.
    """
    verdicts = against_first({"": compared}, margins, metrics)
    convergence = Convergence(compared, axis, horizon)
    tables = {
        "runs": run_table(compared),
        "differences": differences(compared),
        "aucc": convergence.aucc_table(),
        "times": convergence.time_table(reference),
        "seeds": convergence.seed_table(),
    }
    if verdicts:
        tables["verdicts"] = verdict_table(verdicts)
        if sentences := sentence_table(compared):
            tables["sentences"] = sentences
    drawn = {"curves": figures.curves_figure(convergence)}
    layers = [group.layers for group in compared if group.layers]
    if len(layers) == len(compared):
        # Without frozen layers, both figures would be equal.
        for x in ("updatable", "total") if any(one.frozen for one in layers) else ("updatable",):
            if len({getattr(one, x) for one in layers}) > 1:
                drawn[f"layers_{x}"] = figures.layers_figure(convergence, x)
    with output(out):
        for name, table in tables.items():
            publish(out / name, *table)
            if name == "verdicts":
                print(explanation(verdicts, {"": compared}))
        for name, figure in drawn.items():
            figure.savefig(out / f"{name}.png")
    if not convergence.end:
        print(f"All curves end at 0 {axis}: choose another --axis, on which the runs have values.")
    print(f"figures: {', '.join(shown(out / f'{name}.png') for name in drawn)}")


def write_verdicts(
    sets: Mapping[str, Sequence[Group]],
    out: Path,
    *,
    margins: Mapping[str, float],
    metrics: Sequence[str] = (),
) -> None:
    """Prints a table of the verdicts on several data sets, and writes it to `out`.

    For the arguments see `against_first`. Raises the errors of `against_first`, and a UserError if a data set has a
    single group.
    """
    for data, compared in sets.items():
        check(
            len(compared) > 1,
            f"--sets compares groups, but the data set {data} has a single group: give at least two groups",
        )
    verdicts = against_first(sets, margins, metrics)
    with output(out):
        publish(out / "verdicts", *verdict_table(verdicts))
    print(explanation(verdicts, sets))


def against_first(
    sets: Mapping[str, Sequence[Group]], margins: Mapping[str, float], metrics: Sequence[str] = ()
) -> list[Verdict]:
    """Compares each group of a data set with the first group of the data set (`compare`).

    Corrects the p-values of all comparisons together (`correct`).

    Args:
      sets: name of a data set -> its groups.
      margins: metric -> margin of equivalence that replaces the margin in `MARGINS`.
      metrics: metrics to compare; () for all metrics of `compare`.

    Raises the errors of `check_distinct`, `_check_data`, `compare` and `_check_compared`.
    """
    verdicts = []
    for data, (first, *others) in sets.items():
        for group in others:
            check_distinct(group.runs, first.runs)
            _check_data(group.runs, first.runs)
            compared = compare(group.runs, first.runs, MARGINS | margins)
            verdicts += [Verdict(data, first, group, one) for one in compared]
    _check_compared(sets, verdicts, margins, metrics)
    verdicts = [one for one in verdicts if not metrics or one.comparison.metric in metrics]
    corrected = correct([one.comparison for one in verdicts])
    return [a._replace(comparison=b) for a, b in zip(verdicts, corrected, strict=True)]


def _check_compared(
    sets: Mapping[str, Sequence[Group]],
    verdicts: Sequence[Verdict],
    margins: Mapping[str, float],
    metrics: Sequence[str],
) -> None:
    """Raises a UserError if a metric of --margin or --metrics has no effect on the comparisons."""
    names = {one.comparison.metric for one in verdicts}
    for option, values in (("--metrics", metrics), ("--margin", margins)):
        check(
            bool(names) or not values,
            f"{option} has no effect on a single group: give at least two groups, or leave out {option}",
        )
    for metric in metrics:
        check(
            metric in names,
            f"--metrics: the runs are not compared by {metric!r}: choose from {', '.join(sorted(names))}",
        )
    # The margin of the metric of the curves also applies to "best valid METRIC" and "mean METRIC over AXIS".
    chosen = set(metrics) or names
    curves = {group.curves[0].name for compared in sets.values() for group in compared}
    if metrics:
        curves = {name for name in curves if any(name in metric.split() for metric in metrics)}
    known = chosen & MODES.keys() | curves
    for metric, margin in margins.items():
        check(
            metric in known,
            f"--margin={metric}={margin:g} has no effect: the compared metrics that take a margin are"
            f" {', '.join(sorted(known)) or 'none'}; leave out the margin",
        )


def _check_data(a: Sequence[Run], b: Sequence[Run]) -> None:
    """Raises a UserError if the configurations of the groups name different data.

    Checks nothing if all runs have predictions, because `compare` then compares the test examples.
    """
    if all(run.predictions is not None for run in (*a, *b)):
        return
    for field in ("data.source", "dataset"):
        here, there = (portable_source(str(flatten(g[0].config).get(field, ""))) for g in (a, b))
        check(
            here == there,
            f"{a[0].place} and {b[0].place} differ in {field} ({here or 'missing'} and {there or 'missing'}); without"
            " predictions.npz in every run, their test examples cannot be compared: compare runs on the same data",
        )


def verdict_table(verdicts: Sequence[Verdict]) -> Table:
    """Returns the table of verdicts: a row for each data set, group and metric."""
    firsts = {one.first.name for one in verdicts}
    against = firsts.pop() if len(firsts) == 1 else "the first group"
    columns = ("metric", "model", "mean ± sd", f"against {against}", "difference")
    columns += (f"{CONFIDENCE:.0%} interval", "verdict", "margin", "noise of", "p (Holm)")
    rows = []
    for data, _, group, one in verdicts:
        digits = digits_for((*one.a.values, *one.b.values))
        interval = "" if math.isnan(one.low) else f"{one.low:+.{digits}f} to {one.high:+.{digits}f}"
        p = (one.corrected or one.p_values)[0]
        cells = [f"{mean_std(s.values, digits)} (n={len(s.values)})" for s in (one.a, one.b)]
        rows.append(
            (
                *((data,) if data else ()),
                *(one.metric, group.name, *cells, f"{one.difference:+.{digits}f}", interval),
                *(str(one), f"{one.margin:g}" if one.margin else "", one.noise),
                "" if math.isnan(p) else f"{p:.2g}",
            )
        )
    return Table(("data", *columns) if verdicts[0].data else columns, rows)


def _steps(run: Run) -> int:
    """Returns the number of training steps; 0 for a model that is not trained in steps, such as counted words."""
    return run.summary.get("steps", run.curve.points[-1].step)


def explanation(verdicts: Sequence[Verdict], sets: Mapping[str, Sequence[Group]]) -> str:
    """Returns the notes below the table of verdicts. `sets` is the argument of `against_first`."""
    decidable = sum(one.comparison.decidable for one in verdicts)
    lines = [
        "equivalent: the difference is smaller than the margin (p < 0.05), which requires that the whole interval lies"
        " within the margin; better, worse: not equivalent, and the difference is not 0 (p < 0.05, the last column);"
        " with fewer than three seeds a verdict is undecided, unless the runs have no randomness."
    ]
    if decidable > 1:
        lines.append(
            f"The {decidable} comparisons are corrected together by Holm's method; the intervals are not corrected."
        )
    without = [
        f"{data}: {run.name}" if data else run.name
        for data, compared in sets.items()
        for group in compared
        for run in group.runs
        if run.predictions is None
    ]
    if without:
        lines.append(
            f"Runs without predictions.npz: {', '.join(without[:3])}{' ...' * (len(without) > 3)}. Comparisons with"
            f" these runs leave out the test metrics. If a file is lost, {TEST_AGAIN}."
        )
    for data, compared in sets.items():
        spans = {g.name: sorted({_steps(run) for run in g.runs} - {0}) for g in compared}
        spans = {name: steps for name, steps in spans.items() if steps}
        if len(set(map(tuple, spans.values()))) > 1:
            texts = [f"{n} {s[0]:,}" + f" to {s[-1]:,}" * (len(s) > 1) for n, s in spans.items()]
            lines.append(
                f"{data}{': ' * bool(data)}The groups differ in training steps: {'; '.join(texts)}. Test and best"
                " values use all steps of a run; a mean over an axis ends with the shortest compared run."
            )
    # Runs on different data sets are never compared, so they need not have taken turns with each other.
    if not all(runs_alternated([group.runs for group in compared]) for compared in sets.values()):
        lines.append(
            "Seconds are compared only between groups whose runs took turns on the machine (--turns=N)."
        )
    return "\n".join(lines)


def sentence_table(compared: Sequence[Group]) -> Table | None:
    """Returns a table of sacrebleu's paired bootstrap tests: each run against the first group's run with the same seed.

    The p-value covers the choice of test sentences, not the noise of seeds. Returns None if one of these runs has no
    translations, or if no run of another group has the seed of a run of the first group.
    """
    from sacrebleu.significance import PairedTest

    first, *others = compared
    rows = []
    bases = {run.seed: run for run in first.runs}
    for group in others:
        for run in group.runs:
            base = bases.get(run.seed)
            if base is None:
                continue
            mine, theirs = run.predictions, base.predictions
            if not (isinstance(mine, Translations) and isinstance(theirs, Translations)):
                return None
            systems = [(base.name, list(theirs.hypotheses)), (run.name, list(mine.hypotheses))]
            metrics, references = {"BLEU": theirs.metric()}, [list(theirs.references)]
            test = PairedTest(systems, metrics, references, test_type="bs", n_samples=1000)
            _, scores = test()
            (one, other) = scores["BLEU"]
            rows.append((group.name, run.seed, other.score, one.score, f"{other.p_value:.3f}"))
    columns = ("model", "seed", "BLEU", f"{first.name}", "p, noise of sentences only")
    return Table(columns, rows) if rows else None
