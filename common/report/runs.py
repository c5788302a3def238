"""Loads finished runs from their folders or from wandb."""

import glob
import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from common.errors import UserError, check, file_error, parse_json, reason_of
from common.metrics.curve import Curve
from common.metrics.kinds import load
from common.metrics.predictions import PREDICTIONS, Predictions
from common.storage.addresses import address, copy_of, shown
from common.storage.folders import open_folder
from common.track.tracker import METRICS, SUMMARY
from common.track.wandb_run import WANDB_TIMEOUT, log_in

# {field that summary.json must have: its type}. `common.train.summary` and `common.report.record` write these fields.
_NEEDED = {"config": dict, "curve": dict, "test": dict, "params": dict, "seed": int | None}


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
      name: name of the run's folder, of the wandb run, or of a copied summary file without the ending ".json".
      summary: contents of `summary.json`.
      curve: the validation curve, with at least one point.
      folder: folder that may contain predictions: the workdir, or the download folder of a wandb run. None if the run
        is a copied summary file, or a wandb run without predictions.
    """

    name: str
    summary: Mapping[str, Any]
    curve: Curve
    folder: Path | None = None

    @property
    def place(self) -> str:
        """The folder as text (its address if it is in a bucket); for a run without folder, its name."""
        return shown(self.folder) if self.folder else self.name

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
        """The `kind` of `common.train.conditions.Conditions.describe`; "unknown" if the summary lacks this field."""
        return self.summary.get("timing", {}).get("kind", "unknown")

    @property
    def sessions(self) -> tuple[str, ...]:
        """One id for each start or resume of the run (`common.train.conditions.Conditions.sessions`).

        An id is "alone", or a text that is equal for all runs that took turns with each other.
        """
        return tuple(self.summary.get("timing", {}).get("sessions", ()))

    @cached_property
    def predictions(self) -> Predictions | None:
        """The test predictions, or None without predictions.npz. Raises the errors of `load`."""
        path = self.folder / PREDICTIONS if self.folder else None
        return load(path) if path and path.exists() else None

    @property
    def test(self) -> float:
        """Value of the validation curve's metric on the test split. Raises a UserError if the summary has no number."""
        value = self.summary["test"].get(self.curve.name)
        missing = (
            f"the run {self.place} has no value of {self.curve.name} on the test split in its {SUMMARY}: leave out this"
            " run, or train it again with --config.eval.test=true"
        )
        check(isinstance(value, int | float), missing)
        return value


def check_distinct(*groups: Sequence[Run]) -> None:
    """Raises a UserError if two runs have the same folder, or two runs of a group the same seed (other than None)."""
    folders = set()
    for group in groups:
        for run in group:
            folder = run.folder and run.folder.resolve()
            check(
                folder is None or folder not in folders,
                f"the run {run.place} is given twice: give each run only once",
            )
            folders.add(folder)
        for one, other in itertools.combinations(group, 2):
            check(
                one.seed is None or one.seed != other.seed,
                f"{one.place} and {other.place} are in one group and have the same seed {one.seed}: leave out one of"
                " them",
            )


def portable_source(source: str) -> str:
    """Removes the parent folders of PATH from a data source "files:PATH", because they differ between machines."""
    kind, _, path = source.partition(":")
    return f"files:{Path(path).name}" if kind == "files" else source


def runs_alternated(groups: Sequence[Sequence[Run]]) -> bool:
    """Returns whether the runs of all groups were trained in turns (--turns), so that their seconds are comparable.

    Requires that the `timing` of every run is "turns", and that the runs of all groups have the same `sessions`.
    """
    if not all(run.timing == "turns" for group in groups for run in group):
        return False
    sessions = [sorted(run.sessions for run in group) for group in groups]
    return all(other == sessions[0] for other in sessions)


def run_of(
    summary: Any, name: str, source: str | Path | None = None, folder: Path | None = None
) -> Run:
    """Makes a `Run` from the content of a `summary.json`.

    Args:
      source: file or wandb run of the summary, for error messages. None means `name`.

    Raises:
      UserError: `summary` is not a JSON object, lacks a field or has a damaged field, or its curve has no points.
    """
    try:
        check(isinstance(summary, Mapping), "it is not a JSON object")
        missing = [field for field in _NEEDED if field not in summary]
        check(not missing, f"missing fields: {', '.join(missing)}")
        wrong = [field for field, kind in _NEEDED.items() if not isinstance(summary[field], kind)]
        check(not wrong, f"fields whose values have a wrong type: {', '.join(wrong)}")
        params, timing = summary["params"], summary.get("timing", {})
        check(
            all(isinstance(params.get(x, ""), int | float | None) for x in ("trainable", "total")),
            f"its field params is {params!r:.80}, without the numbers trainable and total",
        )
        check(
            isinstance(timing, Mapping) and isinstance(timing.get("sessions", []), list),
            f"its field timing is {timing!r:.80}, not an object with a list of sessions",
        )
        curve = Curve.from_json(summary["curve"])
        check(bool(curve.points), f"the {curve.name} curve has no validation points")
    except UserError as error:
        raise UserError(
            f"{source or name} is not the summary of a run: {error}; restore the summary, or leave out this run"
        ) from error
    return Run(name, summary, curve, folder)


def load_local(*paths: str | Path) -> list[Run]:
    """Loads finished runs with test results from this machine.

    Skips runs without test results, such as runs of a sweep, and unfinished runs in a folder of several runs. Prints
    the skipped runs' names to stderr.

    Args:
      paths: each is the folder of a run, a folder that contains the folders of several runs, or a summary file.

    Raises:
      UserError: a path is missing or has no finished run, a summary is damaged or cannot be read, or no run has a test
        result.
    """
    try:
        files = [file for path in map(Path, paths) for file in _files(path)]
    except OSError as error:  # A path may be too long for a file name.
        raise file_error(error.filename, error) from error
    runs = [read_run(file) for file in files]
    _tell("skipped runs without a test result", [r.name for r in runs if not r.summary["test"]])
    tested = [run for run in runs if run.summary["test"]]
    check(
        bool(tested),
        f"{' '.join(shown(Path(path)) for path in paths)}: no run has a test result; train the runs again with"
        " --config.eval.test=true",
    )
    return tested


