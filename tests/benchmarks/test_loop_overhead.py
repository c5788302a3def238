"""benchmarks.loop_overhead, run as a subprocess."""

import json
import sys
from pathlib import Path

import pytest

from tests.programs import finish, start


@pytest.mark.slow
def test_loop_overhead_writes_its_ratios(tmp_path: Path) -> None:
    out = tmp_path / "loop_overhead.json"
    program = [sys.executable, "-m", "benchmarks.loop_overhead", "--steps=2", "--rounds=1"]
    finish(start([*program, f"--out={out}"]))
    ratios = json.loads(out.read_text())["ratios"]
    assert ratios.keys() == {"loop over bare step", "data over model"}
    assert all(value > 0 for value in ratios.values())
