"""Peak memory of a process (benchmarks.harness), and errors for invalid options of programs in benchmarks/."""

import resource
import sys
from types import SimpleNamespace

import pytest

from benchmarks.harness import peak_bytes
from tests.programs import call


@pytest.mark.parametrize(("platform", "size"), [("linux", 3 * 1024), ("darwin", 3)])
def test_peak_memory_is_in_bytes_on_every_platform(platform, size, monkeypatch):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=3))
    assert peak_bytes() == size


@pytest.mark.parametrize("name", ["before_after", "claims", "imported_lines", "overview"])
def test_wrong_options_raise_one_line_errors(name):
    assert call(f"benchmarks.{name}", "--absent", code=2).count("\n") == 1
