"""Batches of sentence pairs of like length, in fixed shapes.

A batch has one length L and B rows, both given by its bucket, so that XLA compiles once for each
bucket. Batches are global: process p of P gets the rows from p*B/P to (p+1)*B/P of the batch that
one process alone would get, and a run can go on with another number of processes.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import grain
import numpy as np

from common.data.corpus import TokenizedCorpus
from common.data.tokenizer import BOS, EOS, PAD
from common.errors import UserError

Batch = dict[str, np.ndarray]
"""int32 arrays, 0 being the padding:

source: (B, L) ids and end of sentence.
target_inputs: (B, L) begin of sentence and ids.
target_outputs: (B, L) ids and end of sentence.
ids: (B,) indices of the examples, -1 in empty rows, whose other arrays are 0.
"""


class BucketedBatches(grain.MapDataset):
    """Training batches: an endless sequence of epochs with random access.

    An example is in the first bucket whose length holds its longer side and the end of sentence.
    In each epoch every bucket is shuffled and cut into full batches, the last one filled up with
    empty rows; then the batches are shuffled. The seed, the epoch and the position give a batch,
    so its index is all there is to save.

    Attributes:
        batches_per_epoch: batches in one epoch, the same for all epochs.
        dropped: examples that are longer than the last bucket and are in no batch.
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
            target: their translations; None leaves them out of the batches.
            buckets: lengths of the buckets, ascending, in tokens with the end of sentence.
            tokens_per_batch: rows times length of a global batch is at most this, but a batch has
                at least `multiple` rows.
            rows: of every global batch; 0 is as many as `tokens_per_batch` holds.
            multiple: divides the number of rows of every global batch.
            seed: of the order of the examples.
            epochs: how many there are; None is without end.
            process_index: of this process, from 0.
            process_count: number of processes; it must divide `multiple`.

        Raises:
            UserError: no example fits in a bucket, or `multiple` does not divide `rows`.
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
                f"none of the {len(source)} training examples fits in the last bucket "
                f"({buckets[-1]} tokens)"
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
        # Two, as threads that read ahead may be on both sides of the border of an epoch.
        self._plan = lru_cache(maxsize=2)(self._make_plan)

    def __len__(self) -> int:
        """Number of batches; the greatest index there is if there are endless epochs."""
        return ENDLESS if self._epochs is None else self._epochs * self.batches_per_epoch

    def __getitem__(self, index: int | slice) -> Any:
        """The part of global batch `index` that belongs to this process."""
        if isinstance(index, slice):
            return self.slice(index)
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        epoch, position = divmod(index, self.batches_per_epoch)
        order, shuffled = self._plan(epoch)
        bucket, i = self._batches[order[position]]
        rows = self._rows[bucket]
        ids = local_rows(shuffled[bucket][i * rows : (i + 1) * rows], rows, *self._process)
        return _assemble(self._source, self._target, ids, self._buckets[bucket])

    def _make_plan(self, epoch: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """The order of the batches and of the examples in each bucket."""
        generator = np.random.default_rng((self._seed, epoch))
        shuffled = [generator.permutation(members) for members in self._members]
        return generator.permutation(self.batches_per_epoch), shuffled


ENDLESS = 2**62


def iterate(
    batches: BucketedBatches,
    start: dict[str, int] | None = None,
    *,
    threads: int = 2,
    prefetch: int = 16,
) -> Iterator[tuple[Batch, dict[str, int]]]:
    """Reads batches in order, ahead of their use.

    Args:
        batches: what to read.
        start: a state from an earlier iteration, with any number of processes, to go on after the
            batch that came with it; None starts at the beginning.
        threads: threads that assemble batches.
        prefetch: batches assembled ahead.

    Yields:
        A batch and the state after it, a small dict of numbers for JSON.
    """
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=prefetch)
    iterator = iter(batches.to_iter_dataset(options))
    try:
        if start is not None:
            iterator.set_state(start)
        for batch in iterator:
            yield batch, iterator.get_state()
    finally:
        iterator.close()


class EvaluationBatches(Sequence[Batch]):
    """Every example once, bucket by bucket. See `evaluation_batches`."""

    def __init__(
        self,
        source: TokenizedCorpus,
        target: TokenizedCorpus | None,
        batches: list[tuple[int, np.ndarray]],
    ) -> None:
        """Takes the length and the example indices of each batch."""
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
    """Batches with every example exactly once, in fixed order and the shapes of training.

    Nothing is dropped: beyond the last bucket there are others, each twice as long as the one
    before it.

    Args:
        source: the source sentences.
        target: their translations; None for text to translate, whose batches have only `source`
            and `ids`.
        buckets: as in `BucketedBatches`.
        tokens_per_batch: as in `BucketedBatches`.
        rows: of every global batch, at most, but for `multiple`; 0 is as in `BucketedBatches`.
        multiple: as in `BucketedBatches`.
        process_index: as in `BucketedBatches`.
        process_count: as in `BucketedBatches`.
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
        raise ValueError(f"{len(source)} source but {len(target)} target sentences")
    if not buckets or buckets[0] < 1 or list(buckets) != sorted(set(buckets)):
        raise UserError(f"data.buckets must be ascending positive lengths, not {tuple(buckets)}")
    if multiple % process_count:
        raise ValueError(f"{process_count} processes cannot share batches of {multiple} rows")


def _fill_buckets(
    source: TokenizedCorpus, target: TokenizedCorpus | None, buckets: Sequence[int]
) -> tuple[list[np.ndarray], np.ndarray]:
    """Indices of the examples in each bucket, ascending, and of those that fit in none."""
    longer = source.needed if target is None else np.maximum(source.needed, target.needed)
    bucket = np.searchsorted(buckets, longer)
    order = np.argsort(bucket, kind="stable").astype(np.int32)
    *members, rest = np.split(order, np.searchsorted(bucket[order], np.arange(1, len(buckets) + 1)))
    return members, rest


def rows_of(length: int, tokens_per_batch: int, multiple: int) -> int:
    """Rows of a global batch: as many of `multiple` as the tokens allow, and at least that many."""
    return max(multiple, tokens_per_batch // length // multiple * multiple)


def check_rows(rows: int, multiple: int) -> None:
    """`multiple` has to divide the rows of a global batch.

    Raises:
        UserError: it does not.
    """
    if rows < 1 or rows % multiple:
        raise UserError(
            f"a batch of {rows} examples cannot be shared by {multiple} devices and microbatches"
        )


def local_rows(ids: np.ndarray, rows: int, index: int, count: int) -> np.ndarray:
    """This process's share of a batch: ids filled up with -1 to `rows`, then cut, (rows/count,)."""
    full = np.full(rows, -1, np.int32)
    full[: len(ids)] = ids
    return full[index * rows // count : (index + 1) * rows // count]


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
    """Sentences and their ends in the rows of a matrix, (B, length); empty rows are 0."""
    starts = corpus.offsets[ids][:, None]
    lengths = np.where(ids >= 0, corpus.lengths[ids], 0)[:, None]
    positions = np.arange(length)
    inside = positions < lengths
    there = (ids >= 0)[:, None]
    padded = np.where(there, np.int32(corpus.pad), np.int32(0)).repeat(length, axis=1)
    padded[inside] = corpus.tokens[(starts + positions)[inside]]
    if corpus.end is not None:
        padded[(positions == lengths) & there] = corpus.end
    return padded
