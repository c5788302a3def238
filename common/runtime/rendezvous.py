"""A rendezvous of all processes before they join JAX's runtime. Its errors name missing or misconfigured processes.

Every process except process 0 sends one line to process 0: the launcher's token, then JSON. The token keeps out other
programs and other users' runs. The token is sent in plain text, so it does not protect against eavesdroppers.
"""

import hmac
import ipaddress
import json
import selectors
import socket
import time
from collections.abc import Mapping
from contextlib import suppress

from common.errors import UserError

Rendezvous = tuple[dict[int, socket.socket], list[str]]
"""Result of the rendezvous: {process number: connection}, and the host name of each process.

Process 0 has connections to all other processes. Each other process has one connection, to process 0.
"""

LONGEST = 2**20
"""Number of bytes after which process 0 refuses a line without a newline."""

_REFUSES = (
    "refuses this process: TRAINLESS_TOKEN or TRAINLESS_NUM_PROCESSES differs between the two processes, or the port"
    " belongs to another run; start all processes of the run again with one launcher"
)


class MissedRendezvous(Exception):
    """Raised if processes do not connect in time. The message names the missing processes."""


def rendezvous(
    address: str,
    count: int,
    index: int,
    seconds: float,
    settings: Mapping[str, str] | None = None,
    token: str = "",
) -> Rendezvous:
    """Waits until all `count` processes have connected to process 0 at `address`.

    Process 0 closes its server socket before this function returns, so that JAX's coordinator can use the port.

    Args:
      index: number of this process.
      seconds: time limit for connecting. Other processes than process 0 may wait longer for the reply of process 0.
      settings: name -> value of the settings that must be equal on all processes.
      token: secret that the launcher gives to all processes. Process 0 refuses connections with a different token.

    Raises:
      MissedRendezvous: processes did not connect within `seconds`.
      UserError: the address is malformed or in use, two processes have the same number, or the token or settings
        differ.
    """
    settings = dict(settings or {})
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(
            f"TRAINLESS_COORDINATOR must be host:port with a port from 1 to 65535, got {address!r}"
        )
    if index == 0:
        return _receive(_listen(host, int(port), count), count, token, seconds, settings)
    return _arrive((host.strip("[]"), int(port)), index, token, seconds, settings)


def is_loopback(host: str) -> bool:
    """Returns whether `host` is "localhost" or a loopback address. An IPv6 address may be in brackets.

    Does not resolve other host names: a machine may resolve its own name to a loopback address, although other machines
    use this name to connect to it.
    """
    with suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"


def _listen(host: str, port: int, count: int) -> socket.socket:
    """Returns a server socket: on the loopback interface if `host` is a loopback address, else on all interfaces."""
    both = not is_loopback(host) and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    name = host.strip("[]") if is_loopback(host) else ""
    try:
        return socket.create_server((name, port), family=family, backlog=count, dualstack_ipv6=both)
    except OSError as error:
        raise UserError(
            f"process 0 cannot listen on port {port}: {error.strerror}; choose another port in TRAINLESS_COORDINATOR,"
            " the same on all processes"
        ) from error


