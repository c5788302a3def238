"""Rendezvous and heartbeats without JAX: if a process is lost, the other processes name the lost process and exit."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from common.errors import UserError
from common.runtime import rendezvous as rendezvous_module
from common.runtime.heartbeat import LOST, SILENCE, seconds
from common.runtime.rendezvous import MissedRendezvous, rendezvous
from tests.programs import ROOT, free_address

# Program of each of the three processes. The first argument is the behaviour of the process; "work" runs for 30 s.
PROGRAM = """
import ctypes, os, socket, sys, time
from common.runtime import program
from common.runtime import heartbeat
from common.errors import UserError
from common.runtime.rendezvous import MissedRendezvous, rendezvous

process, behaviour = int(os.environ["TRAINLESS_PROCESS_ID"]), sys.argv[1]
arrival, silence = map(float, sys.argv[2:])
socket.gethostname = lambda: f"host-{process}"

def main():
    try:
        met = rendezvous(os.environ["TRAINLESS_COORDINATOR"], 3, process, arrival)
    except MissedRendezvous as absent:
        heartbeat.end(process, str(absent))
    heartbeat.hold_abort()
    watcher = heartbeat.Heartbeat(process, *met, silence)
    watcher.start()
    print("ready", flush=True)
    if behaviour == "fail":
        raise UserError("the file is empty")
    if behaviour == "break":
        raise KeyError("a fault")
    if behaviour == "abort":  # from C code, like JAX's runtime
        ctypes.CDLL(None).abort()
    if behaviour == "die":
        time.sleep(1)
        os.kill(os.getpid(), 9)
    time.sleep({"early": 0, "late": 4}.get(behaviour, 30))
    watcher.end()

