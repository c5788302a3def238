"""Heartbeats between processes: when one is lost, all others name it and exit within a bounded time.

A thread of each process holds a connection to process 0. A killed process closes its connection; a suspended process or
a lost machine sends nothing for TRAINLESS_LOST_SECONDS (60). A deadlock of the main thread alone is not detected.
Process 0 informs all others, and every heartbeat thread prints one line and exits the process, which may be waiting
for the lost one in a collective operation:

    error: process 1 (host-b) is lost: ...; the same command resumes from the last checkpoint ...

Without this, JAX's runtime calls abort() later, with a dump of its own stack. The exit code is 0, or 2 for a user
error, 128 + N after signal N with the run saved, 1 with a traceback for a bug, LOST after the loss of another process.
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

LOST = 75
"""The exit code after another process was lost or missed the rendezvous: EX_TEMPFAIL, "try again"."""

SILENCE = "TRAINLESS_LOST_SECONDS", 60
ARRIVAL = "TRAINLESS_JOIN_SECONDS", 300

AGAIN = "the same command resumes from the last checkpoint, with any number of processes"

_ENDING = threading.Lock()
"""Acquired once, by the first thread that exits this process."""

_ALIVE, _END = b".", b"end\n"

_EXCHANGE = re.compile(
    r"gloo|nccl|coordination|unavailable|connection (closed|reset)|socket closed", re.IGNORECASE
)


def seconds(setting: tuple[str, int]) -> int:
    """Reads a setting (name, default) from the environment.

    Raises:
      UserError: the value is not a positive integer.
    """
    name, default = setting
    text = os.environ.get(name) or str(default)
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"{name} must be a positive whole number of seconds, got {text!r}")
    return int(text)


class Heartbeat(threading.Thread):
    """Exits this process as soon as another one is lost.

    Args:
      process: the number of this process.
      connections: of the rendezvous, by process.
      hosts: of all processes.
      silence: seconds without a heartbeat after which a process is lost.
    """

    def __init__(
        self,
        process: int,
        connections: Mapping[int, socket.socket],
        hosts: list[str],
        silence: float,
    ):
        super().__init__(name="watch", daemon=True)
        self._process, self._connections, self._hosts = process, dict(connections), hosts
        self._silence = silence

    def run(self) -> None:
        selector = selectors.DefaultSelector()
        for number, connection in self._connections.items():
            connection.settimeout(self._silence)
            selector.register(connection, selectors.EVENT_READ, number)
        heard = dict.fromkeys(self._connections, time.monotonic())
        words = dict.fromkeys(self._connections, b"")
        pause, said = min(self._silence / 4, 5.0), 0.0
        while selector.get_map():
            ready = {key.data: key.fileobj for key, _ in selector.select(pause)}
            now = time.monotonic()
            if said and now - said > 3 * pause:
                # This process was suspended; the heartbeats of the others are still to be read.
                heard = dict.fromkeys(heard, now)
            if now - said >= pause:
                self._say(_ALIVE)
                said = now
            for number, connection in ready.items():
                heard[number] = now
                said_now = _receive(connection)
                words[number] = (words[number] + said_now)[-32:]
                if found := re.search(rb"lost (\d+)\n", words[number]):
                    self._lost(int(found[1]))
                elif _END in words[number]:
                    selector.unregister(connection)
                    del heard[number]
                elif not said_now:
                    self._lost(number)
            for number, when in heard.items():
                if now - when > self._silence:
                    self._lost(number)

    def end(self) -> None:
        """Tells the others that this process ends normally."""
        self._say(_END)

    def _say(self, word: bytes) -> None:
        for connection in self._connections.values():
            with suppress(OSError):
                connection.sendall(word)

    def _lost(self, number: int) -> NoReturn:
        self._say(b"lost %d\n" % number)
        reason = "it failed (see its log), was killed, hangs or is unreachable"
        if number == self._process:
            reason = "its heartbeats did not arrive in time"
        end(self._process, f"process {number} ({self._hosts[number]}) is lost: {reason}; {AGAIN}")


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(4096)
    except OSError:
        return b""


def end(process: int, line: str) -> NoReturn:
    """Prints the line and exits with LOST at once."""
    _ENDING.acquire()
    print(f"error: {line}", file=sys.stderr, flush=True)
    _silence_errors()  # later errors of the runtime are consequences
    if process == 0:
        time.sleep(
            2
        )  # the runtime of the others aborts when this one exits: their heartbeats come first
    os._exit(LOST)


def hold_abort() -> None:
    """Delays abort() by six seconds, so that the heartbeat can print its line and set the exit code.

    JAX's runtime aborts as soon as process 0 is gone. The handler is the C library's sleep(), called with the number of
    SIGABRT, 6, since the runtime's threads cannot run Python.
    """
    library = ctypes.CDLL(None)
    library.signal.argtypes = ctypes.c_int, ctypes.c_void_p
    library.signal(int(signal.SIGABRT), ctypes.cast(library.sleep, ctypes.c_void_p))


def several() -> bool:
    """Whether the launcher started several processes."""
    return os.environ.get("TRAINLESS_NUM_PROCESSES", "1") != "1"


def hold(error: Exception) -> None:
    """After a failed collective operation, waits for the heartbeat to name the lost process and exit.

    Returns at once for other errors, and later if no process was lost.
    """
    if several() and _EXCHANGE.search(str(error)):
        time.sleep(seconds(SILENCE) + 5)


def leave(code: int) -> NoReturn:
    """Exits after a failure. One of several processes does not wait for the others, which may be waiting for it."""
    if not several():
        sys.exit(code)
    _ENDING.acquire()
    sys.stdout.flush()
    sys.stderr.flush()
    _silence_errors()
    # The others may fail in the same way, and print their own line first.
    time.sleep(3 if os.environ.get("TRAINLESS_PROCESS_ID") == "0" else 2)
    os._exit(code)


def _silence_errors() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
