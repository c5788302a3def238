"""Training gives equal results with any number of processes, even if a killed run resumes with another number."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from common.errors import UserError
from common.runtime import processes
from common.runtime.heartbeat import LOST
from common.track.tracker import METRICS, read_metrics
from common.train import command
from common.train.agreement import code_version
from tests.programs import finish, start, start_several
from tests.train.noted import EVERYWHERE, STEPS, TASKS, seen, session

SHORT = 5


class Rendezvous(Exception):
    """Raised by the test's replacement for the rendezvous."""


@pytest.mark.parametrize(
    ("arguments", "environment", "differing"),
    [
        ([], {}, set()),
        (["--config.data.cache_dir=/here"], {}, set()),
        (["--config.seed=2", "--profile=2:3"], {}, {"--config.seed", "--profile"}),
        (["--dry-run", "--workdir=runs/x"], {}, {"--dry-run", "--workdir"}),
        ([], {"TRAINLESS_NUM_PROCESSES": "3"}, {"TRAINLESS_NUM_PROCESSES"}),
        ([], {"TRAINLESS_LOST_SECONDS": "7"}, {"TRAINLESS_LOST_SECONDS"}),
        ([], {"TRAINLESS_JOIN_SECONDS": "7"}, set()),
    ],
)
def test_settings_of_all_processes_are_compared(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], environment: dict, differing: set
) -> None:
    """Settings that may differ between processes, such as the cache directory, are not compared."""
    found = []

    def rendezvous(address, count, index, seconds, asked, token):
        found.append(asked)
        raise Rendezvous

    monkeypatch.setattr("common.runtime.join.rendezvous", rendezvous)
    contract = {"TRAINLESS_COORDINATOR": "here:1", "TRAINLESS_PROCESS_ID": "0"}
    for more, settings in (([], {}), (arguments, environment)):
        for name, value in (contract | {"TRAINLESS_NUM_PROCESSES": "2"} | settings).items():
            monkeypatch.setenv(name, value)
        command_line = ["train", "--config=configs/wmt_ffn_res.py:tiny", *more]
        monkeypatch.setattr(sys, "argv", command_line)
        with pytest.raises(Rendezvous):
            command.train("reservoir", lambda *_: None)
    first, other = found
    assert {name for name in first if first[name] != other[name]} == differing
    assert first["the code"] == code_version("common", "configs", "reservoir")


def test_several_processes_without_a_coordinator_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRAINLESS_NUM_PROCESSES", "2")
    with pytest.raises(UserError, match="set TRAINLESS_COORDINATOR to the host:port of process 0"):
        processes.initialize()


def losses(workdir: Path) -> dict[int, float]:
    return {m["step"]: m["train/loss"] for m in read_metrics(workdir) if "train/loss" in m}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Callable[[str, int], Path]:
    """Returns a function (task, step) that trains up to this step on one device, and returns the folder of runs."""
    folders = {until: tmp_path_factory.mktemp("alone") for until in (SHORT, STEPS)}

    def train(name: str, until: int) -> Path:
        if not (folders[until] / name).exists():
            session(folders[until], cache, until, [name], jax.devices()[:1])
        return folders[until]

    return train


def check(workdir: Path, alone: Path, steps: int) -> None:
    """Checks that the losses and examples of steps 1 to `steps` equal the run on one device.

    Also checks the examples of repeated steps, of which metrics.jsonl has only the last loss.
    """
    expected, found = losses(alone / workdir.name), losses(workdir)
    assert list(found) == list(range(1, steps + 1))
    one = [expected[step] for step in found]
    np.testing.assert_allclose(list(found.values()), one, rtol=1e-4, err_msg=workdir.name)
    examples, rightly = seen(workdir), seen(alone / workdir.name)
    for step in range(1, steps + 1):
        assert len(rightly[step]) == 1
        assert examples[step] == rightly[step], (workdir.name, step)


