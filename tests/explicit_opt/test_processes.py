"""explicit_opt.train as subprocesses: one and two processes, and resuming after a kill."""

import json
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.programs import finish, finish_two, start

pytestmark = pytest.mark.slow


def command(workdir: Path, cache: Path, **fields: object) -> list[str]:
    settings = {
        "wandb.mode": "disabled",
        "data.cache_dir": cache,
        "data.vocab_size": 300,
        "data.tokens": 20_001,
        "train.batch": 512,
        "train.epochs": 2,
    }
    settings |= {name.replace("__", "."): value for name, value in fields.items()}
    options = [f"--config.{name}={value}" for name, value in settings.items()]
    config = "--config=configs/babylm_cat.py:tiny"
    return [sys.executable, "-m", "explicit_opt.train", config, f"--workdir={workdir}", *options]


def summary(workdir: Path) -> dict:
    return json.loads((workdir / "summary.json").read_text())


def test_two_processes_match_one_process(tmp_path: Path):
    """The mesh is (2, 2, 2) over two processes with four devices each. Shards of the text have unequal lengths."""
    cache = tmp_path / "cache"
    finish(start(command(tmp_path / "one", cache)))
    mesh = {"mesh__data": 2, "mesh__fsdp": 2, "mesh__tensor": 2}
    finish_two(command(tmp_path / "two", cache, **mesh))
    one, two = (summary(tmp_path / name) for name in ("one", "two"))
    assert two["processes"] == 2
    for a, b in zip(one["curve"]["points"], two["curve"]["points"], strict=True):
        assert a["value"] == pytest.approx(b["value"], rel=1e-5)
    assert one["test"] == pytest.approx(two["test"], rel=1e-5)


def test_killed_run_resumes_to_identical_result(tmp_path: Path):
    cache = tmp_path / "cache"
    fields = {"train__epochs": 4, "checkpoint__steps": 3}
    finish(start(command(tmp_path / "whole", cache, **fields)))
    killed = tmp_path / "killed"
    process = start(command(killed, cache, **fields))
    latest = killed / "checkpoints" / "latest"
    while process.poll() is None and not any(p.name.isdigit() for p in latest.glob("*")):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (killed / "summary.json").exists(), "killed too late"
    assert "resuming from step" in finish(start(command(killed, cache, **fields)))
    whole, again = summary(tmp_path / "whole"), summary(killed)
    points = [[(p["step"], p["value"]) for p in s["curve"]["points"]] for s in (whole, again)]
    assert points[0] == points[1]
    assert whole["test"] == again["test"]
