"""Estimates the training hours for a table or figure: python -m reservoir.reproduce table1 --dry-run"""

import math
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from common import variables
from common.data.lossless import BYTES
from common.model.transformer import compute_dtype
from common.report.table import text
from common.track.tracker import SUMMARY
from common.variables import AbstractModel
from reservoir import downstream, encoder, run
from reservoir.experiments import ExperimentSuite
from reservoir.finetuning import inherit

SIZE = 2048
"""Number of rows and of columns of the matrix whose product with itself is timed to measure this machine's FLOP/s."""


def show(suite: ExperimentSuite, target: str) -> None:
    """Prints model size and estimated training hours of each run of a table or figure, and the sum for missing runs."""
    rows, total, speeds, models = [], 0.0, {}, {}
    for name, config in planned(suite, target):
        # Build each abstract model once, because many fine-tuning runs have the same model.
        key = repr((config.task, config.model.to_dict(), config.get("reservoirs")))
        abstract_model = models[key] = models.get(key) or abstract(config)
        dtype = compute_dtype(config.model.dtype)
        speeds[dtype] = speeds.get(dtype) or flops_per_second(dtype)
        hours = config.train.steps * flops(config, abstract_model) / speeds[dtype] / 3600
        counts = variables.count(abstract_model)
        for seed in range(1, 1 + suite.seeds):
            done = (suite.out / "runs" / name(seed) / SUMMARY).exists()
            total += 0 if done else hours
            sizes = (counts["trainable"], counts["total"], config.train.steps)
            rows.append((name(seed), *sizes, f"{hours:.3g}", "yes" if done else ""))
    columns = ("run", "trained", "parameters", "steps", "hours, at least", "done")
    print(text(columns, rows))
    print(f"the missing runs take {total:.3g} hours of matrix products at this machine's FLOP/s;")
    print(
        "attention, the matrices over positions of gMLP layers, elementwise operations and evaluation are not included:"
        " expect two or three times as many hours"
    )


def planned(
    suite: ExperimentSuite, target: str
) -> Iterator[tuple[Callable[[int], str], ConfigDict]]:
    """Yields (function from seed to run name, configuration for seed 1) for each case and fine-tuning of a target."""
    for cases in suite.needed(target).values():
        # Rows of the table with the same model have the same runs: estimate these runs once.
        for case in {case.name(1): case for case in cases}.values():
            config = suite.configuration(case, 1)
            run.validate(config)
            yield case.name, config
    for tuning in downstream.tunings(suite, target) if target in downstream.FIGURES else ():
        before = suite.configuration(tuning.case, 1)
        config = inherit(downstream.configuration(suite, tuning, 1), before.model)
        # A fine-tuning run reads the tokenizer of its pretraining, so its configuration has no vocabulary size.
        with config.unlocked():
            config.data.vocab_size = before.data.vocab_size
        yield tuning.name, config


def abstract(config: ConfigDict) -> AbstractModel:
    """Returns the abstract model of a configuration. Classifiers are assumed to have two classes."""
    if config.task == "classification":
        return variables.abstract(
            lambda rngs: encoder.classifier(config, config.data.vocab_size, 2, rngs=rngs)
        )
    build = run.task_module(config).build
    tokens = 256 if config.data.get("tokenizer") == BYTES else config.data.vocab_size
    sizes = (tokens, tokens) if config.task == "translation" else (tokens,)
    return variables.abstract(lambda rngs: build(config.model, *sizes, rngs=rngs))


def flops(config: ConfigDict, abstract_model: AbstractModel) -> float:
    """Returns the FLOPs of a training step in products with the kernels of linear layers and the output layer.

    For each token, a weight costs 2 FLOPs in the forward pass, 2 for the gradient of the layer's input and, if trained,
    2 for the gradient of the weight. An embedding table counts only if it is the output layer, and then only for tokens
    that are predicted. Products over positions, of attention and gMLP layers, are not included. Every fine-tuning
    example counts with the length of the shortest bucket, but at most `max_length`.
    """
    data, model = config.data, config.model
    length = model.get("length", model.get("max_length"))
    classifies = config.task == "classification"
    is_tied = not classifies and model.get("tied", True)
    if classifies:
        length = min(*data.buckets, length)
    tokens = data.get("tokens_per_batch") or data.batch * length
    total = 0
    for some, each in ((abstract_model.trainable, 6), (abstract_model.frozen, 4)):
        for name, variable in some.items():
            is_output = is_tied and name.endswith("embed/table") and "source" not in name
            if name.endswith("kernel") or is_output:
                share = data.get("masked", 1.0) if is_output else 1.0
                total += each * share * math.prod(variable.shape)
    return total * tokens


def flops_per_second(dtype: jnp.dtype) -> float:
    """Times a matrix product on one device. Returns its FLOP/s times the number of devices."""
    one = jax.random.normal(jax.random.key(0), (SIZE, SIZE)).astype(dtype)
    product = jax.jit(lambda a: jnp.matmul(a, a, preferred_element_type=jnp.float32))
    product(one).block_until_ready()
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        product(one).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return 2 * SIZE**3 / float(np.median(seconds)) * jax.device_count()
