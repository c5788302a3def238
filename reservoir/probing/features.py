"""What each layer of a trained run makes of a sentence: one vector, that of its first token or the mean of all.

K layers (0: the embeddings), N sentences, B batch, L length, D width.
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
from common.config import check, complete
from common.data.batching import evaluation_batches
from common.data.corpus import TokenizedCorpus
from common.data.tokenizer import BOS, Tokenizer
from common.tasks import translation
from common.tasks.masked_lm import lengths
from common.train.prefetch import put
from common.train.restore import load_run
from common.train.task import ModelState
from common.train.workdir import CONFIG, read_config, read_run
from common.variables import AbstractModel
from reservoir import model, pretrained

POOLS = ("first", "mean")
_SHORTEST = 32  # tokens in the rows of the first bucket
_TOKENS = 8192  # at once

_BLOCK = re.compile(r"encoder/(?:stack/)?blocks/(\d+)/")

Hidden = Callable[[nnx.Module, jax.Array, jax.Array], list[jax.Array]]
"""(model, tokens (B, L), lengths (B,)) to the states (B, L, D) of all K layers."""


@dataclass(frozen=True)
class Reader:
    """A trained encoder: sentences in, vectors out.

    Attributes:
      pool: "first" or "mean".
      begin: whether a sentence begins with a token of its own (which then is the first).
      longest: the tokens that the model has room for; None is no limit.
    """

    values: ModelState
    hidden: Hidden
    tokenizer: Tokenizer
    pool: str
    begin: bool
    longest: int | None

    @property
    def layers(self) -> list[str]:
        """What each of the K layers is: "embeddings", "trained" or "reservoir"."""
        return layer_kinds(self.values.abstract_model)

    def _encode(self, sentences: Sequence[str]) -> list[list[int]]:
        """Ids, without the end of sentence that batches add."""
        start = [BOS] if self.begin else []
        room = None if self.longest is None else self.longest - 1
        return [(start + ids)[:room] for ids in self.tokenizer.encode(sentences)]

    def cut(self, sentences: Sequence[str]) -> int:
        """How many sentences are longer than the model, which reads as much of them as it has room for."""
        if self.longest is None:
            return 0
        room = self.longest - 1 - self.begin
        return sum(len(ids) > room for ids in self.tokenizer.encode(sentences))

    def __call__(self, sentences: Sequence[str]) -> np.ndarray:
        """Vectors, (K, N, D) float32."""
        corpus = TokenizedCorpus.from_lists(self._encode(sentences))
        mesh, result = self.values.mesh, None
        for batch in evaluation_batches(
            corpus,
            None,
            buckets=self._buckets(),
            tokens_per_batch=_TOKENS,
            multiple=sharding.num_batch_shards(mesh),
        ):
            found_KBD = self._read(self.values.trainable, self.values.frozen, put(batch, mesh))
            if result is None:
                layers, _, width = found_KBD.shape
                result = np.zeros((layers, len(sentences), width), np.float32)
            inside_B = batch["ids"] >= 0
            result[:, batch["ids"][inside_B]] = np.asarray(found_KBD)[:, inside_B]
        return result

    def _buckets(self) -> list[int]:
        """Lengths of rows, each twice the one before, up to the model's longest."""
        if self.longest is None:
            return [_SHORTEST]
        buckets = [_SHORTEST * 2**n for n in range(self.longest.bit_length())]
        return [*(length for length in buckets if length < self.longest), self.longest]

    @cached_property
    def _read(self) -> Callable:
        """(trainable, frozen, batch) to vectors (K, B, D), whole on every device."""
        abstract_model = self.values.abstract_model

        def read(trainable, frozen, batch):
            tokens_BL = batch["source"]
            lengths_B = lengths(tokens_BL)
            states = self.hidden(abstract_model.build(trainable, frozen), tokens_BL, lengths_B)
            x_KBLD = jnp.stack(states).astype(jnp.float32)
            if self.pool == "first":
                return x_KBLD[:, :, 0]
            inside_BL1 = jnp.arange(tokens_BL.shape[1])[None, :, None] < lengths_B[:, None, None]
            return jnp.sum(x_KBLD * inside_BL1, 2) / jnp.maximum(lengths_B, 1)[:, None]

        return jax.jit(read, out_shardings=sharding.replicated(self.values.mesh))


def layer_kinds(abstract_model: AbstractModel) -> list[str]:
    """The kinds of `Reader.layers`, from what is frozen in the model."""
    kinds = {}
    # A reservoir that is backskipped has a trained baseline beside it.
    for kind, names in (
        ("trained", abstract_model.trainable),
        ("reservoir", abstract_model.frozen),
    ):
        kinds |= {int(found[1]): kind for name in names if (found := _BLOCK.match(name))}
    return ["embeddings", *(kinds[layer] for layer in sorted(kinds))]


def open_reader(workdir: Path, mesh: Mesh, pool: str | None) -> Reader:
    """The encoder of a masked language model or of a translator.

    Args:
      pool: one of `POOLS`; None is what fits the run. A translator's sentences have no first token of their own.

    Raises:
      UserError: there is no run, it has another task, or no checkpoint.
    """
    openers = {"masked_lm": _masked_lm, "translation": _translator}
    # Runs from before there were other tasks translate.
    task = read_config(workdir).get("task", "translation")
    check(
        task in openers, f"{workdir} is a run of the task {task}; probed are {', '.join(openers)}"
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
    config = read_run(workdir, "translation")
    with complete(workdir / CONFIG):
        config.model = model.with_defaults(config.model)
        model.validate(config.model)
        translation.validate(config)
    tokenizers = translation.load_tokenizers(workdir)
    sizes = [tokenizer.size for tokenizer in tokenizers]
    values = load_run(
        workdir, config, lambda rngs: model.translator(config.model, *sizes, rngs=rngs), mesh
    )
    return Reader(
        values,
        lambda whole, *text: whole.hidden(*text),
        tokenizers[0],
        pool or "mean",
        begin=False,
        longest=config.model.max_length if translation.limited(config.model) else None,
    )
