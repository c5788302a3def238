"""Writes the metrics of a run to `metrics.jsonl`, `summary.json` and wandb."""

import json
import math
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.errors import UserError

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
WANDB_ID = "wandb_id"
WANDB_MODES = ("offline", "online", "disabled")

# Timeout of wandb at the start and at the end of a run, in seconds.
_WANDB_TIMEOUT = 20


class Tracker:
    """Writes the metrics of a run to its workdir and to wandb.

    Every line of `metrics.jsonl` is flushed, so a killed process loses at most its last line. The file has no clock and
    no host: a run that was killed and resumed writes the same file as an uninterrupted run.

    wandb never prompts, and an error in it prints one line on stderr, disables wandb and never stops the run. Its files
    are in `workdir/wandb`; `wandb sync` uploads an offline run.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        config: Mapping[str, Any],
        *,
        wandb_mode: str = "offline",
        project: str = "train-less",
        name: str | None = None,
        group: str | None = None,
        resume_step: int | None = None,
        enabled: bool = True,
    ) -> None:
        """Opens the files and wandb.

        Args:
          workdir: the folder of the run; created if missing.
          config: configuration for wandb.
          wandb_mode: "offline", "online" (falls back to offline), or "disabled".
          project: wandb project.
          name: wandb name of the run; None for the name of the folder.
          group: wandb group, such as a name for runs that differ only in their seed.
          resume_step: step of the checkpoint that the run resumes from: later lines are deleted and the same wandb run
            continues. None starts an empty file and a new wandb run.
          enabled: False makes all methods do nothing (all processes but the first).

        Raises:
          UserError: `wandb_mode` is unknown, or `metrics.jsonl` is damaged.
        """
        if wandb_mode not in WANDB_MODES:
            raise UserError(
                f"--config.wandb.mode={wandb_mode!r} is not one of {', '.join(WANDB_MODES)}"
            )
        self._workdir = Path(workdir)
        self._enabled = enabled
        self._run = None
        self._step = resume_step or 0
        if not enabled:
            return
        self._workdir.mkdir(parents=True, exist_ok=True)
        path = self._workdir / METRICS
        kept = []
        if resume_step is not None and path.exists():
            kept = [line for line, values in _lines(path) if values["step"] <= resume_step]
        write_whole(path, "".join(f"{line}\n" for line in kept))
        self._file = path.open("a", encoding="ascii")
        if wandb_mode != "disabled":
            identity = self._wandb_id(anew=resume_step is None)
            self._run = _start_wandb(
                wandb_mode,
                dir=str(self._workdir),
                config=dict(config),
                project=project,
                name=name or self._workdir.resolve().name,
                group=group,
                id=identity,
                resume="allow",
            )

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes a line with the step and the values (numbers or scalar arrays; NaN becomes null).

        Steps must not decrease: wandb ignores lines before its last step.
        """
        if not self._enabled:
            return
        self._step = step
        values = {key: _plain(value) for key, value in values.items()}
        line = json.dumps(_without_nan({"step": step, **values}))
        self._file.write(line + "\n")
        self._file.flush()
        self._wandb(lambda run: run.log(values, step=step))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Logs a table to wandb at the last logged step."""

        def show(run: Any) -> None:
            import wandb

            table = wandb.Table(columns=list(columns), data=[list(row) for row in rows])
            run.log({name: table}, step=self._step)

        self._wandb(show)

    def image(self, name: str, path: str | os.PathLike[str]) -> None:
        """Logs an image file to wandb at the last logged step."""

        def show(run: Any) -> None:
            import wandb

            run.log({name: wandb.Image(os.fspath(path))}, step=self._step)

        self._wandb(show)

    def file(self, path: Path) -> None:
        """Uploads a file of the workdir to wandb."""
        self._wandb(lambda run: run.save(str(path), base_path=str(path.parent), policy="now"))

    def summary(self, values: Mapping[str, Any]) -> None:
        """Overwrites `summary.json` and the summary in wandb."""
        if not self._enabled:
            return
        values = {key: _plain(value) for key, value in values.items()}
        text = json.dumps(_without_nan(values), indent=2)
        write_whole(self._workdir / SUMMARY, text + "\n")
        self._wandb(lambda run: run.summary.update(values))

    def finish(self) -> None:
        """Closes the file and wandb; may be called twice."""
        if not self._enabled:
            return
        self._file.close()
        self._wandb(lambda run: run.finish())
        self._run = None

    def _wandb(self, call: Callable[[Any], Any]) -> None:
        """Calls wandb if it is active; the first error disables it."""
        if self._run is None:
            return
        try:
            call(self._run)
        except Exception as error:  # wandb does not document its exceptions.
            self._run = None
            _warn(error, "continuing without wandb")
            _stop_wandb()

    def _wandb_id(self, anew: bool) -> str:
        """Returns the id of the workdir's wandb run; `anew` makes a new id."""
        path = self._workdir / WANDB_ID
        if not anew and path.exists() and (identity := path.read_text().strip()):
            return identity
        identity = secrets.token_hex(4)
        write_whole(path, identity + "\n")
        return identity


def read_metrics(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the lines of `metrics.jsonl` as dictionaries with "step"; ignores an incomplete last line.

    Raises:
      UserError: the file is missing, or another line is damaged.
    """
    path = Path(workdir) / METRICS
    if not path.exists():
        raise UserError(f"{workdir} has no {METRICS}: give the workdir of a run")
    return [values for _, values in _lines(path)]


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the lines of a metrics file as text and as values."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
            if not isinstance(values["step"], int):
                raise TypeError
        except (ValueError, KeyError, TypeError):
            # The text after the last newline is empty or incomplete.
            if number == len(lines):
                return
            raise UserError(
                f"{path}, line {number}: not a JSON object with an integer step; the file is damaged"
            ) from None
        yield line, values


def write_whole(path: Path, text: str) -> None:
    """Writes a file atomically."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _plain(value: Any) -> Any:
    """Converts a NumPy or JAX scalar to a Python number."""
    return value.item() if hasattr(value, "item") else value


def _without_nan(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON lacks, by None."""
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    value = _plain(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _start_wandb(mode: str, **arguments: Any) -> Any:
    """Returns a wandb run, offline if online fails, or None if both fail; prints a warning on failure."""
    try:
        import wandb

        settings = wandb.Settings(
            silent=True,
            console="off",
            init_timeout=_WANDB_TIMEOUT,
            finish_timeout=_WANDB_TIMEOUT,
        )
        if mode == "online":
            try:
                wandb.setup(settings)
                # wandb.init alone would ask for a key on a terminal.
                if not wandb.login(prompt=False, verify=False):
                    raise ConnectionError("no API key (`wandb login` stores one)")
                return wandb.init(mode="online", settings=settings, **arguments)
            except Exception as error:  # See Tracker._wandb.
                _warn(error, "logging offline")
                _stop_wandb()
        return wandb.init(mode="offline", settings=settings, **arguments)
    except Exception as error:
        _warn(error, "continuing without wandb")
        _stop_wandb()
        return None


def _stop_wandb() -> None:
    """Stops wandb after an error, so that its exit hook prints nothing."""
    with suppress(Exception):
        import wandb

        wandb.teardown()


def _warn(error: Exception, consequence: str) -> None:
    """Prints a one-line warning."""
    reason = " ".join(str(error).split()) or type(error).__name__
    print(f"warning: wandb: {reason[:200]}; {consequence}", file=sys.stderr)
