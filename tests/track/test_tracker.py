"""metrics.jsonl and summary.json of a run, and errors of wandb."""

import json
import math
import os
import pty
import shutil
import signal
import subprocess
import sys
import types

import numpy as np
import pytest

from common.errors import UserError
from common.track.tracker import Tracker, read_metrics
from common.train.loop import validate
from tests.train import toy


def tracker(workdir, mode="disabled", resume_step=None):
    workdir.mkdir(exist_ok=True)
    config = {"seed": 1, "wandb": {"mode": mode, "project": "", "name": "", "group": "plain"}}
    return Tracker(workdir, config, resume_step)


def log_steps(run, steps):
    for step in steps:
        run.log(step, {"loss": 1 / step})


def test_metrics_and_summary_files(tmp_path):
    run = tracker(tmp_path / "run")
    run.log(1, {"loss": np.float32(0.5), "tokens": np.int64(3), "note": "warm"})
    run.log(2, {"loss": math.nan, "norm": math.inf})
    run.summary({"bleu": 1.0, "curve": {"points": [math.nan, 2]}})
    run.summary({"bleu": 34.5, "curve": {"points": [math.nan, 2]}})
    run.finish()
    assert read_metrics(tmp_path / "run") == [
        {"step": 1, "loss": 0.5, "tokens": 3, "note": "warm"},
        {"step": 2, "loss": None, "norm": None},
    ]
    summary = (tmp_path / "run" / "summary.json").read_text()
    assert json.loads(summary) == {"bleu": 34.5, "curve": {"points": [None, 2]}}
    assert summary.startswith('{\n  "bleu"')
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_resumed_metrics_file_equals_uninterrupted(tmp_path):
    whole, broken = tracker(tmp_path / "whole"), tracker(tmp_path / "broken")
    log_steps(whole, range(1, 11))
    log_steps(broken, range(1, 8))
    with (tmp_path / "broken" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')
    log_steps(tracker(tmp_path / "broken", resume_step=5), range(6, 11))
    files = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "broken")]
    assert files[0] == files[1]


def test_new_run_starts_an_empty_file(tmp_path):
    log_steps(tracker(tmp_path), range(1, 8))
    log_steps(tracker(tmp_path), range(1, 3))
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has /dev/full")
def test_full_disk_names_the_file(tmp_path):
    run = tracker(tmp_path)
    os.dup2(os.open("/dev/full", os.O_WRONLY), run._file.fileno())
    told = "No space left on device; free space, then repeat the command"
    with pytest.raises(UserError, match=f"^cannot write to {tmp_path}/metrics.jsonl: {told}$"):
        run.log(1, {"loss": 1.0})
    (tmp_path / "summary.json.partial").symlink_to("/dev/full")
    with pytest.raises(UserError, match=f"^cannot write to {tmp_path}/summary.json: {told}$"):
        run.summary({"steps": 1})
    run.finish()


def test_lines_survive_sigkill(tmp_path):
    script = (
        "import os, pathlib, signal, sys\n"
        "from common.track.tracker import Tracker\n"
        "run = Tracker(pathlib.Path(sys.argv[1]), {'wandb': {'mode': 'disabled'}})\n"
        "for step in range(100): run.log(step, {'loss': 1.0})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(100))


def test_read_metrics_ignores_only_an_incomplete_last_line(tmp_path):
    log_steps(tracker(tmp_path), range(1, 4))
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text()[:-5])
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(UserError, match="line 2"):
        read_metrics(tmp_path)
    with pytest.raises(UserError, match="line 2"):
        tracker(tmp_path, resume_step=1)
    assert path.read_text().startswith('{"step": 1}\n{"st\n')


def test_read_metrics_of_another_folder_raises_user_error(tmp_path):
    with pytest.raises(UserError, match=r"no metrics\.jsonl"):
        read_metrics(tmp_path)


def test_unknown_wandb_mode_raises_user_error():
    with pytest.raises(UserError, match="'ofline': choose one of offline, online, disabled"):
        validate(toy.config(wandb__mode="ofline"))


class FakeWandb(types.ModuleType):
    """A fake wandb package.

    `broken` names the calls that raise, or a mode, such as "online", in which `init` raises. `login` returns `key`.
    """

    def __init__(self, broken=(), key=True):
        super().__init__("wandb")
        self.broken, self.key = set(broken), key
        self.inits, self.logged, self.summary, self.saved = [], [], {}, []
        self.teardowns = self.finished = 0
        self.Settings = dict

    def _may_fail(self, name):
        if name in self.broken:
            raise RuntimeError(f"{name} broke\nbadly")

    def setup(self, settings):
        self._may_fail("setup")

    def login(self, prompt, verify):
        assert prompt is False
        return self.key

    def init(self, mode, **arguments):
        self._may_fail("init")
        self._may_fail(mode)
        self.inits.append({"mode": mode, **arguments})
        return self

    def log(self, values, step):
        self._may_fail("log")
        self.logged.append((step, values))

    def save(self, path, base_path, policy):
        self._may_fail("save")
        self.saved.append((path, base_path, policy))

    def Table(self, columns, data):
        self._may_fail("Table")
        return columns, data

    def Image(self, path):
        return path

    def finish(self):
        self._may_fail("finish")
        self.finished += 1

    def teardown(self):
        self.teardowns += 1


@pytest.fixture
def fake(monkeypatch):
    def install(**options):
        module = FakeWandb(**options)
        monkeypatch.setitem(sys.modules, "wandb", module)
        return module

    return install


