"""Classification of texts and pairs of texts."""

from collections.abc import Iterator

import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common import sharding
from common.config import check_least
from common.data.batches import check_rows, iterate
from common.data.buckets import BucketedBatches, check_buckets, evaluation_batches
from common.data.corpus import TokenizedCorpus
from common.data.labelled import LabelledText
from common.runtime.processes import is_main
from common.train.saved_tokenizer import SavedTokenizer
from common.train.task import Batch, BatchSpec, Task, integers


def validate(config: ConfigDict) -> None:
    """Raises a UserError for an invalid value of `data.batch`, `data.buckets` or `eval.tokens_per_batch`."""
    check_least(config, ("data.batch", "eval.tokens_per_batch"))
    check_buckets("--config.data.buckets", config.data.buckets)


class Classification(Task):
    """Texts, labels and batches of a classifier.

    Subclasses set `objective`, and implement `build`, `tokenize`, `loss`, and `predict` or `evaluate`.

    Args:
      tokenizer: tokenizer of the texts; None is allowed if `labelled` is None.
      longest: maximum number of tokens L of the model's input. Longer texts are truncated.
      labelled: the splits and class names; None to compile the training step without data.
      classes: number of classes; used only if `labelled` is None.

    Raises:
      UserError: the configuration or the data are invalid.
    """

    mode, unit = "max", "examples"

    def __init__(
        self,
        config: ConfigDict,
        tokenizer: SavedTokenizer | None,
        mesh: Mesh,
        *,
        longest: int,
        labelled: tuple[dict[str, LabelledText], tuple[str, ...]] | None = None,
        classes: int = 0,
    ):
        validate(config)
        self.config, self.mesh = config, mesh
        self.tokenizer, self._longest = tokenizer, longest
        self.multiple = sharding.num_batch_shards(mesh) * config.train.accumulate
        self._class_count = classes
        if not labelled:
            return
        self.splits, self.classes = labelled
        self._class_count = len(self.classes)
        tokenized = {split: self.tokenize(text, longest) for split, text in self.splits.items()}
        self._corpora = {split: corpus for split, (corpus, _) in tokenized.items()}
        cut, total = sum(cut for _, cut in tokenized.values()), sum(map(len, self.splits.values()))
        if cut and is_main():
            print(f"{cut:,} of {total:,} examples are truncated to {longest} tokens")
        buckets = config.data.buckets
        self._buckets = (*(length for length in buckets if length < longest), longest)
        self.training_batches = BucketedBatches(
            self._corpora["train"],
            None,
            buckets=self._buckets,
            rows=config.data.batch,
            multiple=self.multiple,
            seed=config.seed,
        )

    def batch_spec(self, multiple: int) -> BatchSpec:
        rows = self.config.data.batch
        check_rows(rows, multiple)
        each = dict.fromkeys(("lengths", "ids", "labels"), integers(rows))
        arrays = {"tokens": integers(rows, self._longest), **each}
        return BatchSpec(arrays, rows * self._longest)

    def tokenize(self, text: LabelledText, longest: int) -> tuple[TokenizedCorpus, int]:
        """Returns the token ids of every example, and the number of truncated examples.

        An example has at most `longest` tokens, including the end token if batches append one.
        """
        raise NotImplementedError

    def _labelled(self, batch: Batch, split: str) -> Batch:
        """Returns a batch with `tokens` (B, L), `lengths` and `ids`, each (B,), and `labels`.

        The labels are (B,), or (B, C) if an example may have several classes. Padding rows have id -1 and length 0.
        """
        ids_B = batch["ids"]
        lengths_B = np.where(ids_B >= 0, self._corpora[split].needed[ids_B], 0).astype(np.int32)
        labels_B = self.splits[split].labels_E[ids_B]
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
            yield self.training_batch(batch), position

    def batch_samples(self) -> Iterator[Batch]:
        return map(self.training_batch, self.training_batches.samples())

    def training_batch(self, batch: Batch) -> Batch:
        """Converts a batch of `BucketedBatches` to the arrays that `loss` needs."""
        return self._labelled(batch, "train")

    def every(self, split: str) -> Iterator[Batch]:
        """Returns this process's rows of batches that together contain every example of a split once."""
        batches = evaluation_batches(
            self._corpora[split],
            None,
            buckets=self._buckets,
            tokens_per_batch=self.config.eval.tokens_per_batch,
            multiple=self.multiple,
        )
        return (self._labelled(batch, split) for batch in batches)

    def fingerprints(self) -> dict[str, str]:
        splits = {f"the {split} split": text.fingerprint for split, text in self.splits.items()}
        return splits | {"the tokenizer": self.tokenizer.fingerprint}
