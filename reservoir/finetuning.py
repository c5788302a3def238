"""Fine-tunes a masked language model as a classifier (section 4.3)."""

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common import user_parts
from common.config import check_choice, check_least, check_rate, complete
from common.data.corpus import TokenizedCorpus
from common.data.labelled import LabelledText, load_labelled
from common.data.special_ids import BOS, EOS
from common.errors import check
from common.metrics.classes import Classes
from common.model.loss import cross_entropy
from common.runtime.processes import check_agreement
from common.storage.folders import open_folder
from common.tasks import classification
from common.tasks.classification import Classification
from common.train import loop
from common.train.evaluate import PerExample
from common.train.restore import check_snapshot
from common.train.saved_tokenizer import save_tokenizer
from common.train.task import Batch, ModelState
from common.variables import Params
from reservoir import encoder, methods, options
from reservoir.pretrained import Pretrained, open_run
from reservoir.tasks.masked_lm import TOKENIZER, vocabulary

PAIR_TOKENS = 4
"""Number of special tokens of a pair of texts: `<s> a </s></s> b </s>`."""


def validate(config: ConfigDict) -> None:
    """Checks the configuration without reading the pretraining run or the data. Adds missing options with defaults.

    Raises:
      UserError: a field is missing or invalid.
    """
    with complete("--config"):
        check(
            config.task == "classification",
            f"--config.task={config.task} cannot be fine-tuned: choose a configuration with"
            " task=classification, such as configs/sst2.py, or train this configuration with python -m reservoir.train",
        )
        check(
            bool(config.pretrained),
            "--config.pretrained is empty: give the folder of a trained masked language model, --config.pretrained=RUN",
        )
        check_least(config, ("pretrained_step",), 0)
        options.add_to(config)
        user_parts.check_minimum("--config.", config, methods.declared(config))
        methods.of(config)
        for name in ("dropout", "attention_dropout", "head_dropout"):
            check_rate(f"--config.model.{name}", config.model[name])
        check_choice("--config.model.dtype", config.model.dtype, ("auto", "float32", "bfloat16"))
        classification.validate(config)
        loop.validate(config)


def complete_model(config: ConfigDict, pretrained: Pretrained) -> ConfigDict:
    """Returns a copy of a fine-tuning configuration. Missing model fields come from the pretraining run (`inherit`).

    Raises:
      UserError: the method does not fit the pretraining run, `user_method.check_complete` rejects a user's method, or
        the snapshot `config.pretrained_step` is missing.
    """
    if config.pretrained_step:
        check_snapshot(pretrained.workdir, config.pretrained_step)
    config = inherit(config, pretrained.config.model)
    if config.reservoirs in methods.METHODS:
        methods.of(config).check(config, pretrained)
    else:
        from reservoir.user_method import check_complete

        check_complete(config, pretrained)
    return config


def inherit(config: ConfigDict, model: ConfigDict) -> ConfigDict:
    """Returns a copy of `config` that takes fields missing in `config.model` from `model`, and does not backskip."""
    config = config.copy_and_resolve_references()
    config.model = ConfigDict({**model.to_dict(), **config.model.to_dict()})
    if model.backskip.estimator != "none":
        # Fine-tuning does not backskip. "identity" keeps the parameter names of backskipping and has no value network.
        config.model.backskip.estimator = "identity"
    return config


def _log_probabilities(model: encoder.Classifier, batch: Batch) -> dict[str, jax.Array]:
    logits_BC = model(batch["tokens"], batch["lengths"])
    return {"logs": jax.nn.log_softmax(logits_BC.astype(jnp.float32))}


def sequence(parts: Sequence[Sequence[int]], longest: int) -> tuple[list[int], bool]:
    """Returns the sequence `<s> a` of one text, or `<s> a </s></s> b` of two texts. Batches append the last `</s>`.

    Truncates the sequence to `longest` tokens, counting the last `</s>`. Truncates the longer text of a pair first.

    Args:
      parts: token ids of each text.

    Returns:
      The token ids, and whether a text was truncated.
    """
    if len(parts) == 1:
        room = longest - 2
        return [BOS, *parts[0][:room]], len(parts[0]) > room
    (a, b), room = map(len, parts), longest - PAIR_TOKENS
    first = min(a, max(room - b, -(-room // 2)))
    second = min(b, room - first)
    return [BOS, *parts[0][:first], EOS, EOS, *parts[1][:second]], a + b > room


class FineTuning(Classification):
    """Classification of texts in RoBERTa's format. The encoder starts from a pretraining run.

    Args:
      read_data: False makes a task without data, with two classes, for `launch.plan`.
    """

    objective = "accuracy"

    def __init__(
        self, config: ConfigDict, pretrained: Pretrained, mesh: Mesh, *, read_data: bool = True
    ):
        labelled = load_labelled(config.data) if read_data else None
        options = {"longest": config.model.max_length, "labelled": labelled, "classes": 2}
        super().__init__(config, pretrained.tokenizer, mesh, **options)
        self._pretrained = pretrained
        self._log_probabilities = PerExample(_log_probabilities)

    def build(self, rngs: nnx.Rngs) -> encoder.Classifier:
        return encoder.classifier(
            self.config, vocabulary(self.tokenizer), self._class_count, rngs=rngs
        )

    def start(self, trainable: Params, frozen: Params) -> Params:
        # Two hosts may have different runs in folders of the same name. A resumed run does not read the pretraining
        # run's parameters, so the pretraining run may then have changed.
        check_agreement(
            lambda: {"the fingerprint of the pretraining run": self._pretrained.fingerprint[:16]}
        )
        values = self._pretrained.load(self.mesh, self.config.pretrained_step)
        loaded = {n: x for n, x in {**values.trainable, **values.frozen}.items() if n not in frozen}
        return trainable | {n: x for n, x in loaded.items() if n.startswith("encoder/")}

    def tokenize(self, text: LabelledText, longest: int) -> tuple[TokenizedCorpus, int]:
        parts = [self.tokenizer.encode(side) for side in zip(*text.texts, strict=True)]
        examples, cut = zip(*(sequence(x, longest) for x in zip(*parts, strict=True)), strict=True)
        return TokenizedCorpus.from_lists(examples), sum(cut)

    def loss(
        self, model: encoder.Classifier, batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        logits_BC = model(batch["tokens"], batch["lengths"], key)
        loss_B = cross_entropy(logits_BC, batch["labels"]) * (batch["ids"] >= 0)
        return jnp.sum(loss_B), jnp.sum(batch["ids"] >= 0, dtype=jnp.float32)

    def predict(self, values: ModelState, split: str) -> Classes:
        """Returns the class probabilities and the predicted class of every example of a split."""
        text = self.splits[split]
        logs_EC = self._log_probabilities(values, self.every(split), len(text))["logs"]
        return Classes.of_log_probabilities(text.fingerprint, text.labels_E, logs_EC, self.classes)

    def save(self, workdir: Path) -> None:
        save_tokenizer(self.tokenizer, workdir / TOKENIZER)


def prepare(
    config: ConfigDict, mesh: Mesh, read_data: bool = True
) -> tuple[ConfigDict, FineTuning]:
    """Returns the configuration for the training loop, and the task. See `reservoir.run.prepare`."""
    validate(config)
    pretrained = open_run(open_folder(config.pretrained), "--config.pretrained")
    config = complete_model(config, pretrained)
    return config, FineTuning(config, pretrained, mesh, read_data=read_data)
