"""Experiments of a paper by one command: runs that are trained once, tables beside the printed ones."""

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from jax.sharding import Mesh
from ml_collections import ConfigDict

from common.config import check, flatten, override, override_all, to_json
from common.errors import UserError
from common.metrics.curve import Curve
from common.report import claims
from common.report.runs import Run, run_of
from common.report.table import keep, publish, write_csv
from common.track.tracker import METRICS, SUMMARY, read_metrics
from common.train import loop
from common.train.summary import changed
from common.train.task import Task
from common.train.workdir import has_checkpoints

REQUESTED_CONFIG = "requested_config.json"
"""In the folder of a run that has ended: the configuration that it was asked for, before anything was added to it."""


class Side(NamedTuple):
    """An experiment that a claim is about.

    Attributes:
      name: of the case, the same for equal experiments.
      experiment: its configurations.
      missing: why it cannot be run at this scale or with these options; "" where it can.
    """

    name: str
    experiment: "Experiment"
    missing: str = ""


Experiment = Callable[[int], ConfigDict]
"""Seed -> the configuration of a run."""


class Ran(NamedTuple):
    """A run that has ended."""

    name: str
    summary: dict
    workdir: Path

    @property
    def run(self) -> Run:
        """As reports take it."""
        return run_of(self.summary, self.name, folder=self.workdir)


@dataclass(frozen=True)
class Point:
    """A point of a sweep's grid: field "a.b" -> its value as a command line has it."""

    values: Mapping[str, str]

    def set(self, config: ConfigDict) -> ConfigDict:
        """The configuration with these values.

        Raises:
          UserError: it has no such field.
        """
        for name, text in self.values.items():
            try:
                override(config, name, text)
            except UserError as fault:
                raise UserError(str(fault).replace("--config.", "--sweep ")) from fault
        return config

    def name(self, case: str, seed: int) -> str:
        """Of the folder of a run."""
        own = (f"{name.rpartition('.')[2]}={text}" for name, text in self.values.items())
        return "_".join([f"{case}_seed{seed}", *own])


