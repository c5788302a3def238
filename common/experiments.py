"""Experiment suites: the runs of a paper's tables, figures and claims, trained once and compared on equal terms."""

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from jax.sharding import Mesh
from ml_collections import ConfigDict

from common.cached import cached_json
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
"""Beside the summary of a finished run: the configuration that the suite requested, which identifies the run."""


class Side(NamedTuple):
    """One side of a claim.

    Attributes:
      name: of the case; equal experiments have equal names.
      experiment: seed -> configuration.
      missing: why the side cannot be run at this scale or with these options; "" if it can.
    """

    name: str
    experiment: "Experiment"
    missing: str = ""


Experiment = Callable[[int], ConfigDict]
"""Seed -> configuration of a run."""


class Ran(NamedTuple):
    """A finished run."""

    name: str
    summary: dict
    workdir: Path

    @property
    def run(self) -> Run:
        """The run as reports read it."""
        return run_of(self.summary, self.name, folder=self.workdir)


@dataclass(frozen=True)
class Point:
    """A point of a sweep's grid: field "a.b" -> value as text."""

    values: Mapping[str, str]

    def set(self, config: ConfigDict) -> ConfigDict:
        """Sets these values in a configuration and returns it.

        Raises:
          UserError: the configuration has no such field.
        """
        for name, text in self.values.items():
            try:
                override(config, name, text)
            except UserError as fault:
                raise UserError(str(fault).replace("--config.", "--sweep ")) from fault
        return config

    def name(self, case: str, seed: int) -> str:
        """The folder name of a run."""
        own = (f"{name.rpartition('.')[2]}={text}" for name, text in self.values.items())
        return "_".join([f"{case}_seed{seed}", *own])


