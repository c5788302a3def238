"""Batches of sentences or sentence pairs of similar length, padded to the length of a bucket.

The bucket determines the shape (B, L) of a batch, so XLA compiles a function once per bucket. Batches are global:
process i of n gets the rows i B / n to (i + 1) B / n - 1, so a run can resume with a different number of processes.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from common.data.batches import Batch, EndlessBatches, check_rows, local_rows
from common.data.corpus import TokenizedCorpus
from common.data.special_ids import BOS, EOS, PAD
from common.errors import check


class BucketedBatches(EndlessBatches):
    """Endless training batches with random access.

    An example is in the shortest bucket that fits its source and its target (if any), each with its end token (if any).
    Each epoch shuffles the examples of every bucket, splits them into batches, and shuffles the batches. The last batch
    of a bucket is padded with empty rows. The seed and the index determine a batch.

    Attributes:
      batches_per_epoch: number of batches of an epoch, equal for all epochs.
      dropped: number of examples that do not fit into the last bucket.
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
    ) -> None:
        """Sorts the examples into buckets.

        Args:
          target: translations of the source sentences. None makes batches without targets.
          buckets: lengths of the buckets, ascending (`check_buckets`), in tokens including the end token.
          tokens_per_batch: maximum number of source tokens of a global batch, including padding; see `rows_of`.
          rows: number of rows of every global batch. 0 lets `rows_of` choose a number for each bucket.
          multiple: divisor of the number of rows of every global batch. The number of processes must divide `multiple`.

        Raises:
          UserError: no example fits into a bucket, or `rows` is neither 0 nor a positive multiple of `multiple`.
        """
        super().__init__()
        self._source, self._target = source, target
        self._buckets = tuple(buckets)
        self._seed = seed
        self._members, rest = _fill_buckets(source, target, self._buckets)
        self.dropped = len(rest)
        check(
            self.dropped < len(source),
            f"all training examples are longer than {buckets[-1]} tokens, the longest of --config.data.buckets: add a"
            f" bucket of at least {_needed(source, target).min()} tokens",
        )
        if rows:
            check_rows(rows, multiple)
        self._rows = [
            rows or rows_of(length, tokens_per_batch, multiple) for length in self._buckets
        ]
        counts = [-(-len(m) // rows) for m, rows in zip(self._members, self._rows, strict=True)]
        self._batches = [(k, i) for k, count in enumerate(counts) for i in range(count)]
        self.batches_per_epoch = len(self._batches)
        # Cache two epochs, because prefetching threads may already read the next epoch.
        self._order = lru_cache(maxsize=2)(self._make_order)

    def __getitem__(self, index: int) -> Batch:
        epoch, position = divmod(index, self.batches_per_epoch)
        order, shuffled = self._order(epoch)
        bucket, i = self._batches[order[position]]
        rows = self._rows[bucket]
        ids = local_rows(shuffled[bucket][i * rows : (i + 1) * rows], rows)
        return _assemble(self._source, self._target, ids, self._buckets[bucket])

    def samples(self) -> Iterator[Batch]:
        """Yields one batch (this process's rows) of each bucket that has examples."""
        for members, rows, length in zip(self._members, self._rows, self._buckets, strict=True):
            if len(members):
                ids = local_rows(members[:rows], rows)
                yield _assemble(self._source, self._target, ids, length)

    def _make_order(self, epoch: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """Returns the order of an epoch's batches, and the shuffled example indices of each bucket."""
        generator = np.random.default_rng((self._seed, epoch))
        shuffled = [generator.permutation(members) for members in self._members]
        return generator.permutation(self.batches_per_epoch), shuffled


def evaluation_batches(
    source: TokenizedCorpus,
    target: TokenizedCorpus | None,
    *,
    buckets: Sequence[int],
    tokens_per_batch: int,
    multiple: int = 1,
) -> Iterator[Batch]:
    """Yields this process's rows of batches that together contain every example once, in a fixed order.

    Examples that are too long for `buckets` get additional buckets, each twice as long as the previous bucket.
    `BucketedBatches` documents the arguments. If `target` is None, the batches have no targets.
    """
    lengths = list(buckets)
    while lengths[-1] < _needed(source, target).max(initial=0):
        lengths.append(2 * lengths[-1])
    members, _ = _fill_buckets(source, target, lengths)
    for length, examples in zip(lengths, members, strict=True):
        size = rows_of(length, tokens_per_batch, multiple)
        for start in range(0, len(examples), size):
            ids = local_rows(examples[start : start + size], size)
            yield _assemble(source, target, ids, length)


def check_buckets(option: str, buckets: Sequence[int]) -> None:
    """Raises a UserError that names `option` unless `buckets` has one or more positive lengths, strictly ascending."""
    check(
        bool(buckets) and min(buckets) > 0 and list(buckets) == sorted(set(buckets)),
        f"{option} must be one or more lengths above 0 in strictly ascending order, got"
        f" {','.join(map(str, buckets)) or 'none'}",
    )


def _needed(source: TokenizedCorpus, target: TokenizedCorpus | None) -> np.ndarray:
    """Returns the number of tokens that a bucket needs for each example, (examples,)."""
    return source.needed if target is None else np.maximum(source.needed, target.needed)


def _fill_buckets(
    source: TokenizedCorpus, target: TokenizedCorpus | None, buckets: Sequence[int]
) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns the example indices of each bucket, ascending, and the indices of examples that fit into no bucket."""
    bucket = np.searchsorted(buckets, _needed(source, target))
    order = np.argsort(bucket, kind="stable").astype(np.int32)
    *members, rest = np.split(order, np.searchsorted(bucket[order], np.arange(1, len(buckets) + 1)))
    return members, rest


def rows_of(length: int, tokens_per_batch: int, multiple: int) -> int:
    """Returns the number of rows of a global batch whose rows have `length` tokens.

    This is the largest multiple of `multiple` that gives at most `tokens_per_batch` tokens, but at least `multiple`.
    """
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
    """Returns the sentences `ids`, each with its end token and padding, (B, length). The row of an id -1 is all 0."""
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
