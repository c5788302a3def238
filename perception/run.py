"""A configuration as a run, and a finished run ready to be used.

M texts, N classes.
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
from common.data.batching import evaluation_batches
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
"""Of this program, by `config.paper`."""


def validate(config: ConfigDict) -> None:
    """Everything that can be known of a run that is to be made, without pretrained weights and data."""
    with complete("--config"):
        datasets.validate(config)
        finetuning.validate(config)
        finetuning.check_used(config)
    _validate(config)


def _validate(config: ConfigDict) -> None:
    """What does not depend on where weights and data come from."""
    with complete("--config"):
        check_choice("--config.eval.select", config.eval.select, ("valid", "test"))
        task.validate(config)
        loop.validate(resolve(config))


def prepare(
    config: ConfigDict, mesh: Mesh, read_data: bool = True
) -> tuple[ConfigDict, TextClassification]:
    """The configuration that the loop takes, and the task.

    Without data, and with or without a folder of weights, the vocabulary is that of the backbone, or as large as the
    configuration allows; one's own data have two classes.

    Raises:
      UserError: the configuration, the data or the folder are at fault.
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
    given = config, tokenizer, build, mesh, labelled
    read = outside(pretrained, mesh)
    if finetuning.solves_head(config):
        made = head.SolvedHead(*given, read)
    else:
        made = TextClassification(*given, start=start(config, pretrained), outside=read)
    if config.lora.targets or config.reinitialize:
        # What these do not fit is known before anything is written.
        variables.abstract(lambda: made.build(variables.ParamKeys(0)))
    return config, made


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
    """Trains, or goes on with, the run in `workdir`; returns its summary. Errors are those of `loop.fit`."""
    before = ended(config, workdir)
    return loop.fit(*prepare(config, mesh), workdir, mesh) if before is None else before


def ended(config: ConfigDict, workdir: Path) -> dict | None:
    """As `summary.ended`: what a run in `workdir` left that has made its steps on what is still the same data."""
    validate(config)
    found = summary.ended(resolve(config), workdir)
    if found is not None and is_main():
        print(f"{workdir} has ended before: nothing is read or trained")
    return found


@dataclass
class Trained:
    """A run's best values, to be used."""

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
            logits_BN = abstract_model.build(trainable, frozen)(batch["tokens"], batch["lengths"])
            return jax.nn.softmax(logits_BN)

        return jax.jit(classify, out_shardings=sharding.replicated(self.mesh))

    def probabilities(self, lines: Sequence[str], rows: int = 64) -> np.ndarray:
        """Of every class for each line, (M, N); `rows` are computed at once."""
        longest = self.config.data.max_length
        encoded = self.tokenizer.encode(lines, longest)
        corpus = TokenizedCorpus.from_lists(encoded, None, self.tokenizer.pad)
        buckets = (*(n for n in in_rows(self.config).data.buckets if n < longest), longest)
        found_MN = np.zeros((len(lines), len(self.classes)), np.float32)
        batches = evaluation_batches(
            corpus, None, buckets=buckets, rows=rows, multiple=sharding.num_batch_shards(self.mesh)
        )
        for batch in batches:
            ids_B = batch["ids"]
            lengths_B = np.where(ids_B >= 0, corpus.needed[ids_B], 0).astype(np.int32)
            placed = put({"tokens": batch["source"], "lengths": lengths_B}, self.mesh)
            with jax.set_mesh(self.mesh):
                chances_BN = self._compiled(self.values.trainable, self.values.frozen, placed)
            found_MN[ids_B[ids_B >= 0]] = np.asarray(chances_BN)[ids_B >= 0]
        return found_MN


def read(workdir: Path, option: str = "--workdir") -> ConfigDict:
    """The configuration of a run, which `option` of a command line names.

    Raises:
      UserError: there is no run, or it is of another program.
    """
    config = read_config(workdir, option)
    paper = config.get("paper", "")
    check(
        paper in ("", PAPER) and "finetune" in config,  # runs made earlier do not say their paper
        f"{option}={workdir} is a run of another program" + (f": of {paper}" if paper else ""),
    )
    return config


def begun_from(config: ConfigDict, weights: Path | None = None) -> Pretrained | None:
    """The pretrained model that using a run needs, None where it needs none: that in `weights`, or where the run had it
    from.

    Raises:
      UserError: there is nothing, or it is of another shape; or `weights` are for a run that began with random ones.
    """
    if not weights:
        if config.finetune in TRAINS_ALL and config.backbone != "auto":
            return None  # the backbone's name says the shape, and the checkpoint has every value
        return open_pretrained(config, " any more: --pretrained=DIR says where it is now")
    check(weights.expanduser().is_dir(), f"--pretrained={weights} is no folder")
    config.pretrained = str(weights)
    found = open_pretrained(config)
    check(
        found is not None,
        f"--pretrained={weights} would not be used: the run began with random weights of"
        f" --config.backbone={config.backbone}",
    )
    return found


def load(workdir: Path, mesh: Mesh | None = None, weights: Path | None = None) -> Trained:
    """The best checkpoint of a run.

    Args:
      weights: the pretrained ones, if they are no longer where the run had them from.

    Raises:
      UserError: there is no run, it is of another program, it has no checkpoint, or its pretrained weights are gone.
    """
    config, mesh = read(workdir), mesh or make_mesh({"data": -1})
    found, build, pretrained = _open(config, workdir, weights)
    values = load_run(workdir, config, build, mesh, outside(pretrained, mesh))
    return Trained(config, *found, values, mesh)


def load_own(config: ConfigDict, workdir: Path) -> tuple[Trained, str]:
    """As `load`, but for the pretrained values, which are not read; and the fingerprint of their files.

    Args:
      config: of the run, where it may name another folder of these files.
    """
    mesh = make_mesh({"data": -1})
    found, build, _ = _open(config, workdir)
    values, fingerprint = restore.load_own(workdir, config, build, mesh)
    return Trained(config, *found, values, mesh), fingerprint


def _open(
    config: ConfigDict, workdir: Path, weights: Path | None = None
) -> tuple[tuple[Backbone, Subword, tuple[str, ...]], Callable, Pretrained | None]:
    """What a run is of beside its values; what builds its model; and where the weights are."""
    with complete(workdir / CONFIG):
        datasets.validate(config)
        finetuning.validate(config)
    _validate(config)
    tokenizer = Subword.load(workdir / TOKENIZER)
    try:
        classes = tuple(json.loads((workdir / CLASSES).read_text()))
    except OSError as error:
        raise UserError(f"{workdir} has no {CLASSES} to read: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise UserError(f"{workdir / CLASSES} is damaged: {error}") from error
    pretrained = begun_from(config, weights)
    shape = make_shape(config, pretrained, tokenizer.size)
    build = partial(make_model, config, shape, len(classes))
    return (shape, tokenizer, classes), lambda rngs: build(rngs=rngs), pretrained
