"""The language model of section 3.1 as a task: the K tokens before in, the next token out.

B examples, M tokens, K tokens before, N vocabulary.
"""

import math
import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common import sharding, variables
from common.config import check, check_choice
from common.data.batching import check_rows, iterate
from common.data.cache import fingerprint
from common.data.corpus import tokenize_corpus
from common.data.examples import ExampleBatches, in_order
from common.data.text import load_text
from common.data.tokenizer import UNK, build_tokenizer
from common.metrics.predictions import Losses
from common.model.loss import cross_entropy
from common.train.evaluate import PerExample
from common.train.task import Batch, BatchSpec, ModelState, Task, integers
from common.train.workdir import save_tokenizer
from common.variables import Params
from explicit_opt.counts import Noise, count_pairs, language_solution, text_sharding
from explicit_opt.model import AGGREGATES, INITIALIZERS, FeedForward
from explicit_opt.solution import fit_scale

STARTS = ("cold", "zero", "explicit", "warm", "scaled")
"""Random values, zeros, the explicit solution without any training, trained from it, and trained from its multiple by a
scalar that is fitted on training data."""

PAD, OOV = 0, 1
"""The two tokens beside the pieces; `<pad>` stands before every document and is never a target."""

# SentencePiece's ids begin with <pad>, <s>, </s>, <unk>; ours with <pad>, <oov>: no sentence has a begin or an end.
_UNUSED = 2
TOKENIZER = "tokenizer.npz"

STRETCH = 64
"""Neighbouring tokens that are one test example: the losses of neighbours are not independent."""


def validate(config: ConfigDict) -> None:
    """The fields of the language model."""
    check_choice("--config.model.aggregate", config.model.aggregate, AGGREGATES)
    check(
        config.model.context >= 1,
        f"--config.model.context, the number of tokens before, must be at least 1, got {config.model.context}",
    )
    check(
        config.data.tokens >= 0,
        f"--config.data.tokens must not be negative, got {config.data.tokens}",
    )
    check(
        config.eval.train_tokens >= 0,
        f"--config.eval.train_tokens must not be negative, got {config.eval.train_tokens}",
    )
    check(
        not config.data.tokens or config.data.documents != "file",
        f"--config.data.tokens={config.data.tokens} keeps whole documents, which would be a few files with"
        " --config.data.documents=file: set it to 0",
    )
    check(
        0 < config.data.held_out_share <= 1,
        f"--config.data.held_out_share must be above 0 and at most 1, got {config.data.held_out_share}",
    )
    validate_start(config)


def validate_start(config: ConfigDict) -> None:
    """What the paper's experiments have in common."""
    check_choice("--config.start", config.start, STARTS)
    check_choice("--config.model.cold", config.model.cold, INITIALIZERS)
    check(
        config.solution.sign in (-1, 1),
        f"--config.solution.sign must be -1 or 1, got {config.solution.sign}",
    )
    check(
        config.train.steps == 0,
        f"--config.train.steps={config.train.steps} follows from --config.train.epochs: set that",
    )
    for name in ("epochs", "batch"):
        check(
            config.train[name] >= 1,
            f"--config.train.{name} must be at least 1, got {config.train[name]}",
        )


def exponent(config: ConfigDict) -> float | None:
    """That of the solution's prior; a negative number stands for the paper's (K - 1) / K."""
    return None if config.solution.exponent < 0 else config.solution.exponent


def seedless(config: ConfigDict) -> bool:
    """Whether the seed changes nothing: the explicit solution is computed, not drawn, and not trained."""
    return config.start == "explicit"


def zeros(trainable: Params) -> Params:
    """Values of 0 with the shapes and shardings of these."""
    return {name: jax.device_put(jnp.zeros_like(x), x.sharding) for name, x in trainable.items()}