def parse_sweep(given: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Parses --sweep options, "a.b=V1,V2", as a grid.

    Raises:
      UserError: an option has another form, or a field occurs twice.
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
    """The experiments of a paper at one scale. A paper derives its own suite, with its configurations.

    Attributes:
      scale: which sizes.
      seeds: runs of each case, with the seeds 1, 2, ...
      fields: overrides from the command line, "--config.a.b=VALUE".
      out: the folder of tables, figures and `runs`.
      turns: steps between turns of the runs of one seed; 0 trains one run after the other.
      sweep: field "a.b" -> values that every case tries; see `runs`.
    """

    scale: str
    seeds: int
    fields: list[str]
    out: Path
    mesh: Mesh
    turns: int = field(default=0, kw_only=True)
    sweep: Mapping[str, tuple[str, ...]] = field(default_factory=dict, kw_only=True)

    def prepare(self, config: ConfigDict) -> tuple[ConfigDict, Task]:
        """The configuration for the training loop, and the task with its data."""
        raise NotImplementedError

    def override(self, config: ConfigDict, **values: object) -> ConfigDict:
        """Applies the overrides of the command line, then `values` of the experiment."""
        config.wandb.mode = "disabled"
        override_all(config, self.fields)
        config.update_from_flattened_dict(values)
        return config

    def side(self, text: str) -> Side:
        """Reads the side of a claim.

        Raises:
          UserError: the text names no experiment.
        """
        raise NotImplementedError

    def runs(self, cases: Mapping[str, Experiment]) -> dict[str, list[Ran]]:
        """One run per seed of several cases that are compared; missing runs are trained.

        With a `sweep`, seed 1 of every case first tries each point of the same grid, without the test split. All seeds
        then use the point with the best validation value. The table `sweep` lists all points.
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
        """Trains every point of the grid with seed 1 and writes the table; returns the best point of every case."""
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
        """Summary and folder of one run; see `fit_all`."""
        (ran,) = self.fit_all({name: config})
        return ran.summary, ran.workdir

    def fit_all(self, asked: Mapping[str, ConfigDict]) -> list[Ran]:
        """Runs by name; missing ones are trained, in turns if `turns` says so.

        A finished run with the same requested configuration is not opened: its summary is enough.
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
        """The summary of a finished run with this requested configuration; None without one."""
        workdir = self.out / "runs" / name

        def is_same(there: dict) -> bool:
            there, requested = flatten(there), flatten(_requested(config))
            unchanged = changed(config) < (workdir / SUMMARY).stat().st_mtime
            if not has_checkpoints(workdir):
                # A kept run without checkpoints cannot be continued: newer data do not matter, and configuration
                # fields that were added since had their present defaults.
                unchanged = True
                given = {field.removeprefix("--config.").split("=")[0] for field in self.fields}
                new = requested.keys() - there.keys() - given
                requested = {name: value for name, value in requested.items() if name not in new}
                if not config.eval.test:
                    there["eval.test"] = False  # a sweep reads the validation curve only
            return unchanged and there == requested

        if cached_json(workdir / REQUESTED_CONFIG, is_same) is None:
            return None
        return cached_json(workdir / SUMMARY, bool)

    def train(self, asked: Mapping[str, ConfigDict]) -> dict[str, dict]:
        """Trains, or resumes, runs together, in turns; returns their summaries.

        Raises:
          UserError: as `loop.fit_in_turns`, or a folder has the summary of another run and no checkpoints.
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
            # Until the run has finished the folder may hold half of another one.
            (job.workdir / REQUESTED_CONFIG).unlink(missing_ok=True)
        try:
            summaries = loop.fit_in_turns(jobs, self.mesh, self.turns if len(jobs) > 1 else 0)
        except UserError as fault:  # the user named --out, not the run's folder in it
            raise UserError(str(fault).replace("--workdir", "--out")) from fault
        for name, config in asked.items():
            path = self.out / "runs" / name / REQUESTED_CONFIG
            path.write_text(json.dumps(_requested(config), indent=2) + "\n")
        return dict(zip(asked, summaries, strict=True))

    def kept(self, name: str) -> list[Ran]:
        """All finished and tested runs of a case in --out, with any seeds and configurations.

        Raises:
          UserError: a summary is damaged.
        """
        found = []
        for path in sorted((self.out / "runs").glob(f"{name}_seed*/{SUMMARY}")):
            # One name may be a prefix of another: only a seed and the values of a sweep may follow.
            if re.fullmatch(rf"{re.escape(name)}_seed\d+(_[a-z0-9_]+=[^=]+)*", path.parent.name):
                try:
                    summary = json.loads(path.read_text())
                except ValueError as fault:
                    raise UserError(f"{path} is damaged: {fault}") from fault
                if summary["test"]:
                    found.append(Ran(path.parent.name, summary, path.parent))
        return found

    def claims(self, paper: str, only_kept: bool = False) -> None:
        """Prints and writes the table `claims`: the verdict of every claim of a paper.

        Args:
          only_kept: trains nothing and needs no data; a side without finished runs is missing.

        Raises:
          UserError: a claim names an unknown experiment or metric.
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
        """As `write`, without printing, for a table that is still incomplete."""
        keep(self.out / name, columns, rows)

    def write_csv(self, name: str, columns: tuple[str, ...], rows: list[tuple]) -> None:
        """Writes a table that is too long to print as CSV."""
        write_csv(self.out / f"{name}.csv", columns, rows)


def _requested(config: ConfigDict) -> dict:
    """The JSON of a configuration, without the location of its files on this machine."""
    asked = to_json(config)
    kind, colon, place = asked["data"]["source"].partition(":")
    if kind == "files":
        asked["data"]["source"] = f"files{colon}{Path(place).name}"
    asked["data"].pop("cache_dir", None)
    if asked.get("pretrained"):
        asked["pretrained"] = Path(asked["pretrained"]).name
    return asked


def evaluations(workdir: Path, name: str) -> list[dict]:
    """The logged metrics of every evaluation of a finished run; each has the metric `name`.

    Raises:
      UserError: the log is incomplete.
    """
    logged = [m for m in read_metrics(workdir) if name in m]
    points = json.loads((workdir / SUMMARY).read_text())["curve"]["points"]
    check(
        [m["step"] for m in logged] == [p["step"] for p in points],
        f"{workdir / METRICS} is not whole; remove {workdir} to train it again",
    )
    return logged
