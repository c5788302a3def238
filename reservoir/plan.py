"""What the runs of a table or figure cost, without their data: python -m reservoir.reproduce table1 --dry-run"""

import math
import time

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from common import variables
from common.model.transformer import compute_dtype
from common.report.table import text
from common.track.tracker import SUMMARY
from common.variables import Structure
from reservoir import run
from reservoir.experiments import Laboratory

SIZE = 2048
"""Of the matrices whose product tells how fast this machine is."""


def show(lab: Laboratory, target: str) -> None:
    """A line for each run, and the hours of all that are not there yet."""
    rows, total, rates = [], 0.0, {}
    for cases in lab.needed(target).values():
        for case in cases:
            config = lab.configuration(case, 1)
            run.validate(config)
            structure = abstract(config)
            dtype = compute_dtype(config.model.dtype)
            rates[dtype] = rates.get(dtype) or rate(dtype)
            hours = config.train.steps * flops(config, structure) / rates[dtype] / 3600
            counts = variables.count(structure)
            for seed in range(1, 1 + lab.seeds):
                done = (lab.workdir(case, seed) / SUMMARY).exists()
                total += 0 if done else hours
                sizes = (counts["trainable"], counts["total"], config.train.steps)
                rows.append((case.name(seed), *sizes, f"{hours:.3g}", "yes" if done else ""))
    columns = ("run", "trained", "parameters", "steps", "hours, at least", "done")
    print(text(columns, rows))
    print(f"{total:.3g} hours of matrix products are left at the rate of this machine;")
    print(
        "attention, everything element by element and evaluation come on top: expect two or three times that"
    )


def abstract(config: ConfigDict) -> Structure:
    """The model with as many tokens as its vocabulary may have."""
    build = run.TASKS[config.task][-1]
    tokens = config.data.get("vocab_size", 256)
    sizes = (tokens, tokens) if config.task == "translation" else (tokens,)
    return variables.abstract(lambda: build(config.model, *sizes, rngs=variables.Keys(0)))


def flops(config: ConfigDict, structure: Structure) -> float:
    """Of a training step: two operations for each weight and token forward, two for the gradient of what goes in.

    And two for the gradient of the weight where it is trained. Tables count where they are the output layer.
    """
    data, model = config.data, config.model
    length = model.get("length", model.get("max_length"))
    tokens = data.get("tokens_per_batch") or data.batch * length
    total = 0
    for some, each in ((structure.trainable, 6), (structure.frozen, 4)):
        for name, variable in some.items():
            is_output = name.endswith("table") and "source" not in name
            if name.endswith("kernel") or is_output:
                share = data.get("masked", 1.0) if is_output else 1.0
                total += each * share * math.prod(variable.shape)
    return total * tokens


def rate(dtype: jnp.dtype) -> float:
    """Operations per second of all devices in a product of two matrices."""
    one = jax.random.normal(jax.random.key(0), (SIZE, SIZE)).astype(dtype)
    product = jax.jit(lambda a: jnp.matmul(a, a, preferred_element_type=jnp.float32))
    product(one).block_until_ready()
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        product(one).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return 2 * SIZE**3 / float(np.median(seconds)) * jax.device_count()
