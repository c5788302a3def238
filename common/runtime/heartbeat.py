"""Several processes end together: a lost one is named, in bounded time, whatever the others are doing.

A thread of each process holds a connection to process 0. One that was killed closes it; one that is stopped, or whose
machine is gone, is silent for TRAINLESS_LOST_SECONDS (60). (One whose main thread alone waits for ever is not found.)
Process 0 tells all the others, and everybody's thread prints one line and ends its process, which may be waiting for
the lost one in the middle of a step:

    error: process 1 (host-b) is lost: ...; the same command goes on from the last checkpoint ...

Without this, JAX's runtime ends them after a longer time by abort(), with a dump of its own stack. No launcher is
needed. A process ends with 0, with 2 if it found a fault of the user, with 128 and the number of a signal after which
it has saved, with 1 and a traceback at a fault of the program, and with LOST because of another process.
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
"""The exit code of those that end because another process is lost, or never came: EX_TEMPFAIL, "try again"."""

SILENCE = "TRAINLESS_LOST_SECONDS", 60
ARRIVAL = "TRAINLESS_JOIN_SECONDS", 300

AGAIN = "the same command goes on from the last checkpoint, with any number of processes"

_ENDING = threading.Lock()
"""Taken, and never given back, by the first that ends this process."""

_ALIVE, _END = b".", b"end\n"

_EXCHANGE = re.compile(
    r"gloo|nccl|coordination|unavailable|connection (closed|reset)|socket closed", re.IGNORECASE
)


def seconds(setting: tuple[str, int]) -> int:
    """A setting of the environment: its name, and its value where it is not set.

    Raises:
      UserError: it is no positive whole number.
    """
    name, default = setting
    text = os.environ.get(name) or str(default)
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"{name} must be a positive whole number of seconds, got {text!r}")
    return int(text)


class Heartbeat(threading.Thread):
    """Ends this process as soon as another one is lost.

    Args:
      process: the number of this one.
      connections: as the meeting left them: those of process 0 with all others, of others with process 0.
      hosts: of all processes.
      silence: seconds after which a process that says nothing is lost.
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
                # It was this process that was stopped; what the others said meanwhile is still to be read.
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
        """This process has come to its good end, and may go."""
        self._say(_END)

    def _say(self, word: bytes) -> None:
        for connection in self._connections.values():
            with suppress(OSError):
                connection.sendall(word)

    def _lost(self, number: int) -> NoReturn:
        self._say(b"lost %d\n" % number)
        reason = "it failed (its log says why), was killed, hangs or is out of reach"
        if number == self._process:
            reason = "the others have not heard of this one for too long"
        end(self._process, f"process {number} ({self._hosts[number]}) is lost: {reason}; {AGAIN}")


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(4096)
    except OSError:
        return b""


def end(process: int, line: str) -> NoReturn:
    """Prints the line and ends the process with LOST; nothing of it is waited for."""
    _ENDING.acquire()
    print(f"error: {line}", file=sys.stderr, flush=True)
    _silence_errors()  # what the runtime says from now on names nobody
    if process == 0:
        time.sleep(2)  # the others' runtime ends them when ours is gone: their threads come first
    os._exit(LOST)


def hold_abort() -> None:
    """A thread that calls abort() sleeps for six seconds first, so that the line is printed and the exit code is ours.

    JAX's runtime does so as soon as process 0 is gone. The handler is sleep() of the C library itself, which is given
    the number of the signal, 6: the runtime's threads know no Python. An abort() for another reason comes late.
    """
    library = ctypes.CDLL(None)
    library.signal.argtypes = ctypes.c_int, ctypes.c_void_p
    library.signal(int(signal.SIGABRT), ctypes.cast(library.sleep, ctypes.c_void_p))


def several() -> bool:
    """Whether this is one process of several."""
    return os.environ.get("TRAINLESS_NUM_PROCESSES", "1") != "1"


def hold(error: Exception) -> None:
    """An exchange with a lost process may fail at once: waits for the thread, which says who it was and ends this one.

    Returns if nobody was lost, or the error is another.
    """
    if several() and _EXCHANGE.search(str(error)):
        time.sleep(seconds(SILENCE) + 5)


def leave(code: int) -> NoReturn:
    """Ends a process that failed. One of several does not wait for the others, which may be waiting for it."""
    if not several():
        sys.exit(code)
    _ENDING.acquire()
    sys.stdout.flush()
    sys.stderr.flush()
    _silence_errors()
    # They may be failing alike, and have a line of their own to print before this one is missed.
    time.sleep(3 if os.environ.get("TRAINLESS_PROCESS_ID") == "0" else 2)
    os._exit(code)


def _silence_errors() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
