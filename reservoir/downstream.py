"""Table 4 (probing) and Figures 2, 6 and 11 (fine-tuning) of masked language models with reservoirs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from common.config import check, check_choice, override_all
from common.errors import UserError
from common.experiments import Ran, Side
from common.report.figures import layers_figure
from common.report.groups import Group, Layers
from common.report.panels import COLOURS, panels
from common.report.printed import printed
from common.report.table import mean_std
from configs import finetuning
from reservoir import finetuning as fine_tuning
from reservoir.layers import layers_of
from reservoir.probing.data import TABLE_4, ProbingTask, load_task, task_path
from reservoir.probing.data import TASKS as PROBES
from reservoir.probing.features import open_reader
from reservoir.probing.table import Table
from reservoir.targets import FFN, PLAIN, Case, T, snapshot_steps

if TYPE_CHECKING:
    from reservoir.experiments import ExperimentSuite

TASKS = {"sst2": finetuning.sst2, "mnli": finetuning.mnli}

MODES = {PLAIN: ("keep", "freeze_now"), T: ("keep", "tune"), FFN: ("keep", "tune")}
"""Model -> values of `config.reservoirs` that Figure 2 compares. "freeze_now" is the paper's "frozen finetuned"."""

SUFFIXES = {"keep": "", "freeze_now": ", frozen in fine-tuning", "tune": ", reservoirs tuned"}
"""Value of `config.reservoirs` -> suffix of the model's name in tables and claims."""

PROBE_GRIDS = {"tiny": "quick", "laptop": "quick", "paper": "full"}
"""Scale -> hyperparameter grid of the probing classifiers."""


class Tuning(NamedTuple):
    """A fine-tuning case. Its runs use the seeds of their pretraining runs.

    Attributes:
      task: a key of TASKS.
      case: the pretraining case.
      mode: `config.reservoirs`.
      step: the pretraining snapshot to start from; 0 is the best checkpoint.
    """

    task: str
    case: Case
    mode: str
    step: int = 0

    @property
    def stem(self) -> str:
        """The run name without the seed."""
        step = f"_step{self.step}" if self.step else ""
        return f"{self.task}_{self.mode}{step}_{self.case.stem}"

    def name(self, seed: int) -> str:
        """The folder of a run."""
        return f"{self.stem}_seed{seed}"


class Downstream(NamedTuple):
    """The results of one fine-tuning case.

    Attributes:
      pretraining: the pretraining runs, one per seed.
      group: the fine-tuning runs, one per seed.
    """

    tuning: Tuning
    pretraining: Group
    group: Group

    def hours(self) -> list[float]:
        """Returns the pretraining hours of each seed, up to the snapshot that fine-tuning starts from."""
        runs = self.pretraining.runs
        if not self.tuning.step:
            return [run.summary["train_seconds"] / 3600 for run in runs]
        # Steps take about the same time: interpolate between two evaluations.
        known = [[(0, 0.0), *((p.step, p.seconds) for p in run.curve.points)] for run in runs]
        return [
            float(np.interp(self.tuning.step, *zip(*points, strict=True))) / 3600
            for points in known
        ]

    def perplexity(self) -> list[float]:
        """Returns the validation perplexity of each seed: the best, or the last one before the snapshot."""
        before = self.tuning.step
        return [
            max((p for p in run.curve.points if p.step <= before), key=lambda p: p.step).value
            if before and run.curve.points[0].step <= before
            else run.curve.best.value
            for run in self.pretraining.runs
        ]


def fig2(suite: "ExperimentSuite") -> None:
    """Plots accuracy against the number of layers that fine-tuning updates."""
    _against_depth(suite, "fig2", "updatable")


def fig11(suite: "ExperimentSuite") -> None:
    """Plots accuracy against the number of all layers."""
    _against_depth(suite, "fig11", "total")


def _against_depth(suite: "ExperimentSuite", name: str, x: str) -> None:
    for task, rows in _fine_tuned(suite, name).items():
        figure = layers_figure([row.group for row in rows], x, "hours")
        suite.write(f"{name}_{task}", _COLUMNS, [_row(row) for row in rows])
        figure.savefig(suite.out / f"{name}_{task}.png")
        print(f"figure: {suite.out / name}_{task}.png")


