"""The model and the task of section 3.1: predicts a token from the W previous tokens (the paper's K).

Shape letters of this module: B examples of a batch, L tokens of a text, W lags, V vocabulary.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import chain
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common.config import check_choice, check_least
from common.data.batches import in_order
from common.data.cache import fingerprint, fingerprint_arrays
from common.data.corpus import tokenize_corpus
from common.data.special_ids import UNK
from common.data.text import load_text
from common.data.tokenizer import build_tokenizer
from common.errors import check
from common.metrics.losses import Losses
from common.metrics.predictions import perplexity
from common.model.loss import cross_entropy
from common.train.evaluate import PerExample
from common.train.saved_tokenizer import save_tokenizer
from common.train.task import Batch, ModelState, integers
from common.variables import Params
from explicit_opt.counts import TABLE_AXES, Noise, count_pairs, language_solution, text_sharding
from explicit_opt.solution import fit_scale
from explicit_opt.start import INITIALIZERS, StartTask, validate_start

PAD, OOV = 0, 1
"""Ids of `<pad>` and `<oov>`. `<pad>` stands for context positions before the document, and is never a target."""

# SentencePiece's ids begin with <pad>, <s>, </s>, <unk>. The model has only <pad> and <oov>, so two ids are unused.
_UNUSED = 2
TOKENIZER = "tokenizer.npz"

FINEST = 100_000
"""Largest denominator of the fraction to which `held_out` rounds `data.held_out_share`."""

STRETCH = 64
"""Number of consecutive tokens that form one test example; the last example may have fewer. A test example has several
tokens because the losses of neighbouring tokens are not independent."""


def held_out(documents: Sequence[list[str]], share: float) -> list[list[str]]:
    """Returns `share` * len(documents) documents, rounded up, evenly spaced from the first document on.

    Rounds `share` to the nearest fraction with a denominator up to FINEST, because 0.333333 stands for 1/3. Before 28
    November 2026, runs rounded `share` to 1/n, so that 0.3 kept a third and 0.7 kept all documents.
    """
    kept, of = Fraction(share).limit_denominator(FINEST).as_integer_ratio()
    return [documents[n * of // kept] for n in range(-(-len(documents) * kept // of))]


def validate(config: ConfigDict) -> None:
    """Raises a UserError for invalid configuration fields of a language model. Reads no data."""
    check_choice("--config.model.aggregate", config.model.aggregate, ("sum", "cat"))
    check_least(config, ("data.vocab_size",), 8)
    check_least(config, ("model.context",))
    check_least(config, ("data.tokens", "eval.train_tokens"), 0)
    check(
        not config.data.tokens or config.data.documents != "file",
        f"the first --config.data.tokens={config.data.tokens} tokens of the shuffled documents may come from only a few"
        " files with --config.data.documents=file: set --config.data.tokens=0, or --config.data.documents=line or"
        " paragraph",
    )
    share = config.data.held_out_share
    check(
        1 / FINEST <= share <= 1,
        f"--config.data.held_out_share must be at least {1 / FINEST:.5f} and at most 1, got {share}",
    )
    validate_start(config)


@jax.custom_vjp
def constant_matvec(constant_V: jax.Array, table_VV: jax.Array) -> jax.Array:
    """Returns constant @ table, (V,). Only the table has a gradient.

    The custom gradient is row-major. JAX's own gradient is column-major, so XLA would have to copy it.
    """
    return constant_V @ table_VV


constant_matvec.defvjp(
    lambda constant_V, table_VV: (constant_V @ table_VV, constant_V),
    lambda constant_V, g_V: (None, constant_V[:, None] * g_V[None]),
)


class FeedForward(nnx.Module):
    """Computes the logits H U: H is the sum or the concatenation of W noisy embeddings, U the weights (section 3.1)."""

    def __init__(self, vocabulary: int, context: int, aggregate: str, cold: str, *, rngs: nnx.Rngs):
        tables = context if aggregate == "cat" else 1
        shape = (tables, vocabulary, vocabulary)
        draw = INITIALIZERS[cold](tables * vocabulary)
        self.tables = nnx.Param(draw(rngs.params(), shape), axes=TABLE_AXES)
        self.context = context

    def __call__(self, contexts_BW: jax.Array, noise: Noise) -> jax.Array:
        """Returns logits (B, V). Each example sums W table rows and W noise terms, so H is never built."""
        tables = self.tables[...]
        uniform_logits = [constant_matvec(noise.uniform_V, table) for table in tables]
        logits_BV = 0.0
        for lag in range(self.context):
            index = lag % len(tables)  # a sum has one table for all lags
            tokens_B = contexts_BW[:, lag]
            logits_BV += noise.keep_V[tokens_B, None] * tables[index, tokens_B]
            logits_BV += noise.spill_V[tokens_B, None] * uniform_logits[index]
        return logits_BV


class Windows:
    """The tokens of a text, each with the W previous tokens of its document. `<pad>` stands for missing tokens.

    Args:
      tokens_L: SentencePiece ids.
      lengths: number of tokens of each document.
      context: number W of previous tokens.
      limit: number of tokens to keep, from the start of the text; 0 keeps all.
    """

    def __init__(self, tokens_L: np.ndarray, lengths: np.ndarray, context: int, limit: int = 0):
        tokens_L = np.asarray(tokens_L, np.int32)
        positions_L = np.arange(len(tokens_L)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        end = limit or len(tokens_L)
        self.tokens_L = np.where(tokens_L == UNK, OOV, tokens_L - _UNUSED)[:end].astype(np.int32)
        self.positions_L = positions_L[:end]
        self.context = context

    def __len__(self) -> int:
        return len(self.tokens_L)

    def before(self, at_B: np.ndarray, lag: int) -> np.ndarray:
        """Returns the tokens `lag` positions before the positions `at_B`, (B,); `<pad>` before the document."""
        return np.where(self.positions_L[at_B] >= lag, self.tokens_L[at_B - lag], PAD)

    def gather(self, ids_B: np.ndarray) -> Batch:
        """Returns contexts (B, W), targets (B,) and weights (B,) at positions `ids_B`. Position -1 has weight 0.

        The first column of the contexts has the token directly before the target.
        """
        at_B = np.maximum(ids_B, 0)
        lags = range(1, self.context + 1)
        return {
            "contexts": np.stack([self.before(at_B, lag) for lag in lags], 1).astype(np.int32),
            "targets": self.tokens_L[at_B],
            "weights": (ids_B >= 0).astype(np.float32),
        }


def read_documents(data: ConfigDict, split: str) -> list[list[str]]:
    """Returns the lines of each document, without blank lines.

    `data.documents` sets the boundaries of documents, unless a user's function returns the documents. Contexts do not
    cross boundaries. Each line is tokenized on its own. With more than a million training lines, the boundaries also
    change which lines train the tokenizer.
    """
    documents = load_text(data, split)
    return [[line for line in text.split("\n") if line.strip()] for text in documents]


def count_windows(windows: Windows, vocabulary: int, mesh: Mesh) -> jax.Array:
    """Counts the pairs (context token, target) at each lag, (W, V, V) int32. Each device counts in its text shard."""
    total, shards = len(windows), mesh.shape["data"]
    padded = -(-total // shards) * shards
    at_L = np.minimum(np.arange(padded), total - 1)
    targets_L = np.where(np.arange(padded) < total, windows.tokens_L[at_L], -1)
    contexts_WL = np.stack([windows.before(at_L, lag) for lag in range(1, windows.context + 1)])
    sharded = (
        jax.make_array_from_callback(x.shape, where, x.__getitem__)
        for x, where in zip((contexts_WL, targets_L), text_sharding(mesh), strict=True)
    )
    return count_pairs(*sharded, vocabulary, mesh)


class NextToken(StartTask):
    """Next-token prediction with the noisy embedding of section 3.1.1.

    Args:
      read_data: False makes a task without texts, which can only compile its training step. The vocabulary then has
        the maximum size, `config.data.vocab_size`.

    Raises a UserError if the configuration or the data are invalid.
    """

    objective = "perplexity"

    def __init__(self, config: ConfigDict, mesh: Mesh, *, read_data: bool = True):
        validate(config)
        super().__init__(config, mesh)
        self.noise = Noise.of(np.ones(config.data.vocab_size, np.int64))
        self._nats_of_rows = PerExample(lambda model, batch: {"nats": self.nats(model, batch)})
        # Without data, assume that the text has `data.tokens` tokens; 0, no limit, means an unknown number.
        self.examples = config.data.tokens
        if read_data:
            self._read_data()

    def _read_data(self) -> None:
        config = self.config
        data = config.data
        cache = Path(os.path.expanduser(data.cache_dir))
        texts = {split: read_documents(data, split) for split in ("train", "valid", "test")}
        # Shuffle the training documents, so that the first `data.tokens` tokens are drawn from all files. The order
        # does not depend on the run's seed or on `data.tokens`.
        order = np.random.default_rng(0).permutation(len(texts["train"]))
        texts["train"] = [texts["train"][number] for number in order]
        for split in ("valid", "test"):
            texts[split] = held_out(texts[split], data.held_out_share)
        lines = {split: list(chain.from_iterable(text)) for split, text in texts.items()}
        self.tokenizer = build_tokenizer(data.vocab_size, lines["train"], cache, added=-_UNUSED)
        self.vocabulary = self.tokenizer.size - _UNUSED
        self.splits = {}
        for split, text in texts.items():
            corpus = tokenize_corpus(lines[split], self.tokenizer, cache)
            ends = corpus.offsets[np.cumsum([0, *map(len, text)])]
            limit = data.tokens if split == "train" else 0
            self.splits[split] = Windows(corpus.tokens, np.diff(ends), config.model.context, limit)
        for split, windows in self.splits.items():
            check(
                len(windows) > 0,
                f"the {split} split of --config.data.source={data.source} has no tokens: use a text with words",
            )
        train = self.splits["train"]
        self.targets_V = np.bincount(train.tokens_L, minlength=self.vocabulary)
        self.noise = Noise.of(self.targets_V)
        self.set_examples(train.gather, len(train))

    def build(self, rngs: nnx.Rngs) -> FeedForward:
        model = self.config.model
        vocabulary = len(self.noise.keep_V)
        return FeedForward(vocabulary, model.context, model.aggregate, model.cold, rngs=rngs)

    def nats(self, model: FeedForward, batch: Batch) -> jax.Array:
        return cross_entropy(model(batch["contexts"], self.noise), batch["targets"])

    def inputs(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        return {"contexts": integers(rows, self.config.model.context)}

    def explicit_start(self, trainable: Params) -> Params:
        tables = self.solution()
        if self.config.start != "scaled":
            return {"tables": tables}
        values = self.with_parameters({"tables": tables})

        def loss(scale: float) -> float:
            return self._training_loss(replace(values, trainable={"tables": scale * tables}))

        return {"tables": fit_scale(loss) * tables}

    def solution(self) -> jax.Array:
        """Returns the weights of eq. (3), computed in one pass over the training text."""
        return language_solution(
            self.counts(),
            self.noise,
            self.targets_V,
            concatenate=self.config.model.aggregate == "cat",
            exponent=self.exponent,
            sign=self.config.solution.sign,
        )

    def counts(self) -> jax.Array:
        """Returns the number of pairs (context token, target) in the training text at each lag, (W, V, V)."""
        return count_windows(self.splits["train"], self.vocabulary, self.mesh)

    def predict(self, values: ModelState, split: str) -> Losses:
        """Returns the loss of each example of a split: the sum over its `STRETCH` consecutive tokens, in nats."""
        windows = self.splits[split]
        starts_E = np.arange(0, len(windows), STRETCH)
        nats_E = np.add.reduceat(self._nats(values, windows).astype(np.float64), starts_E)
        none = np.zeros(0)
        return Losses(
            # The fingerprint of the examples covers the tokens of the split, but not the context length, so that losses
            # of models with different context lengths can be compared.
            fingerprint([windows.tokens_L.tobytes().hex()]),
            nats_E,
            np.diff(np.append(starts_E, len(windows))),
            hits_E=none,
            words_E=none,
            unit="token",
        )

    def evaluate(self, values: ModelState, split: str) -> dict[str, float]:
        """Returns perplexity and loss (nats per token) of `split`, and the training perplexity."""
        training = float(perplexity(self._training_loss(values)))
        return {**super().evaluate(values, split), "train_perplexity": training}

    @property
    def training_stride(self) -> int:
        """Distance between the training tokens on which the training perplexity is measured.

        The smallest distance that selects at most `eval.train_tokens` tokens; 1 (all tokens) if that field is 0.
        """
        total = len(self.splits["train"])
        return -(-total // (self.config.eval.train_tokens or total))

    def _training_loss(self, values: ModelState) -> float:
        """Returns the loss (nats per token) on every `training_stride`-th training token."""
        nats = self._nats(values, self.splits["train"], self.training_stride)
        return float(nats.mean(dtype=np.float64))

    def _nats(self, values: ModelState, windows: Windows, stride: int = 1) -> np.ndarray:
        """Returns the loss in nats of every `stride`-th token, starting with the first token."""

        def gather(ids_B: np.ndarray) -> Batch:
            return windows.gather(np.where(ids_B < 0, ids_B, stride * ids_B))

        # Evaluation stores no activations for gradients, so its batches may be larger than training batches.
        count, rows = -(-len(windows) // stride), max(self.config.train.batch, 4096)
        batches = in_order(gather, count, rows, multiple=self.multiple)
        return self._nats_of_rows(values, batches, count)["nats"]

    def fingerprints(self) -> dict[str, str]:
        splits = {
            f"the {split} split": fingerprint_arrays(windows.tokens_L, windows.positions_L)
            for split, windows in self.splits.items()
        }
        return splits | {"the tokenizer": self.tokenizer.fingerprint}

    def save(self, workdir: Path) -> None:
        """Writes the tokenizer. Raises a UserError if a resumed run has another tokenizer, or the file is damaged."""
        save_tokenizer(self.tokenizer, workdir / TOKENIZER)
