"""Programs of the project as processes of their own, with as many CPU devices as a test wants."""

import os
import socket
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


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
    output, _ = process.communicate(timeout=240)
    assert process.returncode == code, output[-3000:]
    return output


def finish_two(arguments: list[str]) -> None:
    """Two processes with four devices each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    contract = {"TRAINLESS_COORDINATOR": f"127.0.0.1:{port}", "TRAINLESS_NUM_PROCESSES": "2"}
    processes = [start(arguments, 4, TRAINLESS_PROCESS_ID=str(rank), **contract) for rank in (0, 1)]
    for process in processes:
        finish(process)
