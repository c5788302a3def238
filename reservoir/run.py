"""Tasks of this paper: validation, preparation and training; loading a trained translator."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common.config import check, check_choice, complete, float_arg, parser_for, positive_int_arg
from common.sharding import make_mesh
from common.tasks import language_modelling, masked_lm, translation
from common.tasks.fields import check_transformer
from common.tasks.translation import (
    Translator,
    load_tokenizers,
    search_of,
    validate_search,
)
from common.train import loop
from common.train.checkpoint import snapshots
from common.train.restore import load_run
from common.train.task import ModelState, Task
from common.train.workdir import CONFIG, read_run
from reservoir import encoder, finetuning, kinds, model
from reservoir.backskip import Backskipping, validate_steps
from reservoir.model import language_model, translator


class Translation(Backskipping, translation.Translation):
    """Translation with backskipping."""

    fixed_length = staticmethod(kinds.fixed_length)


class MaskedLm(Backskipping, masked_lm.MaskedLm):
    """Masked language modelling with backskipping."""


class LanguageModelling(Backskipping, language_modelling.LanguageModelling):
    """Byte language modelling with backskipping."""


def validate_translation(config: ConfigDict) -> None:
    """As `translation.validate`, with the limits that reservoirs set."""
    translation.validate(config, kinds.fixed_length(config))


def _language_modelling(config: ConfigDict) -> None:
    check_transformer(config.model)
    language_modelling.validate(config)


TASKS = {
    "translation": (validate_translation, Translation, translator),
    "masked_lm": (masked_lm.validate, MaskedLm, encoder.masked_lm),
    "language_modelling": (_language_modelling, LanguageModelling, language_model),
}
"""`config.task` -> (validation function, task class, function that builds the model)."""


def validate(config: ConfigDict) -> None:
    """Checks the configuration without reading the data.

    Raises:
      UserError: a field is missing or out of range.
    """
    with complete("--config"):
        check(
            config.task != "classification",
            "--config.task=classification starts from a masked language model; train it with reservoir.finetune",
        )
        check_choice("--config.task", config.task, TASKS)
        model.validate(config.model)
        TASKS[config.task][0](config)
        loop.validate(config)
        validate_steps(config)


def prepare(config: ConfigDict, mesh: Mesh, read_data: bool = True) -> tuple[ConfigDict, Task]:
    """Returns the configuration for the training loop, and the task.

    Args:
      read_data: False builds a task without data, for planning. Fine-tuning still reads its pretraining run.

    Raises:
      UserError: the configuration, the data or the pretraining run is invalid.
    """
    if not read_data and config.get("task") == "classification":
        return finetuning.prepare(config, mesh, read_data)
    validate(config)
    _, task, build = TASKS[config.task]
    return config, task(config, build, mesh, read_data=read_data)


def fit(config: ConfigDict, workdir: Path, mesh: Mesh) -> dict:
    """Trains or resumes the run in `workdir`; returns its summary. Raises the errors of `loop.fit`."""
    return loop.fit(*prepare(config, mesh), workdir, mesh)


def parser(program: str) -> argparse.ArgumentParser:
    """Returns a parser with the options that reservoir.translate and reservoir.evaluate share."""
    options = parser_for(program)
    options.add_argument(
        "--workdir", required=True, type=Path, metavar="RUN", help="folder of the run"
    )
    options.add_argument(
        "--beams",
        type=positive_int_arg("--beams"),
        metavar="K",
        help="number of beam hypotheses (default: the run's)",
    )
    options.add_argument(
        "--length_penalty",
        type=float_arg("--length_penalty"),
        metavar="P",
        help="divide scores by length^P (default: the run's)",
    )
    options.add_argument(
        "--batch_tokens",
        type=positive_int_arg("--batch_tokens"),
        metavar="N",
        help="source tokens per batch (default: the run's)",
    )
    options.add_argument(
        "--max_tokens",
        type=positive_int_arg("--max_tokens"),
        metavar="N",
        default=2048,
        help="maximum length of a line in tokens (default 2048)",
    )
    options.add_argument(
        "--average",
        type=positive_int_arg("--average"),
        metavar="N",
        help="average the newest N snapshots (default: the best checkpoint)",
    )
    options.add_argument(
        "--average_best",
        type=positive_int_arg("--average_best"),
        metavar="N",
        help="average the N best checkpoints; the run must keep as many (--config.checkpoint.keep_best)",
    )
    return options


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """A trained translator with its configuration."""

    config: ConfigDict
    mesh: Mesh
    values: ModelState
    translator: Translator

    def translate(self, lines: Sequence[str]) -> list[str]:
        """Returns one translation per line."""
        with jax.set_mesh(self.mesh):
            return self.translator.translate(self.values, lines)


def _newest(workdir: Path, count: int) -> list[int]:
    """Returns the steps of the newest `count` snapshots.

    Raises:
      UserError: the run has fewer snapshots.
    """
    there = snapshots(workdir)
    check(
        count <= len(there),
        f"--average={count}: {workdir} has {len(there)} snapshots; --config.checkpoint.snapshots=N keeps one"
        " every N steps of training",
    )
    return there[-count:]


def load(options: argparse.Namespace) -> TrainedRun:
    """Loads the best checkpoint of a translator, or a mean of several. Options override the run's configuration.

    Raises:
      UserError: the folder has no run or no checkpoint, or the run is not a translator.
    """
    check(
        not (options.average and options.average_best),
        "--average averages snapshots and --average_best the best checkpoints; leave one of them out",
    )
    config = read_run(options.workdir, "translation")
    with complete(options.workdir / CONFIG):
        config.model = model.with_defaults(config.model)
        model.validate(config.model)
        validate_translation(config)
    if options.batch_tokens:
        config.eval.tokens_per_batch = options.batch_tokens
    overrides = {"beams": options.beams, "length_penalty": options.length_penalty}
    search = dataclasses.replace(
        search_of(config), **{k: v for k, v in overrides.items() if v is not None}
    )
    validate_search(search)
    tokenizers = load_tokenizers(options.workdir)
    mesh = make_mesh({"data": -1})
    sizes = [tokenizer.size for tokenizer in tokenizers]
    values = load_run(
        options.workdir,
        config,
        lambda rngs: translator(config.model, *sizes, rngs=rngs),
        mesh,
        snapshots=_newest(options.workdir, options.average) if options.average else (),
        best=options.average_best or 0,
    )
    return TrainedRun(
        config,
        mesh,
        values,
        Translator(
            config,
            tokenizers,
            mesh,
            search,
            options.max_tokens,
            fixed_length=kinds.fixed_length(config),
        ),
    )
