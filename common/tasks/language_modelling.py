"""Language modelling of bytes: random crops for training, bits per byte of whole splits by sliding windows."""

from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common import sharding
from common.config import check, check_choice
from common.data.batches import check_rows, iterate
from common.data.byte_text import load_bytes
from common.data.cache import fingerprint
from common.data.windows import Crops, scored_once
from common.decode.generate import Generator, as_bytes
from common.decode.sample import Sampling
from common.metrics.predictions import Losses
from common.model.language_model import LanguageModel
from common.model.loss import cross_entropy
from common.train.evaluate import PerExample
from common.train.task import Batch, BatchSpec, ModelState, Task, integers

BYTES = 256

# (model config, vocabulary, rngs=) -> model
Build = Callable[..., LanguageModel]


def validate(config: ConfigDict) -> None:
    """Checks the data and evaluation fields of a configuration.

    Raises:
      UserError: a field has a value that is not allowed.
    """
    data, evaluation = config.data, config.eval
    check_choice("--config.model.dtype", config.model.dtype, ("auto", "float32", "bfloat16"))
    for name, value in (
        ("model.length", config.model.length),
        ("data.batch", data.batch),
        ("eval.batch", evaluation.batch),
        ("eval.stride", evaluation.stride),
    ):
        check(value >= 1, f"--config.{name} must be at least 1, got {value}")
    check(
        evaluation.stride <= config.model.length,
        f"--config.eval.stride={evaluation.stride} leaves out bytes: windows have"
        f" --config.model.length={config.model.length}",
    )
    check(
        evaluation.tokens >= 0,
        f"--config.eval.tokens must be at least 0, got {evaluation.tokens}",
    )
    check(
        evaluation.sample >= 0,
        f"--config.eval.sample must be at least 0, got {evaluation.sample}",
    )
    if evaluation.sample:
        room = config.model.length - len(as_bytes(evaluation.prompt))
        check(bool(evaluation.prompt), "--config.eval.prompt is empty")
        check(
            evaluation.sample <= room,
            f"--config.eval.sample={evaluation.sample} and --config.eval.prompt are longer than"
            f" --config.model.length={config.model.length}",
        )
    shares = data.shares
    check(
        len(shares) == 3 and min(shares) > 0 and abs(sum(shares) - 1) < 1e-6,
        f"--config.data.shares must be three shares that add up to 1, got {tuple(shares)}",
    )


class WindowLosses:
    """Scores every byte of a text but the first, by sliding windows.

    Args:
      config: of a run; windows have `model.length` bytes, and `data.words` counts words.
      multiple: divides the rows of a batch, see `scored_once`.
    """

    def __init__(self, config: ConfigDict, mesh: Mesh, multiple: int = 1):
        self._config, self._multiple = config, multiple
        self._rows = PerExample(_nats_and_bytes, mesh)

    def __call__(self, values: ModelState, text_n: np.ndarray, stride: int) -> Losses:
        """Losses of a text (n,) of at least two bytes; every window scores `stride` bytes."""
        length, rows = self._config.model.length, self._config.eval.batch
        batches = scored_once(text_n, length, stride, rows, multiple=self._multiple)
        starts_M = np.arange(0, len(text_n) - 1, stride) + 1
        found = self._rows(values, batches, len(starts_M))
        counted = self._config.data.words
        return Losses(
            fingerprint([text_n.tobytes().hex()]),
            found["nats"].astype(np.float64),
            found["bytes"],
            hits_M=np.zeros(0),
            words_M=words_by_window(text_n, starts_M) if counted else np.zeros(0),
            unit="byte",
        )


def _nats_and_bytes(model: LanguageModel, batch: Batch) -> dict[str, jax.Array]:
    loss_BL = cross_entropy(model(batch["tokens"]), batch["targets"]) * batch["weights"]
    return {"nats": loss_BL.sum(1), "bytes": batch["weights"].sum(1)}


class LanguageModelling(Task):
    """Language modelling of bytes.

    Args:
      build: (model config, vocabulary size, rngs=) -> model
      read_data: False for a task whose step is only compiled.

    Raises:
      UserError: the configuration or the data are at fault.
    """

    objective, mode, unit = "bits_per_byte", "min", "bytes"

    def __init__(self, config: ConfigDict, build: Build, mesh: Mesh, *, read_data: bool = True):
        validate(config)
        self.config, self.mesh, self._build = config, mesh, build
        self.multiple = sharding.num_batch_shards(mesh) * config.train.accumulate
        self._losses = WindowLosses(config, mesh, self.multiple)
        self._writer: Generator | None = None
        if read_data:
            self._read_data()

    def _read_data(self) -> None:
        config = self.config
        self.splits = load_bytes(config.data)
        for split in ("valid", "test"):
            check(len(self.splits[split]) > 1, f"the {split} text has a single byte")
        if config.eval.tokens:
            self.splits["valid"] = self.splits["valid"][: config.eval.tokens + 1]
        for split in ("valid", "test"):
            check(
                not config.data.words or words(self.splits[split]) > 0,
                f"the {split} text has no words, of which --config.data.words asks the perplexity",
            )
        self.crops = Crops(
            self.splits["train"],
            config.model.length,
            config.data.batch,
            multiple=self.multiple,
            seed=config.seed,
        )

    def build(self, rngs: nnx.Rngs) -> LanguageModel:
        return self._build(self.config.model, BYTES, rngs=rngs)

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
        """Loss of every byte but the first, summed over windows of `eval.stride` scored bytes."""
        return self._losses(values, self.splits[split], self.config.eval.stride)

    def evaluate(self, values: ModelState, split: str) -> dict[str, float | str]:
        """Bits and nats per byte; with `data.words` perplexity per word; with `eval.sample`, on "valid", a sample."""
        metrics = super().evaluate(values, split)
        if self.config.eval.sample and split == "valid":
            metrics["sample"] = self._sample(values)
        return metrics

    def _sample(self, values: ModelState) -> str:
        """Text that the model generates after the prompt, always with the same random key."""
        settings = self.config.eval
        if self._writer is None:
            sampling = Sampling(0.8, top_p=0.95)
            self._writer = Generator(
                values.abstract_model, self.mesh, self.config.model.length, sampling
            )
        prompt = as_bytes(settings.prompt)
        chunks = self._writer(values, prompt, settings.sample, 1, chunk=settings.sample)
        return (prompt + b"".join(chunks)).decode(errors="replace")

    def save(self, workdir: Path) -> None:
        del workdir  # bytes need no tokenizer


def words(text: np.ndarray) -> int:
    """Counts words as WikiText's perplexities do: tokens between blanks, and each line end."""
    raw = text.tobytes()
    return len(raw.split()) + raw.count(b"\n")


def words_by_window(text: np.ndarray, starts_M: np.ndarray) -> np.ndarray:
    """Counts `words` by window, (E,), for windows that begin at `starts_M`; a word belongs to the window it begins in.

    Text before the first window belongs to the first window.
    """
    blank_n = np.isin(text, np.frombuffer(b" \t\n\r\x0b\x0c", np.uint8))
    begins_n = ~blank_n & np.concatenate([[True], blank_n[:-1]])
    counts_n = begins_n.astype(np.int64) + (text == ord("\n"))
    first_M = np.concatenate([[0], starts_M[1:]])
    return np.add.reduceat(counts_n, first_M)
