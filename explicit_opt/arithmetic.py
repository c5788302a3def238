"""What the formula can and cannot give, and how far optimizer and cold start decide a comparison.

Neither table is in the paper."""

import math
from functools import partial

import jax
import numpy as np
from ml_collections import ConfigDict

from common import variables
from common.report.table import mean_std
from common.train.task import ModelState
from explicit_opt.counts import language_solution
from explicit_opt.experiments import CONTEXTS, PRINTED, ExperimentSuite, digits_result
from explicit_opt.language import NextToken

OPTIMIZERS = {"adam": 1e-3, "adagrad": 1e-2}
"""Learning rates."""

STARTS = (
    ("warm", "normal"),
    ("scaled", "normal"),
    ("zero", "normal"),
    ("cold", "normal"),
    ("cold", "torch"),
)
"""Starts, and what a cold one is drawn from."""


BOUND = "maximum-likelihood bigram, all tokens: a bound"

DOCUMENTS = ("line", "file")
"""Where contexts end; the paper does not say."""


def formula(suite: ExperimentSuite) -> None:
    """Perplexities before training under other exponents, the other sign and two readings of documents.

    Counted on all training tokens and measured on every n-th. Beside them the printed columns, and the least that any
    table with K = 1 can reach on this text. Development perplexity is of the whole development text.
    """
    rows = []
    for documents in DOCUMENTS:
        for aggregate in PRINTED:
            for context in CONTEXTS:
                if aggregate == "cat" and context == 1:
                    continue  # the same model as the sum
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
    for aggregate, printed in PRINTED.items():
        for context in CONTEXTS:
            for name, first in (("explicit", 2), ("cold", 0), ("warm", 4)):
                cells = printed[context][first : first + 2]
                rows.append((aggregate, context, "", f"printed, {name}", *cells))
    columns = ("input", "K", "documents", "prior", "training", "development")
    suite.write("formula", columns, rows)


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


def sampled_bigram_perplexity(counts_1NN: jax.Array, task: NextToken) -> float:
    """As `bigram_perplexity`, of those training tokens on which the task measures training perplexity."""
    counts, train = np.asarray(counts_1NN[0], np.float64), task.splits["train"]
    batch = train.gather(np.arange(0, len(train), task.training_stride))
    before_B, target_B = batch["contexts"][:, 0], batch["targets"]
    chances_B = counts[before_B, target_B] / counts.sum(1)[before_B]
    return math.exp(-np.log(chances_B).mean())


def _perplexities(task: NextToken, counts: jax.Array, exponent: float, sign: int) -> list[float]:
    tables = language_solution(
        counts,
        task.noise,
        task.targets_N,
        concatenate=task.config.model.aggregate == "cat",
        exponent=exponent,
        sign=sign,
    )
    abstract_model = variables.abstract(lambda: task.build(variables.ParamKeys(0)))
    measured = task.evaluate(ModelState(abstract_model, {"tables": tables}, {}, task.mesh), "valid")
    return [measured["train_perplexity"], measured["perplexity"]]


def sensitivity(suite: ExperimentSuite) -> None:
    """Test accuracy of one layer over digits, from every start, by two optimizers."""
    cases = {
        (optimizer, *start): suite.named(f"digits_1_{'_'.join(start)}_{optimizer}")
        for optimizer in OPTIMIZERS
        for start in STARTS
    }
    found = suite.runs({name: partial(_digits, suite, *case) for case, name in cases.items()})
    rows = []
    for (optimizer, start, cold), name in cases.items():
        tested, curves = zip(*(digits_result(suite, ran) for ran in found[name]), strict=True)
        drawn = {"normal": "N(0, 1)", "torch": "U(±1/√D)"}[cold] if start == "cold" else ""
        cells = [
            mean_std([t[metric] for t in tested], digits)
            for metric, digits in (("accuracy", 2), ("loss", 3))
        ]
        epochs = mean_std([len(points) - 1 for points in curves], 0)
        rows.append((optimizer, f"{OPTIMIZERS[optimizer]:g}", start, drawn, *cells, epochs))
    columns = ("optimizer", "rate", "start", "drawn from", "test accuracy %", "test cross-entropy")
    suite.write(suite.named("sensitivity"), (*columns, "epochs"), rows)


def _digits(suite: ExperimentSuite, optimizer: str, start: str, cold: str, seed: int) -> ConfigDict:
    config = suite.digits(1, start, seed, **{"model.cold": cold})
    config.optimizer.update({"name": optimizer, "learning_rate": OPTIMIZERS[optimizer]})
    return config
