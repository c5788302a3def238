"""Windows of one long token sequence: random crops for training, strided windows for evaluation."""

from collections.abc import Iterator

import numpy as np

from common.data.batches import Batch, EndlessBatches, check_rows, in_order, local_rows
from common.errors import UserError


class Crops(EndlessBatches):
    """Endless batches of random crops, with random access. The seed and the index determine a batch."""

    def __init__(
        self, tokens: np.ndarray, length: int, rows: int, *, multiple: int = 1, seed: int = 0
    ) -> None:
        """Makes crops of the token ids `tokens`.

        Args:
          length: window length L. A crop has L + 1 tokens, because targets are shifted by one.
          rows: number of rows of a global batch, a multiple of `multiple`.

        Raises:
          UserError: there are fewer than L + 1 tokens, or `rows` is not a positive multiple of `multiple`.
        """
        super().__init__()
        if len(tokens) <= length:
            raise UserError(
                f"--config.model.length={length} needs a training text of at least {length + 1} tokens, but the text"
                f" has only {len(tokens)}: use a longer text or a smaller --config.model.length"
            )
        check_rows(rows, multiple)
        self._tokens, self._length, self._rows, self._seed = tokens, length, rows, seed

    def __getitem__(self, index: int) -> Batch:
        generator = np.random.default_rng((self._seed, index))
        starts = generator.integers(0, len(self._tokens) - self._length, self._rows)
        starts = local_rows(starts, self._rows)
        return crop(self._tokens, starts, self._length)


def crop(tokens: np.ndarray, starts_B: np.ndarray, length: int) -> Batch:
    """Returns a batch of the windows of length L that start at `starts_B`.

    The batch has `tokens`, `targets` (the next tokens) and `weights` (1, or 0 for targets beyond the end of the
    sequence), each (B, L).
    """
    at_BL = starts_B[:, None] + np.arange(length + 1)
    inside_BL = at_BL < len(tokens)
    window_BL = tokens[np.minimum(at_BL, len(tokens) - 1)].astype(np.int32)
    return {
        "tokens": window_BL[:, :-1],
        "targets": window_BL[:, 1:],
        "weights": inside_BL[:, 1:].astype(np.float32),
    }


def scored_once(
    tokens: np.ndarray, length: int, stride: int, rows: int, *, multiple: int = 1
) -> Iterator[Batch]:
    """Returns batches of windows that score every token except the first exactly once.

    Window i scores tokens i * stride + 1 to (i + 1) * stride: as targets they have weight 1, and all other targets have
    weight 0. A scored token has `length` - `stride` + 1 to `length` tokens of context, except at the start of the
    sequence. The array `ids` holds the indices of the windows, -1 for empty rows.

    Args:
      stride: number of tokens that a window scores, at most `length`.
      rows: number of rows of a global batch, which is rounded up to a multiple of `multiple`.
    """

    def gather(numbers: np.ndarray) -> Batch:
        starts = np.maximum((numbers + 1) * stride - length, 0)
        batch = crop(tokens, starts, length)
        at = starts[:, None] + 1 + np.arange(length)
        scored = (at > (numbers * stride)[:, None]) & (at <= ((numbers + 1) * stride)[:, None])
        return {**batch, "weights": batch["weights"] * scored}

    return in_order(gather, -(-(len(tokens) - 1) // stride), rows, multiple=multiple)
