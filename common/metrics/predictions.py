"""Per-example predictions of a run on its test split, and their metrics.

Every metric is a function of sums over examples: confusion counts, n-gram counts, nats. So a bootstrap resample of the
test set is a vector of weights, and its metric is `measure(weights @ statistics)`.

Suffixes in this module: B resamples, M examples, N classes, S statistics. They are also names in the saved files.
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
"""File name in the workdir of a run."""

MODES = {
    "accuracy": "max",
    "weighted_f1": "max",
    "bleu": "max",
    "loss": "min",
    "perplexity": "min",
    "bits_per_byte": "min",
    "nats_per_byte": "min",
    "perplexity_per_word": "min",
}
"""Whether a metric is maximised or minimised."""

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
        """(M, S), whose sums over examples determine the metrics."""

    @abstractmethod
    def measure(self, sums_BS: np.ndarray) -> dict[str, np.ndarray]:
        """Returns each metric, (B,), of B sums of `statistics`."""

    @abstractmethod
    def describe(self, example: int) -> dict[str, str]:
        """Returns the label and the prediction of an example as text."""

    @property
    def pairing(self) -> tuple:
        """Key of comparable predictions: equal for the same test examples and metrics."""
        return self.kind, self.examples, len(self)

    @property
    @abstractmethod
    def costs_M(self) -> np.ndarray:
        """(M,), the cost of each example in `cost_unit`; `--examples` sorts by it."""

    @abstractmethod
    def __len__(self) -> int:
        """Returns M."""

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of all examples."""
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
            np.savez_compressed(file, record=_as_bytes(record), **arrays)
        partial.replace(path)


def _as_bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


@dataclass(frozen=True)
class Classes(Predictions):
    """Predictions of a classifier.

    Attributes:
      labels_M, guesses_M: true and predicted classes, int32.
      probabilities_MN: float16.
      nats_M: float32, negative log-probability of the label.
      names: N class names.
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
        """Makes predictions from natural log-probabilities (M, N)."""
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
        """Columns: hits, guesses and labels of each class; nats; 1."""
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
        """Returns accuracy and weighted F1 in percent and the loss in nats. F1 of a class without hits is 0."""
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
    """Translations with one reference each.

    Attributes:
      nats_M, tokens_M: loss of each reference under teacher forcing, and its number of tokens.
      lowercase, tokenize: as in `common.metrics.bleu.corpus_bleu`.
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
        """Returns sacrebleu's metric."""
        from common.metrics.bleu import bleu_metric

        return bleu_metric(self.lowercase, self.tokenize)

    @property
    def statistics(self) -> np.ndarray:
        """Columns: 10 lengths and n-gram counts of sacrebleu; nats; tokens."""
        from common.metrics.bleu import sentence_statistics

        counts_MS = sentence_statistics(self.metric(), self.hypotheses, self.references)
        return np.column_stack([counts_MS, self.nats_M, self.tokens_M]).astype(float)

    def measure(self, sums_BS: np.ndarray) -> dict[str, np.ndarray]:
        """Returns BLEU (0 to 100), and loss in nats and perplexity per token of the references."""
        from common.metrics.bleu import bleu_of

        metric = self.metric()
        loss_B = sums_BS[:, -2] / sums_BS[:, -1]
        return {
            "bleu": np.array([bleu_of(metric, sums_S) for sums_S in sums_BS[:, :-2]]),
            "loss": loss_B,
            "perplexity": np.exp(np.minimum(loss_B, _LARGEST_EXPONENT)),
        }

    def describe(self, example: int) -> dict[str, str]:
        return {"reference": self.references[example], "translation": self.hypotheses[example]}

    @property
    def costs_M(self) -> np.ndarray:
        """Negative sentence BLEU."""
        scores = zip(self.hypotheses, self.references, strict=True)
        metric = self.metric()
        metric.effective_order = True  # sacrebleu recommends this for sentences.
        return np.array([-metric.sentence_score(mine, [right]).score for mine, right in scores])


@dataclass(frozen=True)
class Losses(Predictions):
    """Losses of parts of a text: windows of bytes or tokens, rows of masked tokens.

    Attributes:
      nats_M: float64, loss summed over each part.
      weights_M: predicted bytes, tokens or masked tokens in each part.
      hits_M: correct predictions in each part; empty if not counted.
      words_M: words in each part; empty without perplexity per word.
      unit: "byte" or "token".
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
        """Columns: nats; weights; hits; words."""
        zeros_M = np.zeros(len(self.nats_M))
        hits_M, words_M = (x if len(x) else zeros_M for x in (self.hits_M, self.words_M))
        return np.column_stack([self.nats_M, self.weights_M, hits_M, words_M]).astype(float)

    def measure(self, sums_BS: np.ndarray) -> dict[str, np.ndarray]:
        """Returns bits and nats per byte, or perplexity and loss in nats per token.

        Adds accuracy in percent and perplexity per word if hits and words were counted.
        """
        nats_B, weights_B, hits_B, words_B = sums_BS.T
        loss_B = nats_B / weights_B
        if self.unit == "byte":
            found = {"bits_per_byte": loss_B / np.log(2), "nats_per_byte": loss_B}
        else:
            perplexity_B = np.exp(np.minimum(loss_B, _LARGEST_EXPONENT))
            found = {"perplexity": perplexity_B, "loss": loss_B}
        if len(self.hits_M):
            found["accuracy"] = 100 * hits_B / weights_B
        if len(self.words_M):
            per_word_B = nats_B / np.maximum(words_B, 1)
            found["perplexity_per_word"] = np.exp(np.minimum(per_word_B, _LARGEST_EXPONENT))
        return found

    def describe(self, example: int) -> dict[str, str]:
        share = self.nats_M[example] / max(self.weights_M[example], 1)
        return {f"{self.unit}s": f"{self.weights_M[example]:.0f}", "nats each": f"{share:.3f}"}

    @property
    def costs_M(self) -> np.ndarray:
        return self.nats_M / np.maximum(self.weights_M, 1)


KINDS: Mapping[str, type[Predictions]] = {cls.kind: cls for cls in (Classes, Translations, Losses)}


def load(path: Path) -> Predictions:
    """Reads what `Predictions.save` wrote.

    Raises:
      UserError: the file is missing or damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        record = json.loads(arrays.pop("record").tobytes().decode())
        kind = KINDS[record.pop("kind")]
        plain = {name: tuple(x) if isinstance(x, list) else x for name, x in record.items()}
        made = kind(**plain, **arrays)
        optional = ("hits_M", "words_M")
        wrong = [
            name
            for name, x in arrays.items()
            if len(x) != len(made) and not (name in optional and not len(x))
        ]
        if wrong or not len(made):
            raise ValueError(
                f"{', '.join(wrong)}: not {len(made)} examples" if wrong else "no examples"
            )
        return made
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # zipfile, NumPy and JSON raise many types for a damaged archive.
        raise UserError(f"{path} is damaged: {error}") from error
