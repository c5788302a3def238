"""Finished runs, from their folders or from wandb."""

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

# What `common.train.summary` writes and a comparison reads.
_NEEDED = {"config": dict, "curve": dict, "test": dict, "params": dict, "seed": int | None}

# Seconds that one request to wandb may take.
_WANDB_TIMEOUT = 20


@dataclass(frozen=True)
class Run:
    """A run that has ended.

    Attributes:
      name: of its folder, or its name in wandb.
      summary: what it left in `summary.json`.
      curve: its validation curve, of at least one point.
      folder: where its predictions lie; None for a run that is known by its summary alone.
    """

    name: str
    summary: Mapping[str, Any]
    curve: Curve
    folder: Path | None = None

    @property
    def place(self) -> str:
        """Its folder, or its name where there is none."""
        return str(self.folder or self.name)

    @property
    def config(self) -> dict[str, Any]:
        """Its configuration, nested."""
        return self.summary["config"]

    @property
    def seed(self) -> int | None:
        """None where nothing about the run is random."""
        return self.summary["seed"]

    @property
    def timing(self) -> str:
        """How the machine was shared while the run was timed: turns, paused, shared, alone, or unknown."""
        return self.summary.get("timing", {}).get("kind", "unknown")

    @property
    def sessions(self) -> tuple[str, ...]:
        """Equal for runs that took turns with each other; see `common.train.conditions`."""
        return tuple(self.summary.get("timing", {}).get("sessions", ()))

    def predictions(self) -> Predictions | None:
        """What it predicted for each test example; None where that was not kept.

        Raises:
          UserError: the file is damaged.
        """
        path = self.folder / PREDICTIONS if self.folder else None
        return load(path) if path and path.exists() else None

    @property
    def test(self) -> float:
        """Its objective on the test set, of the values that were best in validation.

        Raises:
          UserError: it was not measured.
        """
        value = self.summary["test"].get(self.curve.name)
        check(isinstance(value, int | float), f"the run {self.name} has no test {self.curve.name}")
        return value


def same_minutes(groups: Sequence[Sequence[Run]]) -> bool:
    """Whether seconds of groups can be compared: each run took turns with runs of all other groups."""
    if not all(run.timing == "turns" for group in groups for run in group):
        return False
    sessions = [sorted(run.sessions for run in group) for group in groups]
    return all(other == sessions[0] for other in sessions)


def run_of(
    summary: Any, name: str, source: str | Path | None = None, folder: Path | None = None
) -> Run:
    """The run that left a summary.

    Args:
      folder: of the run, where there is one.
      source: where the summary comes from, for complaints (default: the name).

    Raises:
      UserError: it is not the summary of a run of this project.
    """
    source = source or name
    check(isinstance(summary, Mapping), f"{source} is not the summary of a run")
    missing = [n for n, k in _NEEDED.items() if n not in summary or not isinstance(summary[n], k)]
    check(not missing, f"{source} is not the summary of a run: it has no {', '.join(missing)}")
    counts = [summary["params"].get(name) for name in ("trainable", "total")]
    check(
        all(isinstance(count, int | float) for count in counts),
        f"{source} is not the summary of a run: its params have no trainable, total",
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
    """Runs from this machine.

    Args:
      paths: each the folder of a run, a folder of such folders (of which those that have ended are taken, but not
        those of a sweep that were never tested), or the file of a summary.

    Raises:
      UserError: there is no run, it has not ended, or its summary is damaged.
    """
    try:
        files = [file for path in map(Path, paths) for file in _files(path)]
    except OSError as error:  # such as a name that is too long
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from error
    runs = [run_of(_read(file), _name(file), file, _folder(file)) for file in files]
    tested = [run for run in runs if run.summary["test"]]
    if len(tested) < len(runs):
        left = ", ".join(run.name for run in runs if not run.summary["test"])
        print(f"left out, since they were never tested: {left}", file=sys.stderr)
    check(bool(tested), f"{' '.join(map(str, paths))}: no run was tested")
    return tested


def load_group(argument: str) -> list[Run]:
    """The runs that an argument of a command line names.

    Args:
      argument: the folder of a run or of several, the file of a summary, a glob of such ("runs/ffn_seed*"), or
        "wandb:ENTITY/PROJECT:GROUP".

    Raises:
      UserError: it names no run that has ended.
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
    check(bool(found), f"{path} has no {SUMMARY}: has the run ended?")
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
    """Runs from wandb, oldest first. Those that have not ended are left out, which a line on stderr tells.

    Args:
      project: "entity/project".
      filters: wandb's, such as {"config.data.source": "tfds:wmt16_translate/de-en"}; None takes all.

    Raises:
      UserError: wandb cannot be reached, knows no such project, or has no run in it that has ended.
    """
    parts = project.split("/")
    check(len(parts) == 2 and all(parts), f'a wandb project is "entity/project", not {project!r}')
    import wandb

    try:
        # wandb.Api would ask for a key where there is a terminal; this does not.
        if not wandb.login(prompt=False, verify=False):
            raise ConnectionError("no API key (`wandb login` stores one)")
        api = wandb.Api(timeout=_WANDB_TIMEOUT)
        # lazy would fetch every summary in a request of its own.
        found = [(r.name, r.summary_metrics, r) for r in api.runs(project, filters, lazy=False)]
    except ValueError as error:  # how wandb says that it does not know a project
        raise UserError(f"wandb: {error}: is {project} its name, and is it yours?") from error
    except Exception as error:  # wandb documents no list of what it raises.
        raise UserError(f"wandb: cannot read {project}: {error}") from error
    ended = [run for run in found if "curve" in run[1]]
    check(
        bool(ended), f"wandb: none of the {len(found)} runs of {project} that match has a summary"
    )
    if len(ended) < len(found):
        left = ", ".join(name for name, summary, _ in found if "curve" not in summary)
        print(f"wandb: left out, since they have no summary yet: {left}", file=sys.stderr)
    return [
        run_of(summary, name, f"wandb run {project}/{name}", _download(remote, project))
        for name, summary, remote in ended
    ]


def _download(remote: Any, project: str) -> Path | None:
    """The folder that the predictions of a wandb run are kept in on this machine; None where it has none."""
    folder = Path(".cache") / "wandb" / project / remote.id
    if not (folder / PREDICTIONS).exists():
        try:
            remote.file(PREDICTIONS).download(root=str(folder), exist_ok=True)
        except (
            Exception
        ):  # of a run of an earlier commit; wandb documents no list of what it raises
            return None
    return folder
