"""Groups runs by configuration and device, or by command-line arguments, and names the groups."""

import glob
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from common.config import flatten, paper_module
from common.errors import check
from common.metrics.curve import Curve
from common.report.runs import Run, check_distinct, load_group
from common.report.table import Table

IGNORED = (
    "seed",
    "paper",
    "wandb.",
    "checkpoint.",
    "data.cache_dir",
    "data.tfds_dir",
    "train.log_steps",
    "pretrained",  # Each seed may start from another pretraining run.
)
"""Configuration fields that may differ between the runs of one group; "a." stands for all fields of `a`."""


class Layers(NamedTuple):
    """The layers of a model's encoder, or of a model without encoder: kind, number, and number of frozen layers."""

    kind: str
    total: int
    frozen: int

    @property
    def updatable(self) -> int:
        return self.total - self.frozen

    def __str__(self) -> str:
        layers = f"{self.total} layer{'s' * (self.total > 1)}"
        return f"{self.kind}, {f'{self.frozen} of {self.total}' if self.frozen else layers}"


@dataclass(frozen=True)
class Group:
    """Runs of one case with different seeds.

    The function `groups` puts runs with equal devices and configurations, except for IGNORED, into one group.

    Attributes:
      name: the name from the command line (`named_groups`), if any. Otherwise the layers of the model, and as many
        settings as distinguish the groups with equal layers. If both are empty, the name of the group's first run. If
        another group already has this name, the name of the first run is appended.
      line: the name from the command line, if any. Otherwise the kind of the model, the number of frozen layers, and
        the settings in `name`. Groups with equal `line` share a line in figures over depth.
      runs: the runs, sorted by seed. Seeds are distinct, except None, the seed of a run without randomness.
      layers: see `layers_of`.
    """

    name: str
    line: str
    runs: tuple[Run, ...]
    layers: Layers | None

    @property
    def curves(self) -> list[Curve]:
        return [run.curve for run in self.runs]


def layers_of(config: Mapping[str, Any]) -> Layers | None:
    """Returns the layers of the model of a configuration; None if their number is unknown.

    Calls the function `PAPER.layers.layers_of` of the configuration's paper. Without this function, the number of
    layers is `model.encoder_layers` or, if this field is missing, `model.layers`; all layers count as trained.
    """
    # Runs from before the commit a3ffa8f (22 November 2026) have no field `paper`. Count their layers as in the paper
    # "reservoir".
    try:
        module = paper_module(str(config.get("paper", "reservoir")), "layers")
    except ModuleNotFoundError:  # The paper may need a package that this machine lacks.
        module = None
    if hasattr(module, "layers_of"):
        return module.layers_of(config)
    model = config.get("model", {})
    model = model if isinstance(model, Mapping) else {}  # A setting of another program.
    total = model.get("encoder_layers", model.get("layers"))
    known = isinstance(total, int)  # Another program may name a list of sizes "layers".
    return Layers(model.get("kind", "transformer"), total, 0) if known else None


def groups(runs: Iterable[Run]) -> list[Group]:
    """Groups runs with equal configurations (except for IGNORED) and devices, in the order of their first runs.

    Raises:
      UserError: `runs` is empty, the metrics differ, a run is given twice, or two runs of a group have the same seed
        (other than None).
    """
    by_settings: dict[tuple, list[Run]] = {}
    for run in runs:
        by_settings.setdefault(tuple(_settings(run).items()), []).append(run)
    check(bool(by_settings), "there are no runs to compare: give the folder of at least one run")
    check_metric(itertools.chain.from_iterable(by_settings.values()))
    members = [
        sorted(group, key=lambda run: (run.seed is not None, run.seed))
        for group in by_settings.values()
    ]
    for group in members:
        check_distinct(group)
    layers = [layers_of(group[0].config) for group in members]
    others = _others([dict(key) for key in by_settings], layers)
    made: dict[str, Group] = {}
    for group, stack, other in zip(members, layers, others, strict=True):
        line = stack.kind + (f", {stack.frozen} frozen" if stack.frozen else "") if stack else ""
        name = ", ".join(filter(None, [str(stack or ""), *other])) or group[0].name
        # Names omit empty and missing settings, so two groups may get the same name: add the name of a run.
        name = f"{name} ({group[0].name})" if name in made else name
        made[name] = Group(name, ", ".join(filter(None, [line, *other])), tuple(group), stack)
    return list(made.values())


