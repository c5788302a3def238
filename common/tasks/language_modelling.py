"""Language modelling of bytes or subwords: training on random crops, bits per byte by sliding windows.

Shape letter of this module: M windows of a text. Lower-case n stands for the tokens of a text, except in `bytes_n` and
in `words_by_window`, where n stands for the bytes of a text.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common import sharding
from common.config import check_choice, check_least
from common.data import lossless
from common.data.batches import check_rows, iterate
from common.data.byte_text import load_bytes
from common.data.cache import fingerprint, fingerprint_arrays
from common.data.lossless import BYTES, SENTENCEPIECE
from common.data.lossless_tokenizer import LosslessTokenizer
from common.data.windows import Crops, scored_once
from common.errors import check
from common.metrics.losses import Losses
from common.model.language_model import LanguageModel
from common.model.loss import cross_entropy
from common.storage.addresses import shown
from common.train.evaluate import PerExample
from common.train.task import Batch, BatchSpec, Decoding, ModelState, Task, integers
from common.train.workdir import has_checkpoints
from common.variables import AbstractModel, Params

if TYPE_CHECKING:
    from common.decode.generate import Generator


def validate(config: ConfigDict) -> None:
    """Raises a UserError for an invalid dtype, length, batch size, limit, share, stride, token count or prompt."""
    data, evaluation = config.data, config.eval
    check_choice("--config.model.dtype", config.model.dtype, ("auto", "float32", "bfloat16"))
    check_least(config, ("model.length", "data.batch", "eval.batch", "eval.stride"))
    check_least(config, ("eval.tokens", "eval.sample"), 0)
    limit = data.get("limit", 0)  # Configurations of old runs lack this field.
    check(limit >= 0, f"--config.data.limit must be at least 0, got {limit}")
    check(
        evaluation.stride <= config.model.length,
        f"--config.eval.stride={evaluation.stride} would skip tokens: it must be at most"
        f" --config.model.length={config.model.length}",
    )
    check(
        bool(evaluation.prompt or not evaluation.sample),
        f"--config.eval.sample={evaluation.sample} needs a prompt, but --config.eval.prompt is empty: set"
        " --config.eval.prompt, or set --config.eval.sample=0",
    )
    shares = data.shares
    check(
        len(shares) == 3 and min(shares) > 0 and abs(sum(shares) - 1) < 1e-6,
        f"--config.data.shares must be three positive numbers that add up to 1, got {','.join(map(str, shares))}",
    )


class WindowLosses:
    """Computes the losses of a text in sliding windows of `model.length` tokens. The text's first token has no loss.

    Args:
      config: configuration of a run. If `data.words` is set, the words of each window are also counted.
      multiple: the batch size `eval.batch` is rounded up to a multiple of this number.
    """

    def __init__(self, config: ConfigDict, tokenizer: LosslessTokenizer, multiple: int = 1):
        self._config, self._tokenizer, self._multiple = config, tokenizer, multiple
        self._rows = PerExample(_nats)

    def __call__(self, values: ModelState, tokens_n: np.ndarray, stride: int) -> Losses:
        """Returns the losses of a text, summed over the scored tokens of each window.

        Args:
          tokens_n: token ids of the text, at least two.
          stride: number of tokens that each window scores. The last window may score fewer tokens.
        """
        length, rows = self._config.model.length, self._config.eval.batch
        batches = scored_once(tokens_n, length, stride, rows, multiple=self._multiple)
        starts_M = np.arange(0, len(tokens_n) - 1, stride) + 1
        losses = self._rows(values, batches, len(starts_M))
        text = self._tokenizer.decode(tokens_n)
        begins_n = np.concatenate([[0], np.cumsum(self._tokenizer.lengths_V[tokens_n])])
        ends_M = begins_n[np.append(starts_M[1:], len(tokens_n))]
        counted = self._config.data.words
        bytes_n = np.frombuffer(text, np.uint8)
        return Losses(
            fingerprint([text.hex()]),
            losses["nats"].astype(np.float64),
            (ends_M - begins_n[starts_M]).astype(np.float32),
            hits_E=np.zeros(0),
            words_E=words_by_window(bytes_n, begins_n[starts_M]) if counted else np.zeros(0),
            unit="byte",
        )


def _nats(model: LanguageModel, batch: Batch) -> dict[str, jax.Array]:
    loss_BL = cross_entropy(model(batch["tokens"]), batch["targets"]) * batch["weights"]
    return {"nats": loss_BL.sum(1)}


class LanguageModelling(Task):
    """Language modelling of bytes or subwords (`data.tokenizer`). Subclasses implement `build`.

    Args:
      read_data: False to compile the training step without data.

    Raises:
      UserError: the configuration or the data are invalid.
    """

    objective, mode = "bits_per_byte", "min"

    def __init__(self, config: ConfigDict, mesh: Mesh, *, read_data: bool = True):
        validate(config)
        self.config, self.mesh = config, mesh
        self.multiple = sharding.num_batch_shards(mesh) * config.train.accumulate
        self._writer: Callable | None = None
        if read_data:
            self._read_data()
        elif config.data.get("tokenizer", BYTES) == SENTENCEPIECE:
            self.vocabulary = config.data.vocab_size
        else:
            self.vocabulary = lossless.choose(config.data, None).size

    def _read_data(self) -> None:
        config = self.config
        texts = load_bytes(config.data)
        self.tokenizer = lossless.choose(config.data, texts["train"])
        self.vocabulary = self.tokenizer.size
        self.splits = {
            split: self.tokenizer.cached_tokens(text, config.data) for split, text in texts.items()
        }
        if config.eval.tokens:
            self.splits["valid"] = self.splits["valid"][: config.eval.tokens + 1]
        for split in ("valid", "test"):
            tokens = self.splits[split]
            source = f"--config.data.source={config.data.source}"
            check(
                len(tokens) > 1,
                f"the {split} split of {source} has fewer than two tokens: use a longer text",
            )
            check(
                not config.data.words or words(self.tokenizer.decode(tokens)) > 0,
                f"the {split} split of {source} has no words to count: set --config.data.words=false",
            )
        self._losses = WindowLosses(config, self.tokenizer, self.multiple)
        self.crops = Crops(
            self.splits["train"],
            config.model.length,
            config.data.batch,
            multiple=self.multiple,
            seed=config.seed,
        )

    @property
    def unit(self) -> str:
        return "tokens" if self.config.data.get("tokenizer", BYTES) != BYTES else "bytes"

    def start(self, trainable: Params, frozen: Params) -> Params:
        """Returns the initial parameters. The function of `config.head_start`, if set, computes the output layer."""
        if not self.config.get("head_start"):
            return trainable
        from common.tasks.head_start import output_layer

        return trainable | output_layer(self, trainable, frozen)

    def loss(
        self, model: LanguageModel, batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        loss_BL = cross_entropy(model(batch["tokens"], key), batch["targets"])
        return jnp.sum(loss_BL * batch["weights"]), jnp.sum(batch["weights"])

    def batch_spec(self, multiple: int) -> BatchSpec:
        rows, length = self.config.data.batch, self.config.model.length
        check_rows(rows, multiple)
        arrays = {
            "tokens": integers(rows, length),
            "targets": integers(rows, length),
            "weights": jax.ShapeDtypeStruct((rows, length), np.float32),
        }
        return BatchSpec(arrays, rows * length)

    @property
    def batches_per_epoch(self) -> float:
        return len(self.splits["train"]) / (self.config.data.batch * self.config.model.length)

    def batches(self, start: dict | None) -> Iterator[tuple[Batch, dict]]:
        return iterate(self.crops, start)

    def predict(self, values: ModelState, split: str) -> Losses:
        """Returns the losses on a split, summed over each window of `eval.stride` scored tokens."""
        return self._losses(values, self.splits[split], self.config.eval.stride)

    def evaluate(self, values: ModelState, split: str) -> dict[str, float | str]:
        """Returns bits and nats per byte on a split, and with `data.words` the perplexity per word.

        With `eval.sample`, the metrics of "valid" also contain a generated text.
        """
        metrics = super().evaluate(values, split)
        if self.config.eval.sample and split == "valid":
            metrics["sample"] = self._sample(values)
        return metrics

    def _generator(self, abstract_model: AbstractModel) -> "Generator":
        from common.decode.generate import Generator
        from common.decode.sample import Sampling

        sampling = Sampling(0.8, top_p=0.95)
        return Generator(abstract_model, self.mesh, self.config.model.length, sampling)

    def decoding(self, abstract_model: AbstractModel) -> Decoding:
        """Returns the program that samples one text on each device. Needs no data."""
        return self._generator(abstract_model).decoding(self.mesh.size)

    def _sample(self, values: ModelState) -> str:
        """Returns the prompt and its continuation by the model, generated with a fixed random key."""
        settings = self.config.eval
        if self._writer is None:
            self._writer = self._generator(values.abstract_model)
        prompt = settings.prompt.encode("utf-8", "surrogateescape")
        chunks = self._writer(values, [self.tokenizer.encode(prompt)], settings.sample, 1)
        text = b"".join(self.tokenizer.decode(row) for (row,) in chunks)
        return (prompt + text).decode(errors="replace")

    def fingerprints(self) -> dict[str, str]:
        splits = {f"the {split} text": fingerprint_arrays(x) for split, x in self.splits.items()}
        return splits | {"the tokenizer": self.tokenizer.fingerprint}

    def save(self, workdir: Path) -> None:
        """Writes the tokenizer to the workdir; writes nothing if the tokens are bytes.

        Raises:
          UserError: the run is resumed with another tokenizer, or the tokenizer in the workdir cannot be read or
            written.
        """
        check(
            not has_checkpoints(workdir)
            or lossless.in_run(workdir).fingerprint == self.tokenizer.fingerprint,
            f"the tokenizer differs from the tokenizer in --workdir={shown(workdir)}, because --config.data.tokenizer,"
            " --config.data.vocab_size or the training text has changed since the run began: choose another --workdir",
        )
        self.tokenizer.save(workdir)


def words(text: bytes) -> int:
    """Returns the number of words, separated by white space, plus the number of line feeds, as usual for WikiText."""
    return len(text.split()) + text.count(b"\n")


def words_by_window(text: np.ndarray, starts_M: np.ndarray) -> np.ndarray:
    """Counts words and line feeds (as `words`) in each of M consecutive windows of a text; returns (M,).

    A word belongs to the window in which it starts. Text before the first window belongs to the first window. `text` is
    (bytes,) uint8, and `starts_M` has the start of each window in bytes.
    """
    blank_n = np.isin(text, np.frombuffer(b" \t\n\r\x0b\x0c", np.uint8))
    begins_n = ~blank_n & np.concatenate([[True], blank_n[:-1]])
    counts_n = begins_n.astype(np.int64) + (text == ord("\n"))
    first_M = np.concatenate([[0], starts_M[1:]])
    return np.add.reduceat(counts_n, first_M)
