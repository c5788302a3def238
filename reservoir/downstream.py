"""What masked language models with reservoirs are good for: Table 4 (probing), Figures 2, 6 and 11 (fine-tuning)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from common.config import check, check_choice, override_all
from common.errors import UserError
from common.experiments import Ran, Side
from common.report.figures import layers_figure
from common.report.groups import Group, Layers
from common.report.panels import COLOURS, panels
from common.report.table import mean_std
from configs import finetuning
from reservoir import finetuning as fine_tuning
from reservoir.experiments import Case, ExperimentSuite, snapshot_steps
from reservoir.layers import layers_of
from reservoir.printed import printed
from reservoir.probing.data import TABLE_4, ProbingTask, load_task, task_path
from reservoir.probing.data import TASKS as PROBES
from reservoir.probing.features import open_reader
from reservoir.probing.table import Table

TASKS = {"sst2": finetuning.sst2, "mnli": finetuning.mnli}

MODES = {
    "Transformer": ("keep", "freeze_now"),
    "T Reservoir": ("keep", "tune"),
    "FFN Reservoir": ("keep", "tune"),
}
"""What becomes of frozen layers in fine-tuning; "freeze_now" is the paper's "frozen finetuned", of a plain model."""

NAMES = {"keep": "", "freeze_now": ", frozen in fine-tuning", "tune": ", reservoirs tuned"}
"""The same behind the name of a model."""

QUICK = {"tiny": "quick", "laptop": "quick", "paper": "full"}
"""What the classifiers of the probing tasks are chosen among, by scale."""


class Tuning(NamedTuple):
    """A way from a pretrained model to a classifier; its seed is that of the pretraining.

    Attributes:
      step: of the snapshot that it starts from; 0 is the best checkpoint.
    """

    task: str
    case: Case
    mode: str
    step: int = 0

    @property
    def stem(self) -> str:
        """Of the names of its runs."""
        step = f"_step{self.step}" if self.step else ""
        return f"{self.task}_{self.mode}{step}_{self.case.stem}"

    def name(self, seed: int) -> str:
        """Of the folder of a run."""
        return f"{self.stem}_seed{seed}"


class Downstream(NamedTuple):
    """A pretrained model, and what fine-tuning made of it in one way.

    Attributes:
      pretraining: the runs of the masked language model, one for each seed.
      group: the fine-tuned ones.
    """

    tuning: Tuning
    pretraining: Group
    group: Group

    def hours(self) -> list[float]:
        """Of pretraining: all of it, or up to the snapshot that fine-tuning starts from."""
        runs = self.pretraining.runs
        if not self.tuning.step:
            return [run.summary["train_seconds"] / 3600 for run in runs]
        # Steps are alike: between two evaluations the clock goes evenly.
        known = [[(0, 0.0), *((p.step, p.seconds) for p in run.curve.points)] for run in runs]
        return [
            float(np.interp(self.tuning.step, *zip(*points, strict=True))) / 3600
            for points in known
        ]

    def perplexity(self) -> list[float]:
        """Of what fine-tuning starts from, on validation: the best of the run, or the last before its snapshot."""
        before = self.tuning.step
        return [
            max((p for p in run.curve.points if p.step <= before), key=lambda p: p.step).value
            if before and run.curve.points[0].step <= before
            else run.curve.best.value
            for run in self.pretraining.runs
        ]


def fig2(suite: ExperimentSuite) -> None:
    """Accuracy against the layers that are updated in fine-tuning."""
    _against_depth(suite, "fig2", "updatable")


def fig11(suite: ExperimentSuite) -> None:
    """Accuracy against all layers."""
    _against_depth(suite, "fig11", "total")


def _against_depth(suite: ExperimentSuite, name: str, x: str) -> None:
    for task, rows in _fine_tuned(suite, name).items():
        figure = layers_figure([row.group for row in rows], x, "hours")
        suite.write(f"{name}_{task}", _COLUMNS, [_row(row) for row in rows])
        figure.savefig(suite.out / f"{name}_{task}.png")
        print(f"figure: {suite.out / name}_{task}.png")


def fig6(suite: ExperimentSuite) -> None:
    """Accuracy against the time of pretraining: a model is fine-tuned from snapshots of one pretraining run."""
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
"""Fields of fine-tuning that differ between the runs of a figure."""

FIGURES = ("fig2", "fig6", "fig11")
"""What is about fine-tuning."""


def tunings(suite: ExperimentSuite, target: str) -> list[Tuning]:
    """What a figure fine-tunes, task by task. All tasks start from one pretraining run per model, depth and seed.

    Raises:
      UserError: the data of no task are given, or a configuration is at fault.
    """
    tasks = [task for task in TASKS if suite.scale != "laptop" or task in suite.places]
    check(bool(tasks), f"nothing to fine-tune on: {' or '.join(f'--data={t}=DIR' for t in TASKS)}")
    for task in TASKS:
        if task not in tasks:
            print(f"{task} is left out: --data={task}=DIR says where it is")
    (cases,) = suite.needed(target).values()
    every = target == "fig6"
    found = [
        Tuning(task, case, mode, step)
        for task in tasks
        for case in cases
        for mode in (("keep",) if every else MODES[case.model])
        for step in (snapshot_steps(suite.configuration(case, 1)) if every else (0,))
    ]
    # Before pretraining, which may take days.
    for tuning in found:
        fine_tuning.validate(configuration(suite, tuning, 1))
    if suite.fields:
        print(f"{' '.join(suite.fields)}: of pretraining; fine-tuning has --finetune=FIELD=VALUE")
    if suite.sweep:
        print("--sweep: of fine-tuning; the configuration of pretraining is as it is")
    return found


