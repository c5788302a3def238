"""Values that must be equal on all processes of a run. Imported only for several processes."""

import os
import re
import sys
import time
from argparse import Namespace
from collections.abc import Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import version
from pathlib import Path

from ml_collections import ConfigDict

from common.config import flatten
from common.data.cache import fingerprint
from common.errors import check
from common.runtime.processes import all_gather
from common.train.workdir import ROOT, commit, lock_word

VISIBLE_SECONDS = 60
"""Seconds that a network file system may need to show a file that another host has written."""


def settings(program: str, config: ConfigDict, options: Namespace) -> dict[str, str]:
    """Returns {name: value} of the settings of a program "PAPER.PROGRAM", to compare the processes of a run.

    Settings are the name of the program, the code version, the versions of JAX, jaxlib and Flax, --workdir, --dry-run,
    --profile, the configuration (`_fields`), and the files of the modules that the configuration names (`_modules`).
    """
    code = code_version("common", "configs", program.partition(".")[0])
    found = {"the program": program, "the code": code, "--workdir": options.workdir}
    found |= {f"the version of {name}": version(name) for name in ("jax", "jaxlib", "flax")}
    found |= {"--dry-run": options.dry_run, "--profile": options.profile}
    return {name: str(value) for name, value in found.items()} | _fields(config) | _modules(config)


def _modules(config: ConfigDict) -> dict[str, str]:
    """Returns {name: fingerprint} of the readable files of modules that a configuration names.

    The configuration names a module by a value "module:name" or "import:module:name".
    """
    found = {}
    for value in flatten(config).values():
        named = re.fullmatch(r"(?:import:)?([\w.]+):\w+", str(value))
        if named and (file := _file_of(named[1])):
            found[f"the module {named[1]}"] = fingerprint([file.read_bytes().hex()])[:12]
    return found


def _file_of(module: str) -> Path | None:
    """Returns the readable source or compiled file of a module; None if the folders of `sys.path` have no such file.

    `importlib.util.find_spec` would import the packages of the module, which may use JAX before the processes join.
    """
    path = module.replace(".", "/")
    ends = [
        start + suffix for start in ("/__init__", "") for suffix in (*EXTENSION_SUFFIXES, ".py")
    ]
    files = [Path(folder, path + end) for folder in sys.path for end in ends]
    return next((file for file in files if os.access(file, os.R_OK)), None)


def inputs(config: ConfigDict, fingerprints: Mapping[str, str]) -> dict[str, str]:
    """Returns {name: value} of the inputs of a run, to compare its processes: configuration, `Task.fingerprints`."""
    prints = {f"the fingerprint of {name}": x[:16] for name, x in fingerprints.items()}
    return prints | _fields(config)


def _fields(config: ConfigDict) -> dict[str, str]:
    """Returns {option: value} of all configuration fields except `data.cache_dir`, which may differ."""
    fields = {f"--config.{name}": str(value) for name, value in flatten(config).items()}
    fields.pop("--config.data.cache_dir", None)
    return fields


def check_shared(workdir: Path) -> None:
    """Checks that the processes share the workdir: waits until each process finds the lock of process 0 in the workdir.

    All processes must call this function, after process 0 has locked the workdir. Raises a UserError on every process
    if a process has not found the lock after `VISIBLE_SECONDS` or cannot write to the workdir.
    """
    wanted, *_ = all_gather(lock_word(workdir))
    deadline = time.monotonic() + VISIBLE_SECONDS
    while lock_word(workdir) != wanted and time.monotonic() < deadline:
        time.sleep(0.5)
    fault = ""
    if lock_word(workdir) != wanted:
        fault = "is not the folder that process 0 has opened: use a folder that all processes share"
    elif not os.access(workdir, os.W_OK):
        fault = "is not writable: choose a writable folder"
    for number, reported in enumerate(all_gather(fault)):
        check(not reported, f"--workdir={workdir} of process {number} {reported}")


def code_version(*packages: str, root: Path = ROOT) -> str:
    """Returns the commit of the code, and the first 12 digits of a SHA-256 of all .py files in `packages`.

    The SHA-256 identifies uncommitted changes, and code outside of a git checkout.
    """
    files = sorted(path for package in packages for path in (root / package).rglob("*.py"))
    names = [path.relative_to(root).as_posix() for path in files]
    digest = fingerprint(names, (path.read_bytes().hex() for path in files))
    return f"{commit()} ({digest[:12]})"
