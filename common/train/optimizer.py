"""Schedules and optimizers, by name."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from common.config import check, check_choice

WARMUP = 0.05
"""The default warm-up, as a share of the run's steps."""


def warmup_steps(optimizer: ConfigDict, steps: int) -> int:
    """Warm-up steps of a run of `steps`; -1 in the configuration means the share `WARMUP`."""
    return round(WARMUP * steps) if optimizer.warmup_steps == -1 else optimizer.warmup_steps


def inverse_sqrt(optimizer: ConfigDict, steps: int) -> optax.Schedule:
    """fairseq's schedule: linear from `warmup_init` to the learning rate, then learning rate * sqrt(warmup / step)."""
    warmup = max(warmup_steps(optimizer, steps), 1)

    def schedule(step):
        rise = (
            optimizer.warmup_init
            + step * (optimizer.learning_rate - optimizer.warmup_init) / warmup
        )
        fall = optimizer.learning_rate * jnp.sqrt(warmup / jnp.maximum(step, 1.0))
        return jnp.where(step < warmup, rise, fall)

    return schedule


def _with_warmup(
    optimizer: ConfigDict, decay: Callable[[int], optax.Schedule], steps: int
) -> optax.Schedule:
    warmup = warmup_steps(optimizer, steps)
    rise = optax.linear_schedule(optimizer.warmup_init, optimizer.learning_rate, max(warmup, 1))
    return optax.join_schedules([rise, decay(max(steps - warmup, 1))], [warmup])


def cosine(optimizer: ConfigDict, steps: int) -> optax.Schedule:
    return _with_warmup(
        optimizer, lambda n: optax.cosine_decay_schedule(optimizer.learning_rate, n), steps
    )


def linear(optimizer: ConfigDict, steps: int) -> optax.Schedule:
    return _with_warmup(
        optimizer, lambda n: optax.linear_schedule(optimizer.learning_rate, 0.0, n), steps
    )


def constant(optimizer: ConfigDict, steps: int) -> optax.Schedule:
    return _with_warmup(
        optimizer, lambda n: optax.constant_schedule(optimizer.learning_rate), steps
    )


SCHEDULES = {"inverse_sqrt": inverse_sqrt, "cosine": cosine, "linear": linear, "constant": constant}


_UNDECAYED = ("bias", "positions/table")
"""Path suffixes of two-dimensional arrays that do not decay: biases of gate heads and position embeddings."""


def matrices(params: Any) -> Any:
    """The weight-decay mask of `decay="matrices"`: a tree of booleans.

    As in GPT-2's public recipes, arrays of at least two dimensions decay: weights of linear layers and spatial gating
    units, and token embeddings. Biases and norm scales do not. Unlike in those recipes, position embeddings do not.
    """

    def is_matrix(path: tuple, x: jax.Array) -> bool:
        return x.ndim >= 2 and not path[-1].key.endswith(_UNDECAYED)

    return jax.tree.map_with_path(is_matrix, params)


DECAYS: dict[str, Callable | None] = {"matrices": matrices, "all": None}
"""Weight-decay masks by name; None decays every trainable parameter."""


def _decay(optimizer: ConfigDict) -> optax.GradientTransformation:
    return optax.add_decayed_weights(optimizer.weight_decay, DECAYS[optimizer.decay])


def adam(optimizer: ConfigDict, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Adam with L2 regularization in the gradient. fairseq's "adam" decouples weight decay: that is `adamw` here."""
    parts = [optax.scale_by_adam(optimizer.beta1, optimizer.beta2, optimizer.epsilon)]
    if optimizer.weight_decay:
        parts.insert(0, _decay(optimizer))
    return optax.chain(*parts, optax.scale_by_learning_rate(schedule))


def adamw(optimizer: ConfigDict, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Adam with decoupled weight decay."""
    return optax.adamw(
        schedule,
        optimizer.beta1,
        optimizer.beta2,
        optimizer.epsilon,
        weight_decay=optimizer.weight_decay,
        mask=DECAYS[optimizer.decay],
    )


def adagrad(optimizer: ConfigDict, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Adagrad with PyTorch's initial accumulator of 0.

    PyTorch adds epsilon to the root of the accumulator, optax to the accumulator: with the square of epsilon the two
    agree where the accumulator is 0 or much larger than epsilon squared.
    """
    return optax.adagrad(schedule, initial_accumulator_value=0.0, eps=optimizer.epsilon**2)


def adafactor(optimizer: ConfigDict, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Adafactor (Shazeer & Stern, 2018) with an external learning rate and no first moment, as in transformers.

    The second moment of a matrix is factored into row and column means, updates are clipped at a root mean square of 1,
    and weight decay is decoupled.
    """
    return optax.chain(
        optax.scale_by_factored_rms(
            decay_rate=0.8, min_dim_size_to_factor=1, epsilon=optimizer.epsilon
        ),
        optax.clip_by_block_rms(1.0),
        _decay(optimizer),
        optax.scale_by_learning_rate(schedule),
    )


OPTIMIZERS = {"adam": adam, "adamw": adamw, "adagrad": adagrad, "adafactor": adafactor}


def validate(optimizer: ConfigDict) -> None:
    check_choice("--config.optimizer.name", optimizer.name, OPTIMIZERS)
    check_choice("--config.optimizer.schedule", optimizer.schedule, SCHEDULES)
    check_choice("--config.optimizer.decay", optimizer.decay, DECAYS)
    check(
        optimizer.learning_rate > 0,
        f"--config.optimizer.learning_rate must be above 0, got {optimizer.learning_rate}",
    )
    check(
        optimizer.epsilon > 0,
        f"--config.optimizer.epsilon must be above 0, got {optimizer.epsilon}",
    )
    check(
        optimizer.name != "adagrad" or optimizer.weight_decay == 0,
        f"--config.optimizer.weight_decay={optimizer.weight_decay}: adagrad has none",
    )
    check(
        optimizer.warmup_steps >= -1,
        "--config.optimizer.warmup_steps must not be negative, but for -1,"
        f" a twentieth of the steps, got {optimizer.warmup_steps}",
    )
    for name in ("warmup_init", "clip", "weight_decay"):
        check(
            optimizer[name] >= 0,
            f"--config.optimizer.{name} must not be negative, got {optimizer[name]}",
        )
    for name in ("beta1", "beta2"):
        check(
            0 <= optimizer[name] < 1,
            f"--config.optimizer.{name} must be in [0, 1), got {optimizer[name]}",
        )


def make(
    optimizer: ConfigDict,
    steps: int,
    own: Mapping[str, float] | None = None,
    names: Iterable[str] = (),
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """The update rule and the learning rate over steps.

    Args:
      steps: the planned number of updates, where cosine and linear schedules end.
      own: learning-rate overrides: modules, named by a part of their paths, that Adam trains at this constant rate.
      names: paths of all trainable values.
    """
    schedule = SCHEDULES[optimizer.schedule](optimizer, steps)
    update = OPTIMIZERS[optimizer.name](optimizer, schedule)
    if optimizer.clip:
        update = optax.chain(optax.clip_by_global_norm(optimizer.clip), update)
    labels = {
        name: next((part for part in own or () if part in name.split("/")), "") for name in names
    }
    if own and any(labels.values()):
        rules = {"": update} | {part: optax.adam(rate) for part, rate in own.items()}
        update = optax.multi_transform(rules, labels)
    return update, schedule
