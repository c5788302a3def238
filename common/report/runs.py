"""Finished runs, from their folders or from wandb."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config import require
from common.errors import UserError
from common.metrics.curve import Curve
from common.track.tracker import SUMMARY

# What `common.train.summary` writes and a comparison reads.
_NEEDED = {"config": dict, "curve": dict, "test": dict, "params": dict, "seed": int}

# Seconds that one request to wandb may take.
_WANDB_TIMEOUT = 20


@dataclass(frozen=True)
class Run:
    """A run that has ended.

    Attributes:
      name: of its folder, or its name in wandb.
      summary: what it left in `summary.json`.
      curve: its validation curve, of at least one point.
    """

    name: str
    summary: Mapping[str, Any]
    curve: Curve

    @property
    def config(self) -> dict[str, Any]:
        """Its configuration, nested."""
        return self.summary["config"]

    @property
    def seed(self) -> int:
        return self.summary["seed"]

    @property
    def test(self) -> float:
        """Its objective on the test set, of the values that were best in validation.

        Raises:
          UserError: it was not measured.
        """
        value = self.summary["test"].get(self.curve.name)
        require(value is not None, f"the run {self.name} has no test {self.curve.name}")
        return value


def run_of(summary: Any, name: str, source: str | Path | None = None) -> Run:
    """The run that left a summary.

    Args:
      source: where the summary comes from, for complaints (default: the name).

    Raises:
      UserError: it is not the summary of a run of this project.
    """
    source = source or name
    require(isinstance(summary, Mapping), f"{source} is not the summary of a run")
    missing = [n for n, kind in _NEEDED.items() if not isinstance(summary.get(n), kind)]
    require(not missing, f"{source} is not the summary of a run: it has no {', '.join(missing)}")
    try:
        curve = Curve.from_json(summary["curve"])
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    require(bool(curve.points), f"{source}: the {curve.name} curve has no validation points")
    return Run(name, summary, curve)


def load_local(*paths: str | Path) -> list[Run]:
    """Runs from this machine.

    Args:
      paths: each the folder of a run, a folder of such folders (of which those that have ended are taken), or
        the file of a summary.

    Raises:
      UserError: there is no run, it has not ended, or its summary is damaged.
    """
    files = [file for path in map(Path, paths) for file in _files(path)]
    return [run_of(_read(file), _name(file), file) for file in files]


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    require(path.is_dir(), f"there is no run {path}")
    if (path / SUMMARY).exists():
        return [path / SUMMARY]
    found = sorted(path.glob(f"*/{SUMMARY}"))
    require(bool(found), f"{path} has no {SUMMARY}: has the run ended?")
    return found


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
    require(len(parts) == 2 and all(parts), f'a wandb project is "entity/project", not {project!r}')
    import wandb

    try:
        # wandb.Api would ask for a key where there is a terminal; this does not.
        if not wandb.login(prompt=False, verify=False):
            raise ConnectionError("no API key (`wandb login` stores one)")
        api = wandb.Api(timeout=_WANDB_TIMEOUT)
        # lazy would fetch every summary in a request of its own.
        found = [(r.name, r.summary_metrics) for r in api.runs(project, filters, lazy=False)]
    except ValueError as error:  # how wandb says that it does not know a project
        raise UserError(f"wandb: {error}: is {project} its name, and is it yours?") from error
    except Exception as error:  # wandb documents no list of what it raises.
        raise UserError(f"wandb: cannot read {project}: {error}") from error
    ended = [(name, summary) for name, summary in found if "curve" in summary]
    require(
        bool(ended), f"wandb: none of the {len(found)} runs of {project} that match has a summary"
    )
    if len(ended) < len(found):
        left = ", ".join(name for name, summary in found if "curve" not in summary)
        print(f"wandb: left out, since they have no summary yet: {left}", file=sys.stderr)
    return [run_of(summary, name, f"wandb run {project}/{name}") for name, summary in ended]