def fig6(suite: "ExperimentSuite") -> None:
    """Plots accuracy against pretraining time. Fine-tunes from the snapshots of each pretraining run."""
    found = _fine_tuned(suite, "fig6")
    figure, parts = panels(len(found))
    for axes, (task, rows) in zip(parts, found.items(), strict=True):
        for number, model in enumerate(dict.fromkeys(row.tuning.case.model for row in rows)):
            own = [row for row in rows if row.tuning.case.model == model]
            hours = [np.mean(row.hours()) for row in own]
            tests = [[run.test for run in row.group.runs] for row in own]
            colour = COLOURS[number]
            axes.plot(hours, [np.mean(t) for t in tests], "o-", color=colour, label=model)
            for seeds in zip(*tests, strict=True) if suite.seeds > 1 else ():
                axes.plot(hours, seeds, ".", color=colour, alpha=0.45)
        axes.set(xlabel="pretraining (h)", ylabel=f"{task} test accuracy (%)")
        axes.legend(frameon=False)
        suite.write(f"fig6_{task}", _COLUMNS, [_row(row) for row in rows])
    figure.savefig(suite.out / "fig6.png")
    print(f"figure: {suite.out / 'fig6.png'}")


_COLUMNS = (
    *("model", "layers", "frozen in pretraining", "in fine-tuning", "perplexity", "step"),
    *("pretraining (h)", "best valid accuracy", "test accuracy"),
)


def _row(row: Downstream) -> tuple:
    before = row.pretraining.runs
    return (
        row.group.line,
        row.tuning.case.layers,
        layers_of(before[0].config).frozen,
        row.group.layers.frozen,
        mean_std(row.perplexity(), 3),
        row.tuning.step or "best",
        mean_std(row.hours(), 3),
        mean_std([run.curve.best.value for run in row.group.runs], 2),
        mean_std([run.test for run in row.group.runs], 2),
    )


FIXED = ("reservoirs=", "freeze_now=", "pretrained=", "pretrained_step=", "seed=")
"""Fields of fine-tuning that the figures set themselves."""

FIGURES = ("fig2", "fig6", "fig11")
"""The figures that fine-tune."""


def tunings(suite: "ExperimentSuite", target: str) -> list[Tuning]:
    """Returns the fine-tuning cases of a figure by task. All tasks start from the same pretraining runs.

    Raises:
      UserError: --data names no task's data, or a configuration is invalid.
    """
    tasks = [task for task in TASKS if suite.scale != "laptop" or task in suite.data_paths]
    check(
        bool(tasks), f"nothing to fine-tune on: add {' or '.join(f'--data={t}=DIR' for t in TASKS)}"
    )
    for task in TASKS:
        if task not in tasks:
            print(f"{task} is left out: --data={task}=DIR sets its folder")
    (cases,) = suite.needed(target).values()
    every = target == "fig6"
    found = [
        Tuning(task, case, mode, step)
        for task in tasks
        for case in cases
        for mode in (("keep",) if every else MODES[case.model])
        for step in (snapshot_steps(suite.configuration(case, 1)) if every else (0,))
    ]
    # Fail before pretraining, which may take days.
    for tuning in found:
        fine_tuning.validate(configuration(suite, tuning, 1))
    if suite.fields:
        print(
            f"{' '.join(suite.fields)}: pretraining only; for fine-tuning use --finetune=FIELD=VALUE"
        )
    if suite.sweep:
        print("--sweep: fine-tuning only; pretraining keeps its configuration")
    return found


def configuration(suite: "ExperimentSuite", tuning: Tuning, seed: int) -> ConfigDict:
    """Returns the configuration of one fine-tuning run.

    Raises:
      UserError: an override of --finetune is invalid.
    """
    config = TASKS[tuning.task]()
    if suite.scale != "paper":
        config = getattr(finetuning, suite.scale)(config)
    config.wandb.mode = "disabled"
    fixed = [f for f in suite.finetune if f.startswith(FIXED)]
    check(not fixed, f"--finetune={' '.join(fixed)}: the figure sets this field; leave it out")
    try:
        override_all(config, [f"--config.{field}" for field in suite.finetune])
    except UserError as error:
        raise UserError(f"--finetune: {error}") from error
    config.reservoirs, config.freeze_now = tuning.mode, tuning.case.reservoirs
    config.pretrained = str(suite.workdir(tuning.case, seed))
    config.pretrained_step, config.seed = tuning.step, seed
    if path := suite.data_paths.get(tuning.task):
        config.data.source = f"files:{path}"
    return config


