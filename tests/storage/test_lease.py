"""The lease of a folder in a bucket: one writer at a time."""

import json
import threading
import time

import pytest

from common.errors import UserError
from common.storage.addresses import copy_of
from common.storage.lease import Lease
from common.storage.mirror import Mirror


@pytest.fixture
def lease(bucket, monkeypatch):
    """Returns a function that switches this process to a machine and returns the machine's lease of the folder."""
    monkeypatch.setenv("TRAINLESS_LEASE_SECONDS", "1")

    def make(machine: str) -> Lease:
        bucket.machine(machine)
        return Lease(Mirror(copy_of(bucket.address)), bucket.address)

    return make


def beat(lease: Lease, seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, lease.renew)
    timer.start()
    return timer


def test_second_writer_is_refused_by_name(lease, bucket, capsys):
    first = lease("first")
    assert first.acquire()
    second = lease("second")
    timer = beat(first, 0.3)
    with pytest.raises(UserError, match=rf"training in {bucket.address} \(process .* of .* on "):
        second.acquire()
    timer.join()
    first.renew()
    assert "waiting up to 1 s to see" in capsys.readouterr().err


def test_lease_of_dead_process_is_taken_over(lease):
    first = lease("first")
    first.acquire()
    second = lease("second")
    assert not second.acquire(), "False: another machine was the last writer"
    with pytest.raises(
        UserError, match=r"has taken over .*; this process stops: repeat the command"
    ):
        first.renew()
    with pytest.raises(UserError, match="has taken over"):
        first.release()
    second.renew()


def test_deleted_lease_is_not_reported_as_taken_over(lease, bucket):
    first = lease("first")
    first.acquire()
    store, name = bucket.open()
    store.delete(f"{name}/lease.json")
    with pytest.raises(UserError, match=rf"^{bucket.address}/lease.json was deleted"):
        first.renew()


def test_released_lease_and_own_lease_are_taken_at_once(lease, monkeypatch):
    monkeypatch.setenv("TRAINLESS_LEASE_SECONDS", "1000")
    first = lease("first")
    first.acquire()
    assert lease("first").acquire(), "True: this machine was the last writer"
    again = lease("first")
    assert again.acquire()
    again.release()
    assert not lease("second").acquire()


def test_one_of_two_writers_takes_a_free_lease(lease, monkeypatch):
    first, second = lease("first"), lease("second")
    read, found = second._store.read, []

    def read_before_first_writes(name: str):
        found.append(read(name))
        if len(found) == 1:
            first.acquire()
            beat(first, 0.3)
        return found[-1]

    monkeypatch.setattr(second._store, "read", read_before_first_writes)
    with pytest.raises(UserError, match="another process is training"):
        second.acquire()
    assert found[0] is None


def test_outage_of_the_store_does_not_end_the_lease(lease, monkeypatch):
    first = lease("first")
    first.acquire()
    second = lease("second")
    read, times = second._store.read, []

    def read_after_outage(name: str):
        found = read(name)
        times.append(time.monotonic())
        if len(times) == 2:
            time.sleep(1.5)  # The pause is longer than the lease.
            beat(first, 0.3)
        return found

    monkeypatch.setattr(second._store, "read", read_after_outage)
    with pytest.raises(UserError, match="another process is training"):
        second.acquire()


def test_lost_answer_does_not_lose_the_lease(lease):
    first = lease("first")
    first.acquire()
    write = first._store._write
    calls = []

    def written_but_unanswered(*arguments):
        calls.append(arguments)
        result = write(*arguments)
        if len(calls) == 1:
            raise TimeoutError
        return result

    first._store._write = written_but_unanswered
    first._store._status = lambda error, status=first._store._status: (
        503 if isinstance(error, TimeoutError) else status(error)
    )
    first.renew()
    assert len(calls) == 2
    first.renew()


def test_lease_that_is_not_renewed_is_not_fresh(lease, monkeypatch):
    monkeypatch.setenv("TRAINLESS_LEASE_SECONDS", "1000")
    first = lease("first")
    first.acquire()
    assert first.is_fresh
    first._renewed -= 2000
    assert not first.is_fresh
    first.renew()
    assert first.is_fresh


def test_damaged_lease_is_taken_over_after_its_seconds(lease, bucket, capsys):
    store, name = bucket.open()
    store.write(f"{name}/lease.json", b"{", "")
    lease("first").acquire()
    assert "an unknown process" in capsys.readouterr().err
    assert json.loads(store.read(f"{name}/lease.json")[0])["holder"].startswith("process ")
