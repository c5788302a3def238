"""One long sequence of tokens as training crops at random places and as windows that score every token once.

L length of a window, S stride, n tokens.
"""

from collections.abc import Iterator
from typing import Any

import grain
import jax
import numpy as np

from common.data.batching import ENDLESS, Batch, local_rows
from common.errors import UserError


class Crops(grain.MapDataset):
    """Batches of crops at random places, without end and with random access: seed and number give a batch."""

    def __init__(
        self, tokens_n: np.ndarray, length: int, rows: int, *, multiple: int = 1, seed: int = 0
    ) -> None:
        """Takes the sequence.

        Args:
            length: L; a crop has L + 1 tokens, inputs and targets.
            rows: of a global batch.
            multiple: has to divide `rows`.

        Raises:
            UserError: the sequence is too short, or `multiple` does not divide `rows`.
        """
        super().__init__()
        if len(tokens_n) <= length:
            raise UserError(
                f"the training text has {len(tokens_n)} tokens, a window of {length} needs more"
            )
        if rows < 1 or rows % multiple:
            raise UserError(
                f"a batch of {rows} windows cannot be shared by {multiple} devices and microbatches"
            )
        self._tokens, self._length, self._rows, self._seed = tokens_n, length, rows, seed

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int | slice) -> Any:
        """The part of global batch `index` that belongs to this process."""
        if isinstance(index, slice):
            return self.slice(index)
        generator = np.random.default_rng((self._seed, index))
        starts = generator.integers(0, len(self._tokens) - self._length, self._rows)
        starts = local_rows(starts, self._rows, jax.process_index(), jax.process_count())
        return crop(self._tokens, starts, self._length)


def crop(tokens_n: np.ndarray, starts_B: np.ndarray, length: int) -> Batch:
    """tokens (B, L) and targets (B, L), the token after each; weights (B, L) 1, and 0 behind the end."""
    at_BL = starts_B[:, None] + np.arange(length + 1)
    inside_BL = at_BL < len(tokens_n)
    found_BL = tokens_n[np.minimum(at_BL, len(tokens_n) - 1)].astype(np.int32)
    return {
        "tokens": found_BL[:, :-1],
        "targets": found_BL[:, 1:],
        "weights": inside_BL[:, 1:].astype(np.float32),
    }


def scored_once(
    tokens_n: np.ndarray, length: int, stride: int, rows: int, *, multiple: int = 1
) -> Iterator[Batch]:
    """Batches in which every token but the first has weight 1 exactly once; `ids` number the windows, -1 is none.

    Window k scores tokens k S + 1 to (k + 1) S, each with L - S + 1 to L tokens of context, or all there are at the
    beginning.
    """
    rows = -(-rows // multiple) * multiple
    count = -(-(len(tokens_n) - 1) // stride)
    for first in range(0, count, rows):
        numbers = np.arange(first, first + rows)
        numbers = local_rows(numbers, rows, jax.process_index(), jax.process_count())
        starts = np.maximum((numbers + 1) * stride - length, 0)
        batch = crop(tokens_n, starts, length)
        places = starts[:, None] + 1 + np.arange(length)
        own = (places > (numbers * stride)[:, None]) & (places <= ((numbers + 1) * stride)[:, None])
        ids = np.where(numbers < count, numbers, -1).astype(np.int32)
        yield {**batch, "ids": ids, "weights": batch["weights"] * own}
