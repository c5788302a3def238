"""A checkout with the launchers only, and stand-ins for programs in PATH that record their calls."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

LAUNCH = Path(__file__).parents[2] / "launch"
CACHE, TOKEN = "JAX_COMPILATION_CACHE_DIR", "TRAINLESS_TOKEN"
CONTRACT = ("TRAINLESS_COORDINATOR", "TRAINLESS_NUM_PROCESSES", "TRAINLESS_PROCESS_ID")

MEGASCALE = tuple(
    f"MEGASCALE_{name}" for name in ("NUM_SLICES", "SLICE_ID", "COORDINATOR_ADDRESS", "PORT")
)
NAMES = (*CONTRACT, "TRAINLESS_COMMIT", "CUDA_VISIBLE_DEVICES", CACHE, TOKEN, *MEGASCALE)

# Stand-in for the trainer: prints the environment variables NAMES and its arguments. With --wait, it then waits up to
# 60 s. Its exit code is $TRAINER_CODE or 0. SIGTERM makes it print "saved" and exit with code 143.
TRAINER = f"""#!{sys.executable}
import json, os, signal, sys, time

def stop(number, frame):
    print("saved")
    sys.exit(143)

signal.signal(signal.SIGTERM, stop)
names = {NAMES}
print(json.dumps([{{name: os.environ[name] for name in names if name in os.environ}}, sys.argv[1:]]), flush=True)
if "--wait" in sys.argv:
    time.sleep(60)
sys.exit(int(os.environ.get("TRAINER_CODE", 0)))
"""

# Program of a stand-in. Each call writes the stand-in's name and the arguments, each followed by NUL, to a new file in
# $here/calls, named after the time. Then the program runs `behaviour`, the shell commands of the test. $here is the
# test's folder.
RECORDER = """#!/usr/bin/env bash
here={here}
printf '%s\\0' {name} "$@" >"$here/calls/$(date +%s%N)-$$"
{behaviour}
"""


class Checkout:
    """A git checkout below `folder`. Its launchers find the stand-ins in PATH."""

    def __init__(self, folder: Path):
        self.folder, self.root, self.bin = folder, folder / "my checkout", folder / "bin"
        for made in (self.bin, folder / "calls"):
            made.mkdir()
        shutil.copytree(LAUNCH, self.root / "launch")
        (self.root / "requirements.txt").write_text("jax\n")
        self.executable(self.bin / "trainer", TRAINER)
        self.git("init", "--quiet")
        self.commit = self.commit_all()

    def git(self, *arguments: str) -> str:
        names = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
        command = ["git", "-C", str(self.root), *names, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def commit_all(self) -> str:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message=all")
        return self.git("rev-parse", "HEAD")

    def executable(self, path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def stand_in(self, name: str, behaviour: str = "") -> None:
        quoted = f"'{self.folder}'"
        text = RECORDER.format(here=quoted, name=name, behaviour=behaviour)
        self.executable(self.bin / name, text)

    def run(self, *command: str | Path, **environment: str) -> subprocess.CompletedProcess:
        """Runs a command with the stand-in trainer as $PYTHON.

        Its environment lacks the variables TRAINLESS_*, CUDA_* and JAX_* of the test process.
        """
        own = ("TRAINLESS_", "CUDA_", "JAX_")
        mine = {k: v for k, v in os.environ.items() if not k.startswith(own)}
        mine |= {"PATH": f"{self.bin}:{mine['PATH']}", "PYTHON": str(self.bin / "trainer")}
        return subprocess.run(
            command,
            cwd=self.root,
            env=mine | environment,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def calls(self, name: str) -> list[list[str]]:
        """Returns the arguments of all calls of a stand-in."""
        recorded = [p.read_text().split("\0") for p in sorted((self.folder / "calls").iterdir())]
        return [call[1:-1] for call in recorded if call[0] == name]

    def freeze_date(self) -> None:
        """Makes `date` print the same second in the names of all directories."""
        program = f"""#!/bin/sh
[ "$1" != +%Y-%m-%d_%H-%M-%S ] || {{ echo 2026-01-02_03-04-05; exit; }}
exec {shutil.which("date")} "$@"
"""
        self.executable(self.bin / "date", program)

    def log_variable(self, name: str) -> None:
        """Makes the stand-in trainer print the environment variable `name`, but not in the launcher's checks (-c)."""
        program = f"""#!/bin/sh
[ "$1" != -c ] || exit 0
printf '%s' "${{{name}-unset}}"
"""
        self.executable(self.bin / "trainer", program)


def flags_of(platform: str) -> str:
    """Returns the compiler flags that launch/flags.sh recommends for a platform ("cpu", "gpu" or a TPU type)."""
    return subprocess.check_output([LAUNCH / "flags.sh", platform], text=True).strip()


def given(log: Path) -> tuple[dict[str, str], list[str]]:
    """Returns the environment (without the random token) and the arguments of the stand-in trainer's first start."""
    environment, arguments = json.loads(log.read_text().splitlines()[0])
    environment.pop(TOKEN, None)
    return environment, arguments


def token(log: Path) -> str:
    """Returns the token that the last start of the stand-in trainer logged."""
    starts = [line for line in log.read_text().splitlines() if line.startswith("[{")]
    return json.loads(starts[-1])[0][TOKEN]
