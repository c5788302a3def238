"""Draws conclusions from the runs of a comparison: tables, verdicts, and the text of answer.txt."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from common.metrics.classes import Classes
from common.metrics.label_sets import LabelSets
from common.metrics.predictions import Predictions
from common.report.runs import Run
from common.report.significance import (
    CONFIDENCE,
    Comparison,
    Sample,
    compare,
    correct,
    resample,
    shared_variance,
)
from common.report.table import Table, mean_std
from common.storage.addresses import shown
from perception import richness
from perception.budget import LEARNING_RATES, Plan, format_seconds
from perception.ways import METRIC, TRAINED, find

SHOWN = 3
"""Maximum number of classes that a sentence lists."""


def scores(found: Classes | LabelSets) -> dict[str, float]:
    """Returns the test scores of one run in percent, without the weighted F1, by column of `results`."""
    known = found.metrics()
    if isinstance(found, Classes):
        return {"accuracy": known["accuracy"], "macro F1": macro_f1(found)}
    average = np.nanmean(average_precisions(found.labels_EC, found.probabilities_EC))
    sets = {"exact match": "accuracy", "micro F1": "micro_f1", "macro F1": "macro_f1"}
    return {name: known[one] for name, one in sets.items()} | {"average precision": float(average)}


def average_precisions(labels_EC: np.ndarray, chances_EC: np.ndarray) -> np.ndarray:
    """Returns the average precision of each class in percent, (C,); NaN for a class without examples."""
    from sklearn.metrics import average_precision_score

    pairs = zip(labels_EC.T, chances_EC.T.astype(np.float64), strict=True)
    found = [average_precision_score(y, p) if y.any() else np.nan for y, p in pairs]
    return 100 * np.array(found)


def results(found: Mapping[str, Sequence[Run]]) -> Table:
    """Returns the table of results. Scores and seconds are means ± standard deviations over the runs of a method.

    Scores are measured at the best step, except in the column "weighted F1, last step".
    """
    rows = []
    for way, runs in found.items():
        summaries = [run.summary for run in runs]
        measured = [scores(run.predictions) for run in runs]
        last, best = ([s[which][METRIC] for s in summaries] for which in ("test_last", "test"))
        flops = float(np.mean([s["flops"] for s in summaries]))
        seconds = [s["train_seconds"] + s["start_seconds"] for s in summaries]
        rows.append(
            (
                find(way).name,
                *(mean_std([one[name] for one in measured], 2) for name in measured[0]),
                mean_std(best, 2),
                mean_std(last, 2),
                summaries[0]["params"]["trainable"],
                f"{flops:.3g}" if flops else None,  # FLOPs of logistic regression are not counted
                mean_std(seconds, 1),
            )
        )
    others = "weighted F1", "weighted F1, last step", "parameters trained", "FLOPs", "training (s)"
    return Table(("", *measured[0], *others), rows)


def verdict_table(verdicts: Mapping[tuple[str, str], Comparison]) -> Table:
    """Returns the table of verdicts, a row for each pair of training methods."""
    columns = "weighted F1 of", "against", "difference", f"{CONFIDENCE:.0%} interval", "verdict"
    rows = [
        (find(a).name, find(b).name, f"{x.difference:+.2f}", _interval(x), str(x), x.noise)
        for (a, b), x in verdicts.items()
    ]
    return Table((*columns, "noise of"), rows)


def macro_f1(found: Classes) -> float:
    """Returns the mean F1 in percent over the classes that have test examples or predictions."""
    from sklearn.metrics import f1_score

    return 100 * float(f1_score(found.labels_E, found.guesses_E, average="macro"))


def best_run(found: Mapping[str, Sequence[Run]]) -> tuple[str, Run]:
    """Returns the training method with the best mean weighted F1 on the split `eval.select`, and its best run."""
    way = max(found, key=lambda way: _valid(found[way]))
    return way, max(found[way], key=lambda run: run.curve.best.value)


def command(run: Run, ending: str = ".csv", options: Sequence[str] = ()) -> str:
    """Returns the command that classifies the texts in the table new{ending} with a run and with further `options`."""
    files = f"--input=new{ending}", f"--output=labelled{ending}"
    given = map(shlex.quote, (f"--run={shown(run.folder)}", *files, *options))
    return f"python -m perception.classify {' '.join(given)}"


def compare_within_runs(
    a: Sequence[Predictions], b: Sequence[Predictions], margin: float
) -> Comparison:
    """Compares the weighted F1 of two predictions of each run, A minus B, without correction for multiple comparisons.

    The two predictions may come from two quantizations of the run, for example. The differences are taken within each
    run, so noise that both predictions share cancels. The interval of a single run covers only the noise of
    test examples. All predictions must have the same test examples.
    """
    points_a, points_b = ([one.metrics()[METRIC] for one in some] for some in (a, b))
    moved_a, moved_b = (np.stack([one[METRIC] for one in resample(some)]) for some in (a, b))
    differences = tuple(x - y for x, y in zip(points_a, points_b, strict=True))
    single = len(differences) == 1
    sample = Sample(differences, seedless=single, resampled_RB=moved_a - moved_b)
    nothing = Sample((0.0,), seedless=True, resampled_RB=np.zeros_like(moved_a[:1]))
    shared = shared_variance(sample, nothing, len(a[0]))
    return Comparison(METRIC, "max", sample, nothing, margin, shared)


def example_interval(found: Classes | LabelSets) -> tuple[float, float]:
    """Returns the 95 % confidence interval of a classifier's weighted F1 over test examples.

    The interval follows the rule of `common.report.significance` for a run without randomness. If all predictions are
    correct, the bootstrap has no variance. The lower bound is then the exact (Clopper-Pearson) bound of the accuracy.
    """
    value = found.metrics()[METRIC]
    if value == 100:
        return 100 * ((1 - CONFIDENCE) / 2) ** (1 / len(found)), 100.0
    variance = float(resample([found])[0][METRIC].var(ddof=1))
    return _score_interval(Sample((value,), seedless=True), variance)


def draws_interval(predicted: Sequence[Classes | LabelSets]) -> tuple[float, float]:
    """Returns the 95 % confidence interval of the mean weighted F1 over random draws of the training examples.

    The interval follows the rule of `common.report.significance`. Its variance is the sum of two parts: one from the
    draws and seeds, and one from the test examples, which all runs share.

    Args:
      predicted: test predictions of runs with different seeds, at least two.
    """
    values = tuple(one.metrics()[METRIC] for one in predicted)
    sample = Sample(values, resampled_RB=np.stack([one[METRIC] for one in resample(predicted)]))
    own = sample.idiosyncratic_variance / len(values)
    shared = max(float(sample.resampled_RB.mean(0).var(ddof=1)) - own, 0.0)
    return _score_interval(sample, shared)


def _score_interval(sample: Sample, shared_variance: float) -> tuple[float, float]:
    """Returns the interval of a weighted F1, clipped to [0, 100]: the interval of its difference from 0."""
    zero = Sample((0.0,), seedless=True)
    one = Comparison(METRIC, "max", sample, zero, 0.0, shared_variance)
    return max(one.low, 0.0), min(one.high, 100.0)


def _valid(runs: Sequence[Run]) -> float:
    """Returns the mean over runs of the best weighted F1 of each run on the split `eval.select`."""
    return float(np.mean([run.curve.best.value for run in runs]))


def choose(found: Mapping[str, Sequence[Run]]) -> str | None:
    """Returns the training method that uses pretrained weights and has the best mean F1 on the split `eval.select`.

    Returns None if no method used pretrained weights.
    """
    pretrained = [way for way in found if find(way).pretrained]
    return max(pretrained, key=lambda way: _valid(found[way]), default=None)


def judge(found: Mapping[str, Sequence[Run]], margin: float) -> dict[tuple[str, str], Comparison]:
    """Compares the weighted test F1 of pairs of methods, with correction for multiple comparisons.

    The pairs are: the method of `choose` and full training from random weights; full training from pretrained and from
    random weights; TF-IDF and the method of `choose`; TF-IDF and full training from random weights; TF-IDF and the
    head. A pair is left out if one of its methods was not run.
    """
    chosen = choose(found)
    pairs = [(chosen, "full"), ("full_pretrained", "full")]
    pairs += [("tf_idf", other) for other in (chosen, "full", "head")]
    pairs = [pair for pair in dict.fromkeys(pairs) if set(pair) <= set(found)]
    compared = [
        next(c for c in compare(found[a], found[b], {METRIC: margin}) if c.metric == METRIC)
        for a, b in pairs
    ]
    return dict(zip(pairs, correct(compared), strict=True))


def _interval(one: Comparison) -> str:
    """Formats the confidence interval of a difference; "" if it is undefined (see `Comparison.half_width`)."""
    return "" if np.isnan(one.low) else f"{one.low:+.1f} to {one.high:+.1f}"


def triviality(found: Classes | LabelSets, score: float) -> str:
    """Returns sentences that compare a classifier with always predicting the most frequent class of the test examples.

    Args:
      found: test predictions of the classifier.
      score: its weighted F1, or the mean over the draws of its training examples.
    """
    several = isinstance(found, LabelSets)
    one_hot_CC = np.eye(len(found.names), dtype=np.int32)
    labels_EC = found.labels_EC if several else one_hot_CC[found.labels_E]
    guesses_EC = found.guesses_EC if several else one_hot_CC[found.guesses_E]
    common = int(labels_EC.sum(0).argmax())
    constant_EC = np.broadcast_to(one_hot_CC[common].astype(labels_EC.dtype), labels_EC.shape)
    constant = (
        replace(found, guesses_EC=constant_EC)
        if several
        else replace(found, guesses_E=np.full_like(found.guesses_E, common))
    )
    trivial = constant.metrics()[METRIC]
    said = [
        f"Always predicting {found.names[common]!r}, the most frequent class, has a weighted F1 of {trivial:.1f} on the"
        " same test examples."
    ]
    if round(score, 1) <= round(trivial, 1):  # as printed
        said.append("The best classifier is not better than always predicting this class.")
    missed = np.flatnonzero(labels_EC.any(0) & ~guesses_EC.any(0)).tolist()
    if missed:
        some = ", ".join(repr(found.names[n]) for n in missed[:SHOWN])
        more = f" and {len(missed) - SHOWN:,} more" if len(missed) > SHOWN else ""
        said.append(f"For the test examples, the best classifier never predicts {some}{more}.")
    return " ".join(said)


def answer(
    found: Mapping[str, Sequence[Run]],
    verdicts: Mapping[tuple[str, str], Comparison],
    size: tuple[int, float, int],
    select: str,
    shots: int = 0,
    pretrained: bool = False,
) -> str:
    """Returns the text of answer.txt: best classifier, scores, verdicts, and the gain that the paper's data predict.

    Args:
      size: number of training examples, of tokens in the training examples, and of test examples.
      select: split on which the best steps and the methods were selected: "valid" or "test".
      shots: number of training examples per class, drawn again for each seed; 0 if the runs used all examples.
      pretrained: whether --config.pretrained is set.
    """
    chosen, (examples, tokens, tests) = choose(found), size
    reached = ", ".join(f"{find(way).name} {_mean(runs)}" for way, runs in found.items())
    way, best = best_run(found)
    on = "test examples, as in the recipe :paper" if select == "test" else "validation examples"
    selected = f"selected on the {on}"
    score = best.test
    if shots and len(found[way]) > 1:
        low, high = draws_interval([run.predictions for run in found[way]])
        score = float(np.mean([run.test for run in found[way]]))
        reaches = (
            f"with a mean weighted F1 of {score:.1f} over {len(found[way])} draws of {shots} examples per class,"
            f" on {tests:,} test examples ({CONFIDENCE:.0%} interval {low:.1f} to {high:.1f}, from draws and test"
            " examples)"
        )
    else:
        low, high = example_interval(best.predictions)
        reaches = (
            f"with a weighted F1 of {score:.1f} on {tests:,} test examples ({CONFIDENCE:.0%} interval {low:.1f} to"
            f" {high:.1f}, from the test examples)"
        )
    lines = [
        f"Best classifier, {selected}: {find(way).name}, {reaches}.",
        triviality(best.predictions, score),
        f"Trained on {examples:,} examples (about {tokens:,.0f} tokens), weighted F1 of each method: {reached}.",
    ]
    if chosen and chosen != way:
        lines.append(f"Best use of the pretrained weights, {selected}: {find(chosen).name}.")
    for (a, b), one in verdicts.items():
        interval = _interval(one)
        lines.append(
            f"{find(a).name} against {find(b).name}: {one.difference:+.1f}"
            f"{f' ({interval})' if interval else ''}: {one}."
        )
    for (a, b), one in verdicts.items():
        other = {(a, "worse"): b, (b, "better"): a}.get((way, one.word))
        if other:
            lines.append(
                f"Validation and test disagree: on the test examples {find(other).name} is better than the selected"
                f" {find(way).name}. Selecting a classifier by its test score would bias this score upwards."
            )
    line = richness.expectation()
    expected = f"{line.gap(tokens):+.1f} ± {line.margin(tokens):.1f}"
    untried = ""
    if not chosen:
        untried = "; no method here used the pretrained weights"
        if not pretrained:
            untried = "; pretrained weights were not tried here: add --config.pretrained=DIR"
    lines.append(
        "Expected difference between LoRA and full training from random weights, from the paper's data sets at this"
        f" size: {expected} ({CONFIDENCE:.0%} prediction interval){untried}."
    )
    return "\n".join(lines)


def only_baseline(seconds: float) -> str:
    """Returns the sentence that says that a budget is too short for every method besides the baseline."""
    return (
        f"Only TF-IDF was trained, because the budget of {format_seconds(seconds)} is too short for the other methods:"
        " repeat the command with a longer --budget."
    )


def describe(plan: Plan, seconds: float, select: str) -> list[str]:
    """Returns sentences for the report: the planned methods that train in steps, and why other methods are left out.

    The learning rates are selected on the split `select`, "valid" or "test".
    """
    trained = [find(way).name for way in plan.ways if way in TRAINED]
    said = []
    if trained:
        said.append(
            f"Budget of {format_seconds(seconds)}: {', '.join(trained)}, {plan.steps:,} steps each, with"
            f" {plan.seeds} seed{'s' * (plan.seeds != 1)}. The learning rate of each method is the best on the"
            f" {'test' if select == 'test' else 'validation'} examples among {', '.join(LEARNING_RATES)}."
        )
    said += [f"Left out: {find(way).name}: {why}." for way, why in plan.left_out.items()]
    return said


def _mean(runs: Sequence[Run]) -> str:
    """Formats the mean test F1 ± standard deviation over runs, or the test F1 of a single run."""
    single = len(runs) == 1 and runs[0].seed is not None
    return mean_std([run.test for run in runs]) + " (one seed)" * single
