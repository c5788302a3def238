"""Lists the training methods that `perception.worth` compares."""

from collections.abc import Mapping
from typing import NamedTuple

METRIC = "weighted_f1"


class Way(NamedTuple):
    """A training method.

    Attributes:
      name: display name.
      fields: configuration overrides.
      pretrained: whether training starts from pretrained weights.
      random: whether the result depends on the seed if training uses all examples.
    """

    name: str
    fields: Mapping[str, object]
    pretrained: bool = False
    random: bool = True


WAYS = {
    "lora": Way("LoRA on pretrained weights", {"finetune": "lora"}, pretrained=True),
    "full_pretrained": Way(
        "all weights, from pretrained ones", {"finetune": "full_pretrained"}, pretrained=True
    ),
    "head": Way(
        "the head alone, on pretrained weights",
        {"finetune": "head", "train.steps": 0},
        pretrained=True,
        random=False,
    ),
    "full": Way("all weights, from random ones", {"finetune": "full"}),
    "tf_idf": Way("TF-IDF and logistic regression", {}, random=False),
}


BASELINE = "tf_idf"

TRAINABLE = tuple(way for way in WAYS if way != BASELINE)
"""Methods that `perception.worth --ways` can select. The baseline cannot be selected, because it always runs."""

TRAINED = ("lora", "full_pretrained", "full")
"""Methods with training steps, in the order in which a time budget includes them."""
