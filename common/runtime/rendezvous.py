"""A rendezvous of all processes before they join JAX's runtime, to name processes that are missing or misconfigured."""

import json
import select
import socket
import time
from collections.abc import Mapping
from contextlib import suppress

from common.errors import UserError

Rendezvous = tuple[dict[int, socket.socket], list[str]]
"""(connections by process, host names by process): process 0 is connected with all others, they with process 0."""


class MissedRendezvous(Exception):
    """Processes missed the rendezvous; the message names them."""


def rendezvous(
    address: str, count: int, index: int, seconds: float, asked: Mapping[str, str] | None = None
) -> Rendezvous:
    """Waits until all `count` processes have connected to process 0 at `address`.

    The port is free again on return, for JAX's coordinator.

    Args:
      index: of this process.
      asked: settings of this process, by name, which have to be the same on all.

    Raises:
      MissedRendezvous: processes did not connect within `seconds`.
      UserError: the address is malformed or taken, two processes have one number, or settings differ.
    """
    asked = dict(asked or {})
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"TRAINLESS_COORDINATOR must be host:port, got {address!r}")
    until = time.monotonic() + seconds
    if index == 0:
        return _receive(int(port), count, until, seconds, asked)
    return _arrive((host.strip("[]"), int(port)), index, until, seconds, asked)


def _receive(
    port: int, count: int, until: float, seconds: float, asked: dict[str, str]
) -> Rendezvous:
    """Process 0: accepts the other processes, then sends all of them the result."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        server = socket.create_server(("", port), family=family, backlog=count, dualstack_ipv6=both)
    except OSError as error:
        raise UserError(f"process 0 cannot listen on port {port}: {error.strerror}") from error
    hosts, here, theirs = {0: socket.gethostname()}, {}, {}
    with server:
        while len(here) < count - 1 and (left := until - time.monotonic()) > 0:
            server.settimeout(min(left, 1.0))
            with suppress(OSError, ValueError, TypeError):  # a timeout, or no process of this run
                connection, _ = server.accept()
                connection.settimeout(5.0)
                number, host, what = json.loads(_line(connection))
                if not 0 < number < count:
                    raise ValueError(number)
                if number in here:
                    _tell(here[number], {"twice": host})
                here[number], hosts[number], theirs[number] = connection, host, dict(what)
            # They send nothing more: a readable connection is a closed one.
            for gone in [k for k, c in here.items() if select.select([c], [], [], 0)[0]]:
                here.pop(gone).close()
    missing = [k for k in range(1, count) if k not in here]
    # Reported first: processes with another count would wait for one that does not exist.
    if unlike := next((k for k in sorted(theirs) if theirs[k] != asked), None):
        how = _differences(asked, theirs[unlike])
        answer = {"unlike": f"process {unlike} ({hosts[unlike]}) is unlike process 0: {how}"}
    elif missing:
        answer = {"absent": f"{_named(missing)} did not come within {seconds:g} s"}
    else:
        answer = {"hosts": [hosts[k] for k in range(count)]}
    for connection in here.values():
        _tell(connection, answer)
    return here, _hosts(answer)


def _differences(first: dict[str, str], other: dict[str, str]) -> str:
    names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f"{n} is {other.get(n)}, not {first.get(n)}" for n in names[:3]) + more


def _hosts(answer: dict) -> list[str]:
    """The hosts in the answer of process 0, or its error raised."""
    if "absent" in answer:
        raise MissedRendezvous(answer["absent"])
    if "unlike" in answer:
        raise UserError(answer["unlike"])
    return answer["hosts"]


def _arrive(
    address: tuple[str, int], index: int, until: float, seconds: float, asked: dict[str, str]
) -> Rendezvous:
    """Any other process: connects to process 0, again if that restarts, and waits for its answer."""
    reason = "it ended again"
    while (left := until - time.monotonic()) > 0:
        try:
            connection = socket.create_connection(address, timeout=left)
            _tell(connection, [index, socket.gethostname(), asked])
            # Process 0 may have started later, and then times out later.
            connection.settimeout(left + seconds)
            answer = json.loads(_line(connection))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or reason
            time.sleep(0.1)
            continue
        if "twice" in answer:
            raise UserError(f"process {index} is started twice, here and on {answer['twice']}")
        return {0: connection}, _hosts(answer)
    where = ":".join(map(str, address))
    raise MissedRendezvous(f"process 0 did not answer at {where} within {seconds:g} s ({reason})")


def _tell(connection: socket.socket, what: dict | list) -> None:
    with suppress(OSError):  # the receiver notices the lost connection
        connection.sendall((json.dumps(what) + "\n").encode())


def _line(connection: socket.socket) -> bytes:
    # Unbuffered: later bytes belong to the heartbeat.
    with connection.makefile("rb", buffering=0) as file:
        return file.readline()


def _named(numbers: list[int]) -> str:
    return f"process{'es' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
