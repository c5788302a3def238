"""The text classification task: tokenization for a backbone, weighted F1, tests of the best step and the last step."""

import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common.config import check_int
from common.data.corpus import TokenizedCorpus
from common.data.labelled import LabelledText
from common.errors import check
from common.metrics.classes import Classes
from common.metrics.predictions import Predictions
from common.storage.addresses import shown
from common.tasks import classification
from common.tasks.classification import Classification
from common.train.evaluate import PerExample
from common.train.saved_tokenizer import save_tokenizer
from common.train.task import (
    NO_PRETRAINED_WEIGHTS,
    Batch,
    BatchSpec,
    ModelState,
    PretrainedWeights,
    integers,
)
from common.train.workdir import has_checkpoints
from common.variables import AbstractModel, Params
from perception import objective
from perception.model import PooledClassifier
from perception.subword import TOKENIZER, Subword

if TYPE_CHECKING:
    from perception.hugging_face import Pretrained

Build = Callable[..., PooledClassifier]
"""Function (number of classes, *, rngs) -> model."""

CLASSES, EXAMPLES = "classes.json", "examples.json"


def in_rows(config: ConfigDict) -> ConfigDict:
    """Returns a copy of `config`. If `pool` is "authors", the copy has `max_length` as its only bucket.

    This pool includes padding, so logits depend on the padded length. The authors' program pads all texts to
    `max_length`.
    """
    config = config.copy_and_resolve_references()
    if config.pool == "authors":
        config.data.buckets = (config.data.max_length,)
    return config


class SegmentedCorpus(TokenizedCorpus):
    """Tokenized texts or pairs of texts.

    Attributes:
      firsts_E: number of tokens in the first segment of each example, (E,) int32.
    """

    firsts_E: np.ndarray


def logits(model: PooledClassifier, batch: Batch, key: jax.Array | None = None) -> jax.Array:
    """Returns logits (B, C) of a batch of texts or of pairs of texts."""
    return model(batch["tokens"], batch["lengths"], key, batch.get("firsts"))


