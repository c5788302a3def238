"""The runs behind the paper's tables and figures: configurations, training, and groups of runs with the same model."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ml_collections import ConfigDict

from common import experiments
from common.config import check_choice
from common.errors import UserError, check
from common.experiments import Experiment, Side
from common.report.groups import Group
from common.report.runs import Run
from common.storage.addresses import copy_of, shown
from reservoir import downstream
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
    """The experiments of the reservoir paper, with the options of `reservoir.reproduce`.

    Attributes:
      settings: keys of `targets.SETTINGS` to run. If empty, runs all settings of the table or figure.
      depths: number of layers -> number of reservoirs; None takes the number in `targets.SETTINGS`. If `depths` is
        empty, runs the depths of the scale.
      models: keys of `targets.MODELS` to run. If empty, runs all rows of the table or figure.
      data_paths: setting, fine-tuning task or "probing" -> folder of its data.
      finetune: overrides "a.b=VALUE" of fine-tuning runs. The inherited attribute `fields` is for all other runs.
    """

    settings: tuple[str, ...] = ()
    depths: Mapping[int, int | None] = field(default_factory=dict)
    models: tuple[str, ...] = ()
    data_paths: dict[str, Path] = field(default_factory=dict)
    finetune: tuple[str, ...] = ()

    def configuration(self, case: Case, seed: int) -> ConfigDict:
        """Returns the configuration of a case's run with the seed `seed`.

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
            config.data.source = f"files:{shown(path)}"
        for name, value in fields.items():
            value = value(config.model, case) if callable(value) else value
            config.update_from_flattened_dict({f"model.{name}": value})
        config = self.override(config, seed=seed)
        if config.task == "masked_lm":
            reason = "reservoir.reproduce sets the snapshots, which Figure 6 fine-tunes"
            self.check_not_overridden(["checkpoint.snapshots"], reason)
            config.checkpoint.snapshots = snapshot_steps(config)[0]
        return config

    def needed(self, target: str) -> dict[str, list[Case]]:
        """Returns {setting: cases} for a table or figure. A case is a model (a row) with a number of layers.

        The cases of a setting are ordered by model, then by depth. Leaves out settings without a case.

        Raises:
          UserError: the command line excludes every case, or `case` fails.
        """
        settings, models, one_depth = NEEDS[target]
        selected = {}
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
                selected[setting] = [case for case in cases if case]
        if not selected:
            raise UserError(self._excluding(target))
        return selected

    def _excluding(self, target: str) -> str:
        """Returns the message about the option that excludes every run of a table or figure."""
        settings, models, _ = NEEDS[target]
        options = (("--settings", self.settings, settings), ("--models", self.models, models))
        for option, given, known in options:
            if given and set(given).isdisjoint(known):
                return (
                    f"{option}={','.join(given)} excludes every run of {target}: choose from"
                    f" {','.join(known)}"
                )
        return (
            f"--depths sets 0 reservoirs, so --models={','.join(self.models)} excludes every run of {target}: set at"
            f" least 1 reservoir in --depths, or add {PLAIN} to --models"
        )

    def setting_depths(self, setting: str) -> list[int]:
        """Returns the numbers of layers in --depths or, without this option, the depths of the scale."""
        return list(self.depths or SETTINGS[setting].depths[self.scale])

    def curve_depth(self, setting: str) -> int:
        """Returns the depth whose curves the paper shows or, if the suite lacks this depth, the greatest depth."""
        depths, curve_depth = self.setting_depths(setting), SETTINGS[setting].curve_depth
        return curve_depth if curve_depth in depths else max(depths)

    def case(self, setting: str, model: str, layers: int) -> Case | None:
        """Returns the case of a model at a depth.

        The row UPDATABLE is a model without reservoirs. Its depth is `layers` minus the number of reservoirs of the
        other rows. For --depths=LAYERS:0, returns None for all models except the plain transformer.

        Raises:
          UserError: the reservoirs do not fit into the layers, or are as many as the layers.
        """
        usual = SETTINGS[setting].reservoirs(self.scale, layers)
        given = self.depths.get(layers)
        number = usual if given is None else given
        if number == 0:
            return Case(setting, model, layers, usual) if model == PLAIN else None
        kind, fields = MODELS[model]
        try:
            placement(layers, number if kind != "none" else 0, fields.get("placement", "alternate"))
            check(
                model == PLAIN or number < layers,
                f"the number of reservoirs, {number}, must be below the number of layers, {layers}, in the row {model}",
            )
        except ValueError as error:
            option = f"--depths={layers}: " if given is None else f"--depths={layers}:{given}: "
            raise UserError(
                f"{option if layers in self.depths else ''}{error}; set a smaller number R of reservoirs by"
                f" --depths={layers}:R"
            ) from error
        if model == UPDATABLE:
            layers -= number
            return Case(setting, model, layers, SETTINGS[setting].reservoirs(self.scale, layers))
        return Case(setting, model, layers, number, number != usual)

    def groups(self, target: str) -> dict[str, dict[Case, Group]]:
        """Trains missing runs. Returns {setting: {case: runs of the case, one per seed}}."""
        needed = self.needed(target)
        every = [case for cases in needed.values() for case in cases]
        runs = self.runs({case.stem: partial(self.configuration, case) for case in every})
        return {
            setting: {case: _group(case, runs[case.stem]) for case in cases}
            for setting, cases in needed.items()
        }

    def horizon(self, setting: str) -> float | str:
        """Returns the end of the AUCC's interval in hours, or "longest" for the end of the longest run."""
        return SETTINGS[setting].horizon if self.scale == "paper" else "longest"

    def side(self, text: str) -> Side:
        """Returns the experiment that `text` names. A claim compares two such experiments.

        "iwslt: T Reservoir" is the row "T Reservoir" of the setting "iwslt" at the depth `curve_depth`.
        "wmt@24: T Reservoir" has 24 layers. "sst2: T Reservoir" and "mnli: T Reservoir" fine-tune the row "T Reservoir"
        of the setting "roberta" with frozen reservoirs. "sst2: T Reservoir, reservoirs tuned" trains the reservoirs.
        "sst2: Transformer, frozen in fine-tuning" freezes layers in fine-tuning only.

        Raises:
          UserError: the setting or row is unknown, the text after "@" is not a number above 0, or `case` or
            `configuration` fails.
        """
        prefix, _, row = text.partition(":")
        row = row.strip()
        setting, at, layers = prefix.partition("@")
        check_choice(
            f"in reservoir/claims.csv, {text!r}, setting", setting, (*SETTINGS, *downstream.TASKS)
        )
        check(
            not at or (layers.isdecimal() and int(layers) > 0),
            f"in reservoir/claims.csv, {text!r}, the number of layers after @ must be a whole number above 0, got"
            f" {layers!r}: write, for example, {setting}@8",
        )
        depth = int(layers) if at else None
        if setting in downstream.TASKS:
            return downstream.side(self, text, setting, row, depth)
        case, missing = self.claimed_case(text, setting, row, depth)
        if case is None:
            return Side(missing=missing)
        return Side(case.stem, partial(self.configuration, case), missing)

    def claimed_case(
        self, text: str, setting: str, model: str, layers: int | None
    ) -> tuple[Case | None, str]:
        """Returns the case that a claim names, and the reason why the case cannot run ("" if the case can run).

        The reason may be an option to add, such as "--data=iwslt=DIR". The case is None if --settings or --models
        excludes the case, or if --depths sets 0 reservoirs and the model is not the plain transformer.

        Args:
          text: the experiment as written in the claim, for error messages.
          layers: number of layers. None takes `curve_depth`.

        Raises:
          UserError: the row is unknown, or `case` or `configuration` fails.
        """
        check_choice(f"in reservoir/claims.csv, {text!r}, row", model, MODELS)
        if self.settings and setting not in self.settings:
            return None, "--settings excludes the setting"
        if self.models and model not in self.models:
            return None, "--models excludes the row"
        try:
            case = self.case(setting, model, layers or self.curve_depth(setting))
        except UserError as error:
            raise UserError(f"in reservoir/claims.csv, {text!r}: {error}") from error
        if case is None:
            return None, "--depths leaves no reservoirs"
        if layers and layers not in self.setting_depths(setting):
            return case, f"--depths={layers}"
        scheme, _, path = self.configuration(case, 1).data.source.partition(":")
        exists = scheme != "files" or copy_of(os.path.expanduser(path)).exists()
        return case, "" if exists else f"--data={setting}=DIR"

    def runs(self, cases: Mapping[str, Experiment]) -> dict[str, list[Run]]:
        """Trains missing runs: first pretraining, then fine-tuning. Returns {case: runs, one for each seed}."""
        tuned = {n: make for n, make in cases.items() if make(1).task == "classification"}
        pretrained = {name: make for name, make in cases.items() if name not in tuned}
        runs = super().runs(pretrained) if pretrained else {}
        if tuned:
            with downstream.named_by_finetune():
                runs |= super().runs(tuned)
        return runs


def _group(case: Case, runs: Sequence[Run]) -> Group:
    name, layers = f"{case.model}, {case.layers} layers", layers_of(runs[0].config)
    return Group(name, case.model, tuple(runs), layers)