class Windows:
    """Every token of a text with the K before it, in its document; `<pad>` where there are fewer.

    Args:
      tokens_M: ids as SentencePiece gives them.
      lengths: tokens of each document.
      limit: only the first so many tokens are kept; 0 for all.
    """

    def __init__(self, tokens_M: np.ndarray, lengths: np.ndarray, context: int, limit: int = 0):
        tokens_M = np.asarray(tokens_M, np.int32)
        places_M = np.arange(len(tokens_M)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        end = limit or len(tokens_M)
        self.tokens_M = np.where(tokens_M == UNK, OOV, tokens_M - _UNUSED)[:end].astype(np.int32)
        self.places_M = places_M[:end]
        self.context = context

    def __len__(self) -> int:
        return len(self.tokens_M)

    def before(self, at_B: np.ndarray, lag: int) -> np.ndarray:
        """The token `lag` places before each, (B,)."""
        return np.where(self.places_M[at_B] >= lag, self.tokens_M[at_B - lag], PAD)

    def gather(self, ids_B: np.ndarray) -> Batch:
        """contexts (B, K), targets (B,) and weights (B,), which are 0 in rows whose id is -1."""
        at_B = np.maximum(ids_B, 0)
        lags = range(1, self.context + 1)
        return {
            "contexts": np.stack([self.before(at_B, lag) for lag in lags], 1).astype(np.int32),
            "targets": self.tokens_M[at_B],
            "weights": (ids_B >= 0).astype(np.float32),
        }


def read_documents(data: ConfigDict, split: str) -> list[list[str]]:
    """The lines of each document, without empty ones.

    A text is tokenized line by line whatever its documents are: `data.documents` changes contexts only, never tokens.
    """
    documents = load_text(data, split)
    return [[line for line in text.split("\n") if line.strip()] for text in documents]


def count_windows(windows: Windows, vocabulary: int, mesh: Mesh) -> jax.Array:
    """Co-occurrences at each lag, (K, N, N) int32; every data-parallel device counts its share of the text."""
    total, ways = len(windows), mesh.shape["data"]
    padded = -(-total // ways) * ways
    at_M = np.minimum(np.arange(padded), total - 1)
    targets_M = np.where(np.arange(padded) < total, windows.tokens_M[at_M], -1)
    contexts_KM = np.stack([windows.before(at_M, lag) for lag in range(1, windows.context + 1)])
    placed = (
        jax.make_array_from_callback(x.shape, place, x.__getitem__)
        for x, place in zip((contexts_KM, targets_M), text_sharding(mesh), strict=True)
    )
    return count_pairs(*placed, vocabulary, mesh)


class NextToken(Task):
    """The language model with its noise.

    Args:
      read_data: False for a task whose step is only compiled; its vocabulary is as large as the configuration allows.

    Raises:
      UserError: the configuration or the data are at fault.
    """

    objective, mode = "perplexity", "min"

    def __init__(self, config: ConfigDict, mesh: Mesh, *, read_data: bool = True):
        validate(config)
        self.config, self.mesh = config, mesh
        self.noise = Noise.of(np.ones(config.data.vocab_size, np.int64))
        self.multiple = sharding.num_batch_shards(mesh) * config.train.accumulate
        self._nats_of_rows = PerExample(self._rows, mesh)
        if read_data:
            self._read_data()

    def _read_data(self) -> None:
        config = self.config
        data = config.data
        cache = Path(os.path.expanduser(data.cache_dir))
        texts = {split: read_documents(data, split) for split in ("train", "valid", "test")}
        # Whatever is left out is left out of all sources alike; the order is the same for every seed and any limit.
        order = np.random.default_rng(0).permutation(len(texts["train"]))
        texts["train"] = [texts["train"][number] for number in order]
        step = round(1 / data.held_out_share)
        for split in ("valid", "test"):
            texts[split] = texts[split][::step]
        lines = {split: list(chain.from_iterable(text)) for split, text in texts.items()}
        self.tokenizer = build_tokenizer(data.vocab_size + _UNUSED, lines["train"], cache)
        self.vocabulary = self.tokenizer.size - _UNUSED
        self.splits = {}
        for split, text in texts.items():
            corpus = tokenize_corpus(lines[split], self.tokenizer, cache)
            ends = corpus.offsets[np.cumsum([0, *map(len, text)])]
            limit = data.tokens if split == "train" else 0
            self.splits[split] = Windows(corpus.tokens, np.diff(ends), config.model.context, limit)
        for split, windows in self.splits.items():
            check(len(windows) > 0, f"the {split} text has no tokens")
        train = self.splits["train"]
        self.targets_N = np.bincount(train.tokens_M, minlength=self.vocabulary)
        self.noise = Noise.of(self.targets_N)
        self.training_batches = ExampleBatches(
            train.gather, len(train), config.train.batch, multiple=self.multiple, seed=config.seed
        )

    def build(self, rngs: nnx.Rngs) -> FeedForward:
        model = self.config.model
        vocabulary = len(self.noise.keep_N)
        return FeedForward(vocabulary, model.context, model.aggregate, model.cold, rngs=rngs)

    def loss(
        self, model: FeedForward, batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        logits_BN = model(batch["contexts"], self.noise)
        loss_B = cross_entropy(logits_BN, batch["targets"])
        return jnp.sum(loss_B * batch["weights"]), jnp.sum(batch["weights"])

    def batch_spec(self, multiple: int) -> BatchSpec:
        rows, context = self.config.train.batch, self.config.model.context
        check_rows(rows, multiple)
        arrays = {
            "contexts": integers(rows, context),
            "targets": integers(rows),
            "weights": jax.ShapeDtypeStruct((rows,), np.float32),
        }
        return BatchSpec(arrays, rows)

    @property
    def seedless(self) -> bool:
        return seedless(self.config)

    @property
    def batches_per_epoch(self) -> int:
        return self.training_batches.batches_per_epoch

    def start(self, trainable: Params) -> Params:
        match self.config.start:
            case "cold":
                return trainable
            case "zero":
                return zeros(trainable)
            case "scaled":
                tables = self.solution()
                abstract_model = variables.abstract(lambda: self.build(variables.ParamKeys(0)))

                def loss(scale: float) -> float:
                    return self._training_loss(
                        ModelState(abstract_model, {"tables": scale * tables}, {}, self.mesh)
                    )

                return {"tables": fit_scale(loss) * tables}
            case _:
                return {"tables": self.solution()}

    def solution(self) -> jax.Array:
        """The tables of eq. (3), from one pass over the training text."""
        solution = self.config.solution
        return language_solution(
            self.counts(),
            self.noise,
            self.targets_N,
            concatenate=self.config.model.aggregate == "cat",
            exponent=exponent(self.config),
            sign=solution.sign,
        )

    def counts(self) -> jax.Array:
        """Co-occurrences at each lag, (K, N, N)."""
        return count_windows(self.splits["train"], self.vocabulary, self.mesh)

    def batches(self, start: dict | None) -> Iterator[tuple[Batch, dict]]:
        return iterate(self.training_batches, start)

    def predict(self, values: ModelState, split: str) -> Losses:
        """Loss of every token of a split, by stretches of `STRETCH` tokens."""
        windows = self.splits[split]
        starts_M = np.arange(0, len(windows), STRETCH)
        nats_M = np.add.reduceat(self._nats(values, windows).astype(np.float64), starts_M)
        none = np.zeros(0)
        return Losses(
            # Not the contexts: models of several tokens before are compared on the same targets.
            fingerprint([windows.tokens_M.tobytes().hex()]),
            nats_M,
            np.diff(np.append(starts_M, len(windows))),
            hits_M=none,
            words_M=none,
            unit="token",
        )

    def evaluate(self, values: ModelState, split: str) -> dict[str, float]:
        """Perplexity and loss (nats per token) of a split, and the perplexity of the training text."""
        training = _perplexity(self._training_loss(values))
        return {**super().evaluate(values, split), "train_perplexity": training}

    @property
    def training_stride(self) -> int:
        """Every so many training tokens one is measured: at most `eval.train_tokens` of them; 0 takes all."""
        total = len(self.splits["train"])
        return -(-total // (self.config.eval.train_tokens or total))

    def _training_loss(self, values: ModelState) -> float:
        """Nats per token over the measured training tokens."""
        nats = self._nats(values, self.splits["train"], self.training_stride)
        return float(nats.mean(dtype=np.float64))

    def _rows(self, model: FeedForward, batch: Batch) -> dict[str, jax.Array]:
        return {"nats": cross_entropy(model(batch["contexts"], self.noise), batch["targets"])}

    def _nats(self, values: ModelState, windows: Windows, stride: int = 1) -> np.ndarray:
        """Loss of every `stride`-th token, from the first on."""
        # As large as a step is fast with: nothing but the forward pass is kept.
        rows = -(-max(self.config.train.batch, 4096) // self.multiple) * self.multiple

        def gather(ids_B: np.ndarray) -> Batch:
            batch = windows.gather(np.where(ids_B < 0, ids_B, stride * ids_B))
            return {**batch, "ids": ids_B.astype(np.int32)}

        count = -(-len(windows) // stride)
        batches = in_order(gather, count, rows, multiple=self.multiple)
        return self._nats_of_rows(values, batches, count)["nats"]

    def save(self, workdir: Path) -> None:
        """The tokenizer; that of a run that goes on is not replaced."""
        save_tokenizer(self.tokenizer, workdir / TOKENIZER)


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))
