"""Runs the project's programs: as subprocesses with any number of CPU devices, or in the process of the test."""

import io
import os
import signal
import socket
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path

import jax
import pytest

from common.runtime import program

ROOT = Path(__file__).parents[1]


def call(name: str, *arguments: object, code: int = 0) -> str:
    """Runs `python -m NAME ARGUMENTS` in this process on one device, checks the exit code, and returns the output.

    A call in this process saves the time to start Python and JAX.
    """
    main, device = import_module(name).main, jax.devices()[:1]
    raw = io.BytesIO()
    output = io.TextIOWrapper(raw, encoding="utf-8", write_through=True)
    interrupted, ended = signal.getsignal(signal.SIGINT), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output), redirect_stderr(output):
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        patch.setattr(jax, "devices", lambda *_: device)
        try:
            program.run(main)
        except SystemExit as end:
            ended = end.code
        finally:
            signal.signal(signal.SIGINT, interrupted)
    text = raw.getvalue().decode()
    assert ended == code, text[-3000:]
    return text


def start(arguments: list[str], devices: int = 1, **environment: str) -> subprocess.Popen:
    settings = (
        os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"} | environment
    )
    return subprocess.Popen(
        arguments,
        cwd=ROOT,
        env=settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen, code: int = 0) -> str:
    try:
        output, _ = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        process.kill()  # The other processes of the run then exit too.
        raise
    assert process.returncode == code, output[-3000:]
    return output


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def start_several(arguments: list[str], count: int, devices: int) -> list[subprocess.Popen]:
    """Starts `count` processes of one run, as a launcher does. Each process has `devices` CPU devices."""
    contract = {"TRAINLESS_COORDINATOR": free_address(), "TRAINLESS_NUM_PROCESSES": str(count)}
    return [
        start(arguments, devices, TRAINLESS_PROCESS_ID=str(rank), **contract)
        for rank in range(count)
    ]


def finish_two(arguments: list[str]) -> None:
    """Starts a run as two processes with four devices each, and waits until both have succeeded."""
    for process in start_several(arguments, 2, 4):
        finish(process)
