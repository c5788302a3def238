"""Training programs that are killed and resumed give the same results as uninterrupted programs."""

import json
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from common.metrics.kinds import load
from common.metrics.predictions import PREDICTIONS
from common.track.tracker import read_metrics
from tests.programs import finish, start

STEPS = 60
SMALL = {
    "data.vocab_size": 300,
    "model.width": 32,
    "model.hidden": 64,
    "model.heads": 2,
    "decode.beams": 2,
    "decode.extra": 4,
    "eval.sentences": 8,
    "eval.steps": 20,
    "checkpoint.steps": 7,
    "train.log_steps": 1,
    "train.steps": STEPS,
    "data.tokens_per_batch": 512,
    "wandb.mode": "disabled",
}


def command(workdir: Path, cache: Path, **fields: object) -> list[str]:
    settings = (
        SMALL | {"data.cache_dir": cache} | {k.replace("__", "."): v for k, v in fields.items()}
    )
    options = [f"--config.{key}={value}" for key, value in settings.items()]
    config = "--config=configs/wmt_ffn_res.py:tiny"
    return [sys.executable, "-m", "reservoir.train", config, f"--workdir={workdir}", *options]


def losses(workdir: Path) -> dict[int, float]:
    return {m["step"]: m["train/loss"] for m in read_metrics(workdir) if "train/loss" in m}


def curve(workdir: Path) -> list[tuple]:
    points = json.loads((workdir / "summary.json").read_text())["curve"]["points"]
    return [(p["step"], p["flops"], p["value"]) for p in points]


def final_checksum(workdir: Path) -> int:
    """Returns the checksum of parameters and optimizer state after the last step."""
    meta = workdir / "checkpoints" / "latest" / str(STEPS) / "meta" / "metadata"
    return json.loads(meta.read_text())["checksum"]


def predictions(workdir: Path) -> tuple:
    """Returns translations, losses and fingerprint of the test sentences. Checks the summary's test metrics."""
    kept = load(workdir / PREDICTIONS)
    said = json.loads((workdir / "summary.json").read_text())["test"]
    assert kept.metrics() == pytest.approx(said, rel=1e-12)
    return kept.hypotheses, kept.nats_E.tolist(), kept.examples


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    workdir = tmp_path_factory.mktemp("runs") / "run"
    finish(start(command(workdir, cache)))
    return workdir


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGKILL, marks=pytest.mark.medium),
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_resume_after_a_kill_is_bit_exact(
    number: signal.Signals, tmp_path: Path, cache: Path, uninterrupted: Path
) -> None:
    workdir = tmp_path / "run"
    last = random.randrange(3, STEPS - 15)
    process = start(command(workdir, cache))
    metrics = workdir / "metrics.jsonl"
    while process.poll() is None and not (
        metrics.exists() and metrics.read_text().count("\n") > last
    ):
        time.sleep(0.005)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert not (workdir / "summary.json").exists(), f"killed too late, after line {last}"
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 128 + number, output
        assert f"{number.name}: saved step" in output and "resumes the run" in output
    output = finish(start(command(workdir, cache)))
    if number != signal.SIGKILL:
        assert "resuming from step" in output
    assert losses(workdir) == losses(uninterrupted)
    assert list(losses(workdir)) == list(range(1, STEPS + 1))
    assert curve(workdir) == curve(uninterrupted)
    assert predictions(workdir) == predictions(uninterrupted)
    assert final_checksum(workdir) == final_checksum(uninterrupted)
