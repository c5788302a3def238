"""Windows of one long token sequence: random crops for training, and strided windows that score every token once."""

from collections.abc import Iterator
from typing import Any

import grain
import jax
import numpy as np

from common.data.batches import ENDLESS, Batch, check_rows, local_rows
from common.errors import UserError


class Crops(grain.MapDataset):
    """Endless batches of random crops with random access: a batch is a function of the seed and its index."""

    def __init__(
        self, tokens: np.ndarray, length: int, rows: int, *, multiple: int = 1, seed: int = 0
    ) -> None:
        """Makes crops of the token ids `tokens`.

        Args:
            length: window length L; a crop has L + 1 tokens, for inputs and targets.
            rows: rows of a global batch.
            multiple: must divide `rows`.

        Raises:
            UserError: the sequence is too short, or `multiple` does not divide `rows`.
        """
        super().__init__()
        if len(tokens) <= length:
            raise UserError(
                f"the training text has {len(tokens)} tokens, but a window of {length} needs at least {length + 1}"
            )
        check_rows(rows, multiple)
        self._tokens, self._length, self._rows, self._seed = tokens, length, rows, seed

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int | slice) -> Any:
        """Returns this process's rows of global batch `index`."""
        if isinstance(index, slice):
            return self.slice(index)
        generator = np.random.default_rng((self._seed, index))
        starts = generator.integers(0, len(self._tokens) - self._length, self._rows)
        starts = local_rows(starts, self._rows, jax.process_index(), jax.process_count())
        return crop(self._tokens, starts, self._length)


def crop(tokens: np.ndarray, starts_B: np.ndarray, length: int) -> Batch:
    """Returns tokens (B, L), targets (B, L), the next tokens, and weights (B, L), 0 after the end of the sequence."""
    at_BL = starts_B[:, None] + np.arange(length + 1)
    inside_BL = at_BL < len(tokens)
    found_BL = tokens[np.minimum(at_BL, len(tokens) - 1)].astype(np.int32)
    return {
        "tokens": found_BL[:, :-1],
        "targets": found_BL[:, 1:],
        "weights": inside_BL[:, 1:].astype(np.float32),
    }


def scored_once(
    tokens: np.ndarray, length: int, stride: int, rows: int, *, multiple: int = 1
) -> Iterator[Batch]:
    """Yields batches in which every token but the first has weight 1 exactly once.

    Window i scores tokens i * stride + 1 to (i + 1) * stride. Each has length - stride + 1 to length tokens of context,
    fewer at the start of the sequence. `ids` are the indices of the windows, -1 for empty rows.
    """
    rows = -(-rows // multiple) * multiple
    count = -(-(len(tokens) - 1) // stride)
    for first in range(0, count, rows):
        numbers = np.arange(first, first + rows)
        numbers = local_rows(numbers, rows, jax.process_index(), jax.process_count())
        starts = np.maximum((numbers + 1) * stride - length, 0)
        batch = crop(tokens, starts, length)
        places = starts[:, None] + 1 + np.arange(length)
        own = (places > (numbers * stride)[:, None]) & (places <= ((numbers + 1) * stride)[:, None])
        ids = np.where(numbers < count, numbers, -1).astype(np.int32)
        yield {**batch, "ids": ids, "weights": batch["weights"] * own}
