"""The text classification task: tokenization for a backbone, weighted F1, and tests of the best and the last step."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from jax.sharding import Mesh
from ml_collections import ConfigDict

from common.config import check
from common.data.labelled import LabelledText
from common.data.subword import Subword
from common.metrics.predictions import Classes
from common.tasks import classification
from common.tasks.classification import Build, Classification
from common.train.task import NO_PRETRAINED_WEIGHTS, ModelState, PretrainedWeights
from common.train.workdir import has_checkpoints, save_tokenizer
from common.variables import AbstractModel, Params

TOKENIZER, CLASSES, EXAMPLES = "tokenizer.json", "classes.json", "examples.json"


def in_rows(config: ConfigDict) -> ConfigDict:
    """Returns a copy with the buckets of batches; the pool "authors" pads all texts to `max_length`."""
    config = config.copy_and_resolve_references()
    if config.pool == "authors":
        config.data.buckets = (config.data.max_length,)
    return config


class TextClassification(Classification):
    """Text classification with a backbone.

    Args:
      build: (number of classes, rngs=) -> model.
      labelled: splits and class names; "valid" may be missing if `config.eval.select` is "test".
      start, outside: implementations of `Task.start` and `Task.outside`.
      classes: see `Classification`.
    """

    objective, mode, tests_last = "weighted_f1", "max", True

    def __init__(
        self,
        config: ConfigDict,
        tokenizer: Subword | None,
        build: Build,
        mesh: Mesh,
        labelled: tuple[dict[str, LabelledText], tuple[str, ...]] | None = None,
        *,
        start: Callable[[Params], Params] = lambda trainable: trainable,
        outside: Callable[[AbstractModel], PretrainedWeights] = lambda abstract_model: (
            NO_PRETRAINED_WEIGHTS
        ),
        classes: int | None = None,
    ):
        self.outside = outside
        config = in_rows(config)
        given = {"longest": config.data.max_length, "start": start, "classes": classes}
        super().__init__(config, tokenizer, build, mesh, labelled=labelled, **given)

    @property
    def select(self) -> str:
        """The split that selects the best step: "valid", or "test" in the authors' recipe."""
        return self.config.eval.select

    def rows(self, texts: Sequence[tuple[str, ...]], longest: int) -> tuple[list[list[int]], int]:
        return self.tokenizer.encode_and_count([text for (text,) in texts], longest)

    @property
    def marks(self) -> tuple[int | None, int]:
        return None, self.tokenizer.pad

    def predict(self, values: ModelState, split: str) -> Classes:
        """Returns predictions like `Classification.predict`; "valid" means the split that selects the best step."""
        return super().predict(values, self.select if split == "valid" else split)

    def save(self, workdir: Path) -> None:
        """Writes tokenizer, class names and fingerprints of the examples; checks them if the run is resumed.

        Raises:
          UserError: classes or examples differ from those that the run started with.
        """
        save_tokenizer(self.tokenizer, workdir / TOKENIZER)
        examples = {name: text.fingerprint for name, text in self.splits.items()}
        for name, what, values in (
            (CLASSES, "have other classes than", self.classes),
            (EXAMPLES, "are not those of", examples),
        ):
            path, text = workdir / name, json.dumps(values, indent=2) + "\n"
            check(
                not path.exists() or not has_checkpoints(workdir) or path.read_text() == text,
                f"the examples {what} {path}: they have changed since the run started; choose another --workdir",
            )
            path.write_text(text)


def validate(config: ConfigDict) -> None:
    """Validates the fields of data and evaluation."""
    longest = config.data.max_length
    check(longest >= 1, f"--config.data.max_length must be at least 1, got {longest}")
    classification.validate(in_rows(config))
