"""Reads the summary of an ended run, so that the run is not tested again; finds when input files last changed."""

import os
from contextlib import suppress
from importlib.util import find_spec

from ml_collections import ConfigDict

from common.cached import read_json_if
from common.config import to_json
from common.runtime.processes import is_main
from common.storage.addresses import copy_of
from common.track.tracker import SUMMARY
from common.train.run import Run


def changed(config: ConfigDict) -> float:
    """Returns when the input files of a configuration last changed, in seconds since 1970.

    Input files are the data files (files:PATH), a user's data module (import:MODULE:FUNCTION) and the folder in the
    field `pretrained` (the name of a model on the Hugging Face hub is not looked up). Returns 0 if none of these files
    exists.
    """
    kind, _, place = config.data.source.partition(":")
    places = [place] if kind == "files" else []
    with suppress(ImportError):  # a parent package of the module is missing
        if kind == "import" and (module := find_spec(place.partition(":")[0])) and module.origin:
            places.append(module.origin)
    places += [config.pretrained] if config.get("pretrained") else []
    folders = [copy_of(os.path.expanduser(place)) for place in places]
    files = [f for folder in folders for f in (folder, *folder.rglob("*")) if f.exists()]
    # Also read the time of a symbolic link itself: a changed link may point to older files.
    known = [stat for f in files for stat in (f.stat(), f.lstat())]
    return max((max(stat.st_mtime, stat.st_ctime) for stat in known), default=0.0)


def kept_summary(run: Run) -> dict | None:
    """Returns the summary that an ended run has written, on process 0; {} on all other processes.

    Returns None on all processes if the summary is missing or damaged, lacks test results although `eval.test` is set,
    or has another number of steps or other decoding options than the run. Sets the modification time of a valid summary
    to now, because some programs reuse a summary only if the file is newer than the input files (`changed`).
    """
    path = run.workdir / SUMMARY
    stored = read_json_if(
        path,
        lambda summary: (
            summary["steps"] == run.step
            and summary["config"].get("decode") == to_json(run.config).get("decode")
            and (bool(summary["test"]) or not run.config.eval.test)
        ),
    )
    if stored is not None and is_main():
        path.touch()
    return stored
