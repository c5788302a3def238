"""Classification of texts with a backbone: rows as its tokenizer makes them, weighted F1, last and best step."""

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
    """A copy with the lengths of rows: the authors' are all as long as the longest."""
    config = config.copy_and_resolve_references()
    if config.pool == "authors":
        config.data.buckets = (config.data.max_length,)
    return config


class TextClassification(Classification):
    """The task that the training loop sees.

    Args:
      build: (number of classes, rngs=) -> model
      labelled: splits and names of the classes; with `config.eval.select` "test" there need be no "valid".
      start, outside: as `Task.start` and `Task.outside`.
      classes: as in `Classification`.
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
        """The authors choose the best step by the test examples."""
        return self.config.eval.select

    def rows(self, texts: Sequence[tuple[str, ...]], longest: int) -> tuple[list[list[int]], int]:
        return self.tokenizer.encode_and_count([text for (text,) in texts], longest)

    @property
    def marks(self) -> tuple[int | None, int]:
        return None, self.tokenizer.pad

    def predict(self, values: ModelState, split: str) -> Classes:
        """As `Classification.predict`, where "valid" is what the best step is chosen by."""
        return super().predict(values, self.select if split == "valid" else split)

    def save(self, workdir: Path) -> None:
        """The tokenizer, the names of the classes and what tells the examples from others; those of a run that goes on
        are not replaced."""
        save_tokenizer(self.tokenizer, workdir / TOKENIZER)
        examples = {name: text.fingerprint for name, text in self.splits.items()}
        for name, what, values in (
            (CLASSES, "have other classes than", self.classes),
            (EXAMPLES, "are not those of", examples),
        ):
            path, text = workdir / name, json.dumps(values, indent=2) + "\n"
            check(
                not path.exists() or not has_checkpoints(workdir) or path.read_text() == text,
                f"the examples {what} {path}: they have changed since the run began;"
                " choose another --workdir",
            )
            path.write_text(text)


def validate(config: ConfigDict) -> None:
    """The fields of the data and of the evaluation."""
    longest = config.data.max_length
    check(longest >= 1, f"--config.data.max_length must be at least 1, got {longest}")
    classification.validate(in_rows(config))
