"""Fixtures: the two stores, and simulated machines that share only the store."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from common.storage import addresses, uploads
from common.storage.stores import Store, open_store
from tests.storage.stores import Proxy, google, s3


class Bucket(NamedTuple):
    """A folder in a bucket of an emulator.

    Attributes:
      machine: function (name) that switches this process to a simulated machine, which has its own copies of buckets.
    """

    proxy: Proxy
    address: str
    machine: Callable[[str], None]

    def open(self) -> tuple[Store, str]:
        return open_store(self.address)

    def paths(self) -> set[str]:
        """Returns the paths of all objects in the folder, relative to the folder."""
        store, name = self.open()
        return {path.removeprefix(f"{name}/") for path in store.list(f"{name}/")}


# Number the folders of tests: an S3 emulator that restarts in the same process keeps the objects of earlier tests.
_folders = itertools.count()


@pytest.fixture(scope="session", params=["gs", "s3"])
def _store(request: pytest.FixtureRequest) -> Iterator[tuple]:
    with {"gs": google, "s3": s3}[request.param]() as (proxy, environment):
        yield request.param, proxy, environment


@pytest.fixture
def bucket(_store: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    scheme, proxy, environment = _store
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(uploads, "INTERVAL", 0.1)
    monkeypatch.setenv("TRAINLESS_BUCKET_SECONDS", "30")

    def machine(name: str) -> None:
        monkeypatch.setattr(addresses, "ROOT", tmp_path / name)

    machine("first")
    proxy.status = 0
    yield Bucket(proxy, f"{scheme}://train-less/runs/{next(_folders)}", machine)
    proxy.status = 0


@pytest.fixture
def one_store(_store: tuple) -> None:
    """Runs a test with one of the two stores only, because the test does not depend on the store."""
    if _store[0] != "gs":
        pytest.skip("this test runs with one store only")
