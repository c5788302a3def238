"""Per-example predictions of a run on its test split, and their metrics.

Every metric is a function of statistics summed over examples: confusion counts, n-gram counts, nats. A bootstrap
resample of the test set is a vector of weights, and its metric is `measure(weights @ statistics)`.

Suffixes in this module: B resamples, M examples, N classes, S statistics. Saved files have the same array names with
suffixes, so the suffixes must not change.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from scipy import sparse

from common.errors import UserError

PREDICTIONS = "predictions.npz"
"""File name of the test predictions in a workdir."""

MODES = {
    "accuracy": "max",
    "weighted_f1": "max",
    "micro_f1": "max",
    "macro_f1": "max",
    "bleu": "max",
    "loss": "min",
    "perplexity": "min",
    "bits_per_byte": "min",
    "nats_per_byte": "min",
    "perplexity_per_word": "min",
}
"""Metric -> "max" if larger values are better, "min" if smaller values are better."""

_LARGEST_EXPONENT = 700.0  # exp(710) overflows float64.


@dataclass(frozen=True)
class Predictions(ABC):
    """Predictions of a run for each of M test examples.

    Attributes:
      examples: fingerprint of the test examples and their labels or references.
    """

    kind: ClassVar[str]
    cost_unit: ClassVar[str] = "nats"
    examples: str

    @property
    @abstractmethod
    def statistics(self) -> np.ndarray | sparse.csr_array:
        """Statistics of each example, (M, S). `measure` computes the metrics from their sum over examples."""

    @abstractmethod
    def measure(self, sums_BS: np.ndarray) -> dict[str, np.ndarray]:
        """Returns metric -> values (B,) for B resampled test sets.

        Args:
          sums_BS: `statistics` summed over the examples of each resampled test set.
        """

    @abstractmethod
    def describe(self, example: int) -> dict[str, str]:
        """Returns the label and the prediction of an example as text."""

    @property
    def pairing(self) -> tuple:
        """A key that is equal for predictions with the same test examples and metrics."""
        return self.kind, self.examples, len(self)

    @property
    @abstractmethod
    def costs_M(self) -> np.ndarray:
        """Cost of each example in `cost_unit`. `common.report --examples` sorts examples by the difference in cost."""

    @abstractmethod
    def __len__(self) -> int:
        """Returns M, the number of test examples."""

    def metrics(self) -> dict[str, float]:
        """Returns metric -> value over all examples."""
        sums_BS = np.asarray(self.statistics.sum(axis=0))[None]
        return {name: float(values[0]) for name, values in self.measure(sums_BS).items()}

    def save(self, path: Path) -> None:
        """Writes a compressed NumPy archive without pickles."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        arrays = {name: x for name, x in values.items() if isinstance(x, np.ndarray)}
        plain = {name: x for name, x in values.items() if name not in arrays}
        record = json.dumps({"kind": self.kind, **plain})
        partial = path.with_name(path.name + ".partial")
        with partial.open("wb") as file:
            text = np.frombuffer(record.encode(), np.uint8)
            np.savez_compressed(file, record=text, **arrays)
        partial.replace(path)


def _perplexity(loss_B: np.ndarray) -> np.ndarray:
    return np.exp(np.minimum(loss_B, _LARGEST_EXPONENT))


