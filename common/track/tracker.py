"""Writes the metrics of a run to `metrics.jsonl`, `summary.json` and wandb."""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.atomic import write_whole
from common.errors import UserError, check, parse_json, write_error
from common.storage.addresses import shown

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
WANDB_MODES = ("offline", "online", "disabled")


class Tracker:
    """Writes the metrics of a run to its workdir and to wandb. Only process 0 has a tracker.

    Every line of `metrics.jsonl` is flushed, so a killed process loses at most its last line. On one device, an
    interrupted and resumed run writes the same file as an uninterrupted run, apart from seconds and the AUCC over them.

    Attributes:
      kept_steps: steps of the lines that earlier starts of the run have written.
    """

    def __init__(
        self, workdir: Path, config: Mapping[str, Any], resume_step: int | None = None
    ) -> None:
        """Opens `metrics.jsonl` and wandb.

        Args:
          config: configuration of the run, for wandb. Its group `wandb` has the `mode`, which is "offline", "online"
            (offline if the connection fails) or "disabled", and the names of the wandb run: `project`, `name` (default:
            the folder name of `workdir`) and `group`.
          resume_step: step at which the run resumes. The lines of later steps are deleted, and the same wandb run
            continues. None starts an empty file and a new wandb run.

        Raises:
          UserError: `metrics.jsonl` is damaged.
        """
        self._workdir, self._step = workdir, resume_step or 0
        path = workdir / METRICS
        kept = []
        if resume_step is not None and path.exists():
            kept = [(line, x["step"]) for line, x in _lines(path) if x["step"] <= resume_step]
        self.kept_steps = {step for _, step in kept}
        write_whole(path, "".join(f"{line}\n" for line, _ in kept))
        self._file = path.open("a", encoding="ascii")
        self._wandb: Callable[[Callable[[Any, Any], Any]], None] = lambda function: None
        if config["wandb"]["mode"] != "disabled":
            from common.track.wandb_run import WandbRun

            self._wandb = WandbRun(workdir, config, resume_step).call

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Appends a line with step and values to `metrics.jsonl`, and sends the values to wandb.

        Values are numbers, scalar arrays or texts. In `metrics.jsonl`, NaN and infinity become null. Steps must not
        decrease, because wandb ignores values of earlier steps. Raises a UserError if the line cannot be written.
        """
        try:
            self._file.write(json.dumps(_to_json({"step": step, **values})) + "\n")
            self._file.flush()
        except OSError as error:
            path = shown(self._workdir / METRICS)
            raise write_error(path, error, "make the file writable") from error
        self._step = step
        self._wandb(lambda run, _: run.log(values, step=step))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Logs a table to wandb, at the last logged step."""
        data = [list(row) for row in rows]
        self._show(name, lambda wandb: wandb.Table(columns=list(columns), data=data))

    def image(self, name: str, path: Path) -> None:
        """Logs an image file to wandb, at the last logged step."""
        self._show(name, lambda wandb: wandb.Image(str(path)))

    def _show(self, name: str, make: Callable[[Any], Any]) -> None:
        self._wandb(lambda run, wandb: run.log({name: make(wandb)}, step=self._step))

    def file(self, path: Path) -> None:
        """Uploads a file of the workdir to wandb."""
        folder = str(path.parent)
        self._wandb(lambda run, _: run.save(str(path), base_path=folder, policy="now"))

    def summary(self, values: Mapping[str, Any]) -> None:
        """Overwrites `summary.json`, and updates the summary of the wandb run."""
        text = json.dumps(_to_json(values), indent=2)
        write_whole(self._workdir / SUMMARY, text + "\n")
        self._wandb(lambda run, _: run.summary.update(values))

    def finish(self) -> None:
        """Closes `metrics.jsonl` and the wandb run."""
        with suppress(OSError):  # `log` has reported a line that cannot be written.
            self._file.close()
        self._wandb(lambda run, _: run.finish())


def read_metrics(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the lines of `metrics.jsonl` as dictionaries, each with the key "step". Ignores an incomplete last line.

    Raises:
      UserError: the file is missing, or a complete line is damaged.
    """
    path = Path(workdir) / METRICS
    check(
        path.exists(),
        f"{shown(path.parent)} has no {METRICS}: restore the file, or train the run again",
    )
    return [values for _, values in _lines(path)]


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each line of a metrics file as text and as a dictionary. See `read_metrics`."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            values = parse_json(line)
            if not isinstance(values["step"], int):
                raise TypeError
        except (ValueError, KeyError, TypeError):
            # The text after the last newline is empty or an incomplete line: ignore it.
            if number == len(lines):
                return
            raise UserError(
                f"{shown(path)} is damaged: line {number} is not a JSON object with an integer step; restore the file"
            ) from None
        yield line, values


def _to_json(value: Any) -> Any:
    """Converts NumPy and JAX scalars to Python numbers; converts NaN and infinity, which JSON lacks, to None."""
    if isinstance(value, Mapping):
        return {key: _to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