def _fine_tuned(suite: "ExperimentSuite", target: str) -> Mapping[str, list[Downstream]]:
    """Trains the missing runs; returns the results by task. A sweep applies to fine-tuning only."""
    cases = tunings(suite, target)
    (groups,) = replace(suite, sweep={}).groups(target).values()
    runs = suite.runs({tuning.stem: partial(configuration, suite, tuning) for tuning in cases})
    found: dict[str, list[Downstream]] = {}
    for tuning in cases:
        before = groups[tuning.case]
        row = Downstream(tuning, before, _group(tuning, before, runs[tuning.stem]))
        found.setdefault(tuning.task, []).append(row)
    return found


def _group(tuning: Tuning, before: Group, ran: Sequence[Ran]) -> Group:
    case, stack = tuning.case, layers_of(before.runs[0].config)
    frozen = {"keep": stack.frozen, "tune": 0, "freeze_now": case.reservoirs}[tuning.mode]
    line = case.model + SUFFIXES[tuning.mode]
    layers = Layers(line, stack.total, frozen)
    return Group(f"{line}, {case.layers} layers", line, tuple(one.run for one in ran), layers)


def side(suite: "ExperimentSuite", text: str, task: str, row: str, layers: int | None) -> Side:
    """Returns the fine-tuning experiment that one side of a claim names, see `ExperimentSuite.side`.

    Raises:
      UserError: the row is unknown, or the configuration is invalid.
    """
    rows = {name + SUFFIXES[mode]: (name, mode) for name in MODES for mode in MODES[name]}
    check_choice(f"{text}: model", row, rows)
    model, mode = rows[row]
    case, missing = suite.claimed_case(text, "roberta", model, layers)
    if case is None:
        return Side("", lambda seed: ConfigDict(), missing)
    tuning = Tuning(task, case, mode)
    if suite.scale == "laptop" and task not in suite.data_paths:
        missing = missing or f"--data={task}=DIR"
    if suite.sweep:
        missing = missing or "a sweep of claims is for pretraining; fig2 sweeps fine-tuning"
    if not missing:
        fine_tuning.validate(configuration(suite, tuning, 1))
    return Side(tuning.stem, partial(configuration, suite, tuning), missing)


def table4(suite: "ExperimentSuite") -> None:
    """Writes the probing accuracy of every layer, beside the printed accuracy at the paper's depth."""
    folder = suite.data_paths.get("probing")
    check(
        folder is not None,
        "the probing tasks are missing: --data=probing=DIR (python -m reservoir.make_probes writes some)",
    )
    names = [name for name in TABLE_4 if any(path.exists() for path in _paths(folder, name))]
    check(bool(names), f"{folder} has none of the tasks of Table 4, such as {TABLE_4[0]}.txt")
    tasks = [load_task(folder, name) for name in names]
    paper, rows = printed("reservoir", "table4"), []
    (groups,) = suite.groups("table4").values()
    for case, group in groups.items():
        majority, *layers = _probed(suite, group, tasks)
        if not rows:
            rows.append(("", None, majority[1], "measured", *majority[2:]))
        for layer, kind, *cells in layers:
            rows.append((case.model, layer, kind, "measured", *cells))
            if case.layers == 12 and (cells := paper.get((case.model, str(layer)))):
                chosen = [cells[TABLE_4.index(name)] for name in names]
                rows.append((case.model, layer, kind, "printed", *chosen))
    columns = ("model", "layer", "kind", "", *(PROBES[name] for name in names))
    suite.write("table4", columns, rows)


def _probed(suite: "ExperimentSuite", group: Group, tasks: Sequence[ProbingTask]) -> list[tuple]:
    """Returns the rows of `Table`; each cell is the mean over the pretraining seeds."""
    table: Table | None = None
    for run in group.runs:
        read = open_reader(run.folder, suite.mesh, None)
        table = table or Table(read.layers, 1, PROBE_GRIDS[suite.scale])
        for task in tasks:
            print(f"{run.name}: {task.name}", flush=True)
            table.add(task, {split: read(text) for split, text in task.sentences.items()})
    return table.rows()


def _paths(folder: Path, name: str) -> tuple[Path, Path]:
    plain = task_path(folder, name)
    return plain, plain.with_name(f"{plain.name}.gz")
