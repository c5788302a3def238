"""Length-bucketed batches of sentence pairs in fixed shapes.

The bucket determines the shape (B, L) of a batch, so XLA compiles once per bucket. Batches are global: process i of n
gets the rows from i B / n to (i + 1) B / n, so a run can resume with a different number of processes.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import grain
import numpy as np

from common.data.batches import ENDLESS, Batch, check_rows, local_rows
from common.data.corpus import TokenizedCorpus
from common.data.tokenizer import BOS, EOS, PAD
from common.errors import UserError


class BucketedBatches(grain.MapDataset):
    """Training batches with random access.

    An example is in the first bucket that fits its longer side with the end of sentence. In each epoch every bucket is
    shuffled and cut into batches, the last batch padded with empty rows; then the batches are shuffled. A batch is a
    function of the seed and its index, so a checkpoint only stores the index.

    Attributes:
        batches_per_epoch: batches per epoch, equal for all epochs.
        dropped: number of examples that are longer than the last bucket.
    """

    def __init__(
        self,
        source: TokenizedCorpus,
        target: TokenizedCorpus | None,
        *,
        buckets: Sequence[int],
        tokens_per_batch: int = 0,
        rows: int = 0,
        multiple: int = 1,
        seed: int = 0,
        epochs: int | None = None,
        process_index: int = 0,
        process_count: int = 1,
    ) -> None:
        """Sorts the examples into buckets.

        Args:
            source: the source sentences.
            target: their translations; None for batches without targets.
            buckets: lengths of the buckets, ascending, in tokens including the end of sentence.
            tokens_per_batch: maximum of rows times length of a global batch, which has at least `multiple` rows.
            rows: rows of every global batch; 0 for the maximum by `tokens_per_batch`.
            multiple: divides the number of rows of every global batch.
            seed: of the order of the examples.
            epochs: number of epochs; None for endless epochs.
            process_index: of this process, from 0.
            process_count: number of processes; must divide `multiple`.

        Raises:
            UserError: no example fits into a bucket, or `multiple` does not divide `rows`.
        """
        super().__init__()
        _check(source, target, buckets, multiple, process_count)
        self._source, self._target = source, target
        self._buckets = tuple(buckets)
        self._seed, self._epochs = seed, epochs
        self._process = (process_index, process_count)
        members, rest = _fill_buckets(source, target, self._buckets)
        self.dropped = len(rest)
        if self.dropped == len(source):
            raise UserError(
                f"none of the {len(source)} training examples fits into the last bucket of --config.data.buckets"
                f" ({buckets[-1]} tokens)"
            )
        self._members = members
        if rows:
            check_rows(rows, multiple)
        self._rows = [
            rows or rows_of(length, tokens_per_batch, multiple) for length in self._buckets
        ]
        counts = [-(-len(m) // rows) for m, rows in zip(members, self._rows, strict=True)]
        self._batches = [(k, i) for k, count in enumerate(counts) for i in range(count)]
        self.batches_per_epoch = len(self._batches)
        # Two epochs: prefetching threads may already read the next epoch.
        self._order = lru_cache(maxsize=2)(self._make_order)

    def __len__(self) -> int:
        """Returns the number of batches, ENDLESS for endless epochs."""
        return ENDLESS if self._epochs is None else self._epochs * self.batches_per_epoch

    def __getitem__(self, index: int | slice) -> Any:
        """Returns this process's rows of global batch `index`."""
        if isinstance(index, slice):
            return self.slice(index)
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        epoch, position = divmod(index, self.batches_per_epoch)
        order, shuffled = self._order(epoch)
        bucket, i = self._batches[order[position]]
        rows = self._rows[bucket]
        ids = local_rows(shuffled[bucket][i * rows : (i + 1) * rows], rows, *self._process)
        return _assemble(self._source, self._target, ids, self._buckets[bucket])

    def _make_order(self, epoch: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """Returns the order of the batches, and of the examples in each bucket."""
        generator = np.random.default_rng((self._seed, epoch))
        shuffled = [generator.permutation(members) for members in self._members]
        return generator.permutation(self.batches_per_epoch), shuffled


class EvaluationBatches(Sequence[Batch]):
    """Batches with every example once, bucket by bucket; see `evaluation_batches`."""

    def __init__(
        self,
        source: TokenizedCorpus,
        target: TokenizedCorpus | None,
        batches: list[tuple[int, np.ndarray]],
    ) -> None:
        """`batches` are pairs of bucket length and example indices."""
        self._source, self._target, self._batches = source, target, batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Batch:
        length, ids = self._batches[index]
        return _assemble(self._source, self._target, ids, length)


def evaluation_batches(
    source: TokenizedCorpus,
    target: TokenizedCorpus | None,
    *,
    buckets: Sequence[int],
    tokens_per_batch: int = 0,
    rows: int = 0,
    multiple: int = 1,
    process_index: int = 0,
    process_count: int = 1,
) -> EvaluationBatches:
    """Returns batches with every example exactly once, in fixed order and in the shapes of training.

    No example is dropped: further buckets follow the last bucket, each twice as long as the previous one.

    Args:
        target: None for text to translate, whose batches only have `source` and `ids`.
        rows: maximum rows of a global batch, but at least `multiple`; 0 for the maximum by `tokens_per_batch`.

    Other arguments are as in `BucketedBatches`.
    """
    _check(source, target, buckets, multiple, process_count)
    lengths = list(buckets)
    while len(_fill_buckets(source, target, lengths)[1]):
        lengths.append(2 * lengths[-1])
    members, _ = _fill_buckets(source, target, lengths)
    batches = []
    for length, examples in zip(lengths, members, strict=True):
        size = rows_of(length, rows * length or tokens_per_batch, multiple)
        for start in range(0, len(examples), size):
            ids = examples[start : start + size]
            batches.append((length, local_rows(ids, size, process_index, process_count)))
    return EvaluationBatches(source, target, batches)


def _check(
    source: TokenizedCorpus,
    target: TokenizedCorpus | None,
    buckets: Sequence[int],
    multiple: int,
    process_count: int,
) -> None:
    if target is not None and len(source) != len(target):
        raise ValueError(f"{len(source)} source sentences but {len(target)} target sentences")
    if not buckets or buckets[0] < 1 or list(buckets) != sorted(set(buckets)):
        raise UserError(
            f"--config.data.buckets must be ascending positive lengths, not {tuple(buckets)}"
        )
    if multiple % process_count:
        raise ValueError(f"{process_count} processes cannot share batches of {multiple} rows")


def _fill_buckets(
    source: TokenizedCorpus, target: TokenizedCorpus | None, buckets: Sequence[int]
) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns the sorted indices of the examples of each bucket, and of the examples that fit into no bucket."""
    longer = source.needed if target is None else np.maximum(source.needed, target.needed)
    bucket = np.searchsorted(buckets, longer)
    order = np.argsort(bucket, kind="stable").astype(np.int32)
    *members, rest = np.split(order, np.searchsorted(bucket[order], np.arange(1, len(buckets) + 1)))
    return members, rest


def rows_of(length: int, tokens_per_batch: int, multiple: int) -> int:
    """Returns the rows of a global batch: the largest multiple of `multiple` by tokens, at least `multiple`."""
    return max(multiple, tokens_per_batch // length // multiple * multiple)


def _assemble(
    source: TokenizedCorpus, target: TokenizedCorpus | None, ids: np.ndarray, length: int
) -> Batch:
    batch = {"source": _pad(source, ids, length), "ids": ids}
    if target is not None:
        outputs = _pad(target, ids, length)
        inputs = np.zeros_like(outputs)
        inputs[:, 1:] = outputs[:, :-1]
        inputs[inputs == EOS] = PAD
        inputs[ids >= 0, 0] = BOS
        batch |= {"target_inputs": inputs, "target_outputs": outputs}
    return batch


def _pad(corpus: TokenizedCorpus, ids: np.ndarray, length: int) -> np.ndarray:
    """Returns sentences with their ends as rows (B, length); empty rows are 0."""
    starts = corpus.offsets[ids][:, None]
    lengths = np.where(ids >= 0, corpus.lengths[ids], 0)[:, None]
    positions = np.arange(length)
    inside = positions < lengths
    nonempty = (ids >= 0)[:, None]
    padded = np.where(nonempty, np.int32(corpus.pad), np.int32(0)).repeat(length, axis=1)
    padded[inside] = corpus.tokens[(starts + positions)[inside]]
    if corpus.end is not None:
        padded[(positions == lengths) & nonempty] = corpus.end
    return padded
