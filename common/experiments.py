"""Trains the runs of a paper's tables, figures and claims, and reuses finished runs.

A case is one experiment, such as a model at one depth. Each case has one run for each seed; a sweep adds runs.
"""

import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from jax.sharding import Mesh
from ml_collections import ConfigDict

from common.arguments import parse_pairs
from common.cached import read_json_if
from common.config import flatten, float_or_text, override_all, run_module, to_json
from common.errors import UserError, check
from common.report.claims import NOTE, chip_hours, find, table
from common.report.claims import read as read_claims
from common.report.runs import Run, portable_source, read_run, run_of
from common.report.table import publish, write_csv
from common.storage.addresses import address, shown
from common.track.tracker import METRICS, SUMMARY, read_metrics
from common.train.finished import changed
from common.train.task import Task
from common.train.turns import Job, fit_in_turns
from common.train.workdir import CONFIG, has_checkpoints, upgrade

REQUESTED_CONFIG = "requested_config.json"
"""Name of the file, in the workdir of a finished run, that holds the configuration that the suite requested."""


class Side(NamedTuple):
    """One of the two cases that a claim compares.

    Attributes:
      name: name of the case. Sides with the same experiment have the same name. "" if this scale or the options exclude
        the case.
      experiment: function from a seed to the configuration of the run; None if `name` is "".
      missing: reason why the case cannot be trained at this scale or with these options; "" if it can be trained.
    """

    name: str = ""
    experiment: "Experiment | None" = None
    missing: str = ""


Experiment = Callable[[int], ConfigDict]
"""Function from a seed to the configuration of a run."""


Point = Mapping[str, str]
"""A point of a sweep's grid: name of a configuration field, "a.b" -> its value as text."""


def set_fields(
    config: ConfigDict, fields: Mapping[str, str], option: str = "--sweep"
) -> ConfigDict:
    """Sets {field "a.b": text} in `config` and returns `config`.

    Raises a UserError for a wrong field or value. Its message names the field after `option`, such as
    "--sweep model.width".
    """
    texts = [f"{option} {name}={text}" for name, text in fields.items()]
    override_all(config, texts, f"{option} ")
    return config


def _run_name(case: str, seed: int, point: Point) -> str:
    values = (f"{name.rpartition('.')[2]}={text}" for name, text in point.items())
    return "_".join([f"{case}_seed{seed}", *values])


def _best(tried: Sequence[tuple[Point, Run]]) -> tuple[Point, Run]:
    """Returns the pair (grid point, run) with the best validation value."""
    order = max if tried[0][1].curve.mode == "max" else min
    return order(tried, key=lambda one: one[1].curve.best.value)


def _number_first(text: str) -> tuple[bool, float | str]:
    value = float_or_text(text)
    return isinstance(value, str), value


def parse_fields(option: str, texts: Iterable[str], form: str) -> dict[str, str]:
    """Parses the values of an option, each FIELD=VALUE, to {configuration field "a.b": value as text}.

    A field may begin with "config." or "--config.". For the arguments and other errors see `parse_pairs`. Raises a
    UserError for the field `seed`.
    """
    names = [text.removeprefix("--").removeprefix("config.") for text in texts]
    fields = parse_pairs(option, names, form)
    check(
        "seed" not in fields,
        f"{option}seed: leave out the seed, because --seeds sets the seeds of all cases",
    )
    return fields