def named_groups(arguments: Sequence[str]) -> list[Group]:
    """Returns the groups of runs that command-line arguments name.

    Each argument is a group if these two conditions hold:
    - The runs of each argument have the same configuration and device.
    - An argument has the form NAME=GROUP, or one of several arguments names several runs.
    Otherwise, the runs of all arguments are pooled and grouped by configuration and device (`groups`), and each NAME is
    ignored.

    Args:
      arguments: see `load_group`. NAME=GROUP gives the group a name. The default name is the last part of the path. If
        two groups would have the same name, each group is named by its whole argument.

    Raises the errors of `load_group` and `groups`.
    """
    named = [_split_name(argument) for argument in arguments]
    loaded = [load_group(argument) for _, argument in named]
    several = len(loaded) > 1 and any(len(runs) > 1 for runs in loaded)
    if several or any(name for name, _ in named):
        grouped = [groups(runs) for runs in loaded]
        if all(len(parts) == 1 for parts in grouped):
            check_metric(one.runs[0] for (one,) in grouped)
            names = [name or argument.rstrip("/").rpartition("/")[2] for name, argument in named]
            names = names if len(set(names)) == len(names) else list(arguments)
            return [
                Group(name, name, one.runs, one.layers)
                for name, (one,) in zip(names, grouped, strict=True)
            ]
    return groups(run for runs in loaded for run in runs)


def _split_name(argument: str) -> tuple[str, str]:
    """Splits NAME=GROUP into name and group; the name is "" for a group without a name."""
    name, _, group = argument.partition("=")
    if not group or set(name) & set("/:*?["):
        return "", argument
    # Do not split the path of an existing folder or a matching glob: folders of runs may have "=" in their names.
    is_path = Path(argument).exists() or glob.glob(argument)
    return ("", argument) if is_path else (name, group)


def differences(compared: Sequence[Group]) -> Table:
    """Returns a table of the settings in which groups differ. A missing setting has an empty cell."""
    settings = [_settings(group.runs[0]) for group in compared]
    rows = [(f, *(_text(s[f]) if f in s else None for s in settings)) for f in _differing(settings)]
    return Table(("setting", *(group.name for group in compared)), rows)


def _settings(run: Run) -> dict[str, Any]:
    """Returns the settings that define a run's group: configuration without IGNORED, and device, which affects time."""
    flat = {"device": run.summary.get("device", "")}
    flat |= {k: _frozen(v) for k, v in sorted(flatten(run.config).items())}
    prefixes = tuple(name for name in IGNORED if name.endswith("."))
    return {k: v for k, v in flat.items() if k not in IGNORED and not k.startswith(prefixes)}


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple(sorted((name, _frozen(x)) for name, x in value.items()))
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_text, value))
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return str(value)


def _differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    fields = dict.fromkeys(field for some in settings for field in some)
    return [f for f in fields if len({(f in some, some.get(f)) for some in settings}) > 1]


def _others(
    settings: Sequence[Mapping[str, Any]], layers: Sequence[Layers | None]
) -> list[list[str]]:
    """Selects settings that distinguish groups with equal layers. Returns each group's selected settings, "name value".

    Tries settings with text values first. Selects a setting only if it distinguishes groups with equal layers and equal
    values of the settings selected before. Omits empty values.
    """
    known = [(stack,) for stack in layers]
    fields = _differing(settings)
    fields.sort(key=lambda f: not any(isinstance(some.get(f), str) for some in settings))
    texts: list[list[str]] = [[] for _ in settings]
    for field in fields:
        finer = [(*k, _text(s.get(field, ""))) for k, s in zip(known, settings, strict=True)]
        if len(set(finer)) > len(set(known)):
            known = finer
            short = field.rpartition(".")[2]
            for text, some in zip(texts, settings, strict=True):
                if some.get(field, "") != "":
                    text.append(f"{short} {_text(some[field])}")
    return texts


def check_metric(runs: Iterable[Run]) -> None:
    """Raises a UserError if the validation curves of two runs differ in the metric or its mode ("max" or "min")."""
    first, *others = runs
    for run in others:
        here, there = run.curve, first.curve
        check(
            (here.name, here.mode) == (there.name, there.mode),
            f"{run.place} measures {here.name} ({here.mode}), but {first.place} measures {there.name} ({there.mode}):"
            " compare runs with the same metric",
        )
