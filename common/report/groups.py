"""Runs that differ in nothing but their seed, as one group with a name that tells it from the others."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
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
    "pretrained",  # each seed has a pretraining run of its own
)
"""Fields, and groups of them, that change neither what a run learns nor how its time is counted."""

_KINDS = {"transformer": "T", "ffn": "FFN", "bigru": "BiGRU", "cnn": "CNN", "gmlp": "gMLP"}


class Layers(NamedTuple):
    """The stack that reservoirs stand in: the encoder, where there is one.

    Attributes:
      kind: of its reservoirs, as the paper calls them ("T", "FFN"); without any, of the model. Backskipping and
        LayerDrop are kinds of their own, as in Tables 1 and 3.
      total: how many layers, frozen ones included.
      frozen: how many of them are never trained.
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
      name: its layers and what else tells it from the other groups.
      line: the same whatever the number of layers: groups that make one line in a figure over depth.
      runs: by seed, which are all different; without one where nothing is random.
      layers: None where the configuration has no number of layers.
    """

    name: str
    line: str
    runs: tuple[Run, ...]
    layers: Layers | None

    @property
    def timed(self) -> str:
        """How the machine was shared while the runs were timed: see `Run.timing`."""
        return ", ".join(dict.fromkeys(run.timing for run in self.runs))

    @property
    def curves(self) -> list[Curve]:
        return [run.curve for run in self.runs]


def groups(runs: Iterable[Run], ignore: Sequence[str] = IGNORED) -> list[Group]:
    """Groups of runs with equal configurations on equal machines, in the order of their first runs.

    Args:
      ignore: fields of the configuration that may differ within a group; "a." stands for all of a.

    Raises:
      UserError: there are no runs, they do not measure the same, or two have the same configuration and seed.
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
        # An empty setting and one that is missing have the same name: none.
        name = f"{name} ({group[0].name})" if name in names else name
        names.add(name)
        made.append(Group(name, ", ".join(filter(None, [line, *other])), tuple(group), stack))
    return made


def layers_of(config: Mapping[str, Any]) -> Layers | None:
    """The layers of a configuration, nested as in a summary."""
    model = config.get("model", {})
    total = model.get("encoder_layers", model.get("layers"))
    if total is None:
        return None
    reservoir, pattern = model.get("reservoir", "none"), model.get("placement", "")
    mode = config.get("reservoirs", "keep")  # of fine-tuning
    if reservoir == "none":
        plain = "LayerDrop" if model.get("layerdrop") else "transformer"
        if mode == "freeze_now":
            return Layers(f"{plain}, frozen in fine-tuning", total, config["freeze_now"])
        return Layers(model.get("kind", plain), total, 0)
    kind = _KINDS.get(reservoir, reservoir)
    if model.get("reservoir_trained"):
        return Layers(f"{kind}, trained", total, 0)
    if model.get("backskip", {}).get("estimator", "none") != "none":
        kind += " backskip"
    if mode == "tune":
        return Layers(f"{kind}, tuned", total, 0)
    # A pattern such as "LLRLRLL" says itself how many there are.
    given = bool(pattern) and set(pattern) <= {"L", "R"}
    return Layers(kind, total, pattern.count("R") if given else model["reservoirs"])


def differences(compared: Sequence[Group], ignore: Sequence[str] = IGNORED) -> Table:
    """Every setting in which groups differ, a column for each group; empty where a configuration lacks the field."""
    settings = [_settings(group.runs[0], ignore) for group in compared]
    rows = [(f, *(_text(s[f]) if f in s else None for s in settings)) for f in _differing(settings)]
    return Table(("setting", *(group.name for group in compared)), rows)


def _settings(run: Run, ignore: Sequence[str]) -> dict[str, Any]:
    """What makes a group: the configuration, flat, and the machine, which the clock depends on."""
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
    """The fewest settings found, words before numbers, that tell apart what the layers do not."""
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
                f"{run.name} measures {here} and {first.name} {there}: they cannot be compared",
            )
        for one, other in itertools.pairwise(group):
            check(
                one.seed is None or one.seed != other.seed,
                f"{one.name} and {other.name} have the same configuration and seed {one.seed}: leave one out",
            )
