"""Per-example predictions of a run on its test split, and their metrics. Each kind of predictions has its own module.

Every metric is a function of statistics summed over examples, such as confusion counts, n-gram counts and losses. If
row b of `counts_BE` says how often the bootstrap resample b of the test set contains each example, the metrics of the
resamples are `measure(counts_BE @ statistics)`.

Shape letters of this module: B resamples, E examples, S statistics.
"""

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from pathlib import Path
from string import ascii_uppercase
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from common.atomic import write_atomic

if TYPE_CHECKING:
    from scipy import sparse

PREDICTIONS = "predictions.npz"  # file name of the test predictions in a workdir

TEST_AGAIN = (
    f"if the run still has its checkpoints, delete its summary.json and {PREDICTIONS} and repeat the command that"
    " trained it, which then only tests it"
)
"""What a user can do about lost or damaged predictions."""


def stem(name: str) -> str:
    """Returns the name of an array without its suffix of shape letters. Saved files use this name."""
    return name.rstrip(ascii_uppercase).removesuffix("_")


@dataclass(frozen=True)
class Predictions(ABC):
    """Predictions of a run for each test example.

    Attributes:
      examples: fingerprint of the test examples and their labels or references.
      nats_E: loss of each example in nats, a field of every subclass.
    """

    kind: ClassVar[str]
    cost_unit: ClassVar[str] = "nats"
    examples: str

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type is np.ndarray:  # The caller may give a list or a JAX array.
                object.__setattr__(self, field.name, np.asarray(getattr(self, field.name)))

    @property
    @abstractmethod
    def statistics(self) -> "np.ndarray | sparse.csr_array":
        """Statistics of each example, (E, S). `measure` computes the metrics from their sum over examples."""

    @abstractmethod
    def measure(self, sums_BS: np.ndarray) -> dict[str, np.ndarray]:
        """Returns {metric: values (B,)} of B test sets from `sums_BS`, the sums of `statistics` over their examples."""

    @abstractmethod
    def describe(self, example: int) -> dict[str, str]:
        """Returns {name: text} that describes an example, such as its label and its prediction."""

    @property
    def pairing(self) -> tuple:
        """A key that is equal for predictions of the same kind and test examples, with equal units and options."""
        return self.kind, self.examples, len(self)

    @property
    def costs_E(self) -> np.ndarray:
        """Cost of each example in `cost_unit`, by which `common.report --examples` compares two runs."""
        return self.nats_E

    @abstractmethod
    def __len__(self) -> int:
        """Returns E, the number of test examples."""

    def metrics(self) -> dict[str, float]:
        """Returns {metric: value} over all examples."""
        sums_BS = np.asarray(self.statistics.sum(axis=0))[None]
        return {name: float(values[0]) for name, values in self.measure(sums_BS).items()}

    def save(self, path: Path) -> None:
        """Writes a compressed NumPy archive without pickles."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        arrays = {stem(name): x for name, x in values.items() if isinstance(x, np.ndarray)}
        plain = {name: x for name, x in values.items() if not isinstance(x, np.ndarray)}
        record = np.frombuffer(json.dumps({"kind": self.kind, **plain}).encode(), np.uint8)
        write_atomic(path, lambda file: np.savez_compressed(file, record=record, **arrays))


def perplexity(loss_B: np.ndarray) -> np.ndarray:
    return np.exp(np.minimum(loss_B, 700.0))  # exp(710) overflows float64.