@dataclass(frozen=True)
class Classes(Predictions):
    """Predictions of a classifier.

    Attributes:
      labels_M, guesses_M: true and predicted classes, int32.
      probabilities_MN: probabilities of the classes, float16.
      nats_M: negative log-probability of the label, float32.
      names: names of the N classes.
    """

    kind: ClassVar[str] = "classes"
    labels_M: np.ndarray
    probabilities_MN: np.ndarray
    guesses_M: np.ndarray
    nats_M: np.ndarray
    names: tuple[str, ...]

    @classmethod
    def of_log_probabilities(
        cls, examples: str, labels_M: np.ndarray, logs_MN: np.ndarray, names: tuple[str, ...]
    ) -> "Classes":
        """Makes predictions from the log-probabilities of all classes, `logs_MN`.

        Args:
          examples: fingerprint of the test examples and their labels.
          labels_M: true class of each example.
          names: names of the N classes.
        """
        at_M = np.arange(len(labels_M))
        return cls(
            examples,
            labels_M.astype(np.int32),
            np.exp(logs_MN).astype(np.float16),
            logs_MN.argmax(-1).astype(np.int32),
            -logs_MN[at_M, labels_M].astype(np.float32),
            names,
        )

    def __len__(self) -> int:
        return len(self.labels_M)

    @property
    def statistics(self) -> sparse.csr_array:
        """Statistics of each example, (M, 3N + 2).

        The columns are: the true class if the prediction is correct, the predicted class and the true class, each
        one-hot (N columns); nats; 1, to count examples.
        """
        classes, count = len(self.names), len(self.labels_M)
        ones_M, at_M = np.ones(count), np.arange(count)
        hits_M = (self.guesses_M == self.labels_M).astype(float)
        entries = (
            (hits_M, self.labels_M),
            (ones_M, classes + self.guesses_M),
            (ones_M, 2 * classes + self.labels_M),
            (self.nats_M.astype(float), np.full(count, 3 * classes)),
            (ones_M, np.full(count, 3 * classes + 1)),
        )
        values, columns = (np.concatenate(parts) for parts in zip(*entries, strict=True))
        return sparse.csr_array((values, (np.tile(at_M, len(entries)), columns)))

    def measure(self, sums_BS: np.ndarray) -> dict[str, np.ndarray]:
        """Returns accuracy and weighted F1 in percent, and the loss in nats. F1 without correct predictions is 0."""
        hits_BN, guessed_BN, labelled_BN = np.split(sums_BS[:, :-2], 3, axis=1)
        nats_B, count_B = sums_BS[:, -2], sums_BS[:, -1]
        f1_BN = 2 * hits_BN / np.maximum(guessed_BN + labelled_BN, 1)
        return {
            "accuracy": 100 * hits_BN.sum(1) / count_B,
            "weighted_f1": 100 * (f1_BN * labelled_BN).sum(1) / count_B,
            "loss": nats_B / count_B,
        }

    def describe(self, example: int) -> dict[str, str]:
        guess = self.guesses_M[example]
        chance = float(self.probabilities_MN[example, guess])
        return {
            "label": self.names[self.labels_M[example]],
            "prediction": f"{self.names[guess]} ({chance:.2f})",
        }

    @property
    def costs_M(self) -> np.ndarray:
        return self.nats_M


@dataclass(frozen=True)
class Translations(Predictions):
    """Translations of test sentences, each with one reference.

    Attributes:
      hypotheses, references: one translation and one reference for each sentence.
      nats_M: loss of each reference under teacher forcing, summed over its tokens.
      tokens_M: number of tokens in each reference.
      lowercase, tokenize: options of `common.metrics.bleu.bleu_metric`.
    """

    kind: ClassVar[str] = "translations"
    cost_unit: ClassVar[str] = "minus sentence BLEU"
    hypotheses: tuple[str, ...]
    references: tuple[str, ...]
    nats_M: np.ndarray
    tokens_M: np.ndarray
    lowercase: bool
    tokenize: str

    def __len__(self) -> int:
        return len(self.hypotheses)

    @property
    def pairing(self) -> tuple:
        return *super().pairing, self.lowercase, self.tokenize

    def metric(self) -> Any:
        """Returns sacrebleu's BLEU metric with the options of these translations."""
        from common.metrics.bleu import bleu_metric

        return bleu_metric(self.lowercase, self.tokenize)

    @property
    def statistics(self) -> np.ndarray:
        """Statistics of each sentence, (M, 12): sacrebleu's lengths and n-gram counts (10), nats, tokens."""
        from common.metrics.bleu import sentence_statistics

        counts_MS = sentence_statistics(self.metric(), self.hypotheses, self.references)
        return np.column_stack([counts_MS, self.nats_M, self.tokens_M]).astype(float)

    def measure(self, sums_BS: np.ndarray) -> dict[str, np.ndarray]:
        """Returns BLEU (0 to 100), the loss in nats per reference token, and the perplexity."""
        from common.metrics.bleu import bleu_of

        metric = self.metric()
        loss_B = sums_BS[:, -2] / sums_BS[:, -1]
        return {
            "bleu": np.array([bleu_of(metric, sums_S) for sums_S in sums_BS[:, :-2]]),
            "loss": loss_B,
            "perplexity": _perplexity(loss_B),
        }

    def describe(self, example: int) -> dict[str, str]:
        return {"reference": self.references[example], "translation": self.hypotheses[example]}

    @property
    def costs_M(self) -> np.ndarray:
        """Negative sentence BLEU of each translation."""
        scores = zip(self.hypotheses, self.references, strict=True)
        metric = self.metric()
        metric.effective_order = (
            True  # sacrebleu recommends this option for the BLEU of a sentence.
        )
        return np.array([-metric.sentence_score(mine, [right]).score for mine, right in scores])


