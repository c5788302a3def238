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

from common.config import check
from common.errors import UserError

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
WANDB_ID = "wandb_id"
WANDB_MODES = ("offline", "online", "disabled")

WANDB_TIMEOUT = 20
"""Timeout in seconds for a request to wandb, and for starting and finishing a wandb run."""


class Tracker:
    """Writes the metrics of a run to its workdir and to wandb.

    Every line of `metrics.jsonl` is flushed, so a killed process loses at most its last line. The file has no times and
    no host names: an interrupted and resumed run writes the same file as an uninterrupted run.

    wandb never prompts. An error in wandb prints one line on stderr and disables wandb, but does not stop the run.
    wandb's files are in `workdir/wandb`; `wandb sync` uploads an offline run.
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
        """Opens `metrics.jsonl` and wandb.

        Args:
          config: configuration of the run, for wandb.
          wandb_mode: "offline", "online" (offline if the connection fails), or "disabled".
          name: name of the wandb run; None for the name of `workdir`.
          group: wandb group of the run, such as a group of seeds.
          resume_step: step at which the run resumes. Deletes the lines of later steps and continues the same wandb run.
            None starts an empty file and a new wandb run.
          enabled: False makes all methods do nothing; for all processes except process 0.

        Raises:
          UserError: `wandb_mode` is unknown, or `metrics.jsonl` is damaged.
        """
        known = ", ".join(WANDB_MODES)
        check(
            wandb_mode in WANDB_MODES, f"--config.wandb.mode={wandb_mode!r} is not one of {known}"
        )
        self._workdir, self._enabled = Path(workdir), enabled
        self._run, self._step = None, resume_step or 0
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
            self._run = _start_wandb(
                wandb_mode,
                dir=str(self._workdir),
                config=dict(config),
                project=project,
                name=name or self._workdir.resolve().name,
                group=group,
                id=self._wandb_id(anew=resume_step is None),
                resume="allow",
            )

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes a line with the step and the values, which are numbers or scalar arrays. NaN becomes null.

        Steps must not decrease, because wandb ignores values of earlier steps.
        """
        if not self._enabled:
            return
        self._step = step
        values = {key: _plain(value) for key, value in values.items()}
        self._file.write(json.dumps(_without_nan({"step": step, **values})) + "\n")
        self._file.flush()
        self._wandb(lambda run: run.log(values, step=step))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Logs a table to wandb, at the last logged step."""
        data = [list(row) for row in rows]
        self._show(name, lambda wandb: wandb.Table(columns=list(columns), data=data))

    def image(self, name: str, path: str | os.PathLike[str]) -> None:
        """Logs an image file to wandb, at the last logged step."""
        self._show(name, lambda wandb: wandb.Image(os.fspath(path)))

    def _show(self, name: str, make: Callable[[Any], Any]) -> None:
        """Logs the wandb object `make(wandb)` under `name`, at the last logged step."""

        def log(run: Any) -> None:
            import wandb

            run.log({name: make(wandb)}, step=self._step)

        self._wandb(log)

    def file(self, path: Path) -> None:
        """Uploads a file of the workdir to wandb."""
        self._wandb(lambda run: run.save(str(path), base_path=str(path.parent), policy="now"))

    def summary(self, values: Mapping[str, Any]) -> None:
        """Overwrites `summary.json`, and updates the summary of the wandb run."""
        if not self._enabled:
            return
        values = {key: _plain(value) for key, value in values.items()}
        text = json.dumps(_without_nan(values), indent=2)
        write_whole(self._workdir / SUMMARY, text + "\n")
        self._wandb(lambda run: run.summary.update(values))

    def finish(self) -> None:
        """Closes `metrics.jsonl` and the wandb run. A second call does nothing."""
        if not self._enabled:
            return
        self._file.close()
        self._wandb(lambda run: run.finish())
        self._run = None

    def _wandb(self, call: Callable[[Any], Any]) -> None:
        """Calls `call` with the wandb run if wandb is enabled. An exception prints a warning and disables wandb."""
        if self._run is None:
            return
        try:
            call(self._run)
        except Exception as error:  # wandb does not document its exceptions.
            self._run = None
            _stop_wandb(error, "continuing without wandb")

    def _wandb_id(self, anew: bool) -> str:
        """Returns the wandb id that the workdir stores. With `anew`, or without a stored id, stores a new id."""
        path = self._workdir / WANDB_ID
        if not anew and path.exists() and (identity := path.read_text().strip()):
            return identity
        identity = secrets.token_hex(4)
        write_whole(path, identity + "\n")
        return identity


def read_metrics(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the lines of `metrics.jsonl` as dictionaries with "step". Ignores an incomplete last line.

    Raises:
      UserError: the file is missing, or a line before the last line is damaged.
    """
    path = Path(workdir) / METRICS
    check(path.exists(), f"{workdir} has no {METRICS}: give the workdir of a run")
    return [values for _, values in _lines(path)]


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each line of a metrics file as text and as a dictionary."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
            if not isinstance(values["step"], int):
                raise TypeError
        except (ValueError, KeyError, TypeError):
            # The text after the last newline is empty or an incomplete line: ignore it.
            if number == len(lines):
                return
            raise UserError(
                f"{path} is damaged: line {number} is not a JSON object with an integer step"
            ) from None
        yield line, values


def write_whole(path: Path, text: str) -> None:
    """Writes a text file atomically."""
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
    """Replaces NaN and infinity by None, because JSON lacks both."""
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    value = _plain(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def log_in() -> None:
    """Logs in to wandb with a stored API key. Raises an exception instead of prompting for a missing key.

    Raises:
      ConnectionError: no API key is stored.
    """
    import wandb

    if not wandb.login(prompt=False, verify=False):
        raise ConnectionError("no API key (`wandb login` stores one)")


def _start_wandb(mode: str, **arguments: Any) -> Any:
    """Starts a wandb run: offline if "online" fails. Returns None if both fail. Prints a warning for each failure."""
    times = {"init_timeout": WANDB_TIMEOUT, "finish_timeout": WANDB_TIMEOUT}
    try:
        import wandb

        settings = wandb.Settings(silent=True, console="off", **times)
        if mode == "online":
            try:
                wandb.setup(settings)
                log_in()
                return wandb.init(mode="online", settings=settings, **arguments)
            except Exception as error:  # wandb does not document its exceptions.
                _stop_wandb(error, "logging offline")
        with suppress(Exception):  # `setup` silences the warnings of `Run.save`, unlike `init`.
            wandb.setup(settings)
        return wandb.init(mode="offline", settings=settings, **arguments)
    except Exception as error:
        _stop_wandb(error, "continuing without wandb")
        return None


def _stop_wandb(error: Exception, consequence: str) -> None:
    """Prints a one-line warning and stops wandb, so that wandb's exit hook prints nothing.

    Args:
      consequence: what follows from the error, for the warning.
    """
    reason = " ".join(str(error).split()) or type(error).__name__
    print(f"warning: wandb: {reason[:200]}; {consequence}", file=sys.stderr)
    with suppress(Exception):
        import wandb

        wandb.teardown()
