"""Programs that run as if a launcher had started several processes, and error lines for faults of the file system."""

import errno
import os
import runpy
import signal
import subprocess
import sys

import pytest

from common.runtime import program
from tests.programs import ROOT

JOINING = {
    "reservoir.train": "wmt_ffn_res",
    "reservoir.finetune": "sst2",
    "gmlp_lm.train": "enwik8_gmlp",
    "explicit_opt.train": "babylm_cat",
    "perception.train": "perception",
}
"""Program that can divide its work among processes -> name of a configuration for this program."""


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """Returns a function (name of a program, *arguments) -> error line, for a program that must fail with exit code 2.

    The program runs in this process, with TRAINLESS_NUM_PROCESSES=2 as if a launcher had started two processes.
    """
    monkeypatch.setenv("TRAINLESS_NUM_PROCESSES", "2")
    monkeypatch.delenv("TRAINLESS_COORDINATOR", raising=False)
    monkeypatch.setattr(program, "leave", sys.exit)  # does not wait for other processes
    interrupted = signal.getsignal(signal.SIGINT)

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(SystemExit) as caught:
            runpy.run_module(name, run_name="__main__")
        assert caught.value.code == 2
        output, error = capsys.readouterr()
        assert not output and error.count("\n") == 1
        return error

    yield run
    signal.signal(signal.SIGINT, interrupted)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("name", ["common.compare", "common.report", "perception.worth"])
def test_program_of_one_process_is_refused(fault, name):
    line = "this program runs as one process, but TRAINLESS_NUM_PROCESSES is 2: start it without"
    assert line in fault(name)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("name", JOINING)
def test_training_program_joins_the_other_processes(fault, name):
    """Without the address of process 0, joining fails."""
    config = f"--config=configs/{JOINING[name]}.py:tiny"
    assert "set TRAINLESS_COORDINATOR to the host:port of process 0" in fault(name, config)


def test_empty_number_of_processes_counts_as_unset(monkeypatch):
    monkeypatch.setenv("TRAINLESS_NUM_PROCESSES", "")
    assert not program.several()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("", "interrupted\n"),
        (
            ", trains=True",
            "interrupted: the same command resumes a run from its last checkpoint, if",
        ),
        (
            ", joins=True",
            "interrupted: the same command resumes a run from its last checkpoint, if",
        ),
    ],
)
def test_interrupted_program_says_whether_the_same_command_resumes(options, line):
    main = "lambda: signal.raise_signal(signal.SIGINT)"
    code = f"import signal; from common.runtime import program; program.run({main}{options})"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=-1, text=True) as process:
        printed = process.stderr.read()
    assert process.returncode == 130
    assert printed.startswith(line) and printed.count("\n") == 1


@pytest.mark.parametrize(
    ("number", "start"),
    [
        (errno.ENOSPC, "error: cannot write to runs/a/config.json: No space left on device; free"),
        (
            errno.EDQUOT,
            f"error: cannot write to runs/a/config.json: {os.strerror(errno.EDQUOT)}; free",
        ),
        (errno.ENAMETOOLONG, "error: File name too long: "),
    ],
)
def test_error_of_the_file_system_is_one_line_that_names_the_file(
    monkeypatch, capsys, number, start
):
    def main() -> None:
        raise OSError(number, os.strerror(number), "runs/a/config.json")

    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as stop:
        program.run(main)
    assert stop.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith(start) and "runs/a/config.json" in line
    assert line.count("\n") == 1


def test_full_disk_in_the_message_of_a_storage_library_names_the_path(monkeypatch, capsys):
    def main() -> None:
        raise ValueError(
            'RESOURCE_EXHAUSTED: Error writing "a/0.0" at local file "/runs/a/state": Failed to write 9 bytes [OS error'
            " 28: ENOSPC No space left on device]"
        )

    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit, match="2"):
        program.run(main)
    assert capsys.readouterr().err == (
        "error: cannot write to /runs/a/state: No space left on device; free space, then repeat the command\n"
    )
