"""Several processes as one run: start-up from the environment, and collective decisions."""

import atexit
import os
import signal
import sys
from collections.abc import Callable, Mapping

import jax
import numpy as np

from common.config import check
from common.errors import UserError
from common.runtime import heartbeat
from common.runtime.rendezvous import MissedRendezvous, rendezvous

COORDINATOR, PROCESSES, PROCESS = (
    "TRAINLESS_COORDINATOR",
    "TRAINLESS_NUM_PROCESSES",
    "TRAINLESS_PROCESS_ID",
)


def initialize(asked: Callable[[], Mapping[str, str]] = dict) -> None:
    """Joins the other processes if a launcher set TRAINLESS_COORDINATOR (host:port), _NUM_PROCESSES and _PROCESS_ID.

    They have TRAINLESS_JOIN_SECONDS (300) to connect; after that a lost process ends all of them, see `heartbeat`.

    Args:
      asked: returns the settings of this process, which have to be the same on all.

    Raises:
      UserError: a setting is wrong, or differs between processes.
    """
    address = os.environ.get(COORDINATOR)
    if not address:
        # Without a coordinator N processes would each train the same run.
        check(not heartbeat.several(), f"{PROCESSES} is set, so {COORDINATOR} must be host:port")
        return
    try:
        count, index = int(os.environ[PROCESSES]), int(os.environ[PROCESS])
    except (KeyError, ValueError) as error:
        raise UserError(
            f"{COORDINATOR} is set, so {PROCESSES} and {PROCESS} must be whole numbers"
        ) from error
    if not 0 <= index < count:
        raise UserError(f"{PROCESS} must be between 0 and {count - 1}, got {index}")
    silence, arrival = heartbeat.seconds(heartbeat.SILENCE), heartbeat.seconds(heartbeat.ARRIVAL)
    if count == 1:
        return
    try:
        same = {PROCESSES: str(count), heartbeat.SILENCE[0]: str(silence)} | asked()
        connections, hosts = rendezvous(address, count, index, arrival, same)
    except MissedRendezvous as absent:
        heartbeat.end(index, f"{absent}; {heartbeat.AGAIN}")
    heartbeat.hold_abort()
    watcher = heartbeat.Heartbeat(index, connections, hosts, silence)
    watcher.start()
    # The runtime's timeouts are longer than those of the heartbeat.
    jax.distributed.initialize(
        address,
        count,
        index,
        initialization_timeout=2 * silence + 60,
        heartbeat_timeout_seconds=2 * silence + 60,
        shutdown_timeout_seconds=3600,
    )

    # The runtime has installed a SIGTERM handler. Until a run installs its own, SIGTERM acts at once.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def end() -> None:
        try:
            jax.distributed.shutdown()  # waits for all processes
        finally:
            watcher.end()

    atexit.register(end)
    if jax.default_backend() == "cpu":
        # jaxlib 0.10.2: cached programs of several CPU processes deadlock.
        jax.config.update("jax_enable_compilation_cache", False)


def is_main() -> bool:
    return jax.process_index() == 0


def warn(line: str) -> None:
    """Prints a warning, once for all processes."""
    if is_main():
        print(f"warning: {line}", file=sys.stderr)


def all_reduce_max(decision: np.ndarray) -> np.ndarray:
    """The elementwise maximum over all processes; a collective call."""
    if jax.process_count() == 1:
        return decision
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(decision)).max(axis=0)


def gather(x: jax.Array) -> np.ndarray:
    """The whole value of a sharded array; a collective call if its shards are in several processes."""
    if x.is_fully_addressable:
        return np.asarray(x)
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(x, tiled=True)


def barrier(name: str) -> None:
    """Waits until every process has called this."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)