program.run(main, joins=True)
"""

CASES = {
    "killed": ("work", "work", "work"),
    "first killed": ("work", "work", "work"),
    "stopped": ("work", "work", "work"),
    "first stopped": ("work", "work", "work"),
    "absent": ("work", "work", None),
    "first absent": (None, "work", "work"),
    "user": ("work", "fail", "work"),
    "all of them": ("fail", "fail", "fail"),
    "fault": ("break", "work", "work"),
    "aborting": ("die", "abort", "abort"),
    "well": ("late", "early", "late"),
}

# (limit of the rendezvous, silence after which a process counts as lost), in seconds.
ABSENT, STOPPED, OTHERS = (3, 60), (60, 3), (60, 60)


class Run:
    """The processes of one case. A behaviour of None starts no process."""

    def __init__(self, behaviours: tuple[str | None, ...], arrival: int, silence: int):
        contract = {"TRAINLESS_COORDINATOR": free_address(), "TRAINLESS_NUM_PROCESSES": "3"}
        self.processes = {
            k: subprocess.Popen(
                [sys.executable, "-c", PROGRAM, behaviour, str(arrival), str(silence)],
                cwd=ROOT,
                env=os.environ | contract | {"TRAINLESS_PROCESS_ID": str(k)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for k, behaviour in enumerate(behaviours)
            if behaviour
        }

    def send(self, number: signal.Signals, process: int) -> None:
        for other in self.processes.values():
            assert other.stdout.readline() == "ready\n"
        self.processes[process].send_signal(number)

    def ends(self, *numbers: int) -> tuple[list[int], list[str]]:
        """Returns the exit codes of the processes `numbers`, and their outputs without the line "ready".

        Raises subprocess.TimeoutExpired if a process does not exit within 20 s. The behaviour "work" would take 30 s.
        """
        outputs = [self.processes[k].communicate(timeout=20)[0] for k in numbers]
        return [self.processes[k].returncode for k in numbers], [
            text.removeprefix("ready\n") for text in outputs
        ]


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, Run]]:
    """Returns the processes of all cases, which run at the same time because they mostly wait."""
    bounds = {"absent": ABSENT, "stopped": STOPPED, "well": STOPPED}
    started = {
        name: Run(behaviours, *bounds.get(name.removeprefix("first "), OTHERS))
        for name, behaviours in CASES.items()
    }
    yield started
    for run in started.values():
        for process in run.processes.values():
            process.kill()
            process.communicate()


def lost(number: int) -> str:
    return f"error: process {number} (host-{number}) is lost: "


@pytest.mark.parametrize(
    ("case", "number", "victim"),
    [
        ("killed", signal.SIGKILL, 1),
        ("first killed", signal.SIGKILL, 0),
        ("stopped", signal.SIGSTOP, 1),
        ("first stopped", signal.SIGSTOP, 0),
    ],
)
def test_lost_process_is_named_by_all_others(runs, case, number, victim):
    runs[case].send(number, victim)
    codes, outputs = runs[case].ends(*({0, 1, 2} - {victim}))
    assert codes == [LOST] * 2
    for output in outputs:
        assert output.startswith(lost(victim)) and output.count("\n") == 1
        assert "the same command resumes from the last checkpoint" in output


def test_process_that_missed_the_rendezvous_is_named(runs):
    codes, outputs = runs["absent"].ends(0, 1)
    assert codes == [LOST] * 2
    for output in outputs:
        assert output.startswith("error: process 2 did not connect to process 0 within 3 s: look")
        assert output.count("\n") == 1
    codes, outputs = runs["first absent"].ends(1, 2)
    assert codes == [LOST] * 2
    for output in outputs:
        assert "error: process 0 did not answer at 127.0.0.1:" in output
        assert "within 3 s (Connection refused): look for errors in its log" in output


def test_failing_process_prints_its_error_and_is_named_by_the_others(runs):
    codes, outputs = runs["user"].ends(0, 1, 2)
    assert codes == [LOST, 2, LOST]
    assert outputs[1] == "error: the file is empty\n"
    assert outputs[0].startswith(lost(1)) and outputs[2].startswith(lost(1))
    codes, outputs = runs["fault"].ends(0, 1, 2)
    assert codes == [1, LOST, LOST]
    assert "Traceback" in outputs[0] and "KeyError: 'a fault'" in outputs[0]
    assert outputs[1].startswith(lost(0)) and outputs[2].startswith(lost(0))


def test_error_of_all_processes_is_printed_once_by_each(runs):
    codes, outputs = runs["all of them"].ends(0, 1, 2)
    assert codes == [2] * 3 and outputs == ["error: the file is empty\n"] * 3


def test_lost_line_is_printed_before_an_abort(runs):
    """A process that calls abort still prints which process is lost, and exits with the code LOST.

    JAX's runtime aborts all other processes when process 0 dies. Here, processes 1 and 2 call abort one second before
    process 0 dies.
    """
    codes, outputs = runs["aborting"].ends(0, 1, 2)
    assert codes == [-signal.SIGKILL, LOST, LOST]
    assert outputs[1].startswith(lost(0)) and outputs[2].startswith(lost(0))


def test_process_that_ends_normally_is_not_reported(runs):
    """Process 1 ends first. The other processes report no loss, even after three seconds without its heartbeat."""
    codes, outputs = runs["well"].ends(0, 1, 2)
    assert codes == [0] * 3 and outputs == [""] * 3


def connect(address: str) -> socket.socket:
    """Connects to process 0. Tries again until process 0 listens."""
    host, port = address.split(":")
    while True:
        try:
            return socket.create_connection((host, int(port)))
        except ConnectionRefusedError:
            time.sleep(0.01)


def test_rendezvous_survives_foreign_and_restarted_connections():
    address = free_address()
    found = {}

    def join_process(number: int) -> None:
        found[number] = rendezvous(address, 3, number, 20)

    threads = [threading.Thread(target=join_process, args=(number,)) for number in range(3)]
    threads[0].start()
    stranger = connect(address)
    host, port = address.split(":")
    with stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with socket.create_connection((host, int(port))) as early:
        early.sendall(b'[2, "early", {}]\n')  # the connection is closed after this line is sent
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join()
    connections, hosts = found[0]
    assert sorted(connections) == [1, 2]
    assert hosts == [socket.gethostname()] * 3
    assert found[1][1] == found[2][1] == hosts
    for connections, _ in found.values():
        for connection in connections.values():
            connection.close()


def test_connections_without_the_token_are_ignored():
    """Process 0 ignores silent connections and endless, nested and malformed lines.

    It refuses a process with another token, and keeps waiting for process 1.
    """
    address, token, found = free_address(), "secret", {}

    def join_process(number: int, token: str, name: str) -> None:
        try:
            found[name] = rendezvous(address, 2, number, 20, {}, token)
        except UserError as error:
            found[name] = str(error)

    first = threading.Thread(target=join_process, args=(0, token, "first"))
    first.start()
    strangers = [connect(address) for _ in range(6)]
    lines = [
        b"",
        b"x" * 100_000,
        b"secret " + b"[" * 100_000 + b"\n",
        b'[1, "stranger", {}]\n',
        b'secret [1.5, "stranger", {}, 0]\n',
        b"other \xff\xfe\n",
    ]
    for stranger, line in zip(strangers, lines, strict=True):
        stranger.sendall(line)
    join_process(1, "another", "refused")
    assert "refuses this process: TRAINLESS_TOKEN" in found["refused"]
    assert first.is_alive()
    begun = time.monotonic()
    join_process(1, token, "second")
    first.join()
    assert time.monotonic() - begun < 2
    assert found["first"][1] == found["second"][1] == [socket.gethostname()] * 2
    for connection in (*strangers, found["first"][0][1], found["second"][0][0]):
        connection.close()


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", {"127.0.0.1"}),
        ("localhost", {"127.0.0.1"}),
        ("127.0.0.7", {"127.0.0.7"}),
        ("10.1.2.3", {"::", "0.0.0.0"}),
        ("host-a", {"::", "0.0.0.0"}),
    ],
)
def test_process_0_listens_on_loopback_only_for_a_loopback_coordinator(host, expected):
    """Host names other than localhost do not count as loopback: a machine may resolve its own name to loopback."""
    with rendezvous_module._listen(host, int(free_address().split(":")[1]), 2) as server:
        assert server.getsockname()[0] in expected


def test_differing_settings_are_named():
    address, errors = free_address(), {}
    settings = [{"--workdir": "runs/a", "--config.seed": "1", "the code": "abc"}] * 3
    settings[2] = settings[2] | {"--config.seed": "2", "the code": "abc+"}

    def join_process(number: int) -> None:
        with pytest.raises(UserError) as fault:
            rendezvous(address, 3, number, 20, settings[number])
        errors[number] = str(fault.value)

    threads = [threading.Thread(target=join_process, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    who = f"process 2 ({socket.gethostname()}) differs from process 0: "
    how = "--config.seed is 2, not 1, the code is abc+, not abc"
    advice = "; give all processes the same options, environment variables, code, data and packages"
    assert set(errors.values()) == {who + how + advice}
    assert len(errors) == 3


def test_invalid_settings_raise_user_errors(monkeypatch):
    with pytest.raises(UserError, match="with a port from 1 to 65535, got 'somewhere'"):
        rendezvous("somewhere", 2, 1, 1)
    with socket.create_server(("", 0)) as taken:
        with pytest.raises(UserError, match="process 0 cannot listen on port"):
            rendezvous(f"localhost:{taken.getsockname()[1]}", 2, 0, 1)
        with pytest.raises(
            MissedRendezvous, match="timed out"
        ):  # the server accepts connections but never answers
            rendezvous(f"localhost:{taken.getsockname()[1]}", 2, 1, 0.2)
    with pytest.raises(MissedRendezvous, match="label empty"):
        rendezvous("host..domain:80", 2, 1, 0.2)
    monkeypatch.setenv(SILENCE[0], "soon")
    with pytest.raises(UserError, match="TRAINLESS_LOST_SECONDS must be a positive whole number"):
        seconds(SILENCE)
