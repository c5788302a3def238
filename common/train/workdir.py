"""The workdir of a run: its configuration, and a lock against a second training run in the same folder."""

import fcntl
import json
import os
import socket
import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ml_collections import ConfigDict

from common.atomic import partial, write_whole
from common.config import flatten, from_json, to_json
from common.errors import UserError, check, file_error, parse_json, write_error
from common.storage.addresses import address, shown
from common.track.tracker import SUMMARY

ROOT = Path(__file__).parents[2]
"""Folder with the packages of this project."""

CONFIG = "config.json"
LOCK = "lock"

# Top-level fields of every configuration.
GROUPS = ("seed", "model", "optimizer", "train", "eval", "checkpoint", "mesh", "wandb")

# Configuration fields that may change when a run resumes: duration, evaluation, decoding, checkpoints, caches,
# hardware, compilation and logging. Each entry is a prefix of field names: "wandb." stands for all fields of the group,
# and "checkpoint.keep" also for "checkpoint.keep_best".
FREE = (
    "train.steps",
    "train.epochs",
    "train.max_seconds",
    "train.scan_layers",
    "train.log_steps",
    *(f"eval.{name}" for name in ("start", "steps", "seconds", "patience", "test")),
    *(f"eval.{name}" for name in ("batch", "buckets", "tokens_per_batch")),
    "decode.",
    *(f"checkpoint.{name}" for name in ("steps", "seconds", "keep", "snapshots")),
    "checkpoint.store_frozen",  # only in runs from before commit 939e222 (22 November 2026)
    "data.cache_dir",
    "mesh.",
    "model.remat",
    "wandb.",
)

# Field that older configurations lack -> value with which the code behaves as before the field was added.
ADDED = {
    "data.balance": False,
    "data.multi_label": False,
    "data.pair": False,
    "data.shots": 0,
    "data.tokenizer": "bytes",
    "data.vocab_size": 8192,
    "head_start": "",
    "lora.alpha": 0.0,
    "lora.rank": 0,
    "model.tied": True,
    "train.reduce_dtype": "float32",
}


def open_workdir(workdir: Path, config: ConfigDict, stack: ExitStack) -> Callable[[], None]:
    """Creates the workdir, locks it until `stack` closes, and writes the configuration.

    The workdir must be missing or empty, or hold a run that has this configuration (except `FREE` fields), or a run
    with neither checkpoints nor a summary. Returns the function that uploads changed files (`lock_workdir`).

    Raises:
      UserError: the workdir has other content, is a file or is not writable, or `lock_workdir` fails.
    """
    try:
        _check(workdir, config)
        upload = stack.enter_context(lock_workdir(workdir))
        # Check again: another process may have written before this process acquired the lock.
        _check(workdir, config)
        write_whole(workdir / CONFIG, json.dumps(to_json(config), indent=2) + "\n")
    except OSError as error:
        raise write_error(f"--workdir={shown(workdir)}", error, "choose another folder") from error
    return upload


def _check(workdir: Path, config: ConfigDict) -> None:
    """Raises a UserError unless the content of the workdir is as `open_workdir` requires."""
    check(not workdir.is_file(), f"--workdir={shown(workdir)} is a file: choose a folder")
    path = workdir / CONFIG
    if not path.exists():
        # A process that was killed at the start of its run leaves these files.
        started = (LOCK, partial(path).name)
        check(
            not workdir.exists() or all(p.name in started for p in workdir.iterdir()),
            f"--workdir={shown(workdir)} is not empty and holds no run ({CONFIG} is missing); choose another folder",
        )
        return
    saved = saved_config(path)
    if not has_checkpoints(workdir):
        check(
            not (workdir / SUMMARY).exists(),
            f"--workdir={shown(workdir)} is a finished run whose checkpoints are gone: delete its {SUMMARY} to"
            " train the run again, or choose another --workdir",
        )
        return
    changed = differences(saved, config)
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    check(
        not changed,
        f"--workdir={shown(workdir)} belongs to a run with another configuration: {', '.join(changed[:3])}{more}; to"
        " resume the run, set the fields to the saved values; to start a new run, choose another --workdir",
    )


def differences(saved: dict, config: ConfigDict) -> list[str]:
    """Describes fields, except `FREE`, that differ from a saved configuration, such as "seed (saved 1, now 2)"."""
    old, new = flatten(from_json(saved)), flatten(from_json(to_json(config)))
    return [
        f"{key} (saved {_shown(old, key)}, now {_shown(new, key)})"
        for key in sorted(old.keys() | new.keys())
        if old.get(key, ADDED.get(key)) != new.get(key) and not key.startswith(FREE)
    ]


def _shown(values: dict, key: str) -> str:
    return repr(values[key]) if key in values else "missing"


def has_checkpoints(workdir: Path) -> bool:
    """Returns whether the run has a complete checkpoint. The folder of frozen values does not count."""
    # Orbax gives a checkpoint its numeric name after it is complete.
    paths = (workdir / "checkpoints").glob("*/*")
    return any(path.name.isdecimal() and path.parent.name != "frozen" for path in paths)


def saved_config(path: Path) -> dict:
    """Returns the content of a configuration file, converted by `upgrade`.

    Raises a UserError if the file is unreadable or damaged.
    """
    try:
        values = parse_json(path.read_text())
    except (OSError, ValueError) as error:
        raise file_error(shown(path), error) from error
    missing = [name for name in GROUPS if not isinstance(values, dict) or name not in values]
    check(
        not missing,
        f"{shown(path)} is damaged or not the configuration of a run: it lacks {', '.join(missing)}; restore the"
        " file, or choose another folder",
    )
    return upgrade(values)


def upgrade(config: dict) -> dict:
    """Converts fields of an older run's configuration to their current form, in place; returns the configuration."""
    # Runs from before commit 82be4da (23 November 2026) store `model.remat` as a boolean.
    model = config.get("model", {})
    if isinstance(model.get("remat"), bool):
        model["remat"] = "full" if model["remat"] else "none"
    return config


@contextmanager
def lock_workdir(workdir: Path) -> Iterator[Callable[[], None]]:
    """Context manager that holds an exclusive lock on a workdir. The lock ends at the latest with the process.

    For a run in a bucket, also holds the run's lease, updates the local copy, and uploads the last changes on exit.
    Yields a function that uploads the changed files of a run in a bucket. For a local run, the function does nothing.

    Raises a UserError if another process holds the lock, or if `Uploads` fails at the start or in `release`.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    with (workdir / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = lock_word(workdir).partition(" ")[2]
            raise UserError(
                f"another process is training in {shown(workdir)}{holder and f' ({holder})'}: wait until it ends, or"
                " choose another --workdir"
            ) from error
        file.truncate(0)
        # `lock_word` reads this text.
        file.write(f"{uuid.uuid4().hex} process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        # Without fsync, a network file system may not show the word to other hosts for a minute.
        os.fsync(file.fileno())
        if not address(workdir):
            yield lambda: None
            return
        from common.storage.uploads import Uploads

        uploads = Uploads(workdir)
        try:
            yield uploads.upload
        finally:
            uploads.release()


def lock_word(workdir: Path) -> str:
    """Returns a random word and the process that wrote it, from the lock file of a workdir; "" if the file is missing.

    Processes that read the same text share the workdir.
    """
    path = workdir / LOCK
    return path.read_text() if path.is_file() else ""


def commit() -> str:
    """Returns the commit of the code, with "+" for uncommitted changes to tracked files.

    Outside of a git checkout, returns the environment variable TRAINLESS_COMMIT, or "unknown" without this variable.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        dirty = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("TRAINLESS_COMMIT", "unknown")
