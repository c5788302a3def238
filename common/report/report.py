"""Writes the report on groups of runs: tables, figures, and verdicts on each group against the first group."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.arguments import parse_pairs
from common.config import check_choice, check_number, flatten, float_or_text
from common.errors import check
from common.metrics.kinds import MODES
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


def write(
    compared: Sequence[Group],
    out: Path,
    *,
    margins: Mapping[str, float],
    axis: str = "seconds",
    horizon: float | str = "longest",
    reference: str = "own",
) -> None:
    """Prints tables that compare groups of runs, and writes the tables and figures to `out`.

    Verdicts compare each group with the first group. A figure over depth needs the layers of every group, and two
    groups of different depths.

    Args:
      margins: see `against_first`.
      axis, horizon: see `Convergence`.
      reference: see `Convergence.times`.

    Raises the errors of `against_first`, `Convergence` and `Run.test`, and a UserError for a margin without comparison.
    """
    comparisons = against_first(compared, margins)
    known = {one.metric for _, one in comparisons} & MODES.keys() | {compared[0].curves[0].name}
    for metric, margin in margins.items():
        check(
            metric in known,
            f"--margin={metric}={margin:g} has no effect, because the runs are compared only by"
            f" {', '.join(sorted(known))}: leave it out",
        )
    convergence = Convergence(compared, axis, horizon)
    tables = {
        "runs": run_table(compared),
        "differences": differences(compared),
        "aucc": convergence.aucc_table(),
        "times": convergence.time_table(reference),
        "seeds": convergence.seed_table(),
    }
    if comparisons:
        tables["verdicts"] = verdict_table(compared[0], comparisons)
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
                print(explanation(comparisons, compared))
        for name, figure in drawn.items():
            figure.savefig(out / f"{name}.png")
    print(f"figures: {', '.join(shown(out / f'{name}.png') for name in drawn)}")


def against_first(
    compared: Sequence[Group], margins: Mapping[str, float]
) -> list[tuple[Group, Comparison]]:
    """Compares each other group with the first group in each metric (`compare`), with Holm's correction (`correct`).

    Args:
      margins: metric -> margin of equivalence that replaces the margin in `MARGINS`.

    Returns:
      A pair (group, comparison) for each group except the first and each metric.

    Raises the errors of `check_distinct` and `compare`, and a UserError if two runs have different data.
    """
    first, *others = compared
    for group in others:
        check_distinct(group.runs, first.runs)
        _check_data(group.runs, first.runs)
    pairs = [
        (group, one)
        for group in others
        for one in compare(group.runs, first.runs, MARGINS | margins)
    ]
    corrected = correct([one for _, one in pairs])
    return [(group, one) for (group, _), one in zip(pairs, corrected, strict=True)]


def _check_data(a: Sequence[Run], b: Sequence[Run]) -> None:
    """Raises a UserError if the configurations of the groups name different data.

    Checks nothing if all runs have predictions, because `compare` then compares the test examples.
    """
    if all(run.predictions() is not None for run in (*a, *b)):
        return
    for field in ("data.source", "dataset"):
        here, there = (portable_source(flatten(g[0].config).get(field, "")) for g in (a, b))
        check(
            here == there,
            f"{a[0].place} and {b[0].place} differ in {field} ({here or 'missing'} and {there or 'missing'}); without"
            " predictions.npz in every run, their test examples cannot be compared: compare runs on the same data",
        )


def verdict_table(first: Group, comparisons: Sequence[tuple[Group, Comparison]]) -> Table:
    """Returns the table of verdicts: a row for each group and metric, compared with the group `first`."""
    columns = ("metric", "model", "mean ± sd", f"against {first.name}", "difference")
    columns += (f"{CONFIDENCE:.0%} interval", "verdict", "margin", "noise of", "p (Holm)")
    rows = []
    for group, one in comparisons:
        digits = digits_for((*one.a.values, *one.b.values))
        interval = "" if math.isnan(one.low) else f"{one.low:+.{digits}f} to {one.high:+.{digits}f}"
        p = (one.corrected or one.p_values)[0]
        cells = [f"{mean_std(s.values, digits)} (n={len(s.values)})" for s in (one.a, one.b)]
        rows.append(
            (
                *(one.metric, group.name, *cells, f"{one.difference:+.{digits}f}", interval),
                *(str(one), f"{one.margin:g}" if one.margin else "", one.noise),
                "" if math.isnan(p) else f"{p:.2g}",
            )
        )
    return Table(columns, rows)


def explanation(comparisons: Sequence[tuple[Group, Comparison]], compared: Sequence[Group]) -> str:
    """Returns the notes below the table of verdicts."""
    decidable = sum(one.decidable for _, one in comparisons)
    lines = [
        "equivalent: the difference is smaller than the margin (p < 0.05), which requires that the whole interval lies"
        " within the margin; better, worse: not equivalent, and the difference is not 0 (p < 0.05, the last column);"
        " with fewer than three seeds a verdict is undecided, unless the runs have no randomness."
    ]
    if decidable > 1:
        lines.append(
            f"The {decidable} comparisons are corrected together by Holm's method; the intervals are not corrected."
        )
    without = [run.name for g in compared for run in g.runs if run.predictions() is None]
    if without:
        lines.append(
            "A comparison of two groups leaves out the test metrics if a run has no predictions.npz:"
            f" {', '.join(without[:3])}{' ...' * (len(without) > 3)}."
        )
    if not runs_alternated([group.runs for group in compared]):
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
            mine, theirs = run.predictions(), base.predictions()
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
