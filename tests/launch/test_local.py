"""launch/local.sh with a stand-in for the trainer: environment, arguments, signals and exit codes."""

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

LAUNCHER = Path(__file__).parents[2] / "launch" / "local.sh"

# Stand-in for the trainer: prints TRAINLESS_* variables and arguments. Then process K behaves as its argument
# `--K=BEHAVIOUR` says.
STAND_IN = """
import json, os, signal, sys, time

keys = [f"TRAINLESS_{name}" for name in ("COORDINATOR", "NUM_PROCESSES", "PROCESS_ID", "TOKEN")]
print(json.dumps([[os.environ[key] for key in keys], sys.argv[1:]]))
process = os.environ["TRAINLESS_PROCESS_ID"]
behaviour = dict(arg[2:].split("=", 1) for arg in sys.argv[1:] if "=" in arg).get(process, "end")

def save(number, frame):
    print(f"process {process} saved after {signal.Signals(number).name}")
    sys.exit(0)

if behaviour == "fail":
    sys.exit("disk full")
if behaviour == "save":
    signal.signal(signal.SIGTERM, save)
    signal.signal(signal.SIGINT, save)
if behaviour == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if behaviour != "end":
    print("ready", os.getpid())
    time.sleep(300)
"""


@pytest.fixture
def launch(tmp_path: Path):
    """Returns a function that starts the launcher in the stand-in's folder. Ends unfinished runs after the test."""
    (tmp_path / "standin.py").write_text(STAND_IN)
    (tmp_path / "configs").mkdir()
    for config in ("c.py", "configs/x.py"):
        (tmp_path / config).touch()
    started = []

    def start(*args: str, **popen: object) -> subprocess.Popen:
        started.append(
            subprocess.Popen(
                [LAUNCHER, *args],
                cwd=tmp_path,
                env={**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)},
                text=True,
                **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **popen},
            )
        )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=90)


def logs(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("process-*.log"))]


def pids_once_ready(folder: Path, count: int) -> list[int]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        ready = [match for text in logs(folder) if (match := re.search(r"ready (\d+)\n", text))]
        if len(ready) == count:
            return [int(match[1]) for match in ready]
        time.sleep(0.02)
    raise AssertionError(f"not ready: {logs(folder)}")


def test_processes_get_environment_and_arguments(launch, tmp_path):
    args = ["--workdir=a folder", "it's", '"quoted" $HOME *', ""]
    run = launch("-m", "standin", "3", "configs/x.py:tiny", *args)
    out, err = run.communicate(timeout=30)
    assert run.returncode == 0, err
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("local-")
    places, given = zip(*map(json.loads, logs(folder)), strict=True)
    assert given == (["--config=configs/x.py:tiny", *args],) * 3
    coordinator, *_, token = places[0]
    assert len(token) == 32 and token.isalnum()
    host, port = coordinator.split(":")
    assert host == "127.0.0.1" and 1024 <= int(port) < 65536
    assert places == tuple([coordinator, "3", str(k), token] for k in range(3))
    assert out == logs(folder)[0], "the terminal shows process 0 and nothing else"


def test_failed_process_is_named_and_ends_the_others(launch, tmp_path):
    run = launch("-m", "standin", "--log-dir", "my logs", "3", "c.py", "--0=save", "--1=fail")
    _, err = run.communicate(timeout=60)
    assert run.returncode == 1
    assert "process 1 exited with code 1: see my logs/process-1.log" in err
    assert "disk full" in err, "the last lines of the failed process are shown"


@pytest.mark.medium
def test_program_that_does_not_join_is_refused(launch, tmp_path):
    run = launch("-m", "common.compare", "--log-dir", "logs", "2", "c.py", "--case", "a")
    run.communicate(timeout=60)
    assert run.returncode == 2
    # The launcher may end the slower process before this process has written its line.
    written = [text for text in logs(tmp_path / "logs") if text]
    assert written
    for text in written:
        assert text.startswith("error: this program runs as one process") and text.count("\n") == 1


def test_process_ignoring_sigterm_is_killed_after_grace(launch, tmp_path):
    args = ["-m", "standin", "--log-dir", "logs", "--grace", "1", "2", "c.py"]
    run = launch(*args, "--0=stubborn", "--1=sleep")
    os.kill(pids_once_ready(tmp_path / "logs", 2)[1], signal.SIGKILL)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGKILL
    assert "process 1 was killed by SIGKILL" in err
    assert "killing processes 0" in err
    assert "Killed" not in err, "bash's own message is not shown"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_is_forwarded_and_launcher_waits(launch, tmp_path, number):
    run = launch("-m", "standin", "--log-dir", "logs", "2", "c.py", "--0=save", "--1=save")
    pids_once_ready(tmp_path / "logs", 2)
    run.send_signal(number)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 0, err
    assert f"{number.name}: forwarded to all processes" in err
    for k, text in enumerate(logs(tmp_path / "logs")):
        assert text.count(f"process {k} saved after {number.name}") == 1
    assert "process 0 saved" in out


def test_ctrl_c_on_a_terminal_is_forwarded(launch, tmp_path):
    # A terminal signals its whole foreground process group; send_signal would reach only the launcher.
    ours, theirs = pty.openpty()

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    args = ["-m", "standin", "--log-dir", "logs", "2", "c.py", "--0=save", "--1=save"]
    terminal = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    run = launch(*args, **terminal, preexec_fn=take_terminal)
    pids_once_ready(tmp_path / "logs", 2)
    os.write(ours, b"\x03")
    run.wait(timeout=60)
    shown = os.read(ours, 10_000).decode()
    os.close(ours)
    os.close(theirs)
    assert run.returncode == 0
    for k, text in enumerate(logs(tmp_path / "logs")):
        assert text.count(f"process {k} saved after SIGINT") == 1
    assert "process 0 saved" in shown


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "N and CONFIG are required"),
        (("0", "c.py"), "N must be a positive whole number without leading zeros, not '0'"),
        (
            ("--grace", "soon", "2", "c.py"),
            "--grace must be 0 or a positive whole number without leading zeros, not 'soon'",
        ),
        (
            ("--grace", "08", "2", "c.py"),
            "--grace must be 0 or a positive whole number without leading zeros, not '08'",
        ),
        (("--grcae", "3", "2", "c.py"), "unknown option --grcae"),
        (("-m",), "-m needs a value"),
        (("--gpus", "1,0,1,2", "2", "c.py"), "the list of GPUs 1 0 1 2 repeats a GPU: list each"),
        (("-m", "nope.train", "2", "c.py"), "cannot find module nope.train, or import"),
        (("-m", "common.nope", "2", "c.py"), "cannot find module common.nope"),
        (("2", "C.py:tiny"), "no file C.py: give the path of a configuration file"),
        (("2", "c.py", "--x=1", "--grace", "3"), "--grace is an option of the launcher: give it"),
    ],
)
def test_invalid_usage_exits_with_code_2(launch, tmp_path, args, message):
    run = launch(*args)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 2
    assert message in err and err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_help_lists_environment_variables(launch):
    out, _ = launch("--help").communicate(timeout=60)
    assert "TRAINLESS_COORDINATOR" in out and "TRAINLESS_LOST_SECONDS" in out
    assert "TRAINLESS_JOIN_SECONDS" in out and "with 75 if" in out and "example:" in out