def use_everything(workdir, mode="offline"):
    run = tracker(workdir, mode)
    run.log(1, {"loss": 1.0})
    run.table("samples", ("a", "b"), [(1, "x")])
    run.image("curve", workdir / "curve.png")
    run.log(2, {"loss": 0.5})
    run.file(workdir / "predictions.npz")
    run.summary({"loss": 0.5})
    run.finish()


def test_wandb_receives_everything_at_its_step(tmp_path, fake):
    wandb = fake()
    use_everything(tmp_path)
    (init,) = wandb.inits
    assert (init["mode"], init["dir"], init["resume"]) == ("offline", str(tmp_path), "allow")
    assert init["config"]["seed"] == 1 and init["group"] == "plain"
    assert (init["project"], init["name"]) == ("train-less", tmp_path.name)
    assert init["settings"]["silent"] and init["settings"]["console"] == "off"
    assert wandb.logged == [
        (1, {"loss": 1.0}),
        (1, {"samples": (["a", "b"], [[1, "x"]])}),
        (1, {"curve": str(tmp_path / "curve.png")}),
        (2, {"loss": 0.5}),
    ]
    assert wandb.summary == {"loss": 0.5}
    assert wandb.saved == [(str(tmp_path / "predictions.npz"), str(tmp_path), "now")]
    assert wandb.finished == 1


@pytest.mark.parametrize("broken", ["init", "log", "Table", "save", "finish"])
def test_wandb_errors_do_not_stop_the_run(tmp_path, fake, capsys, broken):
    wandb = fake(broken=[broken])
    use_everything(tmp_path)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]
    assert (tmp_path / "summary.json").exists()
    assert capsys.readouterr().err == (
        f"warning: wandb: {broken} broke badly; continuing without wandb\n"
    )
    assert wandb.teardowns == 1


@pytest.mark.parametrize("options", [{"broken": ["online"]}, {"broken": ["setup"]}, {"key": False}])
def test_online_falls_back_to_offline(tmp_path, fake, capsys, options):
    wandb = fake(**options)
    use_everything(tmp_path, mode="online")
    assert [init["mode"] for init in wandb.inits] == ["offline"]
    assert len(wandb.logged) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: wandb: ") and line.endswith("; logging offline")


def test_resumed_run_keeps_its_wandb_id(tmp_path, fake):
    wandb = fake()
    for resume_step in (None, 5, None):
        tracker(tmp_path, "offline", resume_step).finish()
    first, resumed, anew = [init["id"] for init in wandb.inits]
    assert first == resumed != anew


REAL = """
import os, signal, subprocess, sys, time
from pathlib import Path
from common.track.tracker import Tracker
workdir, mode, kill = Path(sys.argv[1]), sys.argv[2], len(sys.argv) > 3
start = time.monotonic()
run = Tracker(workdir, {"seed": 1, "wandb": {"mode": mode}})
run.log(1, {"loss": 1.0})
if kill:
    listing = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "pid=,comm="],
                             capture_output=True, text=True).stdout
    for pid, name in (line.split(None, 1) for line in listing.splitlines()):
        if "wandb-core" in name:
            os.kill(int(pid), signal.SIGKILL)
            print("killed")
    time.sleep(0.5)
for step in range(2, 20):
    run.log(step, {"loss": 1.0 / step})
run.table("samples", ["a", "b"], [[1, "x"]])
run.summary({"loss": 0.1})
run.file(workdir / "summary.json")
run.finish()
print("seconds", time.monotonic() - start)
"""


def bare_environment(home):
    """Returns environment variables without wandb's credentials and settings."""
    bare = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    return bare | {"HOME": str(home), "NETRC": str(home / "netrc")}


def run_real(workdir, *arguments, **environment):
    """Runs a process that uses the real wandb, with empty standard input."""
    return subprocess.run(
        [sys.executable, "-c", REAL, str(workdir), *arguments],
        env=bare_environment(workdir) | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_real_wandb_offline_is_silent_and_quick(tmp_path):
    done = run_real(tmp_path, "offline")
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    assert float(line.split()[1]) < 15  # the process takes about 2 s on two idle cores
    identity = (tmp_path / "wandb_id").read_text().strip()
    (record,) = (tmp_path / "wandb").glob(f"offline-run-*-{identity}/run-{identity}.wandb")
    assert record.stat().st_size > 0


@pytest.mark.medium
@pytest.mark.skipif(shutil.which("ps") is None, reason="needs ps")
def test_real_wandb_whose_service_dies_prints_one_line(tmp_path):
    done = run_real(tmp_path, "offline", "kill")
    assert "killed" in done.stdout and done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith("warning: wandb: ") and line.endswith("; continuing without wandb")
    assert len(read_metrics(tmp_path)) == 19


@pytest.mark.medium
def test_real_wandb_online_without_key_does_not_prompt(tmp_path):
    """On a terminal, wandb.init without the tracker's check of the key would prompt for a login."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", REAL, str(tmp_path), "online"],
        env=bare_environment(tmp_path),
        stdin=follower,
        stdout=follower,
        stderr=follower,
    )
    os.close(follower)
    try:
        code = process.wait(timeout=60)
        lines = os.read(leader, 65536).decode().splitlines()
    finally:
        process.kill()
        os.close(leader)
    assert code == 0
    assert (
        lines[0]
        == "warning: wandb: no API key is stored (run `wandb login` to store your key); logging offline"
    )
    assert lines[1].startswith("seconds") and len(lines) == 2


@pytest.mark.slow
def test_real_wandb_online_without_network_falls_back_to_offline(tmp_path):
    done = run_real(tmp_path, "online", WANDB_API_KEY="a" * 40, WANDB_BASE_URL="http://127.0.0.1:9")
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith("warning: wandb: ") and line.endswith("; logging offline")
    assert float(done.stdout.split()[1]) < 60
    assert list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