def load_group(argument: str) -> list[Run]:
    """Loads the finished runs that a command-line argument names.

    Args:
      argument: the folder of a run or of several runs, a summary file, a glob ("runs/ffn_seed*"), an address of one of
        these in a bucket ("gs://..."), where a summary file must have the name summary.json, or
        "wandb:ENTITY/PROJECT[:GROUP]".

    Raises:
      UserError: an address names no folder of a bucket, no file matches the glob, or `load_local`, `load_wandb` or
        `open_folder` raises an error.
    """
    kind, _, place = argument.partition(":")
    if kind == "wandb":
        project, _, group = place.partition(":")
        return load_wandb(project, {"group": group} if group else None)
    if "://" in argument:
        argument = str(_open_bucket(argument))
    if not _is_pattern(argument) or Path(argument).exists():
        return load_local(argument)
    matches = sorted(glob.glob(os.path.expanduser(argument)))
    check(bool(matches), f"no file or folder matches {shown(Path(argument))}: correct the pattern")
    return load_local(*matches)


def _is_pattern(path: str) -> bool:
    return any(letter in path for letter in "*?[")


def _open_bucket(argument: str) -> Path:
    """Downloads summaries, metrics and predictions of runs in a bucket. Returns the local path of `argument`."""
    named = copy_of(argument)
    folder = named.parent if named.name == SUMMARY else named
    while _is_pattern(str(folder)):
        folder = folder.parent
    check(
        bool(address(folder)),
        f"{argument} names no folder of a bucket: give a folder, such as"
        f" {argument.partition('://')[0]}://BUCKET/FOLDER",
    )
    open_folder(
        str(folder), lambda path: PurePosixPath(path).name in (SUMMARY, METRICS, PREDICTIONS)
    )
    return named


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    check(path.is_dir(), f"{shown(path)} does not exist: give the folder or the {SUMMARY} of a run")
    if (path / SUMMARY).exists():
        return [path / SUMMARY]
    files = sorted(path.glob(f"*/{SUMMARY}"))
    check(
        bool(files),
        f"{shown(path)} has no {SUMMARY}: give the folder of a finished run, or a folder of finished runs",
    )
    begun = {file.parent for file in path.glob(f"*/{METRICS}")}
    unfinished = begun - {file.parent for file in files}
    _tell("skipped unfinished runs", sorted(folder.name for folder in unfinished))
    return files


def read_run(file: Path) -> Run:
    """Reads a run from its summary.json, or from a copy of this file with another name.

    Raises:
      UserError: the file is damaged, is not a summary or cannot be read.
    """
    try:
        summary = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) or file.name == SUMMARY:
            raise file_error(shown(file), error) from error
        summary = None  # `run_of` refuses any other file, such as a table that a glob matches.
    if file.name != SUMMARY:
        return run_of(summary, file.stem, shown(file))
    return run_of(summary, file.resolve().parent.name, shown(file), file.parent)


def _tell(message: str, names: Sequence[str]) -> None:
    if names:
        print(f"{message}: {', '.join(names)}", file=sys.stderr)


def load_wandb(project: str, filters: Mapping[str, Any] | None = None) -> list[Run]:
    """Loads the finished runs of the wandb project "ENTITY/PROJECT", oldest first. Lists unfinished runs on stderr.

    Args:
      filters: filters of wandb's API, such as {"config.data.source": "tfds:wmt16_translate/de-en"}; None for all runs.

    Raises:
      UserError: the project is malformed or unknown, wandb cannot be reached, no matching run has finished, or a
        summary is damaged.
    """
    parts = project.split("/")
    check(
        len(parts) == 2 and all(parts), f"a wandb project must be ENTITY/PROJECT, not {project!r}"
    )
    import wandb

    try:
        log_in()
        api = wandb.Api(timeout=WANDB_TIMEOUT)
        # lazy=True would send a request for each summary.
        remotes = [(r, r.summary_metrics) for r in api.runs(project, filters, lazy=False)]
    except Exception as error:  # wandb does not document its exceptions.
        raise UserError(
            f"cannot read the wandb project {project}: {reason_of(error)}; check its name, your login and the network"
        ) from error
    ended = [(remote, summary) for remote, summary in remotes if "curve" in summary]
    check(
        bool(ended),
        f"the wandb project {project} has no matching run that has finished with a summary (unfinished runs:"
        f" {len(remotes)}): correct the project or group, or wait until a run has finished",
    )
    unfinished = [remote.name for remote, summary in remotes if "curve" not in summary]
    _tell("wandb: skipped runs without a summary", unfinished)
    return [
        run_of(summary, one.name, f"wandb run {project}/{one.name}", _download(one, project))
        for one, summary in ended
    ]


def _download(remote: Any, project: str) -> Path | None:
    """Downloads the predictions of a wandb run. Returns the folder of the file; None if the run has no predictions."""
    folder = Path(".cache") / "wandb" / project / remote.id
    if not (folder / PREDICTIONS).exists():
        try:
            remote.file(PREDICTIONS).download(root=str(folder), exist_ok=True)
        except Exception:
            # Treat every exception as a missing file, because wandb does not document the exception for it. Runs
            # without test predictions have no file, nor do runs from before commit 288df7f (22 November 2026).
            return None
    return folder