def configuration(suite: ExperimentSuite, tuning: Tuning, seed: int) -> ConfigDict:
    """Of one fine-tuning run."""
    config = TASKS[tuning.task]()
    if suite.scale != "paper":
        config = getattr(finetuning, suite.scale)(config)
    config.wandb.mode = "disabled"
    given = [f for f in suite.finetune if f.startswith(FIXED)]
    check(not given, f"--finetune={' '.join(given)}: the figure sets this itself, run by run")
    try:
        override_all(config, [f"--config.{field}" for field in suite.finetune])
    except UserError as error:
        raise UserError(f"--finetune: {error}") from error
    config.reservoirs, config.freeze_now = tuning.mode, tuning.case.reservoirs
    config.pretrained = str(suite.workdir(tuning.case, seed))
    config.pretrained_step, config.seed = tuning.step, seed
    if place := suite.places.get(tuning.task):
        config.data.source = f"files:{place}"
    return config


def _fine_tuned(suite: ExperimentSuite, target: str) -> Mapping[str, list[Downstream]]:
    """All rows of each task. A sweep is of fine-tuning."""
    asked = tunings(suite, target)
    (groups,) = replace(suite, sweep={}).groups(target).values()
    runs = suite.runs({tuning.stem: partial(configuration, suite, tuning) for tuning in asked})
    found: dict[str, list[Downstream]] = {}
    for tuning in asked:
        before = groups[tuning.case]
        row = Downstream(tuning, before, _group(tuning, before, runs[tuning.stem]))
        found.setdefault(tuning.task, []).append(row)
    return found


def _group(tuning: Tuning, before: Group, ran: Sequence[Ran]) -> Group:
    case, stack = tuning.case, layers_of(before.runs[0].config)
    frozen = {"keep": stack.frozen, "tune": 0, "freeze_now": case.reservoirs}[tuning.mode]
    line = case.model + NAMES[tuning.mode]
    layers = Layers(line, stack.total, frozen)
    return Group(f"{line}, {case.layers} layers", line, tuple(one.run for one in ran), layers)


def side(suite: ExperimentSuite, text: str, task: str, row: str, layers: int | None) -> Side:
    """What `ExperimentSuite.side` makes of a side of a claim that is about fine-tuning.

    Raises:
      UserError: there is no such model or way, or the configuration is at fault.
    """
    model, mode = row, "keep"
    for name in MODES:
        for way, words in NAMES.items():
            if row == name + words:
                model, mode = name, way
    check_choice(
        f"{text}: model", row, [name + NAMES[way] for name in MODES for way in MODES[name]]
    )
    case, missing = suite.named(text, "roberta", model, layers)
    if case is None:
        return Side("", lambda seed: ConfigDict(), missing)
    tuning = Tuning(task, case, mode)
    if suite.scale == "laptop" and task not in suite.places:
        missing = missing or f"--data={task}=DIR"
    if suite.sweep:
        missing = missing or "a sweep is of pretraining here; fig2 sweeps fine-tuning"
    if not missing:
        fine_tuning.validate(configuration(suite, tuning, 1))
    return Side(tuning.stem, partial(configuration, suite, tuning), missing)


def table4(suite: ExperimentSuite) -> None:
    """Probing accuracy of every layer over the seeds, beside printed where the depths agree."""
    place = suite.places.get("probing")
    check(
        place is not None,
        "the probing tasks are missing: --data=probing=DIR (python -m reservoir.make_probes writes some)",
    )
    names = [name for name in TABLE_4 if any(path.exists() for path in _paths(place, name))]
    check(bool(names), f"{place} has none of the tasks of Table 4, such as {TABLE_4[0]}.txt")
    tasks = [load_task(place, name) for name in names]
    paper, rows = printed("table4"), []
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


def _probed(suite: ExperimentSuite, group: Group, tasks: Sequence[ProbingTask]) -> list[tuple]:
    """The rows of `Table`, each cell over the seeds of the pretraining."""
    table: Table | None = None
    for run in group.runs:
        read = open_reader(run.folder, suite.mesh, None)
        table = table or Table(read.layers, 1, QUICK[suite.scale])
        for task in tasks:
            print(f"{run.name}: {task.name}", flush=True)
            table.add(task, {split: read(text) for split, text in task.sentences.items()})
    return table.rows()


def _paths(place: Path, name: str) -> tuple[Path, Path]:
    plain = task_path(place, name)
    return plain, plain.with_name(f"{plain.name}.gz")
