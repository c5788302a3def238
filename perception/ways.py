"""Lists the training methods that `perception.worth` compares."""

from collections.abc import Mapping
from typing import NamedTuple

from perception import methods
from perception.methods import METHODS, Method

METRIC = "weighted_f1"


class Way(NamedTuple):
    """A training method.

    Attributes:
      name: display name.
      fields: configuration overrides.
      method: method of fine-tuning; None for the baseline.
    """

    name: str
    fields: Mapping[str, object]
    method: Method | None = None

    @property
    def pretrained(self) -> bool:
        """Whether training starts from pretrained weights."""
        return self.method is not None and self.method.pretrained

    @property
    def random(self) -> bool:
        """Whether the result depends on the seed even without `data.shots` and `reinitialize`."""
        return self.method is not None and not self.method.solves_head


BASELINE = "tf_idf"

TRAINABLE = ("lora", "full_pretrained", "head", "full")
"""Methods that `perception.worth` trains by default; without --config.pretrained, only "full". A time budget may leave
out more methods. The baseline always runs."""

TRAINED = tuple(way for way in TRAINABLE if not METHODS[way].solves_head)
"""Methods with training steps. A plan for a time budget prefers earlier methods."""


def find(name: str) -> Way:
    """Returns the training method `name`: BASELINE, or a method of `methods.find`, which documents the errors."""
    if name == BASELINE:
        return Way("TF-IDF and logistic regression", {})
    method = methods.find(name, "--ways")
    fields = {"finetune": name} | {"train.steps": 0} if method.solves_head else {"finetune": name}
    return Way(method.label, fields, method)
