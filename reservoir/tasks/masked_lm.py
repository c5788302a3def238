"""Masked language modelling on packed rows of text, with dynamic masking.

Shape letter of this module: M masked positions of a row, padded to a fixed number.
"""

import math
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
from common.config import check_least
from common.data.batches import check_rows, in_order, iterate
from common.data.cache import fingerprint
from common.data.corpus import tokenize_corpus
from common.data.examples import ExampleBatches
from common.data.special_ids import PAD
from common.data.text import load_text
from common.data.tokenizer import Tokenizer, build_tokenizer
from common.errors import check
from common.metrics.losses import Losses
from common.model.dropout import fold
from common.model.loss import cross_entropy
from common.train.evaluate import PerExample
from common.train.saved_tokenizer import save_tokenizer
from common.train.task import Batch, BatchSpec, ModelState, Task, integers
from reservoir.encoder import MaskedLanguageModel
from reservoir.encoder import masked_lm as build
from reservoir.masking import mask
from reservoir.packing import PackedRows
from reservoir.row_random import row_keys
from reservoir.skipping import Backskipping
from reservoir.transformer_fields import check_transformer

TOKENIZER = "tokenizer.npz"


def validate(config: ConfigDict) -> None:
    """Checks the configuration of a masked language model.

    Raises:
      UserError: a field has an invalid value.
    """
    check_least(config, ("model.max_length", "data.vocab_size"), 8)
    check_transformer(config.model)
    check_least(config, ("data.batch", "eval.batch"))
    check(
        0 < config.data.masked < 1,
        f"--config.data.masked must be above 0 and below 1, got {config.data.masked}",
    )
    check(
        config.eval.sequences >= 0,
        f"--config.eval.sequences must not be negative, got {config.eval.sequences}",
    )


def vocabulary(tokenizer: Tokenizer) -> int:
    """Returns the vocabulary size, including the mask token, which has the last id and never occurs in text."""
    return tokenizer.size + 1


def lengths(tokens_BL: jax.Array) -> jax.Array:
    """Returns the number of tokens of each row, without padding, (B,)."""
    return jnp.sum(tokens_BL != PAD, axis=1, dtype=jnp.int32)


class MaskedLm(Backskipping, Task):
    """Masked language modelling, validated by the perplexity of masked tokens.

    Args:
      read_data: False makes a task without texts, for `launch.plan`. The vocabulary size is then `data.vocab_size`.

    Raises:
      UserError: the data is invalid.
    """

    objective, mode, unit = "perplexity", "min", "masked tokens"

    def __init__(self, config: ConfigDict, mesh: Mesh, *, read_data: bool = True):
        self.config, self.mesh = config, mesh
        self._size = config.data.vocab_size
        self.multiple = sharding.num_batch_shards(mesh) * config.train.accumulate
        self._losses = PerExample(self._rows)
        if read_data:
            self._read_data()

    def _read_data(self) -> None:
        config, data = self.config, self.config.data
        cache = Path(os.path.expanduser(data.cache_dir))
        texts = {split: load_text(data, split) for split in ("train", "valid", "test")}
        self.tokenizer = build_tokenizer(data.vocab_size, texts["train"], cache, added=1)
        self._size = vocabulary(self.tokenizer)
        self.splits = {}
        for split, text in texts.items():
            corpus = tokenize_corpus(text, self.tokenizer, cache)
            check(
                len(corpus.tokens) * data.masked >= 1,
                f"--config.data.masked={data.masked} masks on average less than one token of the {split} split of"
                f" --config.data.source={data.source}, which needs at least {math.ceil(1 / data.masked)} tokens but has"
                f" {len(corpus.tokens)}: use a longer text",
            )
            self.splits[split] = PackedRows(corpus, config.model.max_length)
        self.training_batches = ExampleBatches(
            self._gather("train"),
            len(self.splits["train"]),
            data.batch,
            multiple=self.multiple,
            seed=config.seed,
        )

    def build(self, rngs: nnx.Rngs) -> MaskedLanguageModel:
        return build(self.config.model, self._size, rngs=rngs)

    def _guess(
        self, model: MaskedLanguageModel, batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Masks a batch and returns logits (B, M, V), targets (B, M) and weights (B, M).

        In training, the step's key determines the masked tokens, so checkpoints need not store them. With key=None, the
        id of a row determines its masked tokens, so all evaluations mask the same tokens.
        """
        tokens_BL = batch["tokens"]
        if key is None:
            always = jax.random.key(0)
            keys_B = jax.vmap(lambda number: jax.random.fold_in(always, number))(batch["ids"])
        else:
            keys_B = row_keys(fold(key, 0), len(tokens_BL))
        masked = mask(tokens_BL, keys_B, self._size - 1, self.config.data.masked)
        logits_BMV = model(masked.inputs_BL, lengths(tokens_BL), masked.places_BM, fold(key, 1))
        return logits_BMV, masked.targets_BM, masked.weights_BM

    def loss(
        self, model: MaskedLanguageModel, batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        logits_BMV, targets_BM, weights_BM = self._guess(model, batch, key)
        return jnp.sum(cross_entropy(logits_BMV, targets_BM) * weights_BM), jnp.sum(weights_BM)

    def batch_spec(self, multiple: int) -> BatchSpec:
        rows, length = self.config.data.batch, self.config.model.max_length
        check_rows(rows, multiple)
        return BatchSpec({"tokens": integers(rows, length), "ids": integers(rows)}, rows * length)

    def _gather(self, split: str) -> Callable[[np.ndarray], Batch]:
        rows = self.splits[split]
        return lambda ids_B: {"tokens": rows[ids_B], "ids": ids_B.astype(np.int32)}

    @property
    def batches_per_epoch(self) -> float:
        return self.training_batches.batches_per_epoch

    def batches(self, start: dict | None) -> Iterator[tuple[Batch, dict]]:
        return iterate(self.training_batches, start)

    def predict(self, values: ModelState, split: str) -> Losses:
        """Returns the loss in nats, the number of masked tokens and the number of correct predictions of each row.

        If `eval.sequences` is above 0, only the first `eval.sequences` rows of the split "valid" are evaluated.
        """
        count = len(self.splits[split])
        if split == "valid" and self.config.eval.sequences:
            count = min(count, self.config.eval.sequences)
        rows = self.config.eval.batch
        batches = in_order(self._gather(split), count, rows, multiple=self.multiple)
        losses = self._losses(values, batches, count)
        tokens_EL = self.splits[split][np.arange(count)]
        return Losses(
            fingerprint([tokens_EL.tobytes().hex()]),
            losses["nats"].astype(np.float64),
            losses["weights"],
            losses["hits"],
            words_E=np.zeros(0),
            unit="token",
        )

    def _rows(self, model: MaskedLanguageModel, batch: Batch) -> dict[str, jax.Array]:
        logits_BMV, targets_BM, weights_BM = self._guess(model, batch, None)
        loss_BM = cross_entropy(logits_BMV, targets_BM)
        hit_BM = jnp.argmax(logits_BMV, -1) == targets_BM
        sums = {"nats": loss_BM, "hits": hit_BM, "weights": jnp.ones_like(loss_BM)}
        return {name: (x_BM * weights_BM).sum(1) for name, x_BM in sums.items()}

    def fingerprints(self) -> dict[str, str]:
        splits = {f"the {split} split": rows.fingerprint for split, rows in self.splits.items()}
        return splits | {"the tokenizer": self.tokenizer.fingerprint}

    def save(self, workdir: Path) -> None:
        save_tokenizer(self.tokenizer, workdir / TOKENIZER)
