"""The runs behind the paper's tables and figures: their configurations, training and grouping."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ml_collections import ConfigDict

from common import experiments
from common.config import check, check_choice
from common.errors import UserError
from common.experiments import Experiment, Ran, Side
from common.report.groups import Group
from common.train.task import Task
from reservoir import downstream, finetuning, run
from reservoir.layers import layers_of
from reservoir.placement import placement
from reservoir.targets import (
    MODELS,
    NEEDS,
    PLAIN,
    SETTINGS,
    UPDATABLE,
    Case,
    snapshot_steps,
)


@dataclass(frozen=True)
class ExperimentSuite(experiments.ExperimentSuite):
    """The experiments of this paper with the options of its command line.

    Attributes:
      settings: the settings to run; empty for all that the table or figure has.
      depths: number of layers -> number of reservoirs, None for the setting's number; empty for the scale's depths.
      models: the rows to run; empty for all that the table or figure has.
      data_paths: setting or fine-tuning task -> folder of its data.
      finetune: overrides "a.b=VALUE" of fine-tuning. The inherited `fields` override pretraining.
    """

    settings: tuple[str, ...] = ()
    depths: Mapping[int, int | None] = field(default_factory=dict)
    models: tuple[str, ...] = ()
    data_paths: dict[str, Path] = field(default_factory=dict)
    finetune: tuple[str, ...] = ()

    def prepare(self, config: ConfigDict) -> tuple[ConfigDict, Task]:
        program = finetuning if config.task == "classification" else run
        return program.prepare(config, self.mesh)

    def configuration(self, case: Case, seed: int) -> ConfigDict:
        """Returns the configuration of one run.

        Raises:
          UserError: an override on the command line is invalid.
        """
        setting, (kind, fields) = SETTINGS[case.setting], MODELS[case.model]
        config = setting.recipe(kind)
        if self.scale != "paper":
            config = setting.sizes[self.scale](config)
        config.model.update(setting.fields)
        config.model[setting.depth_field] = case.layers
        config.model.reservoirs = case.reservoirs
        if path := self.data_paths.get(case.setting):
            config.data.source = f"files:{path}"
        for name, value in fields.items():
            value = value(config.model, case) if callable(value) else value
            config.update_from_flattened_dict({f"model.{name}": value})
        config = self.override(config, seed=seed)
        if config.task == "masked_lm":
            overrides = [f for f in self.fields if f.startswith("--config.checkpoint.snapshots=")]
            check(not overrides, f"{''.join(overrides)}: Figure 6 sets the snapshots; leave it out")
            config.checkpoint.snapshots = snapshot_steps(config)[0]
        return config

    def needed(self, target: str) -> dict[str, list[Case]]:
        """Returns the cases of a table or figure by setting, ordered by model and then depth.

        Raises:
          UserError: the options exclude every case, or the reservoirs do not fit.
        """
        settings, models, one_depth = NEEDS[target]
        found = {}
        for setting in settings:
            if self.settings and setting not in self.settings:
                continue
            depths = [self.curve_depth(setting)] if one_depth else self.setting_depths(setting)
            cases = [
                self.case(setting, model, layers)
                for model in models
                if not self.models or model in self.models
                for layers in depths
            ]
            if any(cases):
                found[setting] = [case for case in cases if case]
        check(
            bool(found),
            f"--settings, --models and --depths exclude every run of {target}, which has"
            f" {', '.join(settings)} and {', '.join(models)}",
        )
        return found

    def setting_depths(self, setting: str) -> list[int]:
        """Returns the numbers of layers of --depths, or of the scale."""
        return list(self.depths or SETTINGS[setting].depths[self.scale])

    def curve_depth(self, setting: str) -> int:
        """Returns the depth whose curves the paper shows; the greatest depth where --depths excludes it."""
        depths, curve_depth = self.setting_depths(setting), SETTINGS[setting].curve_depth
        return curve_depth if curve_depth in depths else max(depths)

    def case(self, setting: str, model: str, layers: int) -> Case | None:
        """Returns a row at a depth. With --depths=N:0 only the plain model has one.

        Raises:
          UserError: the reservoirs do not fit, or leave no trained layer.
        """
        usual = SETTINGS[setting].reservoirs(self.scale, layers)
        number = self.depths.get(layers)
        number = usual if number is None else number
        if number == 0:
            return Case(setting, model, layers, usual) if model == PLAIN else None
        kind, fields = MODELS[model]
        try:
            placement(layers, number if kind != "none" else 0, fields.get("placement", "alternate"))
            check(
                model == PLAIN or number < layers,
                f"{model}: {number} reservoirs of {layers} layers leave no trained layer",
            )
        except (ValueError, UserError) as error:
            raise UserError(
                f"--depths={layers}: {error}; set the number of reservoirs by --depths={layers}:R"
            ) from error
        if model == UPDATABLE:
            layers -= number
            return Case(setting, model, layers, SETTINGS[setting].reservoirs(self.scale, layers))
        return Case(setting, model, layers, number, number != usual)

    def groups(self, target: str) -> dict[str, dict[Case, Group]]:
        """Returns the runs of every needed case over all seeds, by setting. Trains the missing runs."""
        needed = self.needed(target)
        cases = [case for some in needed.values() for case in some]
        found = self.runs({case.stem: partial(self.configuration, case) for case in cases})
        return {
            setting: {case: _group(case, found[case.stem]) for case in some}
            for setting, some in needed.items()
        }

    def workdir(self, case: Case, seed: int) -> Path:
        """Returns the folder of a run."""
        return self.out / "runs" / case.name(seed)

    def horizon(self, setting: str) -> float | str:
        """Returns T of the AUCC in hours, or "longest"."""
        return SETTINGS[setting].horizon if self.scale == "paper" else "longest"

    def side(self, text: str) -> Side:
        """Returns the experiment that one side of a claim names.

        "iwslt: T Reservoir" is a row at the setting's `curve_depth`, "wmt@24: T Reservoir" at 24 layers. "sst2: ..."
        and "mnli: ..." fine-tune that row of roberta and keep its reservoirs frozen; one of `downstream.SUFFIXES` may
        follow, as in "sst2: T Reservoir, reservoirs tuned".

        Raises:
          UserError: the setting, row or suffix is unknown, or the reservoirs do not fit.
        """
        prefix, _, row = text.partition(": ")
        setting, at, layers = prefix.partition("@")
        check_choice(f"{text}: setting", setting, (*SETTINGS, *downstream.TASKS))
        check(layers.isdecimal() or not at, f"{text}: {layers!r} is no number of layers")
        depth = int(layers) if at else None
        if setting in downstream.TASKS:
            return downstream.side(self, text, setting, row, depth)
        case, missing = self.claimed_case(text, setting, row, depth)
        if case is None:
            return Side("", lambda seed: ConfigDict(), missing)
        return Side(case.stem, partial(self.configuration, case), missing)

    def claimed_case(
        self, text: str, setting: str, model: str, layers: int | None
    ) -> tuple[Case | None, str]:
        """Returns the case that a side of a claim names, and the option that it lacks ("" where it can run).

        The case is None where the options exclude it.

        Raises:
          UserError: the row is unknown, or the reservoirs do not fit.
        """
        check_choice(f"{text}: model", model, MODELS)
        if self.settings and setting not in self.settings:
            return None, "--settings leaves it out"
        if self.models and model not in self.models:
            return None, "--models leaves it out"
        case = self.case(setting, model, layers or self.curve_depth(setting))
        if case is None:
            return None, "--depths leaves no reservoirs"
        if layers and layers not in self.setting_depths(setting):
            return case, f"--depths={layers}"
        scheme, _, path = self.configuration(case, 1).data.source.partition(":")
        exists = scheme != "files" or Path(path).exists()
        return case, "" if exists else f"--data={setting}=DIR"

    def runs(self, cases: Mapping[str, Experiment]) -> dict[str, list[Ran]]:
        """Trains pretraining runs before the fine-tuning runs that start from them."""
        tuned = {n: make for n, make in cases.items() if make(1).task == "classification"}
        first = {name: make for name, make in cases.items() if name not in tuned}
        found: dict[str, list[Ran]] = {}
        for some in filter(None, (first, tuned)):
            found |= super().runs(some)
        return found


def _group(case: Case, ran: Sequence[Ran]) -> Group:
    runs = tuple(one.run for one in ran)
    return Group(f"{case.model}, {case.layers} layers", case.model, runs, layers_of(runs[0].config))