def parse_sweep(options: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Parses the values of --sweep, each "a.b=V1,V2", to {field: values}.

    Raises a UserError if an option is malformed, a field is the seed, or a field or a value is repeated.
    """
    form = "FIELD=VALUE,VALUE, such as optimizer.learning_rate=1e-4,3e-4, with one --sweep for each field"
    texts = parse_fields("--sweep ", options, form)
    sweep = {name: tuple(filter(None, text.split(","))) for name, text in texts.items()}
    for name, values in sweep.items():
        check(bool(values), f"--sweep {name}= must be {form}")
        check(
            len(set(map(float_or_text, values))) == len(values),
            f"--sweep {name}={','.join(values)}: a value is given twice (values such as 1e-3 and 0.001 are equal);"
            " leave one out",
        )
    return sweep


@dataclass(frozen=True)
class ExperimentSuite:
    """The experiments of a paper at one scale. Each paper has a subclass that makes its configurations.

    Attributes:
      scale: name of a preset of model and data sizes, such as "tiny".
      seeds: number of seeds of each case; the seeds are 1, 2, ...
      fields: configuration overrides from the command line, each "--config.a.b=VALUE".
      out: folder of the tables and figures. The workdirs are in `out`/runs.
      mesh: the device mesh of all runs.
      turns: number of training steps after which the suite switches to another run of the same seed; 0 finishes each
        run before it starts the next. See `common.train.turns.fit_in_turns`.
      sweep: configuration field "a.b" -> values that `runs` tries for every case.
    """

    scale: str
    seeds: int
    fields: list[str]
    out: Path
    mesh: Mesh
    turns: int = field(default=0, kw_only=True)
    sweep: Mapping[str, tuple[str, ...]] = field(default_factory=dict, kw_only=True)

    def folder(self, name: str) -> Path:
        """Returns the workdir of the run `name`."""
        return self.out / "runs" / name

    def prepare(self, config: ConfigDict) -> tuple[ConfigDict, Task]:
        """Calls the paper's `run.prepare`, which loads the data. Returns the completed configuration and the task."""
        return run_module(config).prepare(config, self.mesh)

    def override(self, config: ConfigDict, **values: object) -> ConfigDict:
        """Applies the overrides of the command line, and then `values`, {"a.b": value}, to `config`; returns `config`.

        Disables wandb, unless `wandb.mode` is overridden. Raises a UserError if an override is invalid or sets the
        seed.
        """
        self.check_not_overridden(["seed"], "--seeds sets all seeds")
        config.wandb.mode = "disabled"
        override_all(config, self.fields)
        config.update_from_flattened_dict(values)
        return config

    def check_not_overridden(self, names: Iterable[str], reason: str) -> None:
        """Raises a UserError if the command line overrides one of the fields `names`. `reason` ends the message."""
        fixed = tuple(f"--config.{name}=" for name in names)
        given = [text for text in self.fields if text.startswith(fixed)]
        check(not given, f"leave out {' and '.join(given)}, because {reason}")

    def side(self, text: str) -> Side:
        """Returns the case with the name `text` in a claim. Raises a UserError for an unknown case."""
        raise NotImplementedError

    def runs(self, cases: Mapping[str, Experiment]) -> dict[str, list[Run]]:
        """Trains the missing runs and returns {case: runs, one for each seed}.

        With a `sweep`, every case is first trained at each point of the grid, with seed 1 and without the test split.
        All seeds of a case then use the point with the best validation value. The table `sweep` lists all points.
        """
        points: dict[str, Point] = self._tune(cases) if self.sweep else {name: {} for name in cases}
        runs: dict[str, list[Run]] = {name: [] for name in cases}
        for seed in range(1, 1 + self.seeds):
            configs = {
                _run_name(name, seed, points[name]): set_fields(make(seed), points[name])
                for name, make in cases.items()
            }
            for name, run in zip(cases, self.fit_all(configs), strict=True):
                runs[name].append(run)
        return runs

    def _tune(self, cases: Mapping[str, Experiment]) -> dict[str, Point]:
        """Trains each case at every grid point with seed 1, writes the table `sweep`, returns {case: best point}."""
        combinations = itertools.product(*self.sweep.values())
        grid = [dict(zip(self.sweep, values, strict=True)) for values in combinations]
        configs = {}
        for (name, make), point in itertools.product(cases.items(), grid):
            config = set_fields(make(1), point)
            config.eval.test = False
            configs[_run_name(name, 1, point)] = config
        ran = iter(self.fit_all(configs))
        tried = {name: [(point, next(ran)) for point in grid] for name in cases}
        self._write_sweep(self._tuned_before(cases) | tried)
        print(
            f"--sweep: trained each case with {len(grid)} settings and seed 1, and chose the setting with the best"
            " validation value; the test split was not used"
        )
        return {name: _best(some)[0] for name, some in tried.items()}

    def _tuned_before(self, cases: Mapping[str, Experiment]) -> dict[str, list[tuple[Point, Run]]]:
        """Returns {case: [(point, run)]} of earlier sweeps in --out over the same fields, for cases not in `cases`."""
        values = (f"{name.rpartition('.')[2]}=([^=]+)" for name in self.sweep)
        pattern = re.compile("_".join(["(.+)_seed1", *values]))
        found = defaultdict(list)
        for path in sorted((self.out / "runs").glob(f"*_seed1_*/{SUMMARY}")):
            match = pattern.fullmatch(path.parent.name)
            if match and match[1] not in cases:
                point = dict(zip(self.sweep, match.groups()[1:], strict=True))
                found[match[1]].append((point, read_run(path)))
        for tried in found.values():
            tried.sort(key=lambda one: [_number_first(text) for text in one[0].values()])
        return found

    def _write_sweep(self, tried: Mapping[str, Sequence[tuple[Point, Run]]]) -> None:
        """Prints and writes the table `sweep`: a row for each case and grid point, sorted by case."""
        rows = []
        for case, runs in sorted(tried.items()):
            _, best = _best(runs)
            for point, run in runs:
                measured = (run.summary[field] for field in ("best_valid", "steps", "flops"))
                mark = "chosen" if run is best else ""
                rows.append((case, *point.values(), run.curve.name, *measured, mark))
        columns = ("case", *self.sweep, "metric", "best valid", "steps", "FLOPs", "")
        self.write("sweep", columns, rows)

    def fit_all(self, configs: Mapping[str, ConfigDict]) -> list[Run]:
        """Trains the unfinished runs of `configs`, {name: configuration}. Returns all runs in the order of `configs`.

        A run is finished if its workdir has a summary, and a REQUESTED_CONFIG that equals the run's configuration in
        `configs`. The comparison ignores the paths that `portable` removes, and `eval.test` if `configs` sets it to
        False. If the workdir has checkpoints, the summary must also be newer than the input files (`changed`). Without
        checkpoints, REQUESTED_CONFIG may lack fields that were added to the code after the run, unless the command line
        sets them.
        """
        summaries = {name: self._kept(name, config) for name, config in configs.items()}
        missing = {name: config for name, config in configs.items() if summaries[name] is None}
        single = [{name: config} for name, config in missing.items()]
        for together in [missing] if self.turns and missing else single:
            summaries |= self.train(together)
        return [run_of(summaries[name], name, folder=self.folder(name)) for name in configs]

    def _kept(self, name: str, config: ConfigDict, tested: bool = True) -> dict | None:
        """Returns the summary of the run `name`; None if the run is not finished (see `fit_all`).

        If `tested` is False, the summary may lack the test results that `config` requests.
        """
        workdir = self.folder(name)

        def is_same(stored: dict) -> bool:
            stored, requested = flatten(upgrade(stored)), flatten(portable(to_json(config)))
            if not (tested and config.eval.test):
                # A sweep sets `eval.test` to False, and also accepts runs with test results. If `tested` is False, runs
                # without test results are accepted too.
                stored["eval.test"] = requested["eval.test"]
            if has_checkpoints(workdir):
                unchanged = changed(config) < (workdir / SUMMARY).stat().st_mtime
                return unchanged and stored == requested
            # A run without checkpoints cannot be resumed: keep its results even if data files are newer. Also ignore
            # configuration fields that were added to the code after the run: their defaults do not change the run.
            overridden = {field.removeprefix("--config.").split("=")[0] for field in self.fields}
            new = requested.keys() - stored.keys() - overridden
            return stored == {name: x for name, x in requested.items() if name not in new}

        if read_json_if(workdir / REQUESTED_CONFIG, is_same) is None:
            return None
        return read_json_if(workdir / SUMMARY, bool)

    def train(self, configs: Mapping[str, ConfigDict]) -> dict[str, dict]:
        """Trains or resumes runs, {name: configuration}, in turns if `turns` is above 0. Returns {name: summary}.

        Raises:
          UserError: a workdir has a summary that cannot be reused and no checkpoints. Also raises the errors of
            `prepare` and `common.train.turns.fit_in_turns`.
        """
        workdirs = {name: self.folder(name) for name in configs}
        for name, workdir in workdirs.items():
            # Train a run again that lacks only test results, if `open_workdir` accepts its folder without a summary.
            kept = self._kept(name, configs[name], tested=False) is not None
            check(
                has_checkpoints(workdir)
                or not (workdir / SUMMARY).exists()
                or (kept and (workdir / CONFIG).exists() and not address(workdir)),
                f"{shown(workdir)} has a {SUMMARY} but no checkpoints, and lacks test results or an intact"
                f" {REQUESTED_CONFIG} of this configuration: delete it to train again, or choose another --out",
            )
        # Copy the configurations now: `prepare` may add fields, such as the options of a user's kind of layer.
        requested = {name: portable(to_json(config)) for name, config in configs.items()}
        jobs = []
        for name, config in configs.items():
            print(f"\n{name}", flush=True)
            jobs.append(Job(*self.prepare(config), workdirs[name]))
        for workdir in workdirs.values():
            # `requested_config.json` marks a finished run: delete it before training, write it again afterwards.
            (workdir / REQUESTED_CONFIG).unlink(missing_ok=True)
            if not has_checkpoints(workdir):  # The run lacks only the test results, or is new.
                (workdir / SUMMARY).unlink(missing_ok=True)
        try:
            summaries = fit_in_turns(jobs, self.mesh, self.turns if len(jobs) > 1 else 0)
        except UserError as fault:
            # Messages of the training loop name --workdir. The programs of a suite have the option --out instead.
            line = str(fault).replace("--workdir=", "the run ").replace("--workdir", "--out")
            raise UserError(line) from fault
        for name, values in requested.items():
            text = json.dumps(values, indent=2) + "\n"
            (workdirs[name] / REQUESTED_CONFIG).write_text(text)
        return dict(zip(configs, summaries, strict=True))

    def kept(self, name: str) -> list[Run]:
        """Returns the runs of a case in --out whose summaries have test results, whatever their configurations.

        If runs at several points of a grid have test results, returns the runs at the point with the most seeds.
        """
        # The pattern does not match folders of other cases, such as "NAME_seed1_x_seed1".
        pattern = re.compile(rf"{re.escape(name)}_seed\d+((_[a-z0-9_]+=[^=]+)*)")
        runs = defaultdict(list)
        for path in sorted((self.out / "runs").glob(f"{name}_seed*/{SUMMARY}")):
            match = pattern.fullmatch(path.parent.name)
            if match and (run := read_run(path)).summary["test"]:
                runs[match[1]].append(run)
        return max(runs.values(), key=len, default=[])

    def claims(self, paper: str, only_kept: bool = False) -> None:
        """Prints and writes the table `claims`: the verdict of every claim of a paper.

        With `only_kept`, trains nothing and reads no data; a case without tested runs (`kept`) counts as missing.
        """
        claims = read_claims(paper)
        names = dict.fromkeys(s for one in claims if one.kind == "runs" for s in (one.a, one.b))
        sides = {text: self.side(text) for text in names}
        if only_kept:
            groups = {text: self.kept(side.name) for text, side in sides.items()}
            none = {text: sides[text] for text, runs in groups.items() if not runs}
            # Do not say which data are missing: the table must not depend on the files of this machine.
            missing = {t: "no finished run" if s.name else s.missing for t, s in none.items()}
        else:
            missing = {text: side.missing for text, side in sides.items() if side.missing}
            cases = {s.name: s.experiment for s in sides.values() if not s.missing}
            ran = self.runs(cases) if cases else {}
            groups = {text: ran[side.name] for text, side in sides.items() if not side.missing}
        findings = find(claims, groups, missing)
        self.write("claims", *table(findings, chip_hours(paper), self.scale))
        print(NOTE)

    def write(self, name: str, columns: tuple[str, ...], rows: list[tuple]) -> None:
        """Prints a table, and writes the table to `out` as CSV and Markdown."""
        publish(self.out / name, columns, rows)

    def write_csv(self, name: str, columns: tuple[str, ...], rows: list[tuple]) -> None:
        """Writes a table to `out` as CSV only, and prints nothing. For long tables."""
        write_csv(self.out / f"{name}.csv", columns, rows)


def portable(config: dict) -> dict:
    """Removes `data.cache_dir`, and the parent folders in `data.source` and `pretrained`, from a JSON configuration.

    These paths differ between machines. Changes `config` in place and returns `config`.
    """
    config["data"]["source"] = portable_source(config["data"]["source"])
    config["data"].pop("cache_dir", None)
    if config.get("pretrained"):
        config["pretrained"] = Path(config["pretrained"]).name
    return config


def evaluations(workdir: Path, name: str) -> list[dict]:
    """Returns the logged metrics {name: value} of each evaluation of a finished run, in the order of the steps.

    NaN and infinite values, which are null in `metrics.jsonl`, are returned as NaN.

    Args:
      name: a metric that every evaluation logs.

    Raises:
      UserError: `metrics.jsonl` is missing or damaged, or its evaluations with a finite objective are not at the steps
        of the run's validation curve.
    """
    logged = [
        {key: math.nan if value is None else value for key, value in m.items()}
        for m in read_metrics(workdir)
        if name in m
    ]
    curve = json.loads((workdir / SUMMARY).read_text())["curve"]
    finite = [m["step"] for m in logged if not math.isnan(m[f"valid/{curve['name']}"])]
    check(
        finite == [point["step"] for point in curve["points"]],
        f"{shown(workdir / METRICS)} and the validation curve in {SUMMARY} have evaluations at different steps: remove"
        f" {shown(workdir)} to train the run again",
    )
    return logged