@dataclass(frozen=True)
class Losses(Predictions):
    """Losses of a language model on parts of a text: windows of bytes or tokens, or rows of masked tokens.

    Attributes:
      nats_M: loss summed over each part, float64.
      weights_M: number of predicted bytes, tokens or masked tokens in each part.
      hits_M: number of correct predictions in each part; an empty array if correct predictions are not counted.
      words_M: number of words in each part; an empty array if words are not counted.
      unit: "byte" or "token", the unit of `weights_M`.
    """

    kind: ClassVar[str] = "losses"
    nats_M: np.ndarray
    weights_M: np.ndarray
    hits_M: np.ndarray
    words_M: np.ndarray
    unit: str

    def __len__(self) -> int:
        return len(self.nats_M)

    @property
    def pairing(self) -> tuple:
        return *super().pairing, self.unit

    @property
    def statistics(self) -> np.ndarray:
        """Statistics of each part, (M, 4): nats, weights, hits, words."""
        zeros_M = np.zeros(len(self.nats_M))
        hits_M, words_M = (x if len(x) else zeros_M for x in (self.hits_M, self.words_M))
        return np.column_stack([self.nats_M, self.weights_M, hits_M, words_M]).astype(float)

    def measure(self, sums_BS: np.ndarray) -> dict[str, np.ndarray]:
        """Returns bits and nats per byte if `unit` is "byte", else perplexity and loss in nats per token.

        Adds the accuracy in percent if correct predictions are counted, and perplexity per word if words are counted.
        """
        nats_B, weights_B, hits_B, words_B = sums_BS.T
        loss_B = nats_B / weights_B
        if self.unit == "byte":
            found = {"bits_per_byte": loss_B / np.log(2), "nats_per_byte": loss_B}
        else:
            found = {"perplexity": _perplexity(loss_B), "loss": loss_B}
        if len(self.hits_M):
            found["accuracy"] = 100 * hits_B / weights_B
        if len(self.words_M):
            found["perplexity_per_word"] = _perplexity(nats_B / np.maximum(words_B, 1))
        return found

    def describe(self, example: int) -> dict[str, str]:
        share = self.nats_M[example] / max(self.weights_M[example], 1)
        return {f"{self.unit}s": f"{self.weights_M[example]:.0f}", "nats each": f"{share:.3f}"}

    @property
    def costs_M(self) -> np.ndarray:
        return self.nats_M / np.maximum(self.weights_M, 1)


KINDS: Mapping[str, type[Predictions]] = {cls.kind: cls for cls in (Classes, Translations, Losses)}


def _kind(name: str) -> type[Predictions]:
    if name in KINDS:
        return KINDS[name]
    from common.metrics.label_sets import (
        LabelSets,
    )  # most programs never read predictions of this kind

    return {LabelSets.kind: LabelSets}[name]


def load(path: Path) -> Predictions:
    """Reads predictions that `Predictions.save` has written. Raises a UserError if the file is missing or damaged."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        record = json.loads(arrays.pop("record").tobytes().decode())
        kind = _kind(record.pop("kind"))
        plain = {name: tuple(x) if isinstance(x, list) else x for name, x in record.items()}
        made = kind(**plain, **arrays)
        lengths = {n: len(x) for n, x in arrays.items() if len(x) or n not in ("hits_M", "words_M")}
        if wrong := [name for name, length in lengths.items() if length != len(made)]:
            raise ValueError(
                f"{', '.join(wrong)} must have {len(made)} entries, one for each example"
            )
        if lost := [n for n, x in arrays.items() if x.dtype.kind == "f" and np.isnan(x).any()]:
            raise ValueError(f"NaN in {', '.join(lost)}")
        if not len(made):
            raise ValueError("no examples")
        return made
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # A damaged archive may raise any type of exception.
        raise UserError(f"{path} is damaged: {error}") from error
