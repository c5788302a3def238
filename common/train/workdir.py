"""The folder of a run: its configuration, and a lock so that one group of processes writes to it at a time."""

import fcntl
import json
import os
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ml_collections import ConfigDict

from common.config import check, flatten, from_json, to_json
from common.errors import UserError

if TYPE_CHECKING:
    from common.data.subword import Subword
    from common.data.tokenizer import Tokenizer

CONFIG = "config.json"
LOCK = "lock"

VISIBLE_SECONDS = 60
"""How long a network file system may take to show another host's files."""

# Groups of fields that every configuration has.
GROUPS = ("seed", "model", "optimizer", "train", "eval", "checkpoint", "mesh", "wandb")

# Fields that may change when a run resumes: duration, hardware, and how often it evaluates or saves. What it measures
# may not change: a curve of two metrics has no best point.
FREE = (
    "train.steps",
    "train.epochs",
    "train.max_seconds",
    "train.log_steps",
    *(f"eval.{name}" for name in ("start", "steps", "seconds", "patience", "test")),
    *(f"eval.{name}" for name in ("batch", "buckets", "tokens_per_batch")),
    "decode.",
    "checkpoint.steps",
    "checkpoint.seconds",
    "checkpoint.keep",
    "checkpoint.snapshots",
    "checkpoint.store_frozen",  # of runs that were begun before November 2026
    "data.cache_dir",
    "mesh.",
    "wandb.",
)


def open_workdir(workdir: Path, config: ConfigDict) -> "Lock":
    """Creates and locks the workdir, after checking that it is empty or holds this run.

    Raises:
      UserError: the folder holds another run or other files, or another process trains in it.
    """
    try:
        _check(workdir, config)
        lock = Lock(workdir)
        try:
            _check(workdir, config)  # again: another process may have been here before the lock
            path = workdir / CONFIG
            temporary = path.with_suffix(".tmp")
            temporary.write_text(json.dumps(to_json(config), indent=2) + "\n")
            temporary.replace(path)
        except BaseException:
            lock.release()
            raise
    except OSError as error:
        raise UserError(f"cannot write to --workdir={workdir}: {error.strerror}") from error
    return lock


def check_shared(workdir: Path) -> None:
    """Checks, on processes other than the first, that the workdir is the shared folder that process 0 has opened.

    Raises:
      UserError: the folder is another one here, or is not writable.
    """
    deadline = time.monotonic() + VISIBLE_SECONDS
    while not (workdir / CONFIG).is_file():
        check(
            time.monotonic() < deadline,
            f"--workdir={workdir} is another folder here than for process 0: all processes have to share one",
        )
        time.sleep(0.5)
    check(os.access(workdir, os.W_OK), f"cannot write to --workdir={workdir}")


def _check(workdir: Path, config: ConfigDict) -> None:
    """Checks that the folder is empty or holds this run. Before its first checkpoint a run may be reconfigured."""
    if workdir.exists() and not workdir.is_dir():
        raise UserError(f"--workdir={workdir} is a file")
    path = workdir / CONFIG
    if path.exists() and has_checkpoints(workdir):
        lost = differences(_read(path), config)
        if lost:
            more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
            raise UserError(
                f"{workdir} belongs to a run with another configuration: {', '.join(lost[:3])}{more};"
                " choose another --workdir"
            )
    elif workdir.exists() and not path.exists() and any(p.name != LOCK for p in workdir.iterdir()):
        raise UserError(f"--workdir={workdir} is not empty and holds no run; choose another")


def differences(there: dict, config: ConfigDict) -> list[str]:
    """Fields that may not change and differ from the JSON of a configuration: ["seed (1 there, 2 here)"]."""
    old, new = flatten(from_json(there)), flatten(from_json(to_json(config)))
    return [
        f"{key} ({old.get(key)!r} there, {new.get(key)!r} here)"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not key.startswith(FREE)
    ]


def has_checkpoints(workdir: Path) -> bool:
    """Whether there is a checkpoint to resume from or to use; one that is still being written does not count."""
    found = (workdir / "checkpoints").glob("*/*")
    return any(path.name.isdecimal() and path.parent.name != "frozen" for path in found)


def save_tokenizer(tokenizer: "Tokenizer | Subword", path: Path) -> None:
    """Writes the tokenizer of a run; that of a resumed run has to be the same.

    Raises:
      UserError: the run began with another tokenizer.
    """
    check(
        not path.exists()
        or not has_checkpoints(path.parent)
        or type(tokenizer).load(path).fingerprint == tokenizer.fingerprint,
        f"the training text makes another vocabulary than {path}: it has changed since the run began;"
        " choose another --workdir",
    )
    tokenizer.save(path)


def read_config(workdir: Path, option: str = "--workdir") -> ConfigDict:
    """The configuration of the run in `workdir`, which the user named by `option`.

    Raises:
      UserError: the folder holds no run.
    """
    path = workdir / CONFIG
    if not path.is_file():
        raise UserError(f"{option}={workdir} holds no run ({CONFIG} is missing)")
    return from_json(_read(path))


def read_run(workdir: Path, task: str, option: str = "--workdir") -> ConfigDict:
    """As `read_config`, for a run of this task.

    Raises:
      UserError: the folder holds no run, or one of another task.
    """
    config = read_config(workdir, option)
    found = config.get("task", "")
    whose = f"of the task {found}" if found else "of another program"
    check(found == task, f"{option}={workdir} is a run {whose}, not {task}")
    return config


def _read(path: Path) -> dict:
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from error
    missing = [name for name in GROUPS if not isinstance(values, dict) or name not in values]
    check(not missing, f"{path} is damaged: it has no {', '.join(missing)}")
    return values


class Lock:
    """An exclusive lock on a workdir; the operating system frees it when the process ends."""

    def __init__(self, workdir: Path):
        workdir.mkdir(parents=True, exist_ok=True)
        self._file = (workdir / LOCK).open("a")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise UserError(f"another process is training in {workdir}") from error

    def release(self) -> None:
        self._file.close()


def commit() -> str:
    """The commit of the code, with "+" for uncommitted changes; outside a checkout TRAINLESS_COMMIT or "unknown"."""
    root = Path(__file__).parents[2]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        dirty = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("TRAINLESS_COMMIT", "unknown")