def parse_sweep(given: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """A grid from the options of a command line, "a.b=V1,V2".

    Raises:
      UserError: one is not of this form, or a field is given twice.
    """
    found: dict[str, tuple[str, ...]] = {}
    for text in given:
        name, equals, values = text.partition("=")
        name = name.removeprefix("--config.").removeprefix("config.")
        parts = tuple(filter(None, values.split(",")))
        check(
            bool(name and equals and parts),
            f"--sweep {text}: it is FIELD=VALUE,VALUE, such as optimizer.learning_rate=1e-4,3e-4",
        )
        check(len(set(parts)) == len(parts), f"--sweep {text}: a value is there twice")
        check(name not in found, f"--sweep {text}: {name} is there twice")
        found[name] = parts
    return found


@dataclass(frozen=True)
class ExperimentSuite:
    """Where and how large the experiments are run. A paper derives its own, with its configurations.

    Attributes:
      scale: which sizes.
      seeds: runs of each case, with the seeds 1, 2, ...
      fields: overrides from the command line, "--config.a.b=VALUE".
      out: the folder of tables, figures and `runs`.
      turns: steps after which the runs of one seed take turns; 0 trains one run after the other.
      sweep: field "a.b" -> the values that every case tries; see `runs`.
    """

    scale: str
    seeds: int
    fields: list[str]
    out: Path
    mesh: Mesh
    turns: int = field(default=0, kw_only=True)
    sweep: Mapping[str, tuple[str, ...]] = field(default_factory=dict, kw_only=True)

    def prepare(self, config: ConfigDict) -> tuple[ConfigDict, Task]:
        """The configuration that the loop takes, and the task with its data."""
        raise NotImplementedError

    def override(self, config: ConfigDict, **values: object) -> ConfigDict:
        """With the fields of the command line and those of the experiment, which win."""
        config.wandb.mode = "disabled"
        override_all(config, self.fields)
        config.update_from_flattened_dict(values)
        return config

    def side(self, text: str) -> Side:
        """The experiment that a side of a claim names.

        Raises:
          UserError: there is no such experiment.
        """
        raise NotImplementedError

    def runs(self, cases: Mapping[str, Experiment]) -> dict[str, list[Ran]]:
        """The runs of several cases that are compared, a run per seed; what is missing is trained.

        With a `sweep`, seed 1 of every case first tries each point of the same grid, without the test split. The point
        that is best in validation is then used for all seeds, and tested. Table `sweep` has what was tried.
        """
        points = dict.fromkeys(cases, Point({}))
        if self.sweep:
            points = self._tune(cases)
        found: dict[str, list[Ran]] = {name: [] for name in cases}
        for seed in range(1, 1 + self.seeds):
            asked = {
                points[name].name(name, seed): points[name].set(make(seed))
                for name, make in cases.items()
            }
            for name, ran in zip(cases, self.fit_all(asked), strict=True):
                found[name].append(ran)
        return found

    def _tune(self, cases: Mapping[str, Experiment]) -> dict[str, Point]:
        """Tries the grid with seed 1, and writes what was tried; the best point of every case."""
        grid = [
            Point(dict(zip(self.sweep, values, strict=True)))
            for values in itertools.product(*self.sweep.values())
        ]
        asked = {}
        for (name, make), point in itertools.product(cases.items(), grid):
            config = point.set(make(1))
            config.eval.test = False
            asked[point.name(name, 1)] = config
        ran = iter(self.fit_all(asked))
        best, rows = {}, []
        for name in cases:
            tried = [(point, next(ran).summary) for point in grid]
            curves = [Curve.from_json(summary["curve"]) for _, summary in tried]
            order = max if curves[0].mode == "max" else min
            chosen = order(range(len(grid)), key=lambda i, curves=curves: curves[i].best.value)
            best[name] = grid[chosen]
            rows += [
                (name, *point.values.values(), s["best_valid"], s["steps"], s["flops"], mark)
                for i, (point, s) in enumerate(tried)
                for mark in ["chosen" if i == chosen else ""]
            ]
        columns = ("case", *self.sweep, f"best valid {curves[0].name}", "steps", "FLOPs", "")
        self.write("sweep", columns, rows)
        print(
            f"each case tried {len(grid)} points with seed 1, chosen by validation; the test split was not touched"
        )
        return best

    def fit(self, name: str, config: ConfigDict) -> tuple[dict, Path]:
        """The summary and the folder of a run, which is trained if it is not there yet: see `fit_all`."""
        (ran,) = self.fit_all({name: config})
        return ran.summary, ran.workdir

    def fit_all(self, asked: Mapping[str, ConfigDict]) -> list[Ran]:
        """Runs by name, in turns where `turns` says so.

        A run that has ended with this very configuration is not opened again: its summary is enough, and its data are
        not read.
        """
        kept = {name: self._kept(name, config) for name, config in asked.items()}
        missing = {name: config for name, config in asked.items() if kept[name] is None}
        together = (
            [missing] if self.turns and missing else [{n: config} for n, config in missing.items()]
        )
        for some in together:
            kept |= self.train(some)
        return [Ran(name, kept[name], self.out / "runs" / name) for name in asked]

    def _kept(self, name: str, config: ConfigDict) -> dict | None:
        """The summary of a run that has ended and was asked for with this configuration."""
        workdir = self.out / "runs" / name
        with suppress(OSError, ValueError):  # missing, or damaged
            unchanged = changed(config) < (workdir / SUMMARY).stat().st_mtime
            there = flatten(json.loads((workdir / REQUESTED_CONFIG).read_text()))
            asked = flatten(_asked(config))
            if not has_checkpoints(workdir):
                # Of a kept run there is nothing to open, whenever its data were put here; and fields that
                # configurations have only since then had no other value.
                unchanged = True
                given = {field.removeprefix("--config.").split("=")[0] for field in self.fields}
                new = asked.keys() - there.keys() - given
                asked = {name: value for name, value in asked.items() if name not in new}
                if not config.eval.test:
                    there["eval.test"] = False  # a sweep only reads the validation curve
            if unchanged and there == asked:
                return json.loads((workdir / SUMMARY).read_text())
        return None

    def train(self, asked: Mapping[str, ConfigDict]) -> dict[str, dict]:
        """Trains, or resumes, runs: together, in turns; their summaries.

        Raises:
          UserError: as `loop.fit_in_turns`, or the folder of a run has a summary but no checkpoints.
        """
        for name in asked:
            workdir = self.out / "runs" / name
            check(
                has_checkpoints(workdir) or not (workdir / SUMMARY).exists(),
                f"{workdir} keeps a run of another configuration, without checkpoints: training would replace it;"
                " choose another --out",
            )
        jobs = []
        for name, config in asked.items():
            print(f"\n{name}", flush=True)
            jobs.append(loop.Job(*self.prepare(config), self.out / "runs" / name))
        for job in jobs:
            # Until it has ended, what lies there may be half of another run.
            (job.workdir / REQUESTED_CONFIG).unlink(missing_ok=True)
        try:
            summaries = loop.fit_in_turns(jobs, self.mesh, self.turns if len(jobs) > 1 else 0)
        except UserError as fault:  # the folder of a run is within what the user named
            raise UserError(str(fault).replace("--workdir", "--out")) from fault
        for name, config in asked.items():
            path = self.out / "runs" / name / REQUESTED_CONFIG
            path.write_text(json.dumps(_asked(config), indent=2) + "\n")
        return dict(zip(asked, summaries, strict=True))

    def kept(self, name: str) -> list[Ran]:
        """The tested runs of a case that there are, whatever their seeds and configurations.

        Raises:
          UserError: a summary is damaged.
        """
        found = []
        for path in sorted((self.out / "runs").glob(f"{name}_seed*/{SUMMARY}")):
            # A name may begin with another one's: only a seed and the points of a sweep may follow.
            if re.fullmatch(rf"{re.escape(name)}_seed\d+(_[a-z0-9_]+=[^=]+)*", path.parent.name):
                try:
                    summary = json.loads(path.read_text())
                except ValueError as fault:
                    raise UserError(f"{path} is damaged: {fault}") from fault
                if summary["test"]:
                    found.append(Ran(path.parent.name, summary, path.parent))
        return found

    def claims(self, paper: str, only_kept: bool = False) -> None:
        """Prints and writes what is known of the claims of a paper, in `claims`.

        Args:
          only_kept: train nothing; a side without tested runs is missing. Of the others no data are needed.

        Raises:
          UserError: a claim names an experiment or a metric that there is not.
        """
        read = claims.read(paper)
        names = dict.fromkeys(s for one in read if one.kind == "runs" for s in (one.a, one.b))
        sides = {text: self.side(text) for text in names}
        missing = {text: side.missing for text, side in sides.items() if side.missing}
        if only_kept:
            ran = {side.name: self.kept(side.name) for side in sides.values()}
            none = {t: "no runs are kept" for t, side in sides.items() if not ran[side.name]}
            missing = {text: missing.get(text, why) for text, why in none.items()}
        else:
            wanted = {s.name: s.experiment for s in sides.values() if not s.missing}
            ran = self.runs(wanted) if wanted else {}
        groups = {t: [r.run for r in ran[s.name]] for t, s in sides.items() if t not in missing}
        findings = claims.find(read, groups, missing)
        hours = claims.chip_hours(paper)
        self.write("claims", *claims.table(findings, hours, self.scale))
        print(claims.NOTE)

    def write(self, name: str, columns: tuple[str, ...], rows: list[tuple]) -> None:
        """Prints a table and writes it as CSV and Markdown."""
        publish(self.out / name, columns, rows)

    def keep(self, name: str, columns: tuple[str, ...], rows: list[tuple]) -> None:
        """As `write`, without printing: for a table that is not whole yet."""
        keep(self.out / name, columns, rows)

    def write_csv(self, name: str, columns: tuple[str, ...], rows: list[tuple]) -> None:
        """Writes what is too long to read."""
        write_csv(self.out / f"{name}.csv", columns, rows)


def _asked(config: ConfigDict) -> dict:
    """The JSON of a configuration, without where on this machine its files lie."""
    asked = to_json(config)
    kind, colon, place = asked["data"]["source"].partition(":")
    if kind == "files":
        asked["data"]["source"] = f"files{colon}{Path(place).name}"
    asked["data"].pop("cache_dir", None)
    if asked.get("pretrained"):
        asked["pretrained"] = Path(asked["pretrained"]).name
    return asked


def evaluations(workdir: Path, name: str) -> list[dict]:
    """What a finished run logged at each of its evaluations, which log `name`.

    Raises:
      UserError: its log was cut or removed.
    """
    logged = [m for m in read_metrics(workdir) if name in m]
    points = json.loads((workdir / SUMMARY).read_text())["curve"]["points"]
    check(
        [m["step"] for m in logged] == [p["step"] for p in points],
        f"{workdir / METRICS} is not whole; remove {workdir} to train it again",
    )
    return logged
