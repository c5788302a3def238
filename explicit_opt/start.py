"""Initial parameters of training, for language models and digit classifiers."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from common.config import check_choice, check_least
from common.errors import check
from common.model import initializers
from common.variables import Params

STARTS = ("cold", "zero", "explicit", "warm", "scaled")
"""Values of `config.start`. "cold" trains from random values, "zero" from zeros, "warm" from the explicit solution, and
"scaled" from the explicit solution with one fitted factor for each layer (`solution.fit_scale`). "explicit" takes the
explicit solution without training."""

INITIALIZERS: dict[str, Callable[[int], Callable]] = {
    "torch": lambda inputs: initializers.uniform(inputs**-0.5),
    "normal": lambda inputs: initializers.normal(1.0),
}
"""Name -> function from the number of inputs to the initializer of a cold start. "torch" draws like PyTorch's Linear,
"normal" from N(0, 1)."""


def validate_start(config: ConfigDict) -> None:
    """Checks the configuration fields that language models and digit classifiers share.

    Raises:
      UserError: a field has an invalid value.
    """
    check_choice("--config.start", config.start, STARTS)
    check_choice("--config.model.cold", config.model.cold, INITIALIZERS)
    check(
        config.solution.sign in (-1, 1),
        f"--config.solution.sign must be -1 or 1, got {config.solution.sign}",
    )
    check(
        config.train.steps == 0,
        f"--config.train.steps={config.train.steps} must be 0, because --config.train.epochs determines the number of"
        " steps: leave out --config.train.steps, and set --config.train.epochs",
    )
    check_least(config, ("train.epochs", "train.batch"))


def exponent(config: ConfigDict) -> float | None:
    """Returns the exponent of f in eq. (3). A negative `solution.exponent` gives None: the paper's (K - 1) / K."""
    return None if config.solution.exponent < 0 else config.solution.exponent


def seedless(config: ConfigDict) -> bool:
    """Returns whether the seed has no effect: `start=explicit` replaces all random values and does not train."""
    return config.start == "explicit"


def zeros(trainable: Params) -> Params:
    """Returns zeros with the shapes and shardings of `trainable`."""
    return {name: jax.device_put(jnp.zeros_like(x), x.sharding) for name, x in trainable.items()}
