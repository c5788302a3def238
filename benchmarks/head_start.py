"""Measures whether closed-form initial weights of a linear head save training steps: python -m benchmarks.head_start

Trains a softmax head by Adam from zeros, from random values and from each method of `explicit_opt.head_start`, and
measures the test cross-entropy and accuracy after 0 to 1,000 steps. For each start and number of steps, the learning
rate is chosen on held-out training examples with seed 1. Features are divided by the largest feature of the training
examples.

Shape letters of this module: E examples, M features, N outputs.
"""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from common.config import parser_for
from common.errors import check
from common.report.table import mean_std, publish
from common.runtime import program
from configs import explicit
from explicit_opt import head_start

STEPS = (0, 10, 100, 1000)
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
STARTS = ("zero", "random", "explicit", "lda", "ridge")
SEEDS, BATCH = 5, 64

Split = tuple[np.ndarray, np.ndarray]
"""Features (E, M) and labels (E,) of a split."""


def digits(folder: Path | None) -> dict[str, Split]:
    """Returns {split: examples} of MNIST, read from `folder`, or of scikit-learn's digits if `folder` is None."""
    from common.sharding import make_mesh
    from explicit_opt.digits import Digits

    config: ConfigDict = explicit.mnist()
    if folder is None:
        config = explicit.tiny_digits(config)
    else:
        check(
            folder.is_dir(),
            f"--mnist={folder} is not a directory: give the folder with MNIST's four IDX files",
        )
        config.data.source = f"files:{folder}"
    task = Digits(config, make_mesh({"data": 1}))
    return {
        name: (task.features(name), task.splits[name][1]) for name in ("train", "valid", "test")
    }


def started(start: str, train: Split, seed: int) -> tuple[jax.Array, jax.Array]:
    """Returns the initial kernel (M, N) and bias (N,).

    `start` is "zero", "random" or a method of `explicit_opt.head_start`.
    """
    features_EM, labels_E = train
    inputs, outputs = features_EM.shape[1], int(labels_E.max()) + 1
    if start == "zero":
        return jnp.zeros((inputs, outputs)), jnp.zeros(outputs)
    if start == "random":
        draw = jax.random.normal(jax.random.key(seed), (inputs, outputs))
        return draw * inputs**-0.5, jnp.zeros(outputs)
    return tuple(map(jnp.asarray, head_start(features_EM, labels_E, method=start)))


def cross_entropy(head: tuple[jax.Array, jax.Array], features_EM, labels_E) -> jax.Array:
    """Returns the mean cross-entropy of a head (kernel, bias) in nats."""
    logits_EN = features_EM @ head[0] + head[1]
    return optax.softmax_cross_entropy_with_integer_labels(logits_EN, labels_E).mean()


@partial(jax.jit, static_argnames="steps")
def trained(head, train: Split, rate: float, seed: int, steps: int):
    """Returns the head (kernel, bias) after `steps` steps of Adam from `head`, with the learning rate `rate`."""
    optimizer = optax.adam(rate)

    def step(carry, key):
        head, state = carry
        rows_B = jax.random.randint(key, (BATCH,), 0, len(train[1]))
        grads = jax.grad(cross_entropy)(head, train[0][rows_B], train[1][rows_B])
        updates, state = optimizer.update(grads, state)
        return (optax.apply_updates(head, updates), state), None

    keys = jax.random.split(jax.random.key(seed), steps)
    (head, _), _ = jax.lax.scan(step, (head, optimizer.init(head)), keys)
    return head


def measured(
    splits: dict[str, Split], start: str, steps: int
) -> tuple[list[float], list[float], float]:
    """Returns test accuracies (%) and test cross-entropies (nats), both for each seed, and the chosen learning rate."""
    train, valid, test = (tuple(map(jnp.asarray, splits[n])) for n in ("train", "valid", "test"))
    rates = RATES if steps else RATES[:1]
    begin = {seed: started(start, splits["train"], seed) for seed in range(1, 1 + SEEDS)}
    rate = min(
        rates, key=lambda r: float(cross_entropy(trained(begin[1], train, r, 1, steps), *valid))
    )
    heads = [trained(head, train, rate, seed, steps) for seed, head in begin.items()]
    hits = [jnp.argmax(test[0] @ kernel + bias, 1) == test[1] for kernel, bias in heads]
    return (
        [100 * float(hit.mean()) for hit in hits],
        [float(cross_entropy(head, *test)) for head in heads],
        rate,
    )


def main() -> None:
    parser = parser_for("benchmarks.head_start", __doc__)
    parser.add_argument(
        "--mnist", type=Path, help="folder with MNIST's files (default: scikit-learn's digits)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/head_start"),
        help="table to write, without .csv or .md",
    )
    options = parser.parse_args()
    splits = digits(options.mnist)
    highest = splits["train"][0].max()
    splits = {name: (features / highest, labels) for name, (features, labels) in splits.items()}
    rows = []
    for steps in STEPS:
        for start in STARTS:
            accuracy, loss, rate = measured(splits, start, steps)
            cells = (mean_std(accuracy, 2), mean_std(loss, 3), f"{rate:g}" if steps else "")
            rows.append((steps, start, *cells))
    publish(
        options.out,
        ("steps", "start", "test accuracy %", "test cross-entropy", "learning rate"),
        rows,
    )


if __name__ == "__main__":
    program.run(main)
