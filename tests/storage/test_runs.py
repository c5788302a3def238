"""Runs whose workdir is in a bucket: resuming on another machine, damaged files, outages of the store."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.tree_util import tree_flatten_with_path as flatten

from common.errors import UserError
from common.storage.addresses import copy_of
from common.storage.folders import open_folder
from common.storage.stores import Changed
from common.track.tracker import read_metrics
from common.train.run import Run
from tests.train import toy

ROOT = Path(__file__).parents[2]

MARK = "checkpoints/latest/{}/_CHECKPOINT_METADATA"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Returns the curve, the test metrics and the number of metric lines of an uninterrupted run in a local folder."""
    folder = tmp_path_factory.mktemp("whole")
    return result(folder, toy.run(folder))


def result(folder: Path, summary: dict) -> dict:
    curve = [(point["step"], point["value"]) for point in summary["curve"]["points"]]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {"curve": curve, "test": summary["test"], "lines": len(lines)}


@pytest.mark.medium
def test_run_resumes_on_another_machine(bucket, whole, capsys):
    toy.run(open_folder(bucket.address), train__steps=10)
    assert MARK.format(10) in bucket.paths() and "summary.json" in bucket.paths()
    bucket.machine("second")
    folder = open_folder(bucket.address)
    assert result(folder, toy.run(folder)) == whole
    assert f"resuming from step 10 of {bucket.address}" in capsys.readouterr().out
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    assert bucket.paths() == {path.relative_to(folder).as_posix() for path in files} | {
        "lease.json"
    }


STUCK = """
import sys, time
from pathlib import Path
from common.storage import addresses, folders, uploads
from tests.train import toy

uploads.INTERVAL, addresses.ROOT = 0.1, Path(sys.argv[1])
batches = toy.Toy.batches

def stuck(self, start):
    for number, batch in enumerate(batches(self, start)):
        time.sleep(600 * (number == 13))
        yield batch

toy.Toy.batches = stuck
toy.run(folders.open_folder(sys.argv[2]))
"""
"""Program that trains 11 steps and then waits, so that it can be killed."""


@pytest.mark.slow
def test_killed_run_resumes_on_another_machine(bucket, whole, monkeypatch, tmp_path, capsys):
    """The process is killed after the upload of checkpoint 5. Another machine takes over the lease and resumes."""
    monkeypatch.setenv("TRAINLESS_LEASE_SECONDS", "2")
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK, str(tmp_path / "killed"), bucket.address],
        cwd=ROOT,
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "1"},
        stdout=subprocess.DEVNULL,
    )
    store, name = bucket.open()
    while f"{name}/{MARK.format(5)}" not in store.list(name):
        assert process.poll() is None
        time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    bucket.machine("second")
    folder = open_folder(bucket.address)
    assert not (folder / "summary.json").exists()
    assert result(folder, toy.run(folder)) == whole
    said = capsys.readouterr()
    assert "resuming from step 5 " in said.out or "resuming from step 10 " in said.out
    assert f"was last written by process {process.pid} of " in said.err


