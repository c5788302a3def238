"""Labels the rows of a table of texts with a trained run: a network, or a TF-IDF model.

Shape letters of this module: E texts, C classes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common.arguments import check_texts
from common.config import check_int
from common.errors import check
from common.storage.addresses import shown
from common.storage.folders import open_folder
from perception import baseline, loading
from perception.baseline import Model
from perception.datasets import DATASETS, USER
from perception.loading import Trained
from perception.text_tables import Block, Columns, Fields

PROBABILITY = "probability"


def fields_of(config: ConfigDict) -> tuple[Fields, str]:
    """Returns a run's text columns, each as a list of possible names, and the label column's first possible name."""
    known = DATASETS[config.dataset] if config.dataset else USER
    fields, label = config.data.fields or known.fields, config.data.label or known.label
    texts = split_fields(fields)
    if config.data.premise_only and config.dataset == "snli":
        texts = texts[:1]
    return texts, label.split("|")[0]


def split_fields(fields: str) -> Fields:
    """Parses --config.data.fields: columns separated by spaces, possible names of a column separated by "|"."""
    return [names.split("|") for names in fields.split()]


@dataclass(frozen=True)
class Answers:
    """Columns that are added to a table: classes and probabilities of each text.

    - With `top`: at most `top` classes, most probable first, each followed by its probability.
    - With `ranked` and without `top`: all classes, most probable first, each followed by its probability. With
      `thresholds`, only the predicted classes, so a row may have fewer values than `columns`.
    - Without `top` and `ranked`: the most probable class, its probability, and the probability of every class. With
      `thresholds`, the list of predicted classes, and the probability of every class.

    Attributes:
      label: name of the first column. The next columns of classes are `label`_2, `label`_3, ...
      classes: the class names.
      top: number of classes to write; None if --top is not set.
      ranked: whether to write classes in order of probability if `top` is None.
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
            f"two columns of the output would have the same name ({', '.join(twice)}), because the label column is"
            f" named {self.label}: choose another name with --label=NAME",
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
        """Returns the values of the columns, with probabilities rounded to six decimals."""
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


class Classifier(Protocol):
    """A trained classifier of texts, or of pairs of texts."""

    def __call__(self, texts: Sequence[tuple[str, ...]]) -> np.ndarray:
        """Returns class probabilities, (E, C)."""

    def notes(self, texts: int) -> list[str]:
        """Returns messages about long texts. `texts` is the number of all texts so far, including empty texts."""


class Network:
    """A trained network. Counts texts, or pairs of texts, that are longer than the input of the network.

    Args:
      rows: maximum number of windows in a batch (see `windows.batches`). A window is a whole text, or a part of a text
        that is too long for the network's input.
    """

    def __init__(self, trained: Trained, rows: int):
        self._trained, self._rows = trained, rows
        self._long = self._windows = 0

    def __call__(self, texts: Sequence[tuple[str, ...]]) -> np.ndarray:
        if self._trained.config.data.pair:
            windows, firsts, cut = self._trained.encode_pairs(texts)
            self._long += cut
            return self._trained.probabilities_of(windows, self._rows, firsts)
        windows = self._trained.windows([" ".join(parts) for parts in texts])
        long = [len(parts) for parts in windows if len(parts) > 1]
        self._long += len(long)
        self._windows += sum(long)
        return self._trained.probabilities_of(windows, self._rows)

    def notes(self, texts: int) -> list[str]:
        if not self._long:
            return []
        longest = self._trained.config.data.max_length
        if self._trained.config.data.pair:
            return [
                f"truncated pairs of texts, longer than {longest} tokens: {self._long:,} of {texts:,}"
            ]
        return [
            f"texts longer than {longest} tokens: {self._long:,} of {texts:,}, read in {self._windows:,} windows whose"
            " logits are averaged"
        ]


@dataclass(frozen=True)
class WordCounts:
    """A TF-IDF model. The texts of a row are joined by a space, as in training."""

    model: Model

    def __call__(self, texts: Sequence[tuple[str, ...]]) -> np.ndarray:
        return self.model.probabilities([" ".join(parts) for parts in texts])

    def notes(self, texts: int) -> list[str]:
        del texts
        return []


