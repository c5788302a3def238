"""Tables of verdicts on groups of runs, and of the test examples on which two runs differ most."""

import glob
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from common.config import check_choice, check_number, flatten, float_or_text
from common.errors import check
from common.metrics.kinds import MODES
from common.metrics.translations import Translations
from common.report.groups import Group, check_metric, groups
from common.report.runs import Run, load_group, runs_alternated
from common.report.table import Table, digits_for, mean_std
from common.report.verdict import CONFIDENCE, MARGINS, Comparison, check_runs, compare, correct


def named_groups(arguments: Sequence[str]) -> list[Group]:
    """Returns the groups of runs that command-line arguments name.

    Each argument is a group if at least one argument has the form NAME=GROUP, or if there are several arguments and at
    least one names several runs. This requires that the runs of each argument have the same configuration and device.
    Otherwise, the runs of all arguments are pooled and grouped by configuration and device (`groups`), and each NAME is
    ignored.

    Args:
      arguments: see `load_group`. NAME=GROUP gives the group a name. The default name is the last part of the path. If
        two groups would have the same name, each group is named by its whole argument.

    Raises:
      UserError: an argument cannot be loaded (`load_group`), the metrics differ, or a group has a run twice or two runs
        with the same seed (other than None).
    """
    named = [_split_name(argument) for argument in arguments]
    loaded = [load_group(argument) for _, argument in named]
    several = len(loaded) > 1 and any(len(runs) > 1 for runs in loaded)
    if several or any(name for name, _ in named):
        grouped = [groups(runs) for runs in loaded]
        if all(len(parts) == 1 for parts in grouped):
            check_metric(one.runs[0] for (one,) in grouped)
            names = [name or argument.rstrip("/").rpartition("/")[2] for name, argument in named]
            names = names if len(set(names)) == len(names) else list(arguments)
            return [
                Group(name, name, one.runs, one.layers)
                for name, (one,) in zip(names, grouped, strict=True)
            ]
    return groups(run for runs in loaded for run in runs)


def _split_name(argument: str) -> tuple[str, str]:
    """Splits NAME=GROUP into name and group. The name is "" if the argument is a group without a name."""
    name, _, group = argument.partition("=")
    if not group or set(name) & set("/:*?["):
        return "", argument
    # Do not split the path of an existing folder or a matching glob: folders of runs may have "=" in their names.
    is_path = Path(argument).exists() or glob.glob(argument)
    return ("", argument) if is_path else (name, group)


def parse_margins(options: Sequence[str]) -> dict[str, float]:
    """Parses the values of --margin, each METRIC=NUMBER, to {metric: margin of equivalence}.

    Raises a UserError if a value is malformed, a metric is unknown or has two margins, or a margin is negative or not
    finite.
    """
    chosen: dict[str, float] = {}
    for text in options:
        metric, equals, number = text.partition("=")
        check(
            bool(metric and equals),
            f"--margin={text}: give METRIC=NUMBER, such as --margin=bleu=0.5",
        )
        check_choice(f"--margin={text}: metric", metric, MODES)
        margin = float_or_text(number)
        check_number(f"--margin={text}: the margin", margin)
        check(metric not in chosen, f"--margin={text} is a second margin of {metric}: give one")
        chosen[metric] = margin
    return chosen


def against_first(
    compared: Sequence[Group], margins: Mapping[str, float]
) -> list[tuple[Group, Comparison]]:
    """Compares every group with the first group in every metric, with Holm's correction over all comparisons.

    Args:
      margins: metric -> margin of equivalence that replaces the margin in `MARGINS`.

    Returns:
      A pair (group, comparison) for each metric and each group except the first.

    Raises:
      UserError: a run is twice in a group, or in the first group and in another group; two runs of a group have the
        same seed; the test examples, the metrics or the data of two groups differ; a run's predictions are damaged; or
        a margin is negative or not finite.
    """
    first, *others = compared
    for group in others:
        check_runs(group.runs, first.runs)
        _check_data(group.runs, first.runs)
    pairs = [
        (group, one)
        for group in others
        for one in compare(group.runs, first.runs, MARGINS | margins)
    ]
    corrected = correct([one for _, one in pairs])
    return [(group, one) for (group, _), one in zip(pairs, corrected, strict=True)]


def _check_data(a: Sequence[Run], b: Sequence[Run]) -> None:
    """Raises a UserError if the configurations of two groups name different data, and a run has no predictions.

    If all runs have predictions, `compare` checks that the test examples are the same. Of a source files:PATH, compares
    only the last part of PATH, because paths differ between machines.
    """
    if all(run.predictions() is not None for run in (*a, *b)):
        return
    for field in ("data.source", "dataset"):
        here, there = (str(flatten(group[0].config).get(field, "")) for group in (a, b))
        names = {
            Path(x.removeprefix("files:")).name if x.startswith("files:") else x
            for x in (here, there)
        }
        check(
            len(names) == 1,
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


def example_table(one: Run, other: Run, most: int) -> Table:
    """Returns a table of the `most` test examples with the largest absolute differences in cost between two runs.

    Raises:
      UserError: a run has no predictions or damaged predictions, or the runs have different test examples or metrics.
    """
    mine, theirs = one.predictions(), other.predictions()
    for run, predictions in ((one, mine), (other, theirs)):
        missing = f"the run {run.place} has no predictions.npz, which --examples needs: choose another run"
        check(predictions is not None, missing)
    check(
        mine.pairing == theirs.pairing,
        f"{one.place} and {other.place} have different test examples or metrics: compare runs with the same test set"
        " and metrics",
    )
    difference_E = mine.costs_E - theirs.costs_E
    order = np.argsort(-np.abs(difference_E), kind="stable")[:most]
    described = [(mine.describe(number), theirs.describe(number)) for number in order]
    names = list(described[0][0])
    shared = [name for name in names if all(a[name] == b[name] for a, b in described)]
    differing = [name for name in names if name not in shared]
    rows = [
        (
            *(int(number), *(a[name] for name in shared)),
            *(side[name] for name in differing for side in (a, b)),
            f"{difference_E[number]:+.3f}",
        )
        for number, (a, b) in zip(order, described, strict=True)
    ]
    sides = (f"A: {one.name}", f"B: {other.name}")
    columns = ("example", *shared, *(f"{name}, {side}" for name in differing for side in sides))
    return Table((*columns, f"cost, A - B ({mine.cost_unit})"), rows)
