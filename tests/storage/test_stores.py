"""Objects in Google Cloud Storage and S3: listing, reading, conditional writes, deletion, and errors of the store."""

import sys
import threading
import time

import pytest

from common.errors import UserError
from common.storage.stores import Changed, open_store


def test_objects_are_listed_read_and_deleted(bucket, tmp_path):
    store, name = bucket.open()
    (tmp_path / "one").write_bytes(b"1" * 1000)
    versions = {
        path: store.upload(f"{name}/{path}", tmp_path / "one")
        for path in ("a", "b/with space", "c%")
    }
    found = store.list(f"{name}/")
    assert {path: found[f"{name}/{path}"].version for path in versions} == versions
    assert len(found) == 3
    store.download(f"{name}/b/with space", versions["b/with space"], tmp_path / "two")
    assert (tmp_path / "two").read_bytes() == b"1" * 1000
    store.delete(f"{name}/a")
    store.delete(f"{name}/a")
    assert set(store.list(f"{name}/")) == {f"{name}/b/with space", f"{name}/c%"}
    assert store.read(f"{name}/a") is None


def test_conditional_write_needs_expected_version(bucket):
    store, name = bucket.open()
    first = store.write(name, b"1", "")
    with pytest.raises(Changed):
        store.write(name, b"2", "")
    second = store.write(name, b"2", first)
    assert store.read(name) == (b"2", second)
    with pytest.raises(Changed):
        store.write(name, b"3", first)
    assert store.read(name) == (b"2", second)


def test_download_of_replaced_object_raises(bucket, tmp_path):
    store, name = bucket.open()
    first = store.write(name, b"1", "")
    store.write(name, b"2", first)
    with pytest.raises(Changed):
        store.download(name, first, tmp_path / "file")


def test_request_is_repeated_until_store_answers(bucket, capsys):
    store, name = bucket.open()
    bucket.proxy.refused = 2
    store.write(name, b"1", "")
    assert store.read(name)[0] == b"1"
    assert capsys.readouterr().err.count("retrying for") == 1


def test_outage_is_reported_once_by_several_threads(bucket, one_store, capsys):
    """A run opens the store twice, to renew the lease and to upload. The two threads print one warning per outage."""
    for outages in (1, 2):
        bucket.proxy.status = 503
        stores = [bucket.open() for _ in range(2)]
        stores[1][0].outage = stores[0][0].outage
        threads = [threading.Thread(target=store.read, args=(name,)) for store, name in stores]
        for thread in threads:
            thread.start()
        time.sleep(2)
        bucket.proxy.status = 0
        for thread in threads:
            thread.join()
        assert capsys.readouterr().err.count("retrying for") == 1, outages


@pytest.mark.parametrize("status", [503, 403])
def test_failing_store_raises_one_line_error(bucket, status, monkeypatch):
    monkeypatch.setenv("TRAINLESS_BUCKET_SECONDS", "1")
    store, name = bucket.open()
    bucket.proxy.status = status
    with pytest.raises(UserError, match=r"gs://train-less|s3://train-less"):
        store.list(name)


def test_store_without_server_raises_one_line_error(bucket, monkeypatch):
    monkeypatch.setenv("TRAINLESS_BUCKET_SECONDS", "1")
    for name in ("STORAGE_EMULATOR_HOST", "AWS_ENDPOINT_URL"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    store, name = bucket.open()
    begun = time.monotonic()
    with pytest.raises(UserError, match="have failed for 1 s"):
        store.list(name)
    assert time.monotonic() - begun >= 1


@pytest.mark.parametrize("endpoint", ["localhost:9", "xyz", "http://", "http://host:port"])
@pytest.mark.parametrize(
    ("scheme", "variable"), [("gs", "STORAGE_EMULATOR_HOST"), ("s3", "AWS_ENDPOINT_URL")]
)
def test_malformed_endpoint_raises_one_line_error_at_once(scheme, variable, endpoint, monkeypatch):
    for name in (variable, "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, endpoint)
    begun = time.monotonic()
    with pytest.raises(UserError, match=f"^{scheme}://lab") as caught:
        open_store(f"{scheme}://lab/run")[0].list("run/")
    assert "\n" not in str(caught.value) and time.monotonic() - begun < 30
    assert variable in str(caught.value) or endpoint in str(caught.value)


def test_invalid_bucket_name_raises_one_line_error(monkeypatch):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    with pytest.raises(
        UserError, match=r"^gs://lab_! cannot be opened: Bucket names .*the address"
    ):
        open_store("gs://lab_!/run")


@pytest.mark.parametrize(("scheme", "package"), [("gs", "google.cloud.storage"), ("s3", "boto3")])
def test_reason_of_a_failing_import_is_named(scheme, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"which cannot be imported \(import of {package} halted"):
        open_store(f"{scheme}://lab/run")


def test_missing_bucket_raises_one_line_error(bucket):
    scheme = bucket.address.partition(":")[0]
    store, _ = open_store(f"{scheme}://other-bucket/run")
    with pytest.raises(UserError, match=f"the bucket {scheme}://other-bucket does not exist"):
        store.list("run")
    with pytest.raises(UserError, match=f"the bucket {scheme}://other-bucket does not exist"):
        store.write("run/lease", b"", "")
