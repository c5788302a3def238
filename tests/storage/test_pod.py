"""Processes without a common disk train one run in a bucket."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.storage.folders import open_folder
from tests.programs import finish, free_address

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def train(address: str, folders: list[Path], steps: int) -> list[str]:
    """Trains one run as two processes, each in its working directory; returns the outputs of the processes."""
    contract = {"TRAINLESS_COORDINATOR": free_address(), "TRAINLESS_NUM_PROCESSES": "2"}
    settings = {"JAX_NUM_CPU_DEVICES": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    processes = []
    for number, folder in enumerate(folders):
        folder.mkdir(exist_ok=True)
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.storage.pod", address, str(steps)],
                cwd=folder,
                env=os.environ | settings | contract | {"TRAINLESS_PROCESS_ID": str(number)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return [finish(process) for process in processes]


def test_hosts_without_common_disk_train_and_resume(bucket, one_store, tmp_path):
    first, second, third = (tmp_path / name for name in ("a", "b", "c"))
    train(bucket.address, [first, second], 10)
    # Process 0 now runs on a machine that has so far only downloaded the run, and process 1 on a new machine.
    outputs = train(bucket.address, [second, third], 20)
    assert f"resuming from step 10 of {bucket.address}" in outputs[0]
    train(bucket.address + "-whole", [tmp_path / "d", tmp_path / "e"], 20)
    # Processes of one machine share a working directory.
    train(bucket.address + "-shared", [tmp_path / "f"] * 2, 10)
    train(bucket.address + "-shared", [tmp_path / "f"] * 2, 20)
    found = {}
    for address in (bucket.address + end for end in ("", "-whole", "-shared")):
        summary = json.loads((open_folder(address) / "summary.json").read_text())
        assert summary["processes"] == 2
        found[address] = [point["value"] for point in summary["curve"]["points"]]
        found[address] += [summary["test"], summary["test_mean_of_best"]]
    assert found[bucket.address] == found[bucket.address + "-whole"]
    assert found[bucket.address] == found[bucket.address + "-shared"]
