"""Reads the summary of a run that has ended, so that the run is neither trained nor tested again."""

import os
from importlib.util import find_spec
from pathlib import Path

from ml_collections import ConfigDict

from common.cached import read_json_if
from common.config import to_json
from common.runtime.processes import is_main
from common.storage.addresses import copy_of
from common.track.tracker import SUMMARY
from common.train.run import Run
from common.train.workdir import differences, has_checkpoints


def ended(config: ConfigDict, workdir: Path) -> dict | None:
    """Returns the summary of the run in `workdir` if the run has trained `train.steps` steps. Reads no data.

    Returns:
      The summary on process 0, {} on all other processes. None on all processes if the summary is missing, has another
      number of steps or another configuration, lacks test results (with `eval.test`), or is not newer than the files
      of `changed`, or if the run has no checkpoints.
    """
    path = workdir / SUMMARY
    return read_json_if(
        path,
        lambda summary: (
            summary["steps"] == config.train.steps
            and not differences(summary["config"], config)
            and (bool(summary["test"]) or not config.eval.test)
            and has_checkpoints(workdir)
            and changed(config) < path.stat().st_mtime
        ),
    )


def changed(config: ConfigDict) -> float:
    """Returns the time of the last change of data files, a user's data module and pretrained weights.

    The time is in seconds since 1970; 0 if the configuration names no existing file.
    """
    kind, _, place = config.data.source.partition(":")
    places = [place] if kind == "files" else []
    if kind == "import" and (module := find_spec(place.partition(":")[0])) and module.origin:
        places.append(module.origin)
    places += [config.pretrained] if config.get("pretrained") else []
    folders = [copy_of(os.path.expanduser(place)) for place in places]
    files = [f for folder in folders for f in (folder, *folder.rglob("*")) if f.exists()]
    # Also read the time of a symbolic link itself: a changed link may point to older files.
    known = [stat for f in files for stat in (f.stat(), f.lstat())]
    return max((max(stat.st_mtime, stat.st_ctime) for stat in known), default=0.0)


def summary_of_ended(run: Run) -> dict | None:
    """Returns the summary that an ended run has written, so that the run is not tested again.

    Returns:
      The summary on process 0, {} on all other processes. None on all processes if the summary is missing, lacks test
      results (with `eval.test`), or has another number of steps or different decoding options than the run.
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
        path.touch()  # make the summary newer than the data files, as `ended` requires
    return stored
