"""Heartbeats between processes. If a process is lost, all other processes print its number, and exit in bounded time.

Each process has a heartbeat thread. The threads of the processes 1, 2, ... are connected to the thread of process 0. A
process counts as lost if its connection closes (the process failed or was killed), or if it sends no heartbeat for
TRAINLESS_LOST_SECONDS (default 60; the process is suspended or its machine is unreachable). A deadlock of the main
thread alone is not detected. Process 0 informs the remaining processes of the loss. Each heartbeat thread prints one
line and exits its process, even if the main thread waits in a collective operation:

    error: process 1 (host-b) is lost: ...; the same command resumes from the last checkpoint ...

Without this module, JAX's runtime would abort the processes with a stack trace.
"""

import ctypes
import os
import re
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import NoReturn

from common.errors import UserError
from common.runtime.rendezvous import receive

LOST = 75
"""Exit code after a lost process or a missed rendezvous: EX_TEMPFAIL of sysexits.h."""

SILENCE = "TRAINLESS_LOST_SECONDS", 60
"""Environment variable with the heartbeat timeout in seconds, and its default. A process that sends no heartbeat for
this time counts as lost."""

ARRIVAL = "TRAINLESS_JOIN_SECONDS", 300
"""Environment variable with the time limit of the rendezvous in seconds, and its default."""

AGAIN = "the same command resumes from the last checkpoint, if the run has one, with any number of processes"

_ENDING = threading.Lock()
"""Lock held by the thread that exits this process, so that no other thread prints a second error line."""

_ALIVE, _END = b".", b"end\n"

_EXCHANGE = re.compile(
    r"gloo|nccl|coordination|unavailable|connection (closed|reset)|socket closed", re.IGNORECASE
)
"""Matches the errors of a collective operation that fails because of a lost process."""


def seconds(setting: tuple[str, int]) -> int:
    """Returns the seconds in an environment variable. `setting` is (name, default if the variable is unset or empty).

    Raises a UserError if the value is not a positive integer.
    """
    name, default = setting
    text = os.environ.get(name) or str(default)
    if not text.isdecimal() or int(text) < 1:
        raise UserError(
            f"the environment variable {name} must be a positive whole number of seconds, got {text!r}"
        )
    return int(text)


class Heartbeat(threading.Thread):
    """A thread that exits this process as soon as a process of the run counts as lost.

    Args:
      process: number of this process.
      connections, hosts: result of `common.runtime.rendezvous.rendezvous`.
      silence: seconds without a heartbeat after which a process counts as lost.
    """

    def __init__(
        self,
        process: int,
        connections: Mapping[int, socket.socket],
        hosts: list[str],
        silence: float,
    ):
        super().__init__(name="heartbeat", daemon=True)
        self._process, self._connections, self._hosts = process, dict(connections), hosts
        self._silence = silence

    def run(self) -> None:
        selector = selectors.DefaultSelector()
        for number, connection in self._connections.items():
            connection.settimeout(self._silence)
            selector.register(connection, selectors.EVENT_READ, number)
        last_received = dict.fromkeys(self._connections, time.monotonic())
        buffers = dict.fromkeys(self._connections, b"")
        interval, last_sent = min(self._silence / 4, 5.0), 0.0
        while selector.get_map():
            ready = {key.data: key.fileobj for key, _ in selector.select(interval)}
            now = time.monotonic()
            if last_sent and now - last_sent > 3 * interval:
                # This process was suspended and could not read heartbeats: restart the timeouts of the other processes.
                last_received = dict.fromkeys(last_received, now)
            if now - last_sent >= interval:
                self._send(_ALIVE)
                last_sent = now
            for number, connection in ready.items():
                last_received[number] = now
                received = receive(connection)
                buffers[number] = (buffers[number] + received)[-32:]
                if lost := re.search(rb"lost (\d+)\n", buffers[number]):
                    self._lost(int(lost[1]))
                elif _END in buffers[number]:
                    selector.unregister(connection)
                    del last_received[number]
                elif not received:
                    self._lost(number)
            for number, when in last_received.items():
                if now - when > self._silence:
                    self._lost(number)

    def end(self) -> None:
        """Informs the connected processes that this process ends normally, so that it does not count as lost."""
        self._send(_END)

    def _send(self, message: bytes) -> None:
        for connection in self._connections.values():
            with suppress(OSError):
                connection.sendall(message)

    def _lost(self, number: int) -> NoReturn:
        self._send(b"lost %d\n" % number)
        reason = "it failed (see its log), was killed, is suspended or is unreachable"
        if number == self._process:
            reason = "its heartbeats did not arrive in time"
        end(self._process, f"process {number} ({self._hosts[number]}) is lost: {reason}; {AGAIN}")


def hold_abort() -> None:
    """Delays abort() in this process by six seconds, so that the heartbeat thread can print its line and exit first.

    JAX's runtime calls abort() as soon as process 0 has exited, and would end this process with a C++ stack trace. The
    C++ threads that call abort() cannot run a Python signal handler. The handler of SIGABRT is therefore the C function
    sleep(). Its argument is the number of the signal, 6.

    No setting of jax 0.10.2 prevents or delays the abort, not even `jax_enable_recoverability`. A Python function as
    `missed_heartbeat_callback` of jaxlib's client ends in std::bad_cast and abort().
    """
    library = ctypes.CDLL(None)
    library.signal.argtypes = ctypes.c_int, ctypes.c_void_p
    library.signal(int(signal.SIGABRT), ctypes.cast(library.sleep, ctypes.c_void_p))


def end(process: int, line: str) -> NoReturn:
    """Prints an error line and exits with code LOST, without cleanup. `process` is the number of this process."""
    _ENDING.acquire()
    print(f"error: {line}", file=sys.stderr, flush=True)
    # JAX aborts the other processes when process 0 exits: process 0 waits, so that their heartbeat threads can first
    # name the lost process.
    _exit(LOST, 2 if process == 0 else 0)


def hold(error: Exception) -> None:
    """Waits TRAINLESS_LOST_SECONDS + 5 seconds, if `error` looks like a failed collective operation.

    If the cause is a lost process, the heartbeat thread names the process and exits this process during the wait.
    """
    if _EXCHANGE.search(str(error)):
        time.sleep(seconds(SILENCE) + 5)


def leave(code: int) -> NoReturn:
    """Waits 2 seconds (process 0: 3 seconds), and exits this process with `code` after an error.

    The exit ends all processes of the run. The wait gives the other processes time to print their own errors.
    """
    _ENDING.acquire()
    sys.stdout.flush()
    sys.stderr.flush()
    _exit(code, 3 if os.environ.get("TRAINLESS_PROCESS_ID") == "0" else 2)


def _exit(code: int, wait: int) -> NoReturn:
    """Exits without cleanup after `wait` seconds. Hides the errors that JAX's runtime prints about a lost process."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    time.sleep(wait)
    os._exit(code)
