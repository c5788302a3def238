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
    try:
        output, _ = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        process.kill()  # the others of its run miss it, and end as well
        raise
    assert process.returncode == code, output[-3000:]
    return output


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def start_several(arguments: list[str], count: int, devices: int) -> list[subprocess.Popen]:
    """As a launcher does; `devices` are those of each process."""
    contract = {"TRAINLESS_COORDINATOR": free_address(), "TRAINLESS_NUM_PROCESSES": str(count)}
    return [
        start(arguments, devices, TRAINLESS_PROCESS_ID=str(rank), **contract)
        for rank in range(count)
    ]


def finish_two(arguments: list[str]) -> None:
    """Two processes with four devices each."""
    for process in start_several(arguments, 2, 4):
        finish(process)
