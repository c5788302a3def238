"""Computes sentence vectors in every encoder layer of a run: the first token's state, or the mean over tokens.

With backskipping, adjacent reservoirs count as one layer.

Shape letters of this module: P layers, including the embedding layer as layer 0; E sentences.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from common import sharding
from common.data.buckets import evaluation_batches
from common.data.corpus import TokenizedCorpus
from common.data.special_ids import BOS
from common.data.tokenizer import Tokenizer
from common.errors import check
from common.storage.addresses import shown
from common.train.evaluate import PerExample
from common.train.restore import read_config
from common.train.task import Batch, ModelState
from reservoir import pretrained, saved
from reservoir.tasks import translation
from reservoir.tasks.masked_lm import lengths

POOLS = ("first", "mean")
_FIRST_BUCKET = 32  # length of the shortest bucket in tokens
_BATCH_TOKENS = 8192

_BLOCK = re.compile(r"encoder/(?:stack/)?blocks/(\d+)/")

Hidden = Callable[[nnx.Module, jax.Array, jax.Array], list[jax.Array]]
"""Function (model, tokens (B, L), lengths (B,)) -> list of the P layers' states, (B, L, D) each."""


@dataclass(frozen=True)
class Reader:
    """A trained encoder that maps sentences to vectors.

    Attributes:
      pool: "first" (state of the first token) or "mean" (over tokens).
      begin: whether each sentence begins with the token <s>.
      longest: the model's maximum length in tokens; None means no limit.
    """

    values: ModelState
    hidden: Hidden
    tokenizer: Tokenizer
    pool: str
    begin: bool
    longest: int | None

    @property
    def layers(self) -> list[str]:
        """Kind of each of the P layers: "embeddings", "trained", or "reservoir" for a layer with frozen parameters."""
        kinds = {}
        model = self.values.abstract_model
        # "reservoir" comes last to override "trained": with backskipping, a reservoir also has a trained value network.
        for kind, names in (("trained", model.trainable), ("reservoir", model.frozen)):
            kinds |= {int(match[1]): kind for name in names if (match := _BLOCK.match(name))}
        return ["embeddings", *(kinds[layer] for layer in sorted(kinds))]

    def _encode(self, sentences: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of sentences, truncated to the maximum length, without the end-of-sentence token."""
        start = [BOS] if self.begin else []
        limit = None if self.longest is None else self.longest - 1
        return [(start + ids)[:limit] for ids in self.tokenizer.encode(sentences)]

    def cut(self, sentences: Sequence[str]) -> int:
        """Returns the number of sentences that are longer than the model's maximum length, and so are truncated."""
        if self.longest is None:
            return 0
        limit = self.longest - 1 - self.begin
        return sum(len(ids) > limit for ids in self.tokenizer.encode(sentences))

    def __call__(self, sentences: Sequence[str]) -> np.ndarray:
        """Returns the sentence vectors of every layer, (P, E, D) float32."""
        corpus = TokenizedCorpus.from_lists(self._encode(sentences))
        batches = evaluation_batches(
            corpus,
            None,
            buckets=self._buckets(),
            tokens_per_batch=_BATCH_TOKENS,
            multiple=sharding.num_batch_shards(self.values.mesh),
        )
        return self._vectors(self.values, batches, len(sentences))["x_EPD"].swapaxes(0, 1)

    def _buckets(self) -> list[int]:
        if self.longest is None:  # `evaluation_batches` adds buckets for longer sentences.
            return [_FIRST_BUCKET]
        buckets = [_FIRST_BUCKET * 2**n for n in range(self.longest.bit_length())]
        return [*(length for length in buckets if length < self.longest), self.longest]

    @cached_property
    def _vectors(self) -> PerExample:
        """The function that computes the vectors of all layers, compiled once for each batch shape."""

        def rows(model: nnx.Module, batch: Batch) -> dict[str, jax.Array]:
            tokens_BL = batch["source"]
            lengths_B = lengths(tokens_BL)
            x_BPLD = jnp.stack(self.hidden(model, tokens_BL, lengths_B), 1).astype(jnp.float32)
            if self.pool == "first":
                return {"x_EPD": x_BPLD[:, :, 0]}
            inside_BL = jnp.arange(tokens_BL.shape[1]) < lengths_B[:, None]
            sum_BPD = jnp.sum(x_BPLD * inside_BL[:, None, :, None], 2)
            return {"x_EPD": sum_BPD / jnp.maximum(lengths_B, 1)[:, None, None]}

        return PerExample(rows)


def open_reader(workdir: Path, mesh: Mesh, pool: str | None) -> Reader:
    """Opens the encoder of a masked language model or a translator.

    Args:
      pool: one of `POOLS`. None means "first" for a masked language model, and "mean" for a translator, whose sentences
        have no token <s>.

    Raises:
      UserError: the folder has no run, or the run has another task, an invalid configuration, or a missing or damaged
        tokenizer or checkpoint.
    """
    openers = {"masked_lm": _masked_lm, "translation": _translator}
    # Configurations from before 21 November 2026 have no field `task`, because translation was the only task.
    task = read_config(workdir, paper="reservoir").get("task", "translation")
    check(
        task in openers,
        f"--workdir={shown(workdir)} is a run of the task {task}, which probing cannot read: give a run of the task"
        f" {' or '.join(openers)}",
    )
    return openers[task](workdir, mesh, pool)


def _masked_lm(workdir: Path, mesh: Mesh, pool: str | None) -> Reader:
    run = pretrained.open_run(workdir)
    return Reader(
        run.load(mesh),
        lambda whole, *text: whole.encoder.hidden(*text),
        run.tokenizer,
        pool or "first",
        begin=True,
        longest=run.config.model.max_length,
    )


def _translator(workdir: Path, mesh: Mesh, pool: str | None) -> Reader:
    config = saved.read(workdir, "--workdir", "translation")
    tokenizers, values = saved.load_translator(workdir, config, mesh)
    return Reader(
        values,
        lambda whole, *text: whole.hidden(*text),
        tokenizers[0],
        pool or "mean",
        begin=False,
        longest=config.model.max_length if translation.limited(config) else None,
    )
