"""Verdicts on groups of runs, and the test examples on which two runs differ most."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from common.config import check, check_choice
from common.metrics.predictions import MODES, Predictions, Translations
from common.report.groups import Group, Layers, groups, layers_of
from common.report.runs import Run, load_group, runs_alternated
from common.report.table import Table, digits_for, mean_std
from common.report.verdict import CONFIDENCE, MARGINS, Comparison, check_runs, compare, correct


def named_groups(
    arguments: Sequence[str],
    layers_of: Callable[[Mapping[str, Any]], Layers | None] = layers_of,
) -> list[Group]:
    """Returns the groups of a command line.

    Each argument is a group if one of them names several runs and no argument mixes configurations. Otherwise the runs
    of all arguments are grouped by their configurations.

    Raises:
      UserError: an argument names no runs; or as `groups`.
    """
    loaded = [load_group(argument) for argument in arguments]
    if len(loaded) > 1 and any(len(runs) > 1 for runs in loaded):
        found = [groups(runs, layers_of=layers_of) for runs in loaded]
        if all(len(some) == 1 for some in found):
            names = [argument.rstrip("/").rpartition("/")[2] for argument in arguments]
            names = names if len(set(names)) == len(names) else list(arguments)
            return [
                Group(name, name, one.runs, one.layers)
                for name, (one,) in zip(names, found, strict=True)
            ]
    return groups((run for runs in loaded for run in runs), layers_of=layers_of)


def parse_margins(given: Sequence[str]) -> dict[str, float]:
    """Returns `MARGINS` updated with the --margin options, "METRIC=NUMBER".

    Raises:
      UserError: an option has another form, an unknown metric or a negative number.
    """
    margins = dict(MARGINS)
    for text in given:
        metric, equals, number = text.partition("=")
        if metric and equals:
            check_choice(f"--margin={text}: metric", metric, MODES)
        try:
            margins[metric] = float(number)
        except ValueError:
            equals = ""
        check(
            bool(metric and equals),
            f"--margin={text}: give METRIC=NUMBER, such as --margin=bleu=0.5",
        )
        check(
            math.isfinite(margins[metric]) and margins[metric] >= 0,
            f"--margin={text}: a margin must be a number of at least 0",
        )
    return margins


def against_first(
    compared: Sequence[Group], margins: Mapping[str, float] = MARGINS
) -> list[tuple[Group, Comparison]]:
    """Compares every group with the first in every metric (Holm); raises as `check_runs` and `compare`."""
    first, *others = compared
    for group in others:
        check_runs(group.runs, first.runs)
    pairs = [(group, one) for group in others for one in compare(group.runs, first.runs, margins)]
    corrected = correct([one for _, one in pairs])
    return [(group, one) for (group, _), one in zip(pairs, corrected, strict=True)]


def verdict_table(first: Group, found: Sequence[tuple[Group, Comparison]]) -> Table:
    """Returns a row per group and metric, with the verdict on the group against the first group."""
    columns = ("metric", "model", "mean ± sd", f"against {first.name}", "difference")
    columns += (f"{CONFIDENCE:.0%} interval", "verdict", "margin", "noise of", "p (Holm)")
    rows = []
    for group, one in found:
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


def explanation(found: Sequence[tuple[Group, Comparison]], compared: Sequence[Group]) -> str:
    """Returns the notes below the table of verdicts."""
    decidable = sum(one.decidable for _, one in found)
    lines = [
        "better, worse: the difference is not 0 (p < 0.05); equivalent: its whole interval lies within the margin;"
        " fewer than three seeds decide nothing."
    ]
    if decidable > 1:
        lines.append(
            f"The {decidable} comparisons are corrected together by Holm's method; the intervals are not."
        )
    without = [run.name for g in compared for run in g.runs if run.predictions() is None]
    if without:
        lines.append(
            f"Test metrics are left out: {', '.join(without[:3])}{' ...' * (len(without) > 3)} have no predictions.npz."
        )
    if not runs_alternated([group.runs for group in compared]):
        lines.append(
            "Seconds are not compared, because the runs did not alternate on the machine (reproduce --turns=N)."
        )
    return "\n".join(lines)


def sentence_table(compared: Sequence[Group]) -> Table | None:
    """Returns sacrebleu's paired bootstrap test of each run against the run of the first group with the same seed.

    It tests whether the choice of test sentences explains the difference; it ignores the noise of seeds. None if the
    runs are not translations or share no seed.
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
            test = PairedTest(
                systems,
                {"BLEU": theirs.metric()},
                [list(theirs.references)],
                test_type="bs",
                n_samples=1000,
            )
            _, scores = test()
            (one, other) = scores["BLEU"]
            rows.append((group.name, run.seed, other.score, one.score, f"{other.p_value:.3f}"))
    columns = ("model", "seed", "BLEU", f"{first.name}", "p of the sentences alone")
    return Table(columns, rows) if rows else None


def example_table(one: Run, other: Run, most: int) -> Table:
    """Returns the test examples with the largest difference in cost between two runs.

    Raises:
      UserError: a run has no predictions, or the runs were tested on different examples.
    """
    predicted: list[Predictions] = []
    for run in (one, other):
        found = run.predictions()
        check(
            found is not None, f"the run {run.place} has no predictions.npz, which --examples needs"
        )
        predicted.append(found)
    mine, theirs = predicted
    check(
        mine.pairing == theirs.pairing,
        f"{one.place} and {other.place} were tested on different examples: compare runs with the same test set",
    )
    difference_M = mine.costs_M - theirs.costs_M
    order = np.argsort(-np.abs(difference_M), kind="stable")[:most]
    rows, names = [], (f"A: {one.name}", f"B: {other.name}")
    described = {number: (mine.describe(number), theirs.describe(number)) for number in order}
    shared = [
        name
        for name in next(iter(described.values()))[0]
        if all(a[name] == b[name] for a, b in described.values())
    ]
    own = [name for name in next(iter(described.values()))[0] if name not in shared]
    for number, (a, b) in described.items():
        cells = [one[name] for name in own for one in (a, b)]
        shown = (a[name] for name in shared)
        rows.append((int(number), *shown, *cells, f"{difference_M[number]:+.3f}"))
    columns = ("example", *shared, *(f"{name}, {run}" for name in own for run in names))
    return Table((*columns, f"cost, A - B ({mine.cost_unit})"), rows)
