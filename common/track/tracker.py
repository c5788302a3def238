"""What a run measured: `metrics.jsonl` and `summary.json` always, wandb where it works."""

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

# Seconds that wandb may hold up a run at its start and at its end.
_WANDB_TIMEOUT = 20


class Tracker:
    """Writes the metrics of a run to its workdir and to wandb.

    Every line of `metrics.jsonl` is handed to the operating system at once, so that a killed
    process loses at most the line that it was writing. Nothing that is not passed in is written
    (no clock, no host), so that a run which was killed and resumed leaves the file of an
    uninterrupted one.

    wandb is a convenience: it asks nothing, and a fault in it costs one line on stderr and wandb,
    never the run. Its files lie in `workdir/wandb`; an offline run can be sent with `wandb sync`.
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
        """Opens the files, and wandb.

        Args:
          workdir: the folder of the run; made if need be.
          config: shown in wandb.
          wandb_mode: "offline", "online" (falls back to offline), or "disabled".
          project: wandb project.
          name: wandb name of the run; None takes the folder's.
          group: wandb group, such as the name of what differs in nothing but its seed.
          resume_step: the step of the checkpoint that the run goes on from: later lines are
            dropped and the same wandb run is continued. None begins anew, with an empty file.
          enabled: False (every process but the first) makes all methods do nothing.

        Raises:
          UserError: an unknown `wandb_mode`, or a damaged `metrics.jsonl`.
        """
        if wandb_mode not in WANDB_MODES:
            raise UserError(f"wandb mode {wandb_mode!r} is not one of {', '.join(WANDB_MODES)}")
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
        """Writes one line: the step and the values (numbers, or scalar arrays; NaN becomes null).

        Steps must not go back: wandb leaves out a line behind its last one.
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
        """Shows a table in wandb, at the step last logged."""

        def show(run: Any) -> None:
            import wandb

            table = wandb.Table(columns=list(columns), data=[list(row) for row in rows])
            run.log({name: table}, step=self._step)

        self._wandb(show)

    def image(self, name: str, path: str | os.PathLike[str]) -> None:
        """Shows an image file in wandb, at the step last logged."""

        def show(run: Any) -> None:
            import wandb

            run.log({name: wandb.Image(os.fspath(path))}, step=self._step)

        self._wandb(show)

    def file(self, path: Path) -> None:
        """Uploads a file of the workdir to wandb."""
        self._wandb(lambda run: run.save(str(path), base_path=str(path.parent), policy="now"))

    def summary(self, values: Mapping[str, Any]) -> None:
        """Writes `summary.json`, in place of an earlier one, and the summary in wandb."""
        if not self._enabled:
            return
        values = {key: _plain(value) for key, value in values.items()}
        text = json.dumps(_without_nan(values), indent=2)
        write_whole(self._workdir / SUMMARY, text + "\n")
        self._wandb(lambda run: run.summary.update(values))

    def finish(self) -> None:
        """Closes the file and wandb; may be called again."""
        if not self._enabled:
            return
        self._file.close()
        self._wandb(lambda run: run.finish())
        self._run = None

    def _wandb(self, call: Callable[[Any], Any]) -> None:
        """Calls wandb where there is a run; at the first fault goes on without."""
        if self._run is None:
            return
        try:
            call(self._run)
        except Exception as error:  # wandb documents no list of what it raises.
            self._run = None
            _warn(error, "carrying on without it")
            _stop_wandb()

    def _wandb_id(self, anew: bool) -> str:
        """The id of this workdir's wandb run."""
        path = self._workdir / WANDB_ID
        if not anew and path.exists() and (identity := path.read_text().strip()):
            return identity
        identity = secrets.token_hex(4)
        write_whole(path, identity + "\n")
        return identity


def read_metrics(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a run's `metrics.jsonl`, each a dict with "step".

    A last line that was cut short by a kill is left out.

    Raises:
      UserError: there is no such file, or another line is not what `Tracker` writes.
    """
    path = Path(workdir) / METRICS
    if not path.exists():
        raise UserError(f"{workdir} has no {METRICS}: is it the workdir of a run?")
    return [values for _, values in _lines(path)]


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of a metrics file, as text and as values."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
            if not isinstance(values["step"], int):
                raise TypeError
        except (ValueError, KeyError, TypeError):
            # What follows the last newline is empty, or was being written when the run died.
            if number == len(lines):
                return
            raise UserError(f"{path}, line {number}: not a line of metrics") from None
        yield line, values


def write_whole(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _plain(value: Any) -> Any:
    """A NumPy or JAX scalar as a Python number."""
    return value.item() if hasattr(value, "item") else value


def _without_nan(value: Any) -> Any:
    """JSON has no NaN and no infinity: null stands for both."""
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    value = _plain(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _start_wandb(mode: str, **arguments: Any) -> Any:
    """A wandb run, offline if it cannot be online, or None; a warning if it is not as asked."""
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
                # wandb.init would ask for a key where there is a terminal; this does not.
                if not wandb.login(prompt=False, verify=False):
                    raise ConnectionError("no API key (`wandb login` stores one)")
                return wandb.init(mode="online", settings=settings, **arguments)
            except Exception as error:  # See Tracker._wandb.
                _warn(error, "logging offline")
                _stop_wandb()
        return wandb.init(mode="offline", settings=settings, **arguments)
    except Exception as error:
        _warn(error, "carrying on without it")
        _stop_wandb()
        return None


def _stop_wandb() -> None:
    """Ends a wandb that failed, so that its exit hook has nothing left to complain about."""
    with suppress(Exception):
        import wandb

        wandb.teardown()


def _warn(error: Exception, consequence: str) -> None:
    """One line, whatever the error has to say."""
    reason = " ".join(str(error).split()) or type(error).__name__
    print(f"warning: wandb: {reason[:200]}; {consequence}", file=sys.stderr)
