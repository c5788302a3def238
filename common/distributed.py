"""Several processes as one: start-up from the environment, and decisions that all of them share."""

import os

import jax
import numpy as np

from common.errors import UserError

COORDINATOR, PROCESSES, PROCESS = (
    "TRAINLESS_COORDINATOR",
    "TRAINLESS_NUM_PROCESSES",
    "TRAINLESS_PROCESS_ID",
)


def initialize() -> None:
    """Joins the other processes if a launcher set TRAINLESS_COORDINATOR (host:port), _NUM_PROCESSES and _PROCESS_ID."""
    address = os.environ.get(COORDINATOR)
    if not address:
        return
    try:
        count, index = int(os.environ[PROCESSES]), int(os.environ[PROCESS])
    except (KeyError, ValueError) as error:
        raise UserError(
            f"{COORDINATOR} is set, so {PROCESSES} and {PROCESS} must be whole numbers"
        ) from error
    if not 0 <= index < count:
        raise UserError(f"{PROCESS} must be between 0 and {count - 1}, got {index}")
    jax.distributed.initialize(address, count, index)
    if jax.default_backend() == "cpu":
        # jaxlib 0.10.2: programs of several CPU processes that were kept and read again wait for each other for ever.
        jax.config.update("jax_enable_compilation_cache", False)


def is_main() -> bool:
    return jax.process_index() == 0


def agree(decision: np.ndarray) -> np.ndarray:
    """The maximum over all processes, on all of them; a collective call."""
    if jax.process_count() == 1:
        return decision
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(decision)).max(axis=0)


def gather(x: jax.Array) -> np.ndarray:
    """The whole value of an array; a collective call where its parts lie in several processes."""
    if x.is_fully_addressable:
        return np.asarray(x)
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(x, tiled=True)


def barrier(name: str) -> None:
    """Waits until every process is here."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)