class TextClassification(Classification):
    """Text classification with a backbone.

    Args:
      build: function from the number of classes and `rngs` to a model.
      labelled: splits and class names; "valid" may be missing if `config.eval.select` is "test". None without data.
      pretrained: pretrained model that gives the run its weights or architecture; None for a run without such a model.
      classes: number of classes; used only if `labelled` is None.
      segments: whether the model distinguishes the two texts of a pair by token types.
    """

    objective, mode, tests_last = "weighted_f1", "max", True

    def __init__(
        self,
        config: ConfigDict,
        tokenizer: Subword | None,
        build: Build,
        mesh: Mesh,
        labelled: tuple[dict[str, LabelledText], tuple[str, ...]] | None = None,
        *,
        pretrained: "Pretrained | None" = None,
        classes: int = 0,
        segments: bool = False,
    ):
        self._pretrained, self._build, self._segments = pretrained, build, segments
        config = in_rows(config)
        given = {"longest": config.data.max_length, "classes": classes}
        super().__init__(config, tokenizer, mesh, labelled=labelled, **given)
        self._logits = PerExample(lambda model, batch: {"logits": logits(model, batch)})

    def start(self, trainable: Params, frozen: Params) -> Params:
        if not self._pretrained:
            return trainable
        from perception.pretrained import start  # needed only with a pretrained model

        return start(self.config, self._pretrained, trainable)

    def pretrained_weights(self, abstract_model: AbstractModel) -> PretrainedWeights:
        if not self._pretrained:
            return NO_PRETRAINED_WEIGHTS
        from perception.pretrained import pretrained_weights

        return pretrained_weights(self._pretrained, self.mesh)(abstract_model)

    @property
    def select(self) -> str:
        """Name of the split that selects the best step: "valid", or "test" as in the authors' program."""
        return self.config.eval.select

    def tokenize(self, text: LabelledText, longest: int) -> tuple[SegmentedCorpus, int]:
        rows, firsts, cut = self.tokenizer.encode_parts(text.texts, longest)
        corpus = SegmentedCorpus.from_lists(rows, None, self.tokenizer.pad)
        corpus.firsts_E = np.asarray(firsts, np.int32)
        return corpus, cut

    def _labelled(self, batch: Batch, split: str) -> Batch:
        """Adds "firsts" (B,), the number of tokens in the first segment of each row, if the model has segments."""
        found = super()._labelled(batch, split)
        if not self._segments:
            return found
        firsts_B = self._corpora[split].firsts_E[batch["ids"]]
        return {**found, "firsts": np.where(batch["ids"] >= 0, firsts_B, 0).astype(np.int32)}

    @cached_property
    def weights(self) -> np.ndarray | None:
        """Weights of the training labels in the loss (`objective.balanced_weights`), or None for equal weights."""
        labels = self.splits["train"].labels_E
        return objective.balanced_weights(labels) if self.config.data.balance else None

    def training_batch(self, batch: Batch) -> Batch:
        """Adds the weights of the labels to the batch if `config.data.balance` is set."""
        batch = super().training_batch(batch)
        if self.weights is not None:
            batch = {**batch, "weights": self.weights[batch["ids"]]}
        return batch

    def batch_spec(self, multiple: int) -> BatchSpec:
        found, rows = super().batch_spec(multiple), self.config.data.batch
        arrays = dict(found.arrays)
        if self._segments:
            arrays["firsts"] = integers(rows)
        if self.config.data.multi_label:
            arrays["labels"] = integers(rows, self._class_count)
        if self.config.data.balance:
            arrays["weights"] = jax.ShapeDtypeStruct(arrays["labels"].shape, np.float32)
        return found._replace(arrays=arrays)

    def build(self, rngs: nnx.Rngs) -> PooledClassifier:
        return self._build(self._class_count, rngs=rngs)

    def loss(
        self, model: PooledClassifier, batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the sum of `objective.loss` over the examples, and the number of examples.

        The training step divides the first value by the second. The sum of the label weights as second value would
        cancel these weights in a small batch of a single class.
        """
        logits_BC = logits(model, batch, key)
        there_B = batch["ids"] >= 0
        loss_B = objective.loss(logits_BC, batch["labels"], batch.get("weights", 1.0))
        return jnp.sum(loss_B * there_B), jnp.sum(there_B, dtype=jnp.float32)

    def predict(self, values: ModelState, split: str) -> Predictions:
        """Implements `Task.predict`: returns class predictions for every example of a split.

        "valid" means the split `select`, which is "test" if the best step is selected on test examples.

        With several classes per example, thresholds decide which classes are predicted. The thresholds are
        chosen on the validation examples, also for predictions of the split "test".
        """
        split = self.select if split == "valid" else split
        text, logits_EC = self.splits[split], self.logits(values, split)
        if not self.config.data.multi_label:
            logs_EC = np.asarray(jax.nn.log_softmax(logits_EC))
            return Classes.of_log_probabilities(
                text.fingerprint, text.labels_E, logs_EC, self.classes
            )
        from scipy.special import expit

        from common.metrics.label_sets import LabelSets
        from perception.weighted_f1 import choose_thresholds

        valid_EC = logits_EC if split == "valid" else self.logits(values, "valid")
        thresholds = choose_thresholds(self.splits["valid"].labels_E, expit(valid_EC))
        given = text.fingerprint, text.labels_E, logits_EC, thresholds, self.classes
        return LabelSets.of_logits(*given)

    def logits(self, values: ModelState, split: str) -> np.ndarray:
        """Returns the logits of every example of a split, (E, C) float32."""
        return self._logits(values, self.every(split), len(self.splits[split]))["logits"]

    def save(self, workdir: Path) -> None:
        """Writes tokenizer, class names and fingerprints of the examples.

        Raises a UserError if the run has checkpoints, and one of the three has changed since the run started.
        """
        save_tokenizer(self.tokenizer, workdir / TOKENIZER)
        examples = {name: text.fingerprint for name, text in self.splits.items()}
        for name, what, values in (
            (CLASSES, "have other classes than", self.classes),
            (EXAMPLES, "differ from", examples),
        ):
            path, text = workdir / name, json.dumps(values, indent=2) + "\n"
            check(
                not path.exists() or not has_checkpoints(workdir) or path.read_text() == text,
                f"the examples {what} {shown(path)}: the data have changed since the run started; restore the"
                " data, or choose another --workdir",
            )
            path.write_text(text)


def validate(config: ConfigDict) -> None:
    """Raises a UserError if `data.max_length`, `data.batch`, `data.buckets` or `eval.tokens_per_batch` is invalid."""
    check_int("--config.data.max_length", config.data.max_length)
    classification.validate(in_rows(config))
