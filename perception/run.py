"""Prepares and fits runs, and loads trained ones.

B rows of a batch, E texts, C classes.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common import sharding, variables
from common.config import check, check_choice, complete
from common.data.buckets import evaluation_batches
from common.data.corpus import TokenizedCorpus
from common.data.subword import Subword
from common.errors import UserError
from common.runtime.processes import is_main
from common.sharding import make_mesh
from common.train import loop, restore, summary
from common.train.prefetch import put
from common.train.restore import load_run
from common.train.task import ModelState
from common.train.workdir import CONFIG, read_config
from perception import datasets, finetuning, head, task
from perception.backbones import BACKBONES, Backbone
from perception.datasets import DATASETS
from perception.finetuning import (
    TRAINS_ALL,
    make_model,
    make_shape,
    make_tokenizer,
    open_pretrained,
    outside,
    resolve,
    start,
)
from perception.hugging_face import Pretrained
from perception.task import CLASSES, TOKENIZER, TextClassification, in_rows

PAPER = "perception"
"""Value of `config.paper` for this program."""


def validate(config: ConfigDict) -> None:
    """Validates the configuration of a new run, without opening pretrained weights and data."""
    with complete("--config"):
        datasets.validate(config)
        finetuning.validate(config)
        finetuning.check_used(config)
    _validate(config)


def _validate(config: ConfigDict) -> None:
    """Validates everything that does not depend on the sources of weights and data."""
    with complete("--config"):
        check_choice("--config.eval.select", config.eval.select, ("valid", "test"))
        task.validate(config)
        loop.validate(resolve(config))


def prepare(
    config: ConfigDict, mesh: Mesh, read_data: bool = True
) -> tuple[ConfigDict, TextClassification]:
    """Returns the configuration for the loop and the task.

    Without data the vocabulary is that of the backbone, or for full training the largest that the configuration
    allows, and user data have two classes. --config.pretrained is then optional.

    Raises:
      UserError: the configuration, the data or the pretrained model are invalid.
    """
    if not read_data:
        return _without_data(config, mesh)
    validate(config)
    config = resolve(config)
    pretrained = open_pretrained(config)
    labelled = datasets.load(config)
    tokenizer = make_tokenizer(config, labelled[0]["train"])
    shape = make_shape(config, pretrained, tokenizer.size)
    build = partial(make_model, config, shape)
    arguments = config, tokenizer, build, mesh, labelled
    read = outside(pretrained, mesh)
    if finetuning.solves_head(config):
        prepared = head.SolvedHead(*arguments, outside=read)
    else:
        prepared = TextClassification(*arguments, start=start(config, pretrained), outside=read)
    if config.lora.targets or config.reinitialize:
        # Raises errors about these fields before any file is written.
        variables.abstract(lambda: prepared.build(variables.ParamKeys(0)))
    return config, prepared


def _without_data(config: ConfigDict, mesh: Mesh) -> tuple[ConfigDict, TextClassification]:
    with complete("--config"):
        if config.dataset:
            check_choice("--config.dataset", config.dataset, DATASETS)
        finetuning.validate(config, weights=False)
        finetuning.check_used(config)
    _validate(config)
    config = resolve(config)
    pretrained = open_pretrained(config) if config.pretrained else None
    known = pretrained.shape if pretrained else BACKBONES[config.backbone]
    own_tokenizer = config.finetune == "full" and config.data.tokenizer != "pretrained"
    vocabulary = config.data.vocab_size if own_tokenizer else known.vocabulary
    classes = DATASETS[config.dataset].classes if config.dataset else 2
    build = partial(make_model, config, make_shape(config, pretrained, vocabulary))
    return config, TextClassification(config, None, build, mesh, classes=classes)


def fit(config: ConfigDict, workdir: Path, mesh: Mesh) -> dict:
    """Trains or resumes the run in `workdir`; returns its summary. Raises the errors of `loop.fit`."""
    before = ended(config, workdir)
    return loop.fit(*prepare(config, mesh), workdir, mesh) if before is None else before


def ended(config: ConfigDict, workdir: Path) -> dict | None:
    """Returns the summary of a finished run on unchanged data like `summary.ended`, otherwise None."""
    validate(config)
    found = summary.ended(resolve(config), workdir)
    if found is not None and is_main():
        print(f"{workdir} is a finished run: printing its summary")
    return found


@dataclass
class Trained:
    """A trained run: its best checkpoint, tokenizer and classes."""

    config: ConfigDict
    shape: Backbone
    tokenizer: Subword
    classes: tuple[str, ...]
    values: ModelState
    mesh: Mesh

    @cached_property
    def _compiled(self) -> Callable:
        abstract_model = self.values.abstract_model

        def classify(trainable, frozen, batch):
            logits_BC = abstract_model.build(trainable, frozen)(batch["tokens"], batch["lengths"])
            return jax.nn.softmax(logits_BC)

        return jax.jit(classify, out_shardings=sharding.replicated(self.mesh))

    def probabilities(self, lines: Sequence[str], rows: int = 64) -> np.ndarray:
        """Returns class probabilities of each line, (E, C), computed in batches of `rows`."""
        longest = self.config.data.max_length
        encoded = self.tokenizer.encode(lines, longest)
        corpus = TokenizedCorpus.from_lists(encoded, None, self.tokenizer.pad)
        buckets = (*(n for n in in_rows(self.config).data.buckets if n < longest), longest)
        found_EC = np.zeros((len(lines), len(self.classes)), np.float32)
        batches = evaluation_batches(
            corpus, None, buckets=buckets, rows=rows, multiple=sharding.num_batch_shards(self.mesh)
        )
        for batch in batches:
            ids_B = batch["ids"]
            lengths_B = np.where(ids_B >= 0, corpus.needed[ids_B], 0).astype(np.int32)
            placed = put({"tokens": batch["source"], "lengths": lengths_B}, self.mesh)
            with jax.set_mesh(self.mesh):
                probabilities_BC = self._compiled(self.values.trainable, self.values.frozen, placed)
            found_EC[ids_B[ids_B >= 0]] = np.asarray(probabilities_BC)[ids_B >= 0]
        return found_EC


def read(workdir: Path, option: str = "--workdir") -> ConfigDict:
    """Returns the configuration of a run; `option` is the command-line option that names it.

    Raises:
      UserError: `workdir` holds no run, or a run of another program.
    """
    config = read_config(workdir, option)
    paper = config.get("paper", "")
    check(
        paper in ("", PAPER) and "finetune" in config,  # older runs do not record their paper
        f"{option}={workdir} is a run of another program" + (f": of {paper}" if paper else ""),
    )
    return config


def begun_from(config: ConfigDict, weights: Path | None = None) -> Pretrained | None:
    """Returns the pretrained model that a trained run needs, or None if it needs none.

    Args:
      weights: directory of the pretrained model; default: the directory that the run used.

    Raises:
      UserError: the directory is missing or holds another backbone, or the run does not use pretrained weights.
    """
    if not weights:
        if config.finetune in TRAINS_ALL and config.backbone != "auto":
            return None  # the name gives the shape, and the checkpoint has all parameters
        return open_pretrained(config, " any more: pass its new location as --pretrained=DIR")
    check(weights.expanduser().is_dir(), f"--pretrained={weights} is not a directory")
    config.pretrained = str(weights)
    found = open_pretrained(config)
    check(
        found is not None,
        f"--pretrained={weights} is not used: the run started from random weights with"
        f" --config.backbone={config.backbone}, remove the option",
    )
    return found


def load(workdir: Path, mesh: Mesh | None = None, weights: Path | None = None) -> Trained:
    """Loads the best checkpoint of a run.

    Args:
      weights: directory of the pretrained weights, if it has moved since the run.

    Raises:
      UserError: `workdir` holds no run of this program, a checkpoint is missing, or pretrained weights are missing.
    """
    config, mesh = read(workdir), mesh or make_mesh({"data": -1})
    found, build, pretrained = _open(config, workdir, weights)
    values = load_run(workdir, config, build, mesh, outside(pretrained, mesh))
    return Trained(config, *found, values, mesh)


def load_own(config: ConfigDict, workdir: Path) -> tuple[Trained, str]:
    """Loads a run without reading pretrained weights; also returns the fingerprint of their files.

    Args:
      config: configuration of the run; `config.pretrained` may name a new directory.
    """
    mesh = make_mesh({"data": -1})
    found, build, _ = _open(config, workdir)
    values, fingerprint = restore.load_own(workdir, config, build, mesh)
    return Trained(config, *found, values, mesh), fingerprint


def _open(
    config: ConfigDict, workdir: Path, weights: Path | None = None
) -> tuple[tuple[Backbone, Subword, tuple[str, ...]], Callable, Pretrained | None]:
    """Returns (shape, tokenizer, classes) of a run, a function that builds its model, and its pretrained model."""
    with complete(workdir / CONFIG):
        datasets.validate(config)
        finetuning.validate(config)
    _validate(config)
    tokenizer = Subword.load(workdir / TOKENIZER)
    try:
        classes = tuple(json.loads((workdir / CLASSES).read_text()))
    except OSError as error:
        raise UserError(f"cannot read {workdir / CLASSES}: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise UserError(f"{workdir / CLASSES} is damaged: {error}") from error
    pretrained = begun_from(config, weights)
    shape = make_shape(config, pretrained, tokenizer.size)
    build = partial(make_model, config, shape, len(classes))
    return (shape, tokenizer, classes), lambda rngs: build(rngs=rngs), pretrained
