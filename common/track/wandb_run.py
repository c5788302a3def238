"""Writes the metrics of a run to wandb. An error in wandb never stops the run."""

import secrets
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.atomic import write_whole
from common.errors import reason_of

WANDB_TIMEOUT = 20  # seconds, for a request to wandb, and for starting and finishing a wandb run


class WandbRun:
    """A run in wandb.

    wandb never prompts. An error in wandb prints one line on stderr. If a run in mode "online" cannot start, it is
    logged offline; every other error disables wandb. wandb's files are in `workdir/wandb`; `wandb sync` uploads an
    offline run. `Tracker` describes the arguments. The value "" of a project, name or group stands for the default.
    """

    def __init__(self, workdir: Path, config: Mapping[str, Any], resume_step: int | None):
        arguments = {"project": "train-less", "name": workdir.resolve().name}
        arguments |= {key: value for key, value in config["wandb"].items() if value}
        arguments |= {"dir": str(workdir), "config": dict(config), "resume": "allow"}
        arguments["id"] = _wandb_id(workdir, anew=resume_step is None)
        self._run = _start_wandb(arguments)

    def call(self, function: Callable[[Any, Any], Any]) -> None:
        """Calls `function` with the wandb run and the package wandb. Does nothing after an error in wandb."""
        if self._run is None:
            return
        try:
            import wandb

            function(self._run, wandb)
        except Exception as error:  # wandb does not document its exceptions.
            self._run = None
            _stop_wandb(error, "continuing without wandb")


def _wandb_id(workdir: Path, anew: bool) -> str:
    """Returns the wandb id that a file in the workdir stores. If `anew`, or without the file, first stores a new id."""
    path = workdir / "wandb_id"
    if anew or not path.exists():
        write_whole(path, secrets.token_hex(4) + "\n")
    return path.read_text().strip()


def log_in() -> None:
    """Logs in to wandb with a stored API key, without a prompt. Raises a ConnectionError if no key is stored."""
    import wandb

    if not wandb.login(prompt=False, verify=False):
        raise ConnectionError("no API key is stored (run `wandb login` to store your key)")


def _start_wandb(arguments: dict[str, Any]) -> Any:
    """Calls `wandb.init` with the arguments; if the mode "online" fails, again with the mode "offline".

    Returns None if the mode "offline" fails. Each failure prints a warning.
    """
    times = {"init_timeout": WANDB_TIMEOUT, "finish_timeout": WANDB_TIMEOUT}
    try:
        import wandb

        settings = wandb.Settings(silent=True, console="off", **times)
        if arguments["mode"] == "online":
            try:
                wandb.setup(settings)
                log_in()
                return wandb.init(settings=settings, **arguments)
            except Exception as error:  # wandb does not document its exceptions.
                _stop_wandb(error, "logging offline")
        # Only `setup` silences the warnings of `Run.save`; the settings of `init` do not.
        with suppress(Exception):
            wandb.setup(settings)
        return wandb.init(settings=settings, **arguments | {"mode": "offline"})
    except Exception as error:
        _stop_wandb(error, "continuing without wandb")
        return None


def _stop_wandb(error: Exception, consequence: str) -> None:
    """Prints a one-line warning and stops wandb, so that wandb's exit hook prints nothing."""
    print(f"warning: wandb: {reason_of(error)}; {consequence}", file=sys.stderr)
    with suppress(Exception):
        import wandb

        wandb.teardown()
