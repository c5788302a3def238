"""Joins the processes of a run: rendezvous, heartbeats and JAX's distributed runtime."""

import atexit
import os
import signal
from collections.abc import Callable, Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils

from common.errors import check
from common.runtime import heartbeat
from common.runtime.program import COORDINATOR, PROCESSES
from common.runtime.rendezvous import MissedRendezvous, is_loopback, rendezvous

PROCESS = "TRAINLESS_PROCESS_ID"
TOKEN = "TRAINLESS_TOKEN"


def join(address: str, settings: Callable[[], Mapping[str, str]]) -> None:
    """Joins the other processes at `address`; see `common.runtime.processes.initialize`."""
    count, index = os.environ.get(PROCESSES, ""), os.environ.get(PROCESS, "")
    check(
        count.isdecimal() and int(count) > 0,
        f"{COORDINATOR} is set, so {PROCESSES} must be a whole number of at least 1, got {count!r}: set it to the"
        f" number of processes, or unset {COORDINATOR}",
    )
    count = int(count)
    check(
        index.isdecimal() and int(index) < count,
        f"{COORDINATOR} is set, so {PROCESS} must be a whole number from 0 to {count - 1}, got {index!r}: set it to the"
        f" number of this process, or unset {COORDINATOR}",
    )
    index = int(index)
    token = os.environ.get(TOKEN, "")
    check(
        not token or token.isalnum(),
        f"{TOKEN} must contain only letters and digits: set another secret, the same on all processes",
    )
    silence, arrival = heartbeat.seconds(heartbeat.SILENCE), heartbeat.seconds(heartbeat.ARRIVAL)
    if count == 1:
        return
    try:
        equal = {PROCESSES: str(count), heartbeat.SILENCE[0]: str(silence)} | settings()
        connections, hosts = rendezvous(address, count, index, arrival, equal, token)
    except MissedRendezvous as missed:
        heartbeat.end(index, f"{missed}; {heartbeat.AGAIN}")
    heartbeat.hold_abort()
    thread = heartbeat.Heartbeat(index, connections, hosts, silence)
    thread.start()
    # JAX's timeouts are longer than the heartbeat's timeout, so that the heartbeat reports a lost process first.
    jax.distributed.initialize(
        address,
        count,
        index,
        initialization_timeout=2 * silence + 60,
        heartbeat_timeout_seconds=2 * silence + 60,
        shutdown_timeout_seconds=3600,
        # Processes on one machine need the loopback interface only. By default JAX listens on all interfaces.
        coordinator_bind_address=address if is_loopback(address.rpartition(":")[0]) else None,
    )

    # Replace the SIGTERM handler of JAX's runtime: SIGTERM must end the process until a run installs a handler.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def end() -> None:
        try:
            jax.distributed.shutdown()  # Waits for all processes.
        finally:
            thread.end()

    atexit.register(end)
    if jax.default_backend() == "cpu":
        # Disable the cache: with jaxlib 0.10.2, several CPU processes deadlock in programs loaded from the cache.
        jax.config.update("jax_enable_compilation_cache", False)
        # CPU processes connect to each other in their first collective operation. This operation fails if a process is
        # 30 s late, so run it now, while all processes are at the same point.
        multihost_utils.process_allgather(np.zeros(1))