class Labeller:
    """Labels blocks of texts, and counts the texts and the empty texts."""

    def __init__(self, classifier: Classifier, answers: Answers):
        self._classifier, self._answers = classifier, answers
        self.texts = self.empty = 0

    def __call__(
        self, blocks: Iterable[Block], done: Callable[[int], object] = lambda texts: None
    ) -> Iterator[tuple[Block, list[list]]]:
        """Yields each block with the values of the added columns, a list for each of its rows.

        After the consumer has processed a block, calls `done` with the number of rows of this block.
        """
        for block in blocks:
            there = [i for i, text in enumerate(block.texts) if text]
            self.texts += len(block.texts)
            self.empty += len(block.texts) - len(there)
            values = [self._answers.empty] * len(block.texts)
            if there:
                found_EC = self._classifier([block.texts[i] for i in there])
                for i, probabilities_C in zip(there, found_EC, strict=True):
                    values[i] = self._answers.values(probabilities_C)
            yield block, values
            done(len(values))

    @property
    def notes(self) -> list[str]:
        """Messages about empty and long texts; an empty list without such texts."""
        empty = [f"empty texts without a label: {self.empty:,} of {self.texts:,}"]
        return empty * bool(self.empty) + self._classifier.notes(self.texts)


@dataclass(frozen=True)
class TrainedRun:
    """A trained network or TF-IDF model, described in `Answers`. The first call of `classifier` loads the weights."""

    config: ConfigDict
    classes: Sequence[str]
    thresholds: tuple[float, ...]
    classifier: Callable[[], Classifier]

    def label(
        self, texts: Sequence[str] | Sequence[tuple[str, str]], top: int | None = None
    ) -> list[dict[str, Any]]:
        """Returns for each text, or pair of texts, the columns that perception.classify adds to a table (`Answers`).

        The first column is "label". A blank text, or a pair with a blank text, has no label. If the run was trained on
        several text columns (`data.fields="title body"`), join them with a space. Raises a UserError if an argument is
        invalid, or if the weights are missing, damaged or have changed.
        """
        check_int("top", 1 if top is None else top)
        if self.config.data.get("pair", False):
            rows = [*texts] if isinstance(texts, Iterable) else [None]
            pairs = all(isinstance(row, tuple | list) and len(row) == 2 for row in rows)
            check(pairs, f"texts must be pairs of texts, as in training, got {texts!r:.80}")
            rows = [tuple(check_texts("each pair", row)) for row in rows]
        else:
            rows = [(text,) for text in check_texts("texts", texts)]
        block = Block([row if all(map(str.strip, row)) else () for row in rows], None)
        answers = Answers("label", self.classes, top, thresholds=self.thresholds)
        ((_, values),) = Labeller(self.classifier(), answers)([block])
        return [dict(zip(answers.columns, row, strict=True)) for row in values]


def load_run(
    folder: str | Path,
    *,
    pretrained: str | Path | None = None,
    batch: int = 64,
    mesh: Mesh | None = None,
    option: str = "folder",
) -> TrainedRun:
    """Opens a run of a network, or of the TF-IDF model of perception.worth. The first texts load its weights.

    `pretrained` is the new folder of moved pretrained weights, and `mesh` by default a mesh of all devices. `option`
    names `folder` in error messages. Raises a UserError if an argument is invalid, the folder has no run of this paper,
    or a file of the run is missing or damaged.
    """
    check_int("batch", batch)
    weights_option = "--" * option.startswith("--") + "pretrained"
    folder, weights = open_folder(folder), pretrained and open_folder(pretrained)
    if counted := baseline.read_config(folder):
        check(
            not weights,
            f"{weights_option}={pretrained} is not used: {option}={shown(folder)} is a TF-IDF model; remove"
            f" {weights_option}",
        )
        model = Model.load(folder / baseline.MODEL)
        return TrainedRun(counted, model.names, model.thresholds, lambda: WordCounts(model))
    config = loading.read(folder, option)
    classes, thresholds = loading.read_classes(folder), loading.read_thresholds(folder, config)

    @cache
    def load() -> Network:
        return Network(loading.load(folder, mesh, weights, weights_option), batch)

    return TrainedRun(config, classes, thresholds, load)
