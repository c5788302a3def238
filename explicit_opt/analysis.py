"""Writes two tables that are not in the paper.

`formula` evaluates eq. (3) with several exponents and signs. `sensitivity` trains digit classifiers with several
optimizers and starts.
"""

import math
from functools import partial

import jax
import numpy as np
from ml_collections import ConfigDict

from common.report.table import mean_std
from explicit_opt.counts import language_solution
from explicit_opt.experiments import CONTEXTS, INPUTS, PRINTED, ExperimentSuite, digits_result
from explicit_opt.language import NextToken

OPTIMIZERS = {"adam": 1e-3, "adagrad": 1e-2}
"""Optimizer -> learning rate."""

STARTS = (
    ("warm", "normal"),
    ("scaled", "normal"),
    ("zero", "normal"),
    ("cold", "normal"),
    ("cold", "torch"),
)
"""Pairs (`config.start`, `config.model.cold`). Only the start "cold" uses the initializer `model.cold`."""

BOUND = "maximum-likelihood bigram, all tokens: a bound"

DOCUMENTS = ("line", "file")
"""Values of `config.data.documents` in `formula`: each line, or each file, is a document. Contexts do not cross
documents. The paper does not define a document."""


def formula(suite: ExperimentSuite) -> None:
    """Writes the perplexities of the explicit solution without training, for each reading of eq. (3) (`_readings`).

    Computes the weights from all training tokens, for both definitions of a document (`DOCUMENTS`). Measures training
    perplexity on evenly spaced training tokens, and development perplexity on the whole development text. The table
    also has the paper's values and, for contexts of one token (K = 1), the training perplexity of the
    maximum-likelihood bigram on all training tokens and on the measured tokens.
    """
    rows = []
    for documents in DOCUMENTS:
        for aggregate in INPUTS:
            for context in CONTEXTS:
                if aggregate == "cat" and context == 1:
                    continue  # with K = 1, concatenation and sum are the same model
                fields = {"data.documents": documents, "data.tokens": 0, "data.held_out_share": 1.0}
                task = NextToken(
                    suite.language(aggregate, context, "explicit", **fields), suite.mesh
                )
                counts, model = task.counts(), (aggregate, context, documents)
                if context == 1:
                    measured = sampled_bigram_perplexity(counts, task)
                    rows += [
                        (*model, BOUND, bigram_perplexity(counts), None),
                        (*model, "the same on the measured tokens", measured, None),
                    ]
                for name, exponent, sign in _readings(context):
                    rows.append((*model, name, *_perplexities(task, counts, exponent, sign)))
    for (aggregate, context), paper in PRINTED.items():
        for name, first in (("explicit", 2), ("cold", 0), ("warm", 4)):
            cells = paper[first : first + 2]
            rows.append((aggregate, context, "", f"printed, {name}", *cells))
    columns = ("input", "K", "documents", "prior", "training", "development")
    suite.write("formula", columns, rows)


def _readings(context: int) -> list[tuple[str, float, int]]:
    """Returns the readings of eq. (3) for K = `context` tokens: (name, exponent of f, sign of the exponent).

    Eq. (3) has the sign -, the sentence before eq. (3) the sign +. The sign + is left out for K = 1,
    where the exponent (K - 1) / K is 0.
    """
    printed, other = (context - 1) / context, context / (context + 1)
    readings = [("f^-(K-1)/K, eq. 3", printed, -1), ("f^-K/(K+1)", other, -1)]
    return readings if context == 1 else [*readings, ("f^+(K-1)/K, section 2.1", printed, 1)]


def bigram_perplexity(counts_1VV: jax.Array) -> float:
    """Returns the training perplexity of the maximum-likelihood bigram, the lowest of all models with K = 1."""
    counts = np.asarray(counts_1VV[0], np.float64)
    rows, columns = np.nonzero(counts)
    seen = counts[rows, columns]
    likelihood = np.sum(seen * np.log(seen / counts.sum(1)[rows]))
    return math.exp(-likelihood / counts.sum())


def sampled_bigram_perplexity(counts_1VV: jax.Array, task: NextToken) -> float:
    """Returns the perplexity of the maximum-likelihood bigram on the training tokens that `NextToken.evaluate` uses."""
    counts, train = np.asarray(counts_1VV[0], np.float64), task.splits["train"]
    batch = train.gather(np.arange(0, len(train), task.training_stride))
    before_B, target_B = batch["contexts"][:, 0], batch["targets"]
    chances_B = counts[before_B, target_B] / counts.sum(1)[before_B]
    return math.exp(-np.log(chances_B).mean())


def _perplexities(task: NextToken, counts: jax.Array, exponent: float, sign: int) -> list[float]:
    tables = language_solution(
        counts,
        task.noise,
        task.targets_V,
        concatenate=task.config.model.aggregate == "cat",
        exponent=exponent,
        sign=sign,
    )
    measured = task.evaluate(task.with_parameters({"tables": tables}), "valid")
    return [measured["train_perplexity"], measured["perplexity"]]


def sensitivity(suite: ExperimentSuite) -> None:
    """Trains one softmax layer on digits for `STARTS` and `OPTIMIZERS`; writes test metrics and numbers of epochs."""
    cases = {
        (optimizer, *start): suite.named(f"digits_1_{'_'.join(start)}_{optimizer}")
        for optimizer in OPTIMIZERS
        for start in STARTS
    }
    runs = suite.runs({name: partial(_digits, suite, *case) for case, name in cases.items()})
    rows = []
    for (optimizer, start, cold), name in cases.items():
        tested, curves = zip(*(digits_result(suite, ran) for ran in runs[name]), strict=True)
        drawn = {"normal": "N(0, 1)", "torch": "U(±1/√D)"}[cold] if start == "cold" else ""
        cells = [
            mean_std([t[metric] for t in tested], digits)
            for metric, digits in (("accuracy", 2), ("loss", 3))
        ]
        epochs = mean_std([len(points) - 1 for points in curves], 0)
        rows.append((optimizer, f"{OPTIMIZERS[optimizer]:g}", start, drawn, *cells, epochs))
    columns = (
        "optimizer",
        "learning rate",
        "start",
        "drawn from",
        "test accuracy %",
        "test cross-entropy",
    )
    suite.write(suite.named("sensitivity"), (*columns, "epochs"), rows)


def _digits(suite: ExperimentSuite, optimizer: str, start: str, cold: str, seed: int) -> ConfigDict:
    config = suite.digits(1, start, seed, **{"model.cold": cold})
    config.optimizer.update({"name": optimizer, "learning_rate": OPTIMIZERS[optimizer]})
    return config
