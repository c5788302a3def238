"""Joins several processes into one run, and makes decisions that are equal on all processes."""

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from common.errors import check, named
from common.runtime.program import COORDINATOR, PROCESSES, several


def initialize(settings: Callable[[], Mapping[str, str]] = dict) -> None:
    """Joins the other processes, if a launcher has set TRAINLESS_COORDINATOR to the host:port of process 0.

    The launcher also sets TRAINLESS_NUM_PROCESSES, TRAINLESS_PROCESS_ID and TRAINLESS_TOKEN, a secret that keeps other
    programs out. The processes exit unless all of them connect within TRAINLESS_JOIN_SECONDS (default 300). After that,
    the loss of one process ends all processes (`common.runtime.heartbeat`).

    Args:
      settings: function that returns {name: value} of the settings that must be equal on all processes.

    Raises:
      UserError: an environment variable is missing or invalid, the port is in use, two processes have the same number,
        or the token or a setting differs between processes.
    """
    if address := os.environ.get(COORDINATOR):
        from common.runtime.join import join

        join(address, settings)
    else:
        # Without a coordinator, every process would train the whole run.
        check(
            not several(),
            f"{PROCESSES} is {os.environ.get(PROCESSES)}, but {COORDINATOR} is not set: set {COORDINATOR} to the"
            f" host:port of process 0, or unset {PROCESSES} to train with one process",
        )


def is_main() -> bool:
    return jax.process_index() == 0


def warn(line: str) -> None:
    """Prints a warning to stderr, on process 0 only."""
    if is_main():
        print(f"warning: {line}", file=sys.stderr)


def all_reduce_max(decision: np.ndarray) -> np.ndarray:
    """Returns the elementwise maximum of `decision` over all processes. All processes must call this function."""
    if jax.process_count() == 1:
        return decision
    return np.asarray(multihost_utils.process_allgather(decision)).max(axis=0)


class Votes:
    """Decides when several processes vote: about once a second, or at every call of `due` if calls are rarer.

    If calls are more frequent than 25 in a second, the processes vote at every 25th call. Clocks differ between
    processes, so the processes count calls of `due` instead of seconds. Each vote also sets the number of calls until
    the next vote, for all processes. A run with one process votes at every call.
    """

    def __init__(self) -> None:
        self._calls, self._interval, self._since = 0, 1, time.monotonic()

    def due(self) -> bool:
        """Returns whether to vote now. All processes must call this method equally often."""
        self._calls += 1
        return jax.process_count() == 1 or self._calls >= self._interval

    def hasten(self) -> None:
        """Makes the next call of `due` return True. All processes must call this method."""
        self._interval = 0

    def cast(self, votes: Sequence[int]) -> list[int]:
        """Returns the maximum of each vote over all processes. All processes must call this method if `due` is True."""
        milliseconds = int(1000 * (time.monotonic() - self._since))
        *agreed, slowest = all_reduce_max(np.asarray([*votes, milliseconds])).tolist()
        # The interval at most doubles, because the next calls may be slower than the last calls.
        interval = min(1000 * self._calls // max(1, slowest), 2 * self._calls, 25)
        self._interval = max(1, interval)
        self._calls, self._since = 0, time.monotonic()
        return agreed


def all_gather(value: Any) -> list[Any]:
    """Returns the JSON values of all processes in the order of the processes. All processes must call this function."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.asarray(len(text)))
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: len(text)] = text
    texts = multihost_utils.process_allgather(padded)
    return [json.loads(text[:size].tobytes()) for text, size in zip(texts, sizes, strict=True)]


def check_agreement(known: Callable[[], Mapping[str, str]]) -> None:
    """Raises a UserError on every process if a value differs between processes. All processes must call this function.

    Args:
      known: function that returns {name: value} on this process. Not called in a run with one process.
    """
    if jax.process_count() == 1:
        return
    from common.runtime.rendezvous import difference

    (_, first), *others = all_gather([socket.gethostname(), dict(known())])
    for number, (host, other) in enumerate(others, 1):
        check(first == other, difference(number, host, first, other))


def all_or_none(call: Callable[[], Any]) -> Any:
    """Returns the result of `call()` if it succeeds on all processes. All processes must call this function.

    Raises:
      RuntimeError: on every process, if `call()` raised an exception on at least one process. A run with one process
        raises the exception unchanged.
    """
    result, fault = None, ""
    try:
        result = call()
    except Exception as error:
        if jax.process_count() == 1:
            raise
        fault = named(error)
    for number, reported in enumerate(all_gather(fault)):
        if reported:
            raise RuntimeError(f"process {number}: {reported}")
    return result


def gather(x: jax.Array) -> np.ndarray:
    """Returns a sharded array as a host array. All processes must call this function."""
    if x.is_fully_addressable:
        return np.asarray(x)
    return multihost_utils.process_allgather(x, tiled=True)


def barrier(name: str) -> None:
    """Waits until every process has called `barrier` with this name."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
