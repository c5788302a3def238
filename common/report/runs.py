"""Loads finished runs from their folders or from wandb."""

import glob
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config import check
from common.errors import UserError
from common.metrics.curve import Curve
from common.metrics.predictions import PREDICTIONS, Predictions, load
from common.track.tracker import SUMMARY

# Fields of summary.json (`common.train.summary`) that comparisons read.
_NEEDED = {"config": dict, "curve": dict, "test": dict, "params": dict, "seed": int | None}

# Timeout of a request to wandb, in seconds.
_WANDB_TIMEOUT = 20


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
      name: of the folder, or of the wandb run.
      summary: contents of `summary.json`.
      curve: the validation curve, with at least one point.
      folder: the workdir, which may have predictions; None if only the summary is known.
    """

    name: str
    summary: Mapping[str, Any]
    curve: Curve
    folder: Path | None = None

    @property
    def place(self) -> str:
        """The folder, or the name of a run without folder."""
        return str(self.folder or self.name)

    @property
    def config(self) -> dict[str, Any]:
        """The nested configuration."""
        return self.summary["config"]

    @property
    def seed(self) -> int | None:
        """The seed; None for a run without randomness."""
        return self.summary["seed"]

    @property
    def timing(self) -> str:
        """Use of the machine while the run was timed: turns, paused, shared, alone, or unknown."""
        return self.summary.get("timing", {}).get("kind", "unknown")

    @property
    def sessions(self) -> tuple[str, ...]:
        """The timing sessions, equal for runs that alternated with each other; see `common.train.conditions`."""
        return tuple(self.summary.get("timing", {}).get("sessions", ()))

    def predictions(self) -> Predictions | None:
        """Returns the test predictions; None if the run has no predictions.npz.

        Raises:
          UserError: the file is damaged.
        """
        path = self.folder / PREDICTIONS if self.folder else None
        return load(path) if path and path.exists() else None

    @property
    def test(self) -> float:
        """The objective on the test set, of the best checkpoint.

        Raises:
          UserError: the summary has no test value.
        """
        value = self.summary["test"].get(self.curve.name)
        check(
            isinstance(value, int | float),
            f"the run {self.name} has no test {self.curve.name} in its {SUMMARY}",
        )
        return value


def runs_alternated(groups: Sequence[Sequence[Run]]) -> bool:
    """Returns whether the seconds of groups can be compared: each run alternated with runs of all other groups."""
    if not all(run.timing == "turns" for group in groups for run in group):
        return False
    sessions = [sorted(run.sessions for run in group) for group in groups]
    return all(other == sessions[0] for other in sessions)


def run_of(
    summary: Any, name: str, source: str | Path | None = None, folder: Path | None = None
) -> Run:
    """Makes a `Run` of a summary.

    Args:
      folder: the workdir, if known.
      source: origin of the summary for error messages (default: the name).

    Raises:
      UserError: the summary lacks a field or has a damaged curve.
    """
    source = source or name
    check(isinstance(summary, Mapping), f"{source} is not the summary of a run")
    missing = [n for n, k in _NEEDED.items() if n not in summary or not isinstance(summary[n], k)]
    check(not missing, f"{source} is not the summary of a run: it has no {', '.join(missing)}")
    counts = [summary["params"].get(name) for name in ("trainable", "total")]
    check(
        all(isinstance(count, int | float) for count in counts),
        f"{source} is not the summary of a run: its params have no numbers trainable and total",
    )
    check(
        isinstance(summary.get("timing", {}), Mapping),
        f"{source} is not the summary of a run: its timing is {summary.get('timing')!r}",
    )
    try:
        curve = Curve.from_json(summary["curve"])
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    check(bool(curve.points), f"{source}: the {curve.name} curve has no validation points")
    return Run(name, summary, curve, folder)


def load_local(*paths: str | Path) -> list[Run]:
    """Loads runs from this machine.

    Args:
      paths: each is the folder of a run, a folder of several runs, or a summary file. Of a folder of several runs, only
        finished runs with a test result are loaded (runs of a sweep may have no test result).

    Raises:
      UserError: there is no run, a run has not finished, or a summary is damaged.
    """
    try:
        files = [file for path in map(Path, paths) for file in _files(path)]
    except OSError as error:  # for example a name that is too long
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from error
    runs = [run_of(_read(file), _name(file), file, _folder(file)) for file in files]
    tested = [run for run in runs if run.summary["test"]]
    if len(tested) < len(runs):
        left = ", ".join(run.name for run in runs if not run.summary["test"])
        print(f"skipped runs without a test result: {left}", file=sys.stderr)
    check(bool(tested), f"{' '.join(map(str, paths))}: no run has a test result")
    return tested


def load_group(argument: str) -> list[Run]:
    """Loads the runs of a command-line argument.

    Args:
      argument: the folder of a run or of several runs, a summary file, a glob ("runs/ffn_seed*"), or
        "wandb:ENTITY/PROJECT:GROUP".

    Raises:
      UserError: the argument names no finished run.
    """
    kind, _, place = argument.partition(":")
    if kind == "wandb":
        project, _, group = place.partition(":")
        return load_wandb(project, {"group": group} if group else None)
    if not any(letter in argument for letter in "*?[") or Path(argument).exists():
        return load_local(argument)
    found = sorted(glob.glob(os.path.expanduser(argument)))
    check(bool(found), f"no run matches {argument}")
    return load_local(*found)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    check(path.is_dir(), f"there is no run {path}")
    if (path / SUMMARY).exists():
        return [path / SUMMARY]
    found = sorted(path.glob(f"*/{SUMMARY}"))
    check(bool(found), f"{path} has no {SUMMARY}: the run has not finished")
    return found


def _folder(file: Path) -> Path | None:
    return file.parent if file.name == SUMMARY else None


def _name(file: Path) -> str:
    return file.resolve().parent.name if file.name == SUMMARY else file.stem


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{file} is damaged: {error}") from error


def load_wandb(project: str, filters: Mapping[str, Any] | None = None) -> list[Run]:
    """Loads runs from wandb, oldest first; skips unfinished runs and names them on stderr.

    Args:
      project: "entity/project".
      filters: wandb's filters, such as {"config.data.source": "tfds:wmt16_translate/de-en"}; None for all runs.

    Raises:
      UserError: wandb cannot be reached, the project is unknown, or it has no finished run.
    """
    parts = project.split("/")
    check(
        len(parts) == 2 and all(parts), f'a wandb project must be "entity/project", not {project!r}'
    )
    import wandb

    try:
        # wandb.Api alone would ask for a key on a terminal.
        if not wandb.login(prompt=False, verify=False):
            raise ConnectionError("no API key (`wandb login` stores one)")
        api = wandb.Api(timeout=_WANDB_TIMEOUT)
        # lazy=True would send a request per summary.
        found = [(r.name, r.summary_metrics, r) for r in api.runs(project, filters, lazy=False)]
    except ValueError as error:  # raised for an unknown project
        raise UserError(
            f"wandb: {error}: check the name {project} and your access to it"
        ) from error
    except Exception as error:  # wandb does not document its exceptions.
        raise UserError(f"wandb: cannot read {project}: {error}") from error
    ended = [run for run in found if "curve" in run[1]]
    check(
        bool(ended),
        f"wandb: none of the {len(found)} matching runs of {project} has finished with a summary",
    )
    if len(ended) < len(found):
        left = ", ".join(name for name, summary, _ in found if "curve" not in summary)
        print(f"wandb: skipped runs without a summary: {left}", file=sys.stderr)
    return [
        run_of(summary, name, f"wandb run {project}/{name}", _download(remote, project))
        for name, summary, remote in ended
    ]


def _download(remote: Any, project: str) -> Path | None:
    """Downloads the predictions of a wandb run and returns their folder; None if the run has no predictions."""
    folder = Path(".cache") / "wandb" / project / remote.id
    if not (folder / PREDICTIONS).exists():
        try:
            remote.file(PREDICTIONS).download(root=str(folder), exist_ok=True)
        except Exception:  # Older runs have no predictions; wandb does not document its exceptions.
            return None
    return folder
