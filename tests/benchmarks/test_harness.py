"""benchmarks.harness: peak memory of a process."""

import resource
import sys
from types import SimpleNamespace

import pytest

from benchmarks.harness import peak_bytes


@pytest.mark.parametrize(("platform", "size"), [("linux", 3 * 1024), ("darwin", 3)])
def test_peak_memory_is_in_bytes_on_every_platform(platform, size, monkeypatch):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=3))
    assert peak_bytes() == size