@pytest.mark.parametrize(
    ("counts", "tasks"),
    [
        pytest.param((2, 1), ["translation"], marks=pytest.mark.medium),
        pytest.param((2, 1), ["bytes", "classes"], marks=pytest.mark.slow),
        pytest.param((2, 1, 4), [*TASKS], marks=pytest.mark.slow),
        pytest.param((4, 2), [*TASKS], marks=pytest.mark.slow),
    ],
)
def test_losses_are_equal_for_any_number_of_processes(
    counts: tuple[int, ...],
    tasks: list[str],
    tmp_path: Path,
    cache: Path,
    alone: Callable[[str, int], Path],
) -> None:
    """Tasks: translation with a reservoir, byte language modelling, classification. Each process has one device."""
    for count, until in zip(counts, range(SHORT + 1 - len(counts), SHORT + 1), strict=True):
        if count == 1:
            session(tmp_path, cache, until, tasks, jax.devices()[:1])
            continue
        program = [sys.executable, "-m", "tests.train.noted", tmp_path, cache, until, *tasks]
        for process in start_several([*map(str, program)], count, 1):
            finish(process)
    for name in tasks:
        check(tmp_path / name, alone(name, SHORT), SHORT)


class Session:
    """The command lines of one run's training programs, and the progress of the run."""

    def __init__(self, workdir: Path, cache: Path):
        self.workdir = workdir
        _, config, fields = TASKS["translation"]
        fields = {
            k: ",".join(map(str, v)) if isinstance(v, tuple) else v for k, v in fields.items()
        }
        fields = EVERYWHERE | fields | {"data.cache_dir": cache, "checkpoint.steps": 7}
        self.config = config
        self.options = [f"--workdir={workdir}", *(f"--config.{k}={v}" for k, v in fields.items())]
        self.mesh = [f"--config.mesh.{axis}=2" for axis in ("data", "fsdp", "tensor")]
        self.program = [sys.executable, "-m", "tests.train.noted", f"--config={config}"]

    def wait_for_steps(self, steps: int, process: subprocess.Popen) -> None:
        """Waits until the started program has trained `steps` steps after the newest checkpoint."""
        metrics = self.workdir / METRICS
        before = metrics.stat().st_mtime_ns if metrics.exists() else 0
        first = self.saved()
        # Until the program has resumed, metrics.jsonl still has lines of steps after the newest checkpoint.
        while (
            not metrics.exists()
            or metrics.stat().st_mtime_ns == before
            or max(losses(self.workdir), default=0) < first + steps
        ):
            assert process.poll() is None, process.communicate()[0][-3000:]
            time.sleep(0.02)

    def saved(self) -> int:
        folders = (self.workdir / "checkpoints" / "latest").glob("*")
        return max((int(f.name) for f in folders if f.name.isdecimal()), default=0)


@pytest.mark.slow
def test_kills_and_changes_of_the_process_count_change_no_result(
    tmp_path: Path, cache: Path, alone: Callable[[str, int], Path]
) -> None:
    """The run is started four times: as two processes, until SIGTERM; as one process, until SIGKILL; as two processes,
    until SIGKILL of one of them; as one process, until the last step.
    """
    run = Session(tmp_path / "translation", cache)
    launcher = [
        "bash",
        "launch/local.sh",
        "-m",
        "tests.train.noted",
        "--log-dir",
        f"{tmp_path}/logs",
    ]
    two = start([*launcher, "2", run.config, *run.options, *run.mesh], 4, PYTHON=sys.executable)
    run.wait_for_steps(3, two)
    two.send_signal(signal.SIGTERM)
    finish(two, 128 + signal.SIGTERM)
    logs = [(tmp_path / "logs" / f"process-{k}.log").read_text() for k in (0, 1)]
    steps = [re.search(r"SIGTERM: saved step (\d+) in .*; the same command", log) for log in logs]
    assert steps[0][1] == steps[1][1] == str(run.saved())

    one = start([*run.program, *run.options])
    run.wait_for_steps(10, one)
    one.kill()
    finish(one, -signal.SIGKILL)
    assert run.saved() < STEPS, "killed too late"

    first, second = start_several([*run.program, *run.options, *run.mesh], 2, 4)
    run.wait_for_steps(8, first)
    second.kill()
    killed = time.monotonic()
    output = finish(first, LOST)
    assert time.monotonic() - killed < 30
    assert re.search(r"error: process 1 \(.+\) is lost: .*; the same command resumes", output)
    finish(second, -signal.SIGKILL)
    assert run.saved() < STEPS, "killed too late"

    left = run.saved()
    output = finish(start([*run.program, *run.options, *run.mesh], 8))
    assert f"resuming from step {left}" in output
    check(run.workdir, alone("translation", STEPS), STEPS)
