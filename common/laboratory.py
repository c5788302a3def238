"""Experiments of a paper by one command: runs that are trained once, tables beside the printed ones."""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from jax.sharding import Mesh
from ml_collections import ConfigDict

from common.config import override_all, require, to_json
from common.errors import UserError
from common.report.table import keep, publish, write_csv
from common.track.tracker import METRICS, SUMMARY, read_metrics
from common.train.summary import changed

ASKED = "asked.json"
"""In the folder of a run that has ended: the configuration that it was asked for, before anything was added to it."""


@dataclass(frozen=True)
class Laboratory:
    """Where and how large the experiments are run. A paper derives its own, with its configurations.

    Attributes:
      scale: which sizes.
      seeds: runs of each case, with the seeds 1, 2, ...
      fields: overrides from the command line, "--config.a.b=VALUE".
      out: the folder of tables, figures and `runs`.
    """

    scale: str
    seeds: int
    fields: list[str]
    out: Path
    mesh: Mesh

    def train(self, config: ConfigDict, workdir: Path) -> dict:
        """Trains, or goes on with, one run; its summary."""
        raise NotImplementedError

    def override(self, config: ConfigDict, **values: object) -> ConfigDict:
        """With the fields of the command line and those of the experiment, which win."""
        config.wandb.mode = "disabled"
        override_all(config, self.fields)
        config.update_from_flattened_dict(values)
        return config

    def fit(self, name: str, config: ConfigDict) -> tuple[dict, Path]:
        """The summary and the folder of a run, which is trained if it is not there yet.

        One that has ended with this very configuration is not opened again: its summary is enough, and its data are
        not read.
        """
        print(f"\n{name}", flush=True)
        workdir = self.out / "runs" / name
        asked = to_json(config)
        with suppress(OSError, ValueError):  # missing, or damaged
            unchanged = changed(config) < (workdir / SUMMARY).stat().st_mtime
            if unchanged and json.loads((workdir / ASKED).read_text()) == asked:
                return json.loads((workdir / SUMMARY).read_text()), workdir
        # Until it has ended, what lies there may be half of another run.
        (workdir / ASKED).unlink(missing_ok=True)
        try:
            summary = self.train(config, workdir)
        except UserError as fault:  # the folder of a run is within what the user named
            raise UserError(str(fault).replace("--workdir", "--out")) from fault
        if (workdir / SUMMARY).exists():
            (workdir / ASKED).write_text(json.dumps(asked, indent=2) + "\n")
        return summary, workdir

    def write(self, name: str, columns: tuple[str, ...], rows: list[tuple]) -> None:
        """Prints a table and writes it as CSV and Markdown."""
        publish(self.out / name, columns, rows)

    def keep(self, name: str, columns: tuple[str, ...], rows: list[tuple]) -> None:
        """As `write`, without printing: for a table that is not whole yet."""
        keep(self.out / name, columns, rows)

    def write_csv(self, name: str, columns: tuple[str, ...], rows: list[tuple]) -> None:
        """Writes what is too long to read."""
        write_csv(self.out / f"{name}.csv", columns, rows)


def evaluations(workdir: Path, name: str) -> list[dict]:
    """What a finished run logged at each of its evaluations, which log `name`.

    Raises:
      UserError: its log was cut or removed.
    """
    logged = [m for m in read_metrics(workdir) if name in m]
    points = json.loads((workdir / SUMMARY).read_text())["curve"]["points"]
    require(
        [m["step"] for m in logged] == [p["step"] for p in points],
        f"{workdir / METRICS} is not whole; remove {workdir} to train it again",
    )
    return logged
