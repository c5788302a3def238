"""Masked language modelling: rows of text in, the tokens that were hidden in them out.

B batch, L length, M masked positions, V vocabulary.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common import sharding
from common.config import check
from common.data.batching import check_rows, iterate
from common.data.cache import fingerprint
from common.data.corpus import tokenize_corpus
from common.data.examples import ExampleBatches, in_order
from common.data.packing import PackedRows
from common.data.text import load_text
from common.data.tokenizer import PAD, Tokenizer, build_tokenizer
from common.metrics.predictions import Losses
from common.model.dropout import fold
from common.model.encoder import MaskedLanguageModel
from common.model.loss import cross_entropy
from common.tasks.fields import check_transformer
from common.tasks.masking import mask
from common.train.evaluate import PerExample
from common.train.task import Batch, ModelState, Task, TaskSpec, integers
from common.train.workdir import save_tokenizer

# (model config, vocabulary, rngs=) -> model
Build = Callable[..., MaskedLanguageModel]

TOKENIZER = "tokenizer.npz"


def validate(config: ConfigDict) -> None:
    """The fields of a masked language model."""
    check_transformer(config.model)
    check(
        config.model.max_length >= 8,
        f"--config.model.max_length must be at least 8, got {config.model.max_length}",
    )
    check(
        0 < config.data.masked < 1,
        f"--config.data.masked, a share, must be between 0 and 1, got {config.data.masked}",
    )
    check(
        config.data.vocab_size >= 8,
        f"--config.data.vocab_size must be at least 8, got {config.data.vocab_size}",
    )
    for group in ("data", "eval"):
        rows = config[group].batch
        check(rows >= 1, f"--config.{group}.batch must be at least 1, got {rows}")
    check(
        config.eval.sequences >= 0,
        f"--config.eval.sequences must not be negative, got {config.eval.sequences}",
    )


def vocabulary(tokenizer: Tokenizer) -> int:
    """Pieces, special ones included, and the mask. That is the last id: text, whatever it says, never has it."""
    return tokenizer.size + 1


def lengths(tokens_BL: jax.Array) -> jax.Array:
    """Tokens in each row, (B,); padding stands at its end."""
    return jnp.sum(tokens_BL != PAD, axis=1, dtype=jnp.int32)


class Objective(Task):
    """A masked language model and its loss, without data.

    Args:
      size: of the vocabulary; its last id is the mask.
    """

    objective, mode = "perplexity", "min"

    def __init__(self, config: ConfigDict, build: Build, size: int):
        self.config, self._build, self._size = config, build, size

    @classmethod
    def sketch(cls, config: ConfigDict, build: Build, multiple: int) -> TaskSpec:
        """With a vocabulary as large as the configuration allows; `multiple` divides the rows of a batch."""
        rows, length = config.data.batch, config.model.max_length
        check_rows(rows, multiple)
        batch = {"tokens": integers(rows, length), "ids": integers(rows)}
        return TaskSpec(config, cls(config, build, config.data.vocab_size), batch, rows * length)

    def build(self, rngs: nnx.Rngs) -> MaskedLanguageModel:
        return self._build(self.config.model, self._size, rngs=rngs)

    def _guess(
        self, model: MaskedLanguageModel, batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Logits (B, M, V), targets (B, M) and weights (B, M).

        The mask follows from the step's key: every step has one of its own, and nothing has to be saved. Without a
        key it follows from the number of each row, so that all evaluations ask the same questions, in any batches.
        """
        tokens_BL = batch["tokens"]
        if key is None:
            always = jax.random.key(0)
            keys_B = jax.vmap(lambda number: jax.random.fold_in(always, number))(batch["ids"])
        else:
            keys_B = jax.random.split(fold(key, 0), len(tokens_BL))
        masked = mask(tokens_BL, keys_B, self._size - 1, self.config.data.masked)
        logits_BMV = model(masked.inputs_BL, lengths(tokens_BL), masked.places_BM, fold(key, 1))
        return logits_BMV, masked.targets_BM, masked.weights_BM

    def loss(
        self, model: MaskedLanguageModel, batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        logits_BMV, targets_BM, weights_BM = self._guess(model, batch, key)
        return jnp.sum(cross_entropy(logits_BMV, targets_BM) * weights_BM), jnp.sum(weights_BM)


class MaskedLm(Objective):
    """The task that the training loop sees."""

    def __init__(self, config: ConfigDict, build: Build, mesh: Mesh):
        """Reads and tokenizes the data.

        Raises:
          UserError: the configuration or the data are at fault.
        """
        validate(config)
        self.mesh = mesh
        data = config.data
        cache = Path(os.path.expanduser(data.cache_dir))
        texts = {split: load_text(data, split) for split in ("train", "valid", "test")}
        self.tokenizer = build_tokenizer(data.vocab_size - 1, texts["train"], cache)
        super().__init__(config, build, vocabulary(self.tokenizer))
        self.splits = {}
        for split, text in texts.items():
            corpus = tokenize_corpus(text, self.tokenizer, cache)
            check(
                len(corpus.tokens) * data.masked >= 1,
                f"the {split} text has {len(corpus.tokens)} tokens, too few for a share of"
                f" --config.data.masked={data.masked}",
            )
            self.splits[split] = PackedRows(corpus, config.model.max_length)
        self.multiple = sharding.num_batch_shards(mesh) * config.train.accumulate
        self.training_batches = ExampleBatches(
            self._gather("train"),
            len(self.splits["train"]),
            data.batch,
            multiple=self.multiple,
            seed=config.seed,
        )
        self._losses = PerExample(self._rows, mesh)

    def _gather(self, split: str) -> Callable[[np.ndarray], Batch]:
        rows = self.splits[split]
        return lambda ids_B: {"tokens": rows[ids_B], "ids": ids_B.astype(np.int32)}

    @property
    def batches_per_epoch(self) -> float:
        return self.training_batches.batches_per_epoch

    def batches(self, start: dict | None) -> Iterator[tuple[Batch, dict]]:
        return iterate(self.training_batches, start)

    def predict(self, values: ModelState, split: str) -> Losses:
        """Loss of the masked tokens of every row of a split."""
        count = len(self.splits[split])
        if split == "valid" and self.config.eval.sequences:
            count = min(count, self.config.eval.sequences)
        rows = -(-self.config.eval.batch // self.multiple) * self.multiple
        batches = in_order(self._gather(split), count, rows, multiple=self.multiple)
        found = self._losses(values, batches, count)
        tokens_ML = self.splits[split][np.arange(count)]
        return Losses(
            fingerprint([tokens_ML.tobytes().hex()]),
            found["nats"].astype(np.float64),
            found["weights"],
            found["hits"],
            words_M=np.zeros(0),
            unit="token",
        )

    def _rows(self, model: MaskedLanguageModel, batch: Batch) -> dict[str, jax.Array]:
        logits_BMV, targets_BM, weights_BM = self._guess(model, batch, None)
        loss_BM = cross_entropy(logits_BMV, targets_BM)
        hit_BM = jnp.argmax(logits_BMV, -1) == targets_BM
        sums = {"nats": loss_BM, "hits": hit_BM, "weights": jnp.ones_like(loss_BM)}
        return {name: (x_BM * weights_BM).sum(1) for name, x_BM in sums.items()}

    def save(self, workdir: Path) -> None:
        """The tokenizer; that of a run that goes on is not replaced."""
        save_tokenizer(self.tokenizer, workdir / TOKENIZER)
