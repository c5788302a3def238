"""Local copies of folders in buckets: which files are downloaded, uploaded and kept."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import pytest

from common.errors import UserError
from common.runtime import processes
from common.storage import uploads
from common.storage.addresses import address, copy_of, shown
from common.storage.folders import open_folder, output
from common.storage.mirror import Mirror, roles
from common.storage.stores import Object, Store
from common.storage.uploads import Uploads

MARK = "_CHECKPOINT_METADATA"


def write(folder: Path, **files: str) -> None:
    for name, content in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def checkpoint(folder: Path, kind: str, step: int, content: str = "") -> None:
    for name in ("state/d/1", "meta/metadata", MARK):
        write(folder / "checkpoints" / kind / str(step), **{name: content or f"{kind} {step}"})


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


@contextmanager
def training(folder: Path) -> Iterator[None]:
    """Holds the lease of a folder and uploads its files, as a run does."""
    run = Uploads(folder)
    yield
    run.release()


def upload(folder: Path) -> None:
    with training(folder):
        pass


def test_address_and_local_copy_map_to_each_other(bucket, tmp_path):
    copy = copy_of(bucket.address + "/")
    assert address(copy) == shown(copy) == bucket.address
    assert address(tmp_path) == "" and shown(tmp_path) == str(tmp_path)
    assert copy_of("runs/one") == Path("runs/one")
    assert open_folder(str(copy)) == copy


@pytest.mark.parametrize(
    "text", ["hdfs://a/b", "gs://a", "gs:/a/b", "s3://a/../b", "gs:///b", "gs://a//b"]
)
def test_invalid_address_raises_one_line_error(text):
    with pytest.raises(UserError, match=text):
        copy_of(text)


def test_another_machine_gets_the_same_files(bucket):
    folder = open_folder(bucket.address)
    write(folder, config="1", sub__file="2", empty="")
    checkpoint(folder, "latest", 5)
    upload(folder)
    bucket.machine("second")
    assert not copy_of(bucket.address).exists()
    assert contents(open_folder(bucket.address)) == contents(folder)


def test_only_changed_files_are_transferred(bucket, one_store):
    folder = open_folder(bucket.address)
    write(folder, a="1", b="2")
    upload(folder)
    before = len(bucket.proxy.requests)
    upload(folder)
    open_folder(bucket.address)
    new = bucket.proxy.requests[before:]
    assert not any("/a" in request or "/b?" in request for request in new)
    write(folder, a="3")
    upload(folder)
    bucket.machine("second")
    assert contents(open_folder(bucket.address)) == {"a": "3", "b": "2"}


def test_deleted_files_are_deleted_in_the_bucket_and_in_other_copies(bucket):
    folder = open_folder(bucket.address)
    checkpoint(folder, "latest", 5)
    checkpoint(folder, "latest", 10)
    upload(folder)
    bucket.machine("second")
    other = open_folder(bucket.address)
    bucket.machine("first")
    with training(folder):
        shutil.rmtree(folder / "checkpoints" / "latest" / "5")
    assert not any("latest/5" in path for path in bucket.paths())
    bucket.machine("second")
    open_folder(bucket.address)
    assert [path.name for path in (other / "checkpoints" / "latest").iterdir()] == ["10"]


def test_run_can_be_resumed_after_any_upload(bucket, one_store, monkeypatch):
    """If the writer dies after any upload or deletion, another machine finds only complete checkpoints.

    The machine also finds the best checkpoint and the metrics of the step from which it would resume.
    """
    folder = open_folder(bucket.address)
    write(folder, metrics="5")
    checkpoint(folder, "best", 5)
    checkpoint(folder, "latest", 5)
    upload(folder)
    monkeypatch.setattr(uploads, "INTERVAL", 1000)  # Upload only at the end.
    run = Uploads(folder)
    write(folder, metrics="10")
    for kind in ("best", "latest"):
        checkpoint(folder, kind, 10)
        shutil.rmtree(folder / "checkpoints" / kind / "5")
    changes: list[str] = []

    def look() -> None:
        changes.append("")
        bucket.machine(f"after {len(changes)}")
        found = contents(open_folder(bucket.address))
        steps = {}
        for kind in ("best", "latest"):
            whole = (copy_of(bucket.address) / "checkpoints" / kind).glob("*")
            steps[kind] = {int(path.name) for path in whole}
            for step in steps[kind]:
                parts = ("state/d/1", "meta/metadata", MARK)
                assert all(f"checkpoints/{kind}/{step}/{part}" in found for part in parts)
        assert steps["latest"] and max(steps["latest"]) in steps["best"]
        assert int(found["metrics"]) >= max(steps["latest"])
        bucket.machine("first")

    for name in ("upload", "delete_object"):
        change = getattr(Mirror, name)

        def changed(self, path, change=change):
            result = change(self, path)
            look()
            return result

        monkeypatch.setattr(Mirror, name, changed)
    run.release()
    assert len(changes) == 13
    assert steps_of(folder) == [10]


def steps_of(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in (folder / "checkpoints" / "latest").iterdir())


def test_incomplete_checkpoint_is_not_downloaded_and_then_deleted(bucket):
    folder = open_folder(bucket.address)
    checkpoint(folder, "latest", 5)
    upload(folder)
    store, name = bucket.open()
    store.upload(f"{name}/checkpoints/latest/10/state/d/1", folder / "checkpoints/latest/5" / MARK)
    bucket.machine("second")
    other = open_folder(bucket.address)
    assert steps_of(other) == [5]
    upload(other)
    assert not any("latest/10" in path for path in bucket.paths())


def test_files_not_uploaded_are_kept_if_no_other_machine_has_written(bucket):
    folder = open_folder(bucket.address)
    write(folder, metrics="5")
    upload(folder)
    write(folder, metrics="10")  # The process was killed before the next upload.
    checkpoint(folder, "latest", 10)
    assert contents(open_folder(bucket.address))["metrics"] == "10"
    upload(folder)
    bucket.machine("second")
    other = open_folder(bucket.address)
    assert contents(other) == contents(folder) and steps_of(other) == [10]


def test_checkpoint_whose_upload_was_interrupted_is_kept(bucket, one_store, monkeypatch):
    folder = open_folder(bucket.address)
    checkpoint(folder, "latest", 5)
    upload(folder)
    checkpoint(folder, "latest", 10)
    transfer = Mirror.upload

    def lost(self: Mirror, path: str) -> None:
        if path.endswith(MARK):
            raise UserError("no connection")
        transfer(self, path)

    with monkeypatch.context() as patch:
        patch.setattr(Mirror, "upload", lost)
        with pytest.raises(UserError, match="no connection"):
            upload(folder)
    kept = contents(folder)
    assert contents(open_folder(bucket.address)) == kept and steps_of(folder) == [5, 10]
    upload(folder)
    bucket.machine("second")
    assert contents(open_folder(bucket.address)) == kept


def test_files_not_uploaded_are_discarded_if_another_machine_has_written(bucket):
    folder = open_folder(bucket.address)
    write(folder, metrics="5")
    checkpoint(folder, "latest", 5)
    upload(folder)
    checkpoint(folder, "latest", 10)
    write(folder, metrics="10")
    bucket.machine("second")
    other = open_folder(bucket.address)
    with training(other):
        checkpoint(other, "latest", 8)
    bucket.machine("first")
    assert contents(open_folder(bucket.address)) == contents(other)
    assert steps_of(folder) == [5, 8]


def test_hidden_and_incomplete_files_are_not_uploaded(bucket):
    folder = open_folder(bucket.address)
    write(folder, **{".hidden": "", "a.partial": "", "lock": "", "b": ""})
    checkpoint(folder, "latest.orbax-checkpoint-tmp-1", 3)
    os.symlink("b", folder / "link")
    upload(folder)
    assert bucket.paths() == {"b", "lease.json"}


def test_folder_of_a_run_in_training_is_not_overwritten(bucket):
    folder = open_folder(bucket.address)
    write(folder, metrics="5")
    upload(folder)
    bucket.machine("second")
    other = open_folder(bucket.address)
    with training(other):
        write(other, metrics="6")
    bucket.machine("first")
    with (folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        open_folder(bucket.address)
        open_folder(bucket.address.rpartition("/")[0])
        assert contents(folder) == {"metrics": "5"}
    open_folder(bucket.address)
    assert contents(folder) == {"metrics": "6"}


def test_folder_that_changes_during_download_is_read_again(bucket, monkeypatch):
    folder = open_folder(bucket.address)
    write(folder, a="old", b="old")
    upload(folder)
    bucket.machine("second")
    other, download, times = copy_of(bucket.address), Mirror.download, []

    def download_late(self, path, known):
        if not times:
            store, name = bucket.open()
            write(folder, a="new")
            store.upload(f"{name}/a", folder / "a")
            store.delete(f"{name}/b")
        times.append(path)
        download(self, path, known)

    monkeypatch.setattr(Mirror, "download", download_late)
    open_folder(bucket.address)
    assert contents(other) == {"a": "new"}


def test_only_requested_files_are_downloaded(bucket):
    folder = open_folder(bucket.address)
    write(folder, one__summary="1", one__config="2")
    upload(folder)
    bucket.machine("second")
    other = open_folder(bucket.address, lambda path: path.endswith("summary"))
    assert contents(other) == {"one/summary": "1"}
    assert set(contents(open_folder(bucket.address))) == {"one/summary", "one/config"}


def test_object_outside_of_its_folder_raises_one_line_error(bucket, one_store, monkeypatch):
    _, name = bucket.open()
    found = {f"{name}/../../x": Object("1", 0.0)}
    monkeypatch.setattr(Store, "list", lambda store, prefix: found)
    with pytest.raises(UserError, match="is not a valid file path"):
        open_folder(bucket.address)


def test_output_is_uploaded_even_after_an_error(bucket):
    folder = open_folder(bucket.address)
    with pytest.raises(ValueError), output(folder):
        write(folder, table="1")
        raise ValueError
    bucket.machine("second")
    assert contents(open_folder(bucket.address)) == {"table": "1"}


def test_missing_package_raises_one_line_error(bucket, monkeypatch):
    package = {"gs": "google.cloud.storage", "s3": "boto3"}[bucket.address[:2]]
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(UserError, match=r"pip install .*\[(gcs|s3)\]"):
        open_folder(bucket.address)


@pytest.mark.parametrize(
    ("found", "different", "leaders"),
    [
        (["a/1 x", "a/1 x"], False, [0, 1]),
        (["a/1 x", "a/1 x", "b/2 ", "b/2 "], True, [0, 2]),
        (["a/1 x", "b/2 old", "a/1 x", "b/2 old"], True, [0, 1]),
        (["a/1 x", "b/1 x"], False, [0, 1]),  # Two hosts mount one file system.
        (["a/1 x", "b/1 ", "c/1 "], True, [0, 1, 2]),  # Three hosts have the same disk image.
    ],
)
def test_first_process_of_each_local_copy_leads(monkeypatch, found, different, leaders):
    monkeypatch.setattr(processes, "all_gather", lambda _: [one.split(" ") for one in found])
    for number in range(len(found)):
        monkeypatch.setattr(jax, "process_index", lambda number=number: number)
        assert roles("") == (different, number in leaders)
