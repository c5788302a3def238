"""Reads the configuration of a run, and loads a trained translator. Also reads runs of older versions."""

import importlib
from pathlib import Path
from typing import Any

from jax.sharding import Mesh
from ml_collections import ConfigDict

from common.config import complete
from common.data.tokenizer import Tokenizer
from common.storage.addresses import shown
from common.train.restore import load_run, read_config
from common.train.task import ModelState
from common.train.workdir import CONFIG
from configs.reservoirs import fields
from reservoir import model
from reservoir.tasks.translation import TOKENIZERS


def with_defaults(model: ConfigDict) -> ConfigDict:
    """Returns a copy of `config.model` of an older run, in the current form.

    Adds missing fields of `configs.reservoirs.fields`, and renames the reward "norm" to "own_rms".
    """
    filled = ConfigDict({**fields(), **model.to_dict()})
    if filled.backskip.reward == "norm":
        filled.backskip.reward = "own_rms"
    return filled


def read(workdir: Path, option: str, task: str) -> ConfigDict:
    """Returns the configuration of the run in `workdir`, in the current form.

    Args:
      option: the command-line option of `workdir`, for error messages.
      task: task of the run, "translation" or "masked_lm".

    Raises:
      UserError: the folder has no run, or the run has another task or an invalid configuration.
    """
    config = read_config(workdir, option, "reservoir", task)
    with complete(shown(workdir / CONFIG)):
        config.model = with_defaults(config.model)
        model.validate(config.model)
        importlib.import_module(f"reservoir.tasks.{task}").validate(config)
    return config


def load_translator(
    workdir: Path, config: ConfigDict, mesh: Mesh, **checkpoints: Any
) -> tuple[tuple[Tokenizer, Tokenizer], ModelState]:
    """Returns the source and the target tokenizer of a run, and its trained model.

    Args:
      checkpoints: the arguments `snapshots` or `best` of `common.train.restore.load_run`. By default, loads the best
        checkpoint.

    Raises:
      UserError: a tokenizer is missing or damaged, or `load_run` fails.
    """
    tokenizers = tuple(Tokenizer.load(workdir / name) for name in TOKENIZERS)
    sizes = [tokenizer.size for tokenizer in tokenizers]
    build = lambda rngs: model.translator(config.model, *sizes, rngs=rngs)  # noqa: E731
    return tokenizers, load_run(workdir, config, build, mesh, **checkpoints)
