"""What the formula can and cannot give, and how far optimizer and cold start decide a comparison.

Neither table is in the paper."""

import math

import jax
import numpy as np

from common import variables
from common.report.table import spread
from common.train.task import Values
from explicit_opt.counts import language_solution
from explicit_opt.experiments import CONTEXTS, PRINTED, Laboratory
from explicit_opt.language import NextToken

OPTIMIZERS = {"adam": 1e-3, "adagrad": 1e-2}
"""Learning rates."""


def formula(lab: Laboratory) -> None:
    """Perplexities before training under other exponents and the other sign, beside the printed T-p and D-p."""
    rows = []
    for aggregate in PRINTED:
        for context in CONTEXTS:
            if aggregate == "cat" and context == 1:
                continue  # the same model as the sum
            config = lab.language(aggregate, context, "explicit")
            config.eval.train_tokens = 0
            task = NextToken(config, lab.mesh)
            counts = task.counts()
            if context == 1:
                rows.append((aggregate, 1, "maximum-likelihood bigram", bigram_perplexity(counts), None))  # fmt: skip
            for name, exponent, sign in _readings(context):
                found = _perplexities(task, counts, exponent, sign)
                rows.append((aggregate, context, name, *found))
            rows.append((aggregate, context, "printed", *PRINTED[aggregate][context][2:4]))
    lab.write("formula", ("input", "K", "prior", "training", "development"), rows)


def _readings(context: int) -> list[tuple[str, float, int]]:
    """Name, exponent and sign."""
    share, other = (context - 1) / context, context / (context + 1)
    readings = [("f^-(K-1)/K, eq. 3", share, -1), ("f^-K/(K+1)", other, -1)]
    return readings if context == 1 else [*readings, ("f^+(K-1)/K, section 2.1", share, 1)]


def bigram_perplexity(counts_1NN: jax.Array) -> float:
    """Of the training text under the relative frequencies of its own pairs: the least that any table can reach."""
    counts = np.asarray(counts_1NN[0], np.float64)
    rows, columns = np.nonzero(counts)
    seen = counts[rows, columns]
    likelihood = np.sum(seen * np.log(seen / counts.sum(1)[rows]))
    return math.exp(-likelihood / counts.sum())


def _perplexities(task: NextToken, counts: jax.Array, exponent: float, sign: int) -> list[float]:
    tables = language_solution(
        counts,
        task.noise,
        task.targets_N,
        concatenate=task.config.model.aggregate == "cat",
        exponent=exponent,
        sign=sign,
    )
    structure = variables.abstract(lambda: task.build(variables.Keys(0)))
    measured = task.evaluate(Values(structure, {"tables": tables}, {}, task.mesh), "valid")
    return [measured["train_perplexity"], measured["perplexity"]]


def sensitivity(lab: Laboratory) -> None:
    """Test accuracy of one layer over digits, from the explicit and from two cold starts, by two optimizers."""
    rows = []
    for optimizer, rate in OPTIMIZERS.items():
        for start, cold in (("warm", "normal"), ("cold", "normal"), ("cold", "torch")):
            accuracies, epochs = [], []
            for seed in range(1, 1 + lab.seeds):
                config = lab.digits(1, start, seed)
                config.optimizer.update({"name": optimizer, "learning_rate": rate})
                config.model.cold = cold
                name = f"digits_1_{start}_{cold}_{optimizer}_seed{seed}"
                summary, _ = lab.fit(name, config)
                accuracies.append(summary["test"]["accuracy"])
                epochs.append(len(summary["curve"]["points"]) - 1)
            drawn = {"normal": "N(0, 1)", "torch": "U(±1/√D)"}[cold] if start == "cold" else ""
            rows.append((optimizer, f"{rate:g}", start, drawn, spread(accuracies, 2), spread(epochs, 0)))  # fmt: skip
    columns = ("optimizer", "rate", "start", "drawn from", "test accuracy %", "epochs")
    lab.write("sensitivity", columns, rows)
