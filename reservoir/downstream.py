"""What masked language models with reservoirs are good for: Table 4 (probing), Figures 2, 6 and 11 (fine-tuning)."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from common.config import require
from common.metrics.curve import Curve
from common.report.figures import layers_figure
from common.report.groups import Group, Layers, layers_of
from common.report.panels import COLOURS, panels
from common.report.runs import Run
from common.report.table import spread
from configs import finetuning
from reservoir import finetuning as tuning
from reservoir.experiments import Case, Laboratory
from reservoir.printed import printed
from reservoir.probing.data import TABLE_4, load_task, task_path
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

_NAMES = {"keep": "", "freeze_now": ", frozen in fine-tuning", "tune": ", reservoirs tuned"}

QUICK = {"tiny": "quick", "laptop": "quick", "paper": "full"}
"""What the classifiers of the probing tasks are chosen among, by scale."""


class Downstream(NamedTuple):
    """A pretrained model, and what fine-tuning made of it in one way.

    Attributes:
      pretraining: the runs of the masked language model, one for each seed.
      group: the fine-tuned ones.
    """

    case: Case
    mode: str
    pretraining: Group
    group: Group


def fig2(lab: Laboratory) -> None:
    """Accuracy against the layers that are updated in fine-tuning."""
    _against_depth(lab, "fig2", "updatable")


def fig11(lab: Laboratory) -> None:
    """Accuracy against all layers."""
    _against_depth(lab, "fig11", "total")


def _against_depth(lab: Laboratory, name: str, x: str) -> None:
    for task, rows in _fine_tuned(lab, name).items():
        figure = layers_figure([row.group for row in rows], x, "hours")
        lab.write(f"{name}_{task}", _COLUMNS, [_row(row) for row in rows])
        figure.savefig(lab.out / f"{name}_{task}.png")
        print(f"figure: {lab.out / name}_{task}.png")


def fig6(lab: Laboratory) -> None:
    """Accuracy against the time that pretraining took."""
    found = _fine_tuned(lab, "fig6")
    figure, parts = panels(len(found))
    for axes, (task, rows) in zip(parts, found.items(), strict=True):
        for number, row in enumerate(row for row in rows if row.mode == "keep"):
            hours = [run.summary["train_seconds"] / 3600 for run in row.pretraining.runs]
            tests = [run.test for run in row.group.runs]
            axes.plot(hours, tests, "o", color=COLOURS[number], label=row.case.model)
        axes.set(xlabel="pretraining (h)", ylabel=f"{task} test accuracy (%)")
        axes.legend(frameon=False)
        lab.write(f"fig6_{task}", _COLUMNS, [_row(row) for row in rows])
    figure.savefig(lab.out / "fig6.png")
    print(f"figure: {lab.out / 'fig6.png'}")


_COLUMNS = (
    *("model", "layers", "frozen in pretraining", "in fine-tuning", "perplexity"),
    *("pretraining (h)", "best valid accuracy", "test accuracy"),
)


def _row(row: Downstream) -> tuple:
    before = row.pretraining.runs
    return (
        row.group.line,
        row.case.layers,
        layers_of(before[0].config).frozen,
        row.group.layers.frozen,
        spread([run.curve.best.value for run in before], 3),
        spread([run.summary["train_seconds"] / 3600 for run in before], 3),
        spread([run.curve.best.value for run in row.group.runs], 2),
        spread([run.test for run in row.group.runs], 2),
    )


def _fine_tuned(lab: Laboratory, target: str) -> Mapping[str, list[Downstream]]:
    """All rows of each task. Both are fine-tuned from one pretraining run per model, depth and seed."""
    tasks = [task for task in TASKS if lab.scale != "laptop" or task in lab.places]
    require(
        bool(tasks), f"nothing to fine-tune on: {' or '.join(f'--data={t}=DIR' for t in TASKS)}"
    )
    for task in TASKS:
        if task not in tasks:
            print(f"{task} is left out: --data={task}=DIR says where it is")
    (groups,) = lab.groups(target).values()
    return {
        task: [
            Downstream(case, mode, group, _fine_tune(lab, task, case, mode, group))
            for case, group in groups.items()
            for mode in MODES[case.model]
        ]
        for task in tasks
    }


def _fine_tune(lab: Laboratory, task: str, case: Case, mode: str, before: Group) -> Group:
    runs = []
    for seed in range(1, 1 + lab.seeds):
        name = f"{task}_{mode}_{case.name(seed)}"
        config = TASKS[task]()
        if lab.scale != "paper":
            config = getattr(finetuning, lab.scale)(config)
        config.reservoirs, config.freeze_now = mode, case.reservoirs
        config.pretrained = str(lab.workdir(case, seed))
        if place := lab.places.get(task):
            config.data.source = f"files:{place}"
        config.wandb.mode, config.seed = "disabled", seed
        print(f"\n{name}", flush=True)
        workdir = lab.out / "runs" / name
        summary = tuning.fit(config, workdir, lab.mesh)
        runs.append(Run(name, summary, Curve.from_json(summary["curve"])))
    stack = layers_of(before.runs[0].config)
    frozen = {"keep": stack.frozen, "tune": 0, "freeze_now": case.reservoirs}[mode]
    line = case.model + _NAMES[mode]
    layers = Layers(line, stack.total, frozen)
    return Group(f"{line}, {case.layers} layers", line, tuple(runs), layers)


def table4(lab: Laboratory) -> None:
    """Probing accuracy of every layer, beside printed where the depths agree."""
    place = lab.places.get("probing")
    require(
        place is not None,
        "the probing tasks are missing: --data=probing=DIR (python -m reservoir.make_probes writes some)",
    )
    names = [name for name in TABLE_4 if any(path.exists() for path in _paths(place, name))]
    require(bool(names), f"{place} has none of the tasks of Table 4, such as {TABLE_4[0]}.txt")
    tasks = [load_task(place, name) for name in names]
    paper, rows = printed("table4"), []
    (groups,) = lab.groups("table4").values()
    for case in groups:
        for seed in range(1, 1 + lab.seeds):
            read = open_reader(lab.workdir(case, seed), lab.mesh, None)
            table = Table(read.layers, 1, QUICK[lab.scale])
            for task in tasks:
                print(f"{case.name(seed)}: {task.name}", flush=True)
                table.add(task, {s: read(text) for s, text in task.sentences.items()})
            rows += [(case.model, seed, *row) for row in table.rows()]
        for layer in range(1, 1 + case.layers):
            if case.layers == 12 and (cells := paper.get((case.model, str(layer)))):
                chosen = [cells[TABLE_4.index(name)] for name in names]
                rows.append((case.model, "printed", layer, None, *chosen))
    columns = ("model", "seed", "layer", "kind", *(PROBES[name] for name in names))
    lab.write("table4", columns, rows)


def _paths(place: Path, name: str) -> tuple[Path, Path]:
    plain = task_path(place, name)
    return plain, plain.with_name(f"{plain.name}.gz")
