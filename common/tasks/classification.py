"""Classification of texts and of pairs of texts.

B batch, L length, M examples, N classes.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common import sharding
from common.config import check
from common.data.batching import BucketedBatches, check_rows, evaluation_batches, iterate
from common.data.corpus import TokenizedCorpus
from common.data.labelled import LabelledText, load_labelled
from common.data.subword import Subword
from common.data.tokenizer import BOS, EOS, PAD, Tokenizer
from common.metrics.predictions import Classes
from common.model.classifier import Classifier
from common.model.loss import cross_entropy
from common.runtime.processes import is_main
from common.train.evaluate import PerExample
from common.train.task import Batch, ModelState, Task, TaskSpec, integers
from common.train.workdir import save_tokenizer
from common.variables import Params

# (number of classes, rngs=) -> model
Build = Callable[..., Classifier]

TOKENIZER = "tokenizer.npz"
PAIR_TOKENS = 4
"""Special tokens of a pair: one before, two between, one behind."""


def validate(config: ConfigDict) -> None:
    """The fields of the data and of the evaluation."""
    data = config.data
    check(data.batch >= 1, f"--config.data.batch must be at least 1, got {data.batch}")
    check(
        bool(data.buckets)
        and min(data.buckets) > 0
        and list(data.buckets) == sorted(set(data.buckets)),
        f"--config.data.buckets must be ascending lengths, got {data.buckets}",
    )
    tokens = config.eval.tokens_per_batch
    check(tokens >= 1, f"--config.eval.tokens_per_batch must be at least 1, got {tokens}")


def sequence(parts: Sequence[Sequence[int]], longest: int) -> tuple[list[int], bool]:
    """One or two texts as `<s> a` or `<s> a </s></s> b`, the last `</s>` left to the batch; and whether one was cut.

    Of a pair the longer text is cut until both fit.
    """
    if len(parts) == 1:
        room = longest - 2
        return [BOS, *parts[0][:room]], len(parts[0]) > room
    (a, b), room = map(len, parts), longest - PAIR_TOKENS
    first = min(a, max(room - b, -(-room // 2)))
    second = min(b, room - first)
    return [BOS, *parts[0][:first], EOS, EOS, *parts[1][:second]], a + b > room


class Objective(Task):
    """A classifier of texts and its loss, without data.

    Args:
      classes: their number.
    """

    objective, mode, unit = "accuracy", "max", "examples"

    def __init__(self, config: ConfigDict, build: Build, classes: int):
        self.config, self._build, self._classes = config, build, classes

    def sketch(self, length: int, multiple: int) -> TaskSpec:
        """With rows of this length; `multiple` divides their number."""
        rows = self.config.data.batch
        check_rows(rows, multiple)
        each = dict.fromkeys(("lengths", "ids", "labels"), integers(rows))
        batch = {"tokens": integers(rows, length), **each}
        return TaskSpec(self.config, self, batch, rows * length)

    def build(self, rngs: nnx.Rngs) -> Classifier:
        return self._build(self._classes, rngs=rngs)

    def loss(
        self, model: Classifier, batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        logits_BN = model(batch["tokens"], batch["lengths"], key)
        loss_B = cross_entropy(logits_BN, batch["labels"]) * (batch["ids"] >= 0)
        return jnp.sum(loss_B), jnp.sum(batch["ids"] >= 0, dtype=jnp.float32)


def _log_probabilities(model: Classifier, batch: Batch) -> dict[str, jax.Array]:
    logits_BN = model(batch["tokens"], batch["lengths"])
    return {"logs": jax.nn.log_softmax(logits_BN.astype(jnp.float32))}


class Classification(Objective):
    """The task that the training loop sees. Rows begin and end with marks, as RoBERTa's do.

    A task of rows that a tokenizer of another kind makes has `rows`, `marks` and `save` of its own.

    Args:
      tokenizer: kept with the run.
      longest: L, the most tokens that the model reads; texts that have more are cut.
      start: as `Task.start`.
      labelled: splits and names of the classes, where they have been read already.
    """

    def __init__(
        self,
        config: ConfigDict,
        tokenizer: Tokenizer | Subword,
        build: Build,
        mesh: Mesh,
        *,
        longest: int,
        start: Callable[[Params], Params] = lambda trainable: trainable,
        labelled: tuple[dict[str, LabelledText], tuple[str, ...]] | None = None,
    ):
        """Reads and tokenizes the data.

        Raises:
          UserError: the configuration or the data are at fault.
        """
        validate(config)
        self.splits, self.classes = labelled or load_labelled(config.data)
        super().__init__(config, build, len(self.classes))
        self.mesh, self.tokenizer = mesh, tokenizer
        self.start, self._longest = start, longest
        self._cut = 0
        self._corpora = {split: self._tokenize(text) for split, text in self.splits.items()}
        if self._cut and is_main():
            total = sum(len(text) for text in self.splits.values())
            print(f"{self._cut:,} of {total:,} examples are longer than {longest} tokens, and cut")
        buckets = config.data.buckets
        self._buckets = (*(length for length in buckets if length < longest), longest)
        self.multiple = sharding.num_batch_shards(mesh) * config.train.accumulate
        self.training_batches = BucketedBatches(
            self._corpora["train"],
            None,
            buckets=self._buckets,
            rows=config.data.batch,
            multiple=self.multiple,
            seed=config.seed,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
        )
        self._log_probabilities = PerExample(_log_probabilities, mesh)

    def rows(self, texts: Sequence[tuple[str, ...]], longest: int) -> tuple[list[list[int]], int]:
        """The ids of every example, at most `longest` with what `marks` adds; and how many were cut."""
        parts = [self.tokenizer.encode(side) for side in zip(*texts, strict=True)]
        found = [sequence(one, longest) for one in zip(*parts, strict=True)]
        return [tokens for tokens, _ in found], sum(cut for _, cut in found)

    @property
    def marks(self) -> tuple[int | None, int]:
        """What ends a row, if anything does, and what fills it up."""
        return EOS, PAD

    def _tokenize(self, text: LabelledText) -> TokenizedCorpus:
        found, cut = self.rows(text.texts, self._longest)
        self._cut += cut
        return TokenizedCorpus.from_lists(found, *self.marks)

    def _labelled(self, batch: Batch, split: str) -> Batch:
        """tokens (B, L), ids (B,), which are -1 in empty rows, lengths (B,), which are 0 there, and labels (B,)."""
        ids_B = batch["ids"]
        lengths_B = np.where(ids_B >= 0, self._corpora[split].needed[ids_B], 0).astype(np.int32)
        labels_B = self.splits[split].labels_M[ids_B]
        return {
            "tokens": batch["source"],
            "lengths": lengths_B,
            "ids": ids_B,
            "labels": labels_B,
        }

    @property
    def batches_per_epoch(self) -> float:
        return self.training_batches.batches_per_epoch

    def batches(self, start: dict | None) -> Iterator[tuple[Batch, dict]]:
        for batch, position in iterate(self.training_batches, start):
            yield self._labelled(batch, "train"), position

    def every(self, split: str) -> Iterator[Batch]:
        """Batches with every example of a split once."""
        batches = evaluation_batches(
            self._corpora[split],
            None,
            buckets=self._buckets,
            tokens_per_batch=self.config.eval.tokens_per_batch,
            multiple=self.multiple,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
        )
        return (self._labelled(batch, split) for batch in batches)

    def predict(self, values: ModelState, split: str) -> Classes:
        """Probabilities of the classes for every example of a split."""
        text = self.splits[split]
        logs_MN = self._log_probabilities(values, self.every(split), len(text))["logs"]
        return Classes.of_log_probabilities(text.fingerprint, text.labels_M, logs_MN, self.classes)

    def save(self, workdir: Path) -> None:
        """The tokenizer; that of a run that goes on is not replaced."""
        save_tokenizer(self.tokenizer, workdir / TOKENIZER)
