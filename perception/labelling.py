"""Labels the rows of a table of texts with a trained run.

E texts, C classes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from ml_collections import ConfigDict

from common.config import check
from perception.datasets import DATASETS, OWN
from perception.loading import Trained
from perception.text_tables import Block, Columns

PROBABILITY = "probability"


def fields_of(config: ConfigDict) -> tuple[str, str]:
    """Returns the names of a run's text fields, separated by spaces, and the name of its label field."""
    known = DATASETS[config.dataset] if config.dataset else OWN
    fields, label = config.data.fields or known.fields, config.data.label or known.label
    if config.data.premise_only and config.dataset == "snli":
        fields = fields.split()[0]
    return fields, label.split("|")[0]


@dataclass(frozen=True)
class Answers:
    """Columns that are added to a table: classes and probabilities of each text.

    With `ranked` or `top`, the columns are the most probable classes in order, each followed by its probability.
    Otherwise the columns are the most probable class, its probability, and the probability of every class.

    If a text may have several classes and `top` is None, only classes above their thresholds are written. Without
    `ranked`, the columns are then the list of these classes and the probability of every class.

    Attributes:
      label: name of the column of the most probable class.
      top: number of ranked classes; None for all classes.
      ranked: whether to write all classes in order of probability if `top` is None.
      thresholds: if a text may have several classes, the smallest probability at which each class is predicted;
        otherwise ().

    Raises:
      UserError: two of the columns have the same name.
    """

    label: str
    classes: Sequence[str]
    top: int | None = None
    ranked: bool = False
    thresholds: tuple[float, ...] = ()

    def __post_init__(self):
        names = [name for name, _ in self._columns()]
        twice = sorted({name for name in names if names.count(name) > 1})
        check(
            not twice,
            f"the label column {self.label!r} would overwrite the column {', '.join(twice)}: choose another name with"
            " --config.data.label=NAME",
        )

    @property
    def columns(self) -> Columns:
        return dict(self._columns())

    def _columns(self) -> list[tuple[str, type]]:
        if self.top is None and not self.ranked:
            every = [(f"{PROBABILITY}_{name}", float) for name in self.classes]
            if self.thresholds:
                return [(self.label, list), *every]
            return [(self.label, str), (PROBABILITY, float), *every]
        names = []
        for rank in range(1, min(self.top or len(self.classes), len(self.classes)) + 1):
            end = "" if rank == 1 else f"_{rank}"
            names += [(f"{self.label}{end}", str), (f"{PROBABILITY}{end}", float)]
        return names

    @property
    def empty(self) -> list:
        """Values of the columns for an empty text."""
        return [{str: "", list: None}.get(kind) for kind in self.columns.values()]

    def values(self, probabilities_C: np.ndarray) -> list:
        """Returns the values of the columns, with probabilities rounded to six digits."""
        order = np.argsort(-probabilities_C, kind="stable")
        if self.thresholds and self.top is None:
            order = [i for i in order if probabilities_C[i] >= self.thresholds[i]]
            if not self.ranked:
                found = [self.classes[i] for i in order]
                return [found, *np.round(probabilities_C, 6).tolist()]
        rounded = np.round(probabilities_C, 6).tolist()
        pairs = [value for i in order for value in (self.classes[i], rounded[i])]
        if self.top is None and not self.ranked:
            return [*pairs[:2], *rounded]
        return pairs[: len(self.columns)]


class Labeller:
    """Labels blocks of texts, and counts empty and long texts.

    Attributes:
      texts, empty, long: numbers of all texts, of empty texts, and of texts longer than the model's input.
      windows: number of windows into which long texts were split.
    """

    def __init__(self, trained: Trained, answers: Answers, rows: int):
        """Stores the arguments. `rows` is the maximum number of windows in a batch."""
        self._trained, self._answers, self._rows = trained, answers, rows
        self.texts = self.empty = self.long = self.windows = 0

    def __call__(
        self, blocks: Iterable[Block], done: Callable[[int], object] = lambda texts: None
    ) -> Iterator[tuple[Block, list[list]]]:
        """Yields each block with the column values of its rows. Then calls `done` with the number of its texts."""
        for block in blocks:
            there = [i for i, text in enumerate(block.texts) if text]
            self.texts += len(block.texts)
            self.empty += len(block.texts) - len(there)
            values = [self._answers.empty] * len(block.texts)
            found_EC = self._probabilities([block.texts[i] for i in there])
            for i, probabilities_C in zip(there, found_EC, strict=True):
                values[i] = self._answers.values(probabilities_C)
            yield block, values
            done(len(values))

    def _probabilities(self, texts: Sequence[tuple[str, ...]]) -> np.ndarray:
        """Returns class probabilities (E, C) of texts or pairs of texts, and counts texts that are too long."""
        if self._trained.config.data.pair:
            windows, firsts, cut = self._trained.encode_pairs(texts)
            self.long += cut
            return self._trained.probabilities_of(windows, self._rows, firsts)
        windows = self._trained.windows([" ".join(parts) for parts in texts])
        long = [len(parts) for parts in windows if len(parts) > 1]
        self.long += len(long)
        self.windows += sum(long)
        return self._trained.probabilities_of(windows, self._rows)

    @property
    def notes(self) -> list[str]:
        """Messages about empty and long texts; an empty list without such texts."""
        notes = []
        if self.empty:
            notes.append(f"empty texts without a label: {self.empty:,} of {self.texts:,}")
        if self.long:
            longest = self._trained.config.data.max_length
            notes.append(
                f"truncated pairs of texts, longer than {longest} tokens: {self.long:,} of {self.texts:,}"
                if self._trained.config.data.pair
                else f"texts longer than {longest} tokens: {self.long:,} of {self.texts:,}, read in {self.windows:,}"
                " windows whose logits are averaged"
            )
        return notes