def _receive(
    server: socket.socket, count: int, token: str, seconds: float, settings: dict[str, str]
) -> Rendezvous:
    """Runs on process 0: accepts connections of all other processes, then sends them the host names or the error."""
    until = time.monotonic() + seconds
    hosts, connected, received = {0: socket.gethostname()}, {}, {}
    with server, selectors.DefaultSelector() as selector:
        # `key.data` of a connection holds the bytes of its incomplete line. After the line is complete, it holds the
        # number of the process.
        selector.register(server, selectors.EVENT_READ)
        while len(connected) < count - 1 and (left := until - time.monotonic()) > 0:
            for key, _ in selector.select(min(left, 1.0)):
                connection, before = key.fileobj, key.data
                if connection is server:
                    with suppress(OSError):
                        new, _ = server.accept()
                        new.settimeout(5.0)
                        selector.register(new, selectors.EVENT_READ, b"")
                    continue
                part = receive(connection)
                if isinstance(before, int):
                    # A process sends only one line: this event means that the process has exited.
                    if connected.get(before) is connection:
                        del connected[before]
                elif part and len(before) < LONGEST and not part.endswith(b"\n"):
                    selector.modify(connection, selectors.EVENT_READ, before + part)
                    continue
                elif line := _parse(before + part, count, token):
                    number, host, values = line
                    if number in connected:
                        twice = f"process {number} was started twice, on {hosts[number]} and {host}"
                        advice = "give each process its own TRAINLESS_PROCESS_ID"
                        _send(connected[number], {"error": f"{twice}: {advice}"})
                    connected[number], hosts[number], received[number] = connection, host, values
                    selector.modify(connection, selectors.EVENT_READ, number)
                    continue
                else:
                    _send(connection, {"error": f"process 0 ({hosts[0]}) {_REFUSES}"})
                selector.unregister(connection)
                connection.close()
        for key in selector.get_map().values():
            if isinstance(key.data, bytes):
                key.fileobj.close()
    missing = [k for k in range(1, count) if k not in connected]
    # Report differing settings first. If the number of processes differs, the missing processes may not exist.
    if unlike := next((k for k in sorted(received) if received[k] != settings), None):
        answer = {"error": difference(unlike, hosts[unlike], settings, received[unlike])}
    elif missing:
        named = f"process{'es' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        answer = {
            "absent": f"{named} did not connect to process 0 within {seconds:g} s: look for errors in the logs of all"
            " processes, or raise TRAINLESS_JOIN_SECONDS"
        }
    else:
        answer = {"hosts": [hosts[k] for k in range(count)]}
    for connection in connected.values():
        _send(connection, answer)
    return connected, _hosts(answer)


def receive(connection: socket.socket) -> bytes:
    """Returns the received bytes; b"" if the connection is closed or fails."""
    try:
        return connection.recv(65536)
    except OSError:
        return b""


def _parse(line: bytes, count: int, token: str) -> tuple[int, str, dict[str, str]] | None:
    """Returns (number, host name, settings) from the line of a process; None if the token or the format is wrong."""
    sent, _, rest = line.partition(b" ")
    if hmac.compare_digest(sent, token.encode()):
        with suppress(ValueError, TypeError, RecursionError):
            number, host, settings = json.loads(rest)
            if isinstance(number, int) and 0 < number < count:
                return number, host, dict(settings)
    return None


def difference(number: int, host: str, first: Mapping[str, str], other: Mapping[str, str]) -> str:
    """Describes how the settings `other` of process `number` differ from the settings `first` of process 0."""
    names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    values = ((n, other.get(n, "missing"), first.get(n, "missing")) for n in names[:3])
    how = ", ".join(f"{n} is {here}, not {there}" for n, here, there in values) + more
    return (
        f"process {number} ({host}) differs from process 0: {how}; give all processes the same options,"
        " environment variables, code, data and packages"
    )


def _hosts(answer: dict) -> list[str]:
    """Returns the host names in the reply of process 0, or raises the error in the reply."""
    if "absent" in answer:
        raise MissedRendezvous(answer["absent"])
    if "error" in answer:
        raise UserError(answer["error"])
    return answer["hosts"]


def _arrive(
    address: tuple[str, int], index: int, token: str, seconds: float, settings: dict[str, str]
) -> Rendezvous:
    """Runs on all processes except process 0: connects to process 0, with retries, and waits for a reply."""
    until = time.monotonic() + seconds
    reason = ""
    while (left := until - time.monotonic()) > 0:
        try:
            connection = socket.create_connection(address, timeout=left)
            _send(connection, [index, socket.gethostname(), settings], f"{token} ")
            # Wait longer than `left` for the reply: if process 0 started later than this process, the time limit of
            # process 0 also ends later.
            connection.settimeout(left + seconds)
            # Read without a buffer: the bytes after the line are heartbeats, which the heartbeat thread must receive.
            with connection.makefile("rb", buffering=0) as file:
                answer = json.loads(file.readline())
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            if isinstance(error, json.JSONDecodeError):
                reason = "it closed the connection"
            time.sleep(0.1)
            continue
        return {0: connection}, _hosts(answer)
    where = ":".join(map(str, address))
    raise MissedRendezvous(
        f"process 0 did not answer at {where} within {seconds:g} s ({reason}): look for errors in its log, check"
        " TRAINLESS_COORDINATOR, or raise TRAINLESS_JOIN_SECONDS"
    )


def _send(connection: socket.socket, message: dict | list, prefix: str = "") -> None:
    with suppress(OSError):  # ignore a closed connection: both ends detect it when they read
        connection.sendall(f"{prefix}{json.dumps(message)}\n".encode())
