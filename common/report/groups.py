"""Groups of runs that differ only in their seed, with distinct names."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from common.config import check, flatten
from common.metrics.curve import Curve
from common.report.runs import Run
from common.report.table import Table

IGNORED = (
    "seed",
    "paper",
    "wandb.",
    "checkpoint.",
    "data.cache_dir",
    "data.tfds_dir",
    "train.log_steps",
    "pretrained",  # Each seed has its own pretraining run.
)
"""Configuration fields that change neither what a run learns nor how its time is counted; "a." is all fields of a."""


class Layers(NamedTuple):
    """The layers of a model.

    Attributes:
      kind: name of the kind of model or layer.
      total: number of layers, frozen layers included.
      frozen: number of layers that are not trained.
    """

    kind: str
    total: int
    frozen: int

    @property
    def updatable(self) -> int:
        return self.total - self.frozen

    def __str__(self) -> str:
        frozen = f"{self.frozen} of {self.total}" if self.frozen else f"{self.total} layers"
        return f"{self.kind}, {frozen}"


@dataclass(frozen=True)
class Group:
    """Runs of one configuration.

    Attributes:
      name: the layers and the settings in which the group differs from the other groups.
      line: the name without the number of layers: groups with the same line share a line in figures over depth.
      runs: sorted by seed; seeds are distinct, or None for a run without randomness.
      layers: None if the configuration has no number of layers.
    """

    name: str
    line: str
    runs: tuple[Run, ...]
    layers: Layers | None

    @property
    def timed(self) -> str:
        """The kinds of timing of the runs, see `Run.timing`."""
        return ", ".join(dict.fromkeys(run.timing for run in self.runs))

    @property
    def curves(self) -> list[Curve]:
        return [run.curve for run in self.runs]


def layers_of(config: Mapping[str, Any]) -> Layers | None:
    """Returns the layers of a configuration without frozen layers; None if it has no number of layers."""
    model = config.get("model", {})
    total = model.get("encoder_layers", model.get("layers"))
    return None if total is None else Layers(model.get("kind", "transformer"), total, 0)


def groups(
    runs: Iterable[Run],
    ignore: Sequence[str] = IGNORED,
    layers_of: Callable[[Mapping[str, Any]], Layers | None] = layers_of,
) -> list[Group]:
    """Groups runs with equal configurations and devices, in the order of their first runs.

    Args:
      ignore: configuration fields that may differ within a group; "a." is all fields of a.
      layers_of: returns the layers of a configuration.

    Raises:
      UserError: there are no runs, their metrics differ, or two runs have the same configuration and seed.
    """
    found: dict[tuple, list[Run]] = {}
    for run in runs:
        found.setdefault(tuple(_settings(run, ignore).items()), []).append(run)
    check(bool(found), "there are no runs to compare")
    members = [
        sorted(group, key=lambda run: (run.seed is not None, run.seed)) for group in found.values()
    ]
    _check(members)
    layers = [layers_of(group[0].config) for group in members]
    others = _others([dict(key) for key in found], layers)
    made, names = [], set()
    for group, stack, other in zip(members, layers, others, strict=True):
        kind = f"{stack.kind}, {stack.frozen} frozen" if stack and stack.frozen else ""
        line = kind or (stack.kind if stack else "")
        name = ", ".join(filter(None, [str(stack or ""), *other])) or group[0].name
        # An empty setting and a missing setting are both left out of the name.
        name = f"{name} ({group[0].name})" if name in names else name
        names.add(name)
        made.append(Group(name, ", ".join(filter(None, [line, *other])), tuple(group), stack))
    return made


def differences(compared: Sequence[Group], ignore: Sequence[str] = IGNORED) -> Table:
    """Returns a row per setting in which the groups differ and a column per group; missing fields are empty."""
    settings = [_settings(group.runs[0], ignore) for group in compared]
    rows = [(f, *(_text(s[f]) if f in s else None for s in settings)) for f in _differing(settings)]
    return Table(("setting", *(group.name for group in compared)), rows)


def _settings(run: Run, ignore: Sequence[str]) -> dict[str, Any]:
    """Returns what the runs of a group share: the flat configuration, and the device, which determines the time."""
    flat = {"device": run.summary.get("device", "")}
    flat |= {k: _frozen(v) for k, v in sorted(flatten(run.config).items())}
    whole = tuple(name for name in ignore if name.endswith("."))
    return {k: v for k, v in flat.items() if k not in ignore and not k.startswith(whole)}


def _frozen(value: Any) -> Any:
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
    """Returns the settings that distinguish groups with equal layers: few of them, strings before numbers."""
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


def _check(members: Sequence[Sequence[Run]]) -> None:
    first = members[0][0]
    for group in members:
        for run in group:
            here, there = (r.curve.name for r in (run, first))
            check(
                (here, run.curve.mode) == (there, first.curve.mode),
                f"{run.name} measures {here} and {first.name} {there}: compare runs with the same metric",
            )
        for one, other in itertools.pairwise(group):
            check(
                one.seed is None or one.seed != other.seed,
                f"{one.name} and {other.name} have the same configuration and seed {one.seed}: leave one out",
            )
