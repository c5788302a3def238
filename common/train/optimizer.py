"""Learning-rate schedules and optimizers by name."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from common.config import check_choice, check_number
from common.errors import check
from common.model.layers import is_stacked

WARMUP = 0.05
"""Warm-up if `optimizer.warmup_steps` is -1, as a fraction of the run's steps."""


def warmup_steps(optimizer: ConfigDict, steps: int) -> int:
    """Returns the number of warm-up steps: `optimizer.warmup_steps` or, if it is -1, `WARMUP` times `steps`."""
    return round(WARMUP * steps) if optimizer.warmup_steps == -1 else optimizer.warmup_steps


def inverse_sqrt(optimizer: ConfigDict, steps: int) -> optax.Schedule:
    """Returns fairseq's schedule: linear warm-up from `warmup_init`, then learning_rate * sqrt(warmup_steps / step)."""
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
    decay: Callable[[float, int], optax.Schedule], optimizer: ConfigDict, steps: int
) -> optax.Schedule:
    """Returns a linear warm-up from `warmup_init`, followed by `decay` over the remaining steps."""
    warmup = warmup_steps(optimizer, steps)
    rise = optax.linear_schedule(optimizer.warmup_init, optimizer.learning_rate, max(warmup, 1))
    fall = decay(optimizer.learning_rate, max(steps - warmup, 1))
    return optax.join_schedules([rise, fall], [warmup])


SCHEDULES: dict[str, Callable[[ConfigDict, int], optax.Schedule]] = {
    "inverse_sqrt": inverse_sqrt,
    "cosine": partial(_with_warmup, optax.cosine_decay_schedule),
    "linear": partial(_with_warmup, lambda rate, steps: optax.linear_schedule(rate, 0.0, steps)),
    "constant": partial(_with_warmup, lambda rate, steps: optax.constant_schedule(rate)),
}


_UNDECAYED = ("bias", "positions/table")
"""Path suffixes of arrays of two dimensions without weight decay: biases of spatial gates, one for each head and
position, and position embeddings."""


def matrices(params: Any) -> Any:
    """Returns the weight-decay mask of `decay="matrices"`: a tree of booleans.

    Arrays of at least two dimensions decay, as in GPT-2's public recipes, except arrays whose paths end in `_UNDECAYED`
    (GPT-2's recipes decay position embeddings). The layer axis of a stacked array does not count as a dimension.
    """

    def is_matrix(path: tuple, x: jax.Array) -> bool:
        return x.ndim - is_stacked(path[-1].key) >= 2 and not path[-1].key.endswith(_UNDECAYED)

    return jax.tree.map_with_path(is_matrix, params)


DECAYS: dict[str, Callable | None] = {"matrices": matrices, "all": None}
"""Value of `optimizer.decay` -> weight-decay mask for optax; None decays every trainable parameter."""


def _decay(optimizer: ConfigDict) -> optax.GradientTransformation:
    return optax.add_decayed_weights(optimizer.weight_decay, DECAYS[optimizer.decay])


def adam(optimizer: ConfigDict, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Returns Adam with L2 regularization in the gradient. (fairseq's "adam" decouples weight decay: see `adamw`.)"""
    parts = [optax.scale_by_adam(optimizer.beta1, optimizer.beta2, optimizer.epsilon)]
    if optimizer.weight_decay:
        parts.insert(0, _decay(optimizer))
    return optax.chain(*parts, optax.scale_by_learning_rate(schedule))


def adamw(optimizer: ConfigDict, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Returns Adam with decoupled weight decay."""
    return optax.adamw(
        schedule,
        optimizer.beta1,
        optimizer.beta2,
        optimizer.epsilon,
        weight_decay=optimizer.weight_decay,
        mask=DECAYS[optimizer.decay],
    )


def adagrad(optimizer: ConfigDict, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Returns Adagrad with PyTorch's initial accumulator of 0.

    PyTorch adds epsilon to the square root of the accumulator. optax adds its epsilon to the accumulator, before the
    square root, and therefore gets epsilon². PyTorch and optax agree if the accumulator is 0 or much larger than
    epsilon².
    """
    return optax.adagrad(schedule, initial_accumulator_value=0.0, eps=optimizer.epsilon**2)


def adafactor(optimizer: ConfigDict, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Returns Adafactor (Shazeer & Stern, 2018) with an external learning rate and no first moment.

    As in Hugging Face transformers, the second moment of a matrix is factored into row and column means, updates are
    clipped at a root mean square of 1, and weight decay is decoupled.
    """
    from common.train.layerwise import layerwise  # only Adafactor needs it

    factored = optax.scale_by_factored_rms(
        decay_rate=0.8, min_dim_size_to_factor=1, epsilon=optimizer.epsilon
    )
    return optax.chain(
        layerwise(factored),
        layerwise(optax.clip_by_block_rms(1.0)),
        _decay(optimizer),
        optax.scale_by_learning_rate(schedule),
    )


OPTIMIZERS = {"adam": adam, "adamw": adamw, "adagrad": adagrad, "adafactor": adafactor}


def validate(optimizer: ConfigDict) -> None:
    """Raises a UserError if a field of the configuration group `optimizer` has an invalid value."""
    check_choice("--config.optimizer.name", optimizer.name, OPTIMIZERS)
    check_choice("--config.optimizer.schedule", optimizer.schedule, SCHEDULES)
    check_choice("--config.optimizer.decay", optimizer.decay, DECAYS)
    for name in ("learning_rate", "epsilon"):
        check_number(f"--config.optimizer.{name}", optimizer[name], positive=True)
    check(
        optimizer.name != "adagrad" or optimizer.weight_decay == 0,
        f"--config.optimizer.name=adagrad has no weight decay, but --config.optimizer.weight_decay is"
        f" {optimizer.weight_decay}: set it to 0",
    )
    check(
        optimizer.warmup_steps >= -1,
        "--config.optimizer.warmup_steps must be at least 0, or -1 for a twentieth of the steps,"
        f" got {optimizer.warmup_steps}",
    )
    for name in ("warmup_init", "clip", "weight_decay"):
        check_number(f"--config.optimizer.{name}", optimizer[name])
    for name in ("beta1", "beta2"):
        check(
            0 <= optimizer[name] < 1,
            f"--config.optimizer.{name} must be at least 0 and below 1, got {optimizer[name]}",
        )


def make(
    optimizer: ConfigDict,
    steps: int,
    own: Mapping[str, float] | None = None,
    names: Iterable[str] = (),
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """Returns the optimizer and the learning-rate schedule.

    Args:
      steps: number of training steps, at which cosine and linear schedules end.
      own: learning-rate overrides: component of a parameter path, such as "head" -> constant learning rate. Adam,
        without clipping and weight decay, trains the parameters whose paths have this component.
      names: paths of all trainable parameters.
    """
    schedule = SCHEDULES[optimizer.schedule](optimizer, steps)
    update = OPTIMIZERS[optimizer.name](optimizer, schedule)
    if optimizer.clip:
        update = optax.chain(optax.clip_by_global_norm(optimizer.clip), update)

    def labels(names: Iterable[str]) -> dict[str, str]:
        return {n: next((part for part in own or () if part in n.split("/")), "") for n in names}

    if any(labels(names).values()):
        rules = {"": update} | {part: optax.adam(rate) for part, rate in own.items()}
        update = optax.multi_transform(rules, labels)
    return update, schedule
