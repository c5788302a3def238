"""Table 4 (probing) and Figures 2, 6 and 11 (fine-tuning) of masked language models with reservoirs."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from common.config import override_all
from common.data.labelled import load_labelled
from common.errors import UserError, check
from common.experiments import Side
from common.report.convergence import Convergence
from common.report.figures import layers_figure
from common.report.groups import Group, Layers
from common.report.panels import COLOURS, panels
from common.report.printed import printed
from common.report.runs import Run
from common.report.table import mean_std
from common.storage.addresses import shown
from common.track.tracker import SUMMARY
from configs import finetuning
from reservoir import finetuning as fine_tuning
from reservoir.layers import layers_of
from reservoir.methods import METHODS, of_run
from reservoir.probing.data import TABLE_4, ProbingTask, find_task, load_task
from reservoir.probing.data import TASKS as PROBES
from reservoir.probing.features import open_reader
from reservoir.probing.table import Table
from reservoir.targets import FFN, PLAIN, Case, T, snapshot_steps

if TYPE_CHECKING:
    from reservoir.experiments import ExperimentSuite

TASKS = {"sst2": finetuning.sst2, "mnli": finetuning.mnli}

MODES = {PLAIN: ("keep", "freeze_now"), T: ("keep", "tune"), FFN: ("keep", "tune")}
"""Model -> methods of fine-tuning (`config.reservoirs`) in Figures 2 and 11. The paper's "frozen finetuned" is
"freeze_now"."""

PROBE_GRIDS = {"tiny": "quick", "laptop": "quick", "paper": "full"}
"""Scale -> hyperparameter grid of the probing classifiers."""


class Tuning(NamedTuple):
    """A fine-tuning experiment. A run starts from the pretraining run with the same seed.

    Attributes:
      task: a key of TASKS.
      case: model and depth of the pretraining run.
      mode: value of `config.reservoirs`.
      step: step of the pretraining snapshot to start from; 0 is the best checkpoint.
    """

    task: str
    case: Case
    mode: str
    step: int = 0

    @property
    def stem(self) -> str:
        """Returns the name of the experiment's runs, without the seed."""
        step = f"_step{self.step}" if self.step else ""
        return f"{self.task}_{self.mode}{step}_{self.case.stem}"

    def name(self, seed: int) -> str:
        """Returns the folder name of the run with the seed `seed`."""
        return f"{self.stem}_seed{seed}"


class Downstream(NamedTuple):
    """The runs of one fine-tuning experiment: for each seed a pretraining run and a fine-tuning run (`group`)."""

    tuning: Tuning
    pretraining: Group
    group: Group

    def hours(self) -> list[float]:
        """Returns the training hours of each pretraining run up to the step `tuning.step`; 0 means the whole run."""
        runs = self.pretraining.runs
        if not self.tuning.step:
            return [run.summary["train_seconds"] / 3600 for run in runs]
        # Only evaluations record the training time, so interpolate between two evaluations.
        known = [[(0, 0.0), *((p.step, p.seconds) for p in run.curve.points)] for run in runs]
        return [
            float(np.interp(self.tuning.step, *zip(*points, strict=True))) / 3600
            for points in known
        ]

    def perplexity(self) -> list[float]:
        """Returns the validation perplexity of the pretraining checkpoint from which each seed's fine-tuning starts.

        For a snapshot, returns the perplexity at the last evaluation up to the snapshot's step or, without such an
        evaluation, the best perplexity of the run.
        """
        before = self.tuning.step
        return [
            max((p for p in run.curve.points if p.step <= before), key=lambda p: p.step).value
            if before and run.curve.points[0].step <= before
            else run.curve.best.value
            for run in self.pretraining.runs
        ]


def _against_depth(suite: "ExperimentSuite", name: str, x: str) -> None:
    for task, rows in _fine_tuned(suite, name).items():
        figure = layers_figure(Convergence([row.group for row in rows], "hours"), x)
        suite.write(f"{name}_{task}", _COLUMNS, [_row(row) for row in rows])
        figure.savefig(suite.out / f"{name}_{task}.png")
        print(f"figure: {shown(suite.out / name)}_{task}.png")


