"""A configuration as a run, and a finished run ready to be used.

M texts, N classes.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common import sharding, variables
from common.config import choose, complete, require
from common.data.batching import evaluation_batches
from common.data.corpus import TokenizedCorpus
from common.data.subword import Subword
from common.distributed import is_main
from common.errors import UserError
from common.sharding import make_mesh
from common.train import loop, summary, trained
from common.train.feed import put
from common.train.task import Values
from common.train.trained import load_run
from common.train.workdir import CONFIG, read_config
from perception import datasets, finetuning, task
from perception.backbones import Backbone
from perception.finetuning import (
    dtype_of,
    make_model,
    make_shape,
    make_tokenizer,
    open_pretrained,
    outside,
)
from perception.hugging_face import Pretrained
from perception.model import PooledClassifier
from perception.task import CLASSES, TOKENIZER, TextClassification, in_rows


def validate(config: ConfigDict) -> None:
    """Everything that can be known without pretrained weights and data."""
    with complete("--config"):
        require(
            config.task == "perception",
            f"--config.task={config.task!r} is trained by another program than perception.train",
        )
        datasets.validate(config)
        finetuning.validate(config)
        choose("--config.eval.select", config.eval.select, ("valid", "test"))
        task.validate(config)
        loop.validate(config)


def prepare(config: ConfigDict, mesh: Mesh) -> tuple[ConfigDict, TextClassification]:
    """The configuration that the loop takes, and the task. Errors are those of the configuration and of the data."""
    config = _resolved(config)
    pretrained = open_pretrained(config)
    labelled = datasets.load(config)
    tokenizer = make_tokenizer(config, labelled[0]["train"])
    shape = make_shape(config, pretrained, tokenizer)

    def build(classes: int, *, rngs: nnx.Rngs) -> PooledClassifier:
        return make_model(config, shape, classes, rngs=rngs)

    made = TextClassification(config, tokenizer, build, mesh, labelled, outside(pretrained, mesh))
    if config.lora.targets or config.reinitialize:
        # What these do not fit is known before anything is written.
        variables.abstract(lambda: made.build(variables.Keys(0)))
    return config, made


def fit(config: ConfigDict, workdir: Path, mesh: Mesh) -> dict:
    """Trains, or goes on with, the run in `workdir`; returns its summary. Errors are those of `loop.fit`."""
    before = ended(config, workdir)
    return loop.fit(*prepare(config, mesh), workdir, mesh) if before is None else before


def ended(config: ConfigDict, workdir: Path) -> dict | None:
    """As `summary.ended`: what a run in `workdir` left that has made its steps on what is still the same data."""
    config = _resolved(config)
    kind, _, place = config.data.source.partition(":")
    places = [Path(place).expanduser()] if kind == "files" else []
    places += [Path(config.pretrained).expanduser()] if config.pretrained else []
    found = summary.ended(config, workdir, places)
    if found is not None and is_main():
        print(f"{workdir} has ended before: nothing is read or trained")
    return found


def _resolved(config: ConfigDict) -> ConfigDict:
    """A valid configuration, as the run keeps it."""
    validate(config)
    config = config.copy_and_resolve_references()
    config.model.dtype = dtype_of(config)
    return config


@dataclass
class Trained:
    """A run's best values, to be used."""

    config: ConfigDict
    shape: Backbone
    tokenizer: Subword
    classes: tuple[str, ...]
    values: Values
    mesh: Mesh

    @cached_property
    def _compiled(self) -> Callable:
        structure = self.values.structure

        def classify(trainable, frozen, batch):
            logits_BN = structure.build(trainable, frozen)(batch["tokens"], batch["lengths"])
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
            corpus, None, buckets=buckets, rows=rows, multiple=sharding.batch_ways(self.mesh)
        )
        for batch in batches:
            ids_B = batch["ids"]
            lengths_B = np.where(ids_B >= 0, corpus.needed[ids_B], 0).astype(np.int32)
            placed = put({"tokens": batch["source"], "lengths": lengths_B}, self.mesh)
            with jax.set_mesh(self.mesh):
                chances_BN = self._compiled(self.values.trainable, self.values.frozen, placed)
            found_MN[ids_B[ids_B >= 0]] = np.asarray(chances_BN)[ids_B >= 0]
        return found_MN


def load(workdir: Path, mesh: Mesh | None = None) -> Trained:
    """The best checkpoint of a run.

    Raises:
      UserError: there is no run, it is of another program, it has no checkpoint, or its pretrained weights are gone.
    """
    config, mesh = read_config(workdir), mesh or make_mesh({"data": -1})
    found, build, pretrained = _open(config, workdir)
    values = load_run(workdir, config, build, mesh, outside(pretrained, mesh))
    return Trained(config, *found, values, mesh)


def load_own(config: ConfigDict, workdir: Path) -> tuple[Trained, str]:
    """As `load`, but for the pretrained values, which are not read; and the fingerprint of their files.

    Args:
      config: of the run, where it may name another folder of these files.
    """
    mesh = make_mesh({"data": -1})
    found, build, _ = _open(config, workdir)
    values, fingerprint = trained.load_own(workdir, config, build, mesh)
    return Trained(config, *found, values, mesh), fingerprint


def _open(
    config: ConfigDict, workdir: Path
) -> tuple[tuple[Backbone, Subword, tuple[str, ...]], Callable, Pretrained | None]:
    """What a run is of beside its values; what builds its model; and where the weights are."""
    with complete(workdir / CONFIG):
        validate(config)
    tokenizer = Subword.load(workdir / TOKENIZER)
    try:
        classes = tuple(json.loads((workdir / CLASSES).read_text()))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the classes from {workdir / CLASSES}: {error}") from error
    pretrained = open_pretrained(config)
    shape = make_shape(config, pretrained, tokenizer)

    def build(rngs: nnx.Rngs) -> PooledClassifier:
        return make_model(config, shape, len(classes), rngs=rngs)

    return (shape, tokenizer, classes), build, pretrained