def test_damaged_newest_checkpoint_is_set_aside(bucket, one_store, whole, capsys):
    toy.run(open_folder(bucket.address), train__steps=10)
    store, name = bucket.open()
    (damaged,) = (p for p in bucket.paths() if p.endswith("latest/10/meta/metadata"))
    content, version = store.read(f"{name}/{damaged}")
    store.write(f"{name}/{damaged}", content[: len(content) // 2], version)
    bucket.machine("second")
    folder = open_folder(bucket.address)
    assert result(folder, toy.run(folder)) == whole
    said = capsys.readouterr()
    assert "checkpoint of step 10 is damaged" in said.err and "resuming from step 5 of" in said.out
    assert any(path.startswith("checkpoints/damaged/10.0/") for path in bucket.paths())


@pytest.mark.slow
def test_outage_of_the_store_changes_no_result(bucket, one_store, whole, monkeypatch, capsys):
    """The store answers 503 from the checkpoint of step 5 to the checkpoint of step 20, for longer than the lease."""
    monkeypatch.setenv("TRAINLESS_LEASE_SECONDS", "1")
    save, saves = Run.save, []

    def save_without_store(run: Run) -> None:
        saves.append(run.step)
        bucket.proxy.status = 503 if run.step in (5, 10, 15) else 0
        save(run)
        time.sleep(1.5)

    monkeypatch.setattr(Run, "save", save_without_store)
    folder = open_folder(bucket.address)
    assert result(folder, toy.run(folder)) == whole
    assert saves == [5, 10, 15, 20]
    assert "retrying for" in capsys.readouterr().err
    bucket.machine("second")
    other = open_folder(bucket.address)
    assert (other / "metrics.jsonl").read_text() == (folder / "metrics.jsonl").read_text()
    assert MARK.format(20) in bucket.paths()


OUTAGE = 60.0
"""Seconds for which the store answers every request with 503."""


class Interrupted(toy.Toy):
    """The toy task. Calls `begin` before the eighth batch, and delays this and each later batch by 5 seconds."""

    def __init__(self, begin: Callable[[], None]):
        super().__init__()
        self.begin, self.number = begin, 0

    def batches(self, start):
        for batch, position in super().batches(start):
            self.number = position["next"]
            if self.number == 8:
                self.begin()
            time.sleep(5 * (self.number >= 8))
            yield batch, position


def outcome(folder: Path) -> dict:
    """Returns metrics, summary and checkpoints of a run, without seconds."""
    found = {"metrics": [without_seconds(line) for line in read_metrics(folder)]}
    found["summary"] = without_seconds(json.loads((folder / "summary.json").read_text()))
    with ocp.StandardCheckpointer() as reader:
        for meta in sorted((folder / "checkpoints").glob("*/*/meta/metadata")):
            checkpoint = meta.parents[1]
            arrays = jax.tree.map(np.asarray, reader.restore(checkpoint.absolute() / "state"))
            found[str(checkpoint.relative_to(folder))] = (
                {jax.tree_util.keystr(path): x.tolist() for path, x in flatten(arrays)[0]},
                without_seconds(json.loads(meta.read_text())),
            )
    return found


def without_seconds(value):
    """Returns a JSON value without the fields that depend on the speed of the machine."""
    if isinstance(value, list):
        return [without_seconds(item) for item in value]
    if not isinstance(value, dict):
        return value
    timed = {"hours", "timing", "clock", "sessions"}
    kept = {name: x for name, x in value.items() if name not in timed and "second" not in name}
    if isinstance(kept.get("aucc"), float):  # in metrics.jsonl, the AUCC over seconds
        del kept["aucc"]
    if "last_evaluation" in kept:
        kept["last_evaluation"] = kept["last_evaluation"][:1]  # of (step, seconds), keep the step
    return {name: without_seconds(item) for name, item in kept.items()}


@pytest.mark.slow
def test_a_minute_of_503_changes_no_result(bucket, monkeypatch, tmp_path, capsys):
    """The outage begins and ends during training, with the default retries and the default lease."""
    monkeypatch.delenv("TRAINLESS_BUCKET_SECONDS")
    whole = tmp_path / "whole"
    toy.run(whole)
    capsys.readouterr()
    ended = []

    def begin() -> None:
        while MARK.format(5) not in bucket.paths():
            time.sleep(0.1)
        bucket.proxy.refusals.clear()
        bucket.proxy.status = 503
        threading.Timer(OUTAGE, end).start()

    def end() -> None:
        bucket.proxy.status = 0
        ended.append(task.number)

    task = Interrupted(begin)
    toy.run(open_folder(bucket.address), task)
    refusals = bucket.proxy.refusals
    # Pauses between requests grow up to 30 s, so the last refusal may be 30 s before the end of the outage.
    assert len(refusals) > 5 and refusals[-1] - refusals[0] > OUTAGE / 3
    assert 15 < ended[0] < 22, "checkpoint 10 is saved during the outage, 20 after the outage"
    lines = capsys.readouterr().err.splitlines()
    (line,) = (line for line in lines if "retrying for" in line)
    store = bucket.address.removesuffix(bucket.address.partition("train-less")[2])
    assert line.startswith(f"warning: requests to {store} fail (")
    assert line.endswith("); retrying for 300 s")
    bucket.machine("second")
    found, expected = outcome(open_folder(bucket.address)), outcome(whole)
    assert len([name for name in found if name.startswith("checkpoints/latest/")]) == 2
    assert found == expected


@pytest.mark.slow
def test_unreachable_store_stops_the_run_which_resumes_without_loss(
    bucket, one_store, whole, monkeypatch
):
    monkeypatch.setenv("TRAINLESS_BUCKET_SECONDS", "1")
    save = Run.save

    def save_without_store(run: Run) -> None:
        bucket.proxy.status = 503 if run.step == 5 else 0
        save(run)
        if run.step == 5:
            time.sleep(3)

    monkeypatch.setattr(Run, "save", save_without_store)
    folder = open_folder(bucket.address)
    with pytest.raises(
        UserError, match=r"have failed for .*; .* contains this machine's copy of"
    ) as error:
        toy.run(folder)
    assert bucket.address in str(error.value) and str(folder) in str(error.value)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    bucket.proxy.status = 0
    assert MARK.format(5) not in bucket.paths()
    assert result(folder, toy.run(open_folder(bucket.address))) == whole
    assert MARK.format(20) in bucket.paths()


@pytest.mark.slow
def test_run_whose_lease_is_taken_stops(bucket, one_store, monkeypatch):
    monkeypatch.setenv("TRAINLESS_LEASE_SECONDS", "1")
    save = Run.save

    def take_over() -> None:
        store, name = bucket.open()
        while True:
            _, version = store.read(f"{name}/lease.json")
            try:
                store.write(f"{name}/lease.json", b'{"holder": "process 1 of ann on b"}', version)
                return
            except Changed:  # The run has renewed its lease since the read: read again.
                continue

    def save_and_lose(run: Run) -> None:
        save(run)
        if run.step == 5:
            take_over()
            time.sleep(1)

    monkeypatch.setattr(Run, "save", save_and_lose)
    with pytest.raises(UserError, match="has taken over"):
        toy.run(open_folder(bucket.address))
    assert MARK.format(20) not in bucket.paths()
    store, name = bucket.open()
    assert b"ann" in store.read(f"{name}/lease.json")[0]


@pytest.mark.slow
def test_two_trainings_of_one_run_are_refused(bucket, one_store, monkeypatch):
    monkeypatch.setenv("TRAINLESS_LEASE_SECONDS", "2")
    evaluate, refused = toy.Toy.evaluate, []

    def evaluate_and_start_another(task, values, split):
        if not refused:
            refused.append(None)
            with pytest.raises(UserError, match=f"another process is training in {bucket.address}"):
                toy.run(copy_of(bucket.address))  # on the machine of the first training
            bucket.machine("second")
            with pytest.raises(UserError, match=rf"training in {bucket.address} \(process "):
                toy.run(copy_of(bucket.address))
            bucket.machine("first")
        return evaluate(task, values, split)

    monkeypatch.setattr(toy.Toy, "evaluate", evaluate_and_start_another)
    toy.run(open_folder(bucket.address))
    assert refused