# AUCC and test accuracy of fine-tuning against the number of layers that fine-tuning updates (Figure 2), or against the
# number of all encoder layers, trained and frozen (Figure 11).
fig2 = partial(_against_depth, name="fig2", x="updatable")
fig11 = partial(_against_depth, name="fig11", x="total")


def fig6(suite: "ExperimentSuite") -> None:
    """Plots the test accuracy of fine-tuning against pretraining time. Fine-tunes every pretraining snapshot."""
    results = _fine_tuned(suite, "fig6")
    figure, parts = panels(len(results))
    for axes, (task, rows) in zip(parts, results.items(), strict=True):
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
    print(f"figure: {shown(suite.out / 'fig6.png')}")


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


FIXED = ("task=", "reservoirs=", "freeze_now=", "pretrained=", "pretrained_step=", "seed=")
"""Fields of fine-tuning that the figures set. --finetune cannot override them."""

FIGURES = ("fig2", "fig6", "fig11")
"""The figures with fine-tuning runs."""


def tunings(suite: "ExperimentSuite", target: str) -> list[Tuning]:
    """Returns the fine-tuning experiments of a figure, ordered by task. All tasks share the pretraining runs.

    Raises:
      UserError: a configuration is invalid, `ExperimentSuite.needed` fails, or the scale is "laptop" and no option
        --data names a fine-tuning task.
    """
    tasks = [task for task in TASKS if suite.scale != "laptop" or task in suite.data_paths]
    check(
        bool(tasks),
        f"{target} with --scale={suite.scale} has no data to fine-tune on: add"
        f" {' or '.join(f'--data={t}=DIR' for t in TASKS)}",
    )
    for task in TASKS:
        if task not in tasks:
            print(f"{task} is left out: set its data folder by --data={task}=DIR")
    (cases,) = suite.needed(target).values()
    every = target == "fig6"
    experiments = [
        Tuning(task, case, mode, step)
        for task in tasks
        for case in cases
        for mode in (("keep",) if every else MODES[case.model])
        for step in (snapshot_steps(suite.configuration(case, 1)) if every else (0,))
    ]
    # Validate before pretraining, which may take days.
    for tuning in experiments:
        _validate(suite, tuning)
    if suite.fields:
        print(
            f"{' '.join(suite.fields)} sets pretraining only; for fine-tuning, give --finetune=FIELD=VALUE"
        )
    if suite.sweep:
        print("--sweep varies fine-tuning only; pretraining keeps its configuration")
    return experiments


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
    check(
        not fixed,
        f"remove --finetune={' and --finetune='.join(fixed)}: reservoir.reproduce sets"
        f" {' and '.join(f.partition('=')[0] for f in fixed)}",
    )
    with named_by_finetune():
        override_all(config, [f"--config.{field}" for field in suite.finetune])
        check(
            tuning.mode == "keep" or not config.lora.rank,
            f"--config.lora.rank={config.lora.rank} needs reservoirs=keep in all fine-tuning runs, but the run"
            f" {tuning.name(seed)} has reservoirs={tuning.mode}: leave out --config.lora.rank",
        )
    config.reservoirs, config.freeze_now = tuning.mode, tuning.case.reservoirs
    config.pretrained = str(suite.folder(tuning.case.name(seed)))
    config.pretrained_step, config.seed = tuning.step, seed
    if path := suite.data_paths.get(tuning.task):
        config.data.source = f"files:{shown(path)}"
    return config


def _validate(suite: "ExperimentSuite", tuning: Tuning) -> None:
    config = configuration(suite, tuning, 1)
    with named_by_finetune():
        fine_tuning.validate(config)


