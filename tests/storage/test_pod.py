"""Processes without a common disk train one run in a bucket."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.storage.folders import open_folder
from tests.programs import free_address
from tests.storage.conftest import Bucket
from tests.storage.pod import result

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

FIELDS = {"train__steps": 24, "eval__steps": 4}


def start(address: str, folders: list[Path], fields: dict, *last: int) -> list[subprocess.Popen]:
    """Starts one run as several processes, each in its working directory; see `tests.storage.pod`."""
    contract = {"TRAINLESS_COORDINATOR": free_address()}
    contract["TRAINLESS_NUM_PROCESSES"] = str(len(folders))
    settings = {"JAX_NUM_CPU_DEVICES": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    arguments = [address, json.dumps(fields), *map(str, last)]
    processes = []
    for number, folder in enumerate(folders):
        folder.mkdir(exist_ok=True)
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.storage.pod", *arguments],
                cwd=folder,
                env=os.environ | settings | contract | {"TRAINLESS_PROCESS_ID": str(number)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return processes


def train(address: str, folders: list[Path], fields: dict) -> list[str]:
    """Trains one run as several processes; returns the outputs of the processes."""
    processes = start(address, folders, fields)
    try:
        outputs = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        kill(processes)
    # Show the outputs of all processes, because the output of process 0 only names the process that has failed.
    assert not any(process.returncode for process in processes), "\n".join(outputs)
    return outputs


def kill(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()


def results(outputs: list[str]) -> list:
    """Returns the result that every process has printed. Checks that the results are equal."""
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    assert all(one == found[0] for one in found)
    return found[0]


def test_hosts_without_common_disk_train_and_resume(bucket, one_store, tmp_path):
    first, second, third = (tmp_path / name for name in ("a", "b", "c"))
    train(bucket.address, [first, second], {"train__steps": 10})
    # Process 0 now runs on a machine that has so far only downloaded the run, and process 1 on a new machine.
    outputs = train(bucket.address, [second, third], {})
    assert f"resuming from step 10 of {bucket.address}" in outputs[0]
    train(bucket.address + "-whole", [tmp_path / "d", tmp_path / "e"], {})
    # Processes of one machine share a working directory.
    train(bucket.address + "-shared", [tmp_path / "f"] * 2, {"train__steps": 10})
    train(bucket.address + "-shared", [tmp_path / "f"] * 2, {})
    found = []
    for address in (bucket.address + end for end in ("", "-whole", "-shared")):
        summary = json.loads((open_folder(address) / "summary.json").read_text())
        assert summary["processes"] == 2
        found.append(result(summary))
    assert found[0] == found[1] == found[2]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list:
    """Returns the result of an uninterrupted run of four processes in a local folder."""
    folder = tmp_path_factory.mktemp("whole")
    return results(train(str(folder / "run"), [folder] * 4, FIELDS))


def train_and_kill(bucket: Bucket, folders: list[Path]) -> None:
    """Kills all processes after step 13, when their checkpoints are in the bucket."""
    processes = start(bucket.address, folders, FIELDS, 13)
    names = ("latest/5", "latest/10", "best/12", "top/12")
    wanted = {f"checkpoints/{name}/_CHECKPOINT_METADATA" for name in names}
    try:
        while not wanted <= bucket.paths():
            assert all(process.poll() is None for process in processes)
            time.sleep(0.2)
    finally:
        kill(processes)


def checkpoints(bucket: Bucket, folder: Path) -> dict[str, bytes]:
    """Returns {path: content} of a machine's checkpoints. Checks that the bucket has the same paths."""
    copy = folder / ".cache/buckets" / bucket.address.replace("://", "/")
    files = [path for path in (copy / "checkpoints").rglob("*") if path.is_file()]
    found = {path.relative_to(copy).as_posix(): path.read_bytes() for path in files}
    assert found.keys() == {path for path in bucket.paths() if path.startswith("checkpoints/")}
    return found


# The letters of `machines` name the machines of processes 0, 1, 2 and 3. Processes of one machine share a local copy.
@pytest.mark.parametrize(("machines", "lost"), [("aabb", "a"), ("abab", "b")])
def test_killed_run_of_two_machines_resumes_after_loss_of_a_local_copy(
    bucket, one_store, whole, tmp_path, monkeypatch, machines, lost
):
    """The killed run also has "best" and "top" checkpoints after its newest "latest" checkpoint."""
    monkeypatch.setenv("TRAINLESS_LEASE_SECONDS", "2")
    folders = [tmp_path / machine for machine in machines]
    train_and_kill(bucket, folders)
    shutil.rmtree(tmp_path / lost)
    outputs = train(bucket.address, folders, FIELDS)
    assert f"resuming from step 10 of {bucket.address}" in outputs[0]
    assert results(outputs) == whole
    assert checkpoints(bucket, tmp_path / "a") == checkpoints(bucket, tmp_path / "b")


def test_checkpoint_that_only_one_machine_has_is_discarded(
    bucket, one_store, whole, tmp_path, monkeypatch
):
    """The killed process 0 had not uploaded its newest checkpoint. Process 0 of the resumed run is on machine "b"."""
    monkeypatch.setenv("TRAINLESS_LEASE_SECONDS", "2")
    train_and_kill(bucket, [tmp_path / machine for machine in "aabb"])
    newest = "checkpoints/latest/10"
    store, name = bucket.open()
    for path in bucket.paths():
        if path.startswith(newest):
            store.delete(f"{name}/{path}")
    records = tmp_path / "a/.cache/buckets/records" / bucket.address.replace("://", "/")
    shutil.rmtree(records / newest)
    outputs = train(bucket.address, [tmp_path / machine for machine in "bbaa"], FIELDS)
    assert f"resuming from step 5 of {bucket.address}" in outputs[0]
    assert results(outputs) == whole
    assert checkpoints(bucket, tmp_path / "a") == checkpoints(bucket, tmp_path / "b")


def test_machines_with_the_same_disk_image_id_train_one_run(bucket, one_store, whole, tmp_path):
    for machine in "ab":
        folder = tmp_path / machine / ".cache/buckets"
        folder.mkdir(parents=True)
        (folder / "id").write_text("same")
    outputs = train(bucket.address, [tmp_path / machine for machine in "aabb"], FIELDS)
    assert results(outputs) == whole
    assert checkpoints(bucket, tmp_path / "a") == checkpoints(bucket, tmp_path / "b")
