"""Programs whose reader or terminal is gone while they write."""

import os
import pty
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from common.runtime import program
from tests.programs import ROOT

MAIN = """
import sys
from pathlib import Path
from common.errors import UserError
from common.runtime import program

def main():
    sys.stdin.read()  # returns after the reader is gone
    {write}
    Path(sys.argv[1]).touch()
    {end}

program.run(main, {option})
"""
PRINT = "print('step'); print('line'); sys.stdout.flush(); print('loss', file=sys.stderr)"


def run(
    done: Path,
    output: int,
    error: int,
    gone: int,
    *,
    option: str = "",
    write: str = PRINT,
    end="pass",
) -> tuple[int, str]:
    """Runs a program that writes after the file descriptor `gone`, the other end of `output`, is closed.

    Returns its exit code and what it writes to a pipe on `error`. Creates the file `done` if it writes all lines.
    """
    code = MAIN.format(write=write, option=option, end=end)
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(done)],
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": ""},
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=error,
        text=True,
    )
    os.close(gone)
    os.close(output)
    _, text = process.communicate(timeout=60)
    return process.returncode, text


@pytest.mark.parametrize("option", ["trains=True", "joins=True"])
def test_training_goes_on_without_the_reader_of_stdout(tmp_path, option):
    reader, writer = os.pipe()
    code, text = run(tmp_path / "done", writer, subprocess.PIPE, reader, option=option)
    assert code == 0 and (tmp_path / "done").exists()
    first, *others = text.splitlines()
    assert first.startswith(
        "warning: cannot write to standard output (Broken pipe): the program goes"
    )
    assert others == ["loss"]


def test_training_goes_on_without_its_terminal(tmp_path):
    """Both streams are a terminal, or a pipe to `tee`."""
    for name, (reader, writer) in {"terminal": pty.openpty(), "pipe": os.pipe()}.items():
        code, _ = run(tmp_path / name, writer, subprocess.STDOUT, reader, option="trains=True")
        assert code == 0 and (tmp_path / name).exists()


@pytest.mark.parametrize("write", [PRINT, "sys.stdout.buffer.write(b'x' * 10**6)", "print('x')"])
def test_program_that_prints_ends_quietly_without_its_reader(tmp_path, write):
    reader, writer = os.pipe()
    result = run(tmp_path / "done", writer, subprocess.PIPE, reader, write=write)
    assert result == (0, "")
    # Python has buffered the short text: it is written after `main` returns.
    assert (tmp_path / "done").exists() == (write == "print('x')")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
@pytest.mark.parametrize(
    ("option", "code", "line"),
    [
        (
            "",
            2,
            "error: cannot write to standard output: No space left on device; free space, then repeat the command",
        ),
        (
            "trains=True",
            0,
            "warning: cannot write to standard output (No space left on device): the program goes on without it",
        ),
    ],
)
def test_full_disk_below_stdout_is_named(tmp_path, option, code, line):
    full, unused = os.open("/dev/full", os.O_WRONLY), os.open(os.devnull, os.O_RDONLY)
    write = "print('x')"
    result = run(tmp_path / "done", full, subprocess.PIPE, unused, option=option, write=write)
    assert result == (code, f"{line}\n")


@pytest.mark.parametrize("option", ["", "trains=True"])
def test_error_of_a_program_keeps_its_exit_code_without_a_reader(tmp_path, option):
    reader, writer = os.pipe()
    options = {"option": option, "write": "print('x')", "end": "raise UserError('wrong')"}
    code, _ = run(tmp_path / "done", writer, subprocess.STDOUT, reader, **options)
    assert code == 2


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize(
    "name",
    [
        *("common.compare", "perception.worth"),
        *(f"{paper}.reproduce" for paper in ("reservoir", "gmlp_lm", "explicit_opt", "perception")),
    ],
)
def test_programs_of_one_process_that_train_go_on_without_a_reader(monkeypatch, name):
    called = []
    monkeypatch.setattr(program, "run", lambda _, **options: called.append(options))
    runpy.run_module(name, run_name="__main__")
    assert called == [{"trains": True}]