@contextmanager
def named_by_finetune() -> Iterator[None]:
    """Context manager that renames the options --config.FIELD in error messages to --finetune=FIELD."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace("--config.", "--finetune=")) from error


def _fine_tuned(suite: "ExperimentSuite", target: str) -> Mapping[str, list[Downstream]]:
    """Trains missing runs. Returns {task: results of its experiments}. --sweep varies fine-tuning only."""
    cases = tunings(suite, target)
    _read_data(suite, cases)
    (groups,) = replace(suite, sweep={}).groups(target).values()
    runs = suite.runs({tuning.stem: partial(configuration, suite, tuning) for tuning in cases})
    results: dict[str, list[Downstream]] = {}
    for tuning in cases:
        before = groups[tuning.case]
        row = Downstream(tuning, before, _group(tuning, before, runs[tuning.stem]))
        results.setdefault(tuning.task, []).append(row)
    return results


def _read_data(suite: "ExperimentSuite", cases: Sequence[Tuning]) -> None:
    """Checks that the data of fine-tuning can be read, unless all pretraining runs have summaries."""
    seeds = range(1, 1 + suite.seeds)
    runs = {suite.folder(tuning.case.name(seed)) for tuning in cases for seed in seeds}
    if all((run / SUMMARY).is_file() for run in runs):
        return
    for task, tuning in {tuning.task: tuning for tuning in cases}.items():
        data = configuration(suite, tuning, 1).data
        try:
            with named_by_finetune():
                load_labelled(data)
        except UserError as error:
            named = str(error)
            if task in suite.data_paths:
                option = f"--data={task}={data.source.removeprefix('files:')}"
                named = named.replace(f"--finetune=data.source={data.source}", option)
                named = named.replace("--finetune=data.source", f"--data={task}")
            raise UserError(
                f"cannot read the data of fine-tuning on {task} (checked before pretraining): {named}"
            ) from error


def _group(tuning: Tuning, before: Group, runs: Sequence[Run]) -> Group:
    case, stack = tuning.case, layers_of(before.runs[0].config)
    method = of_run(runs[0].config)
    line = method.name(case.model)
    layers = Layers(line, stack.total, method.frozen(runs[0].config, stack))
    return Group(f"{line}, {case.layers} layers", line, tuple(runs), layers)


def side(suite: "ExperimentSuite", text: str, task: str, row: str, layers: int | None) -> Side:
    """Returns a fine-tuning experiment that a claim names. `ExperimentSuite.side` documents the syntax of claims.

    Args:
      text: the experiment as written in the claim, for error messages.
      task: a key of TASKS.
      row: name of a model and a method (`Method.name`), such as "T Reservoir, reservoirs tuned".
      layers: number of layers. None takes `ExperimentSuite.curve_depth`.

    Raises:
      UserError: the row is unknown, a configuration is invalid, or `ExperimentSuite.case` fails.
    """
    rows = {METHODS[mode].name(name): (name, mode) for name in MODES for mode in MODES[name]}
    check(
        row in rows,
        f"in the claim {text!r}, the row {row!r} is unknown: choose one of {', '.join(map(repr, rows))}",
    )
    model, mode = rows[row]
    case, missing = suite.claimed_case(text, "roberta", model, layers)
    if case is None:
        return Side(missing=missing)
    tuning = Tuning(task, case, mode)
    if suite.scale == "laptop" and task not in suite.data_paths:
        missing = missing or f"--data={task}=DIR"
    if suite.sweep:
        missing = missing or "--sweep tunes only pretraining in claims; fig2 tunes fine-tuning"
    if not missing:
        _validate(suite, tuning)
    return Side(tuning.stem, partial(configuration, suite, tuning), missing)


def table4(suite: "ExperimentSuite") -> None:
    """Writes Table 4: the probing accuracy of the majority class and of every layer.

    For models of 12 layers, also writes the paper's accuracy.
    """
    folder = suite.data_paths.get("probing")
    check(
        folder is not None,
        "table4 needs SentEval's probing tasks: set the folder of their files by --data=probing=DIR"
        " (python -m reservoir.make_probes makes two of the nine tasks from your own text)",
    )
    names = [name for name in TABLE_4 if find_task(folder, name)]
    check(
        bool(names),
        f"--data=probing={shown(folder)} has none of the tasks of Table 4, such as {TABLE_4[0]}.txt: choose another"
        " folder",
    )
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
    """Probes the runs of a group. Returns `Table.rows`, averaged over the pretraining seeds."""
    table: Table | None = None
    for run in group.runs:
        read = open_reader(run.folder, suite.mesh, None)
        table = table or Table(read.layers, 1, PROBE_GRIDS[suite.scale])
        for task in tasks:
            print(f"{run.name}: {task.name}", flush=True)
            table.add(task, {split: read(text) for split, text in task.sentences.items()})
    return table.rows()
