"""Language modelling of bytes: crops in, the byte after each out, bits per byte of whole splits.

B batch, L length, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common import sharding
from common.config import choose, require
from common.data.batching import check_rows, iterate
from common.data.byte_text import load_bytes
from common.data.windows import Crops, scored_once
from common.decode.generate import Writer, as_bytes
from common.decode.sample import Sampling
from common.model.language_model import LanguageModel
from common.model.loss import cross_entropy
from common.train.feed import put
from common.train.task import Batch, Sketch, Task, Values, integers

BYTES = 256

# (model config, vocabulary, rngs=) -> model
Build = Callable[..., LanguageModel]


def validate(config: ConfigDict) -> None:
    """The fields of the data and of the evaluation."""
    data, evaluation = config.data, config.eval
    choose("--config.model.dtype", config.model.dtype, ("auto", "float32", "bfloat16"))
    for name, value in (
        ("model.length", config.model.length),
        ("data.batch", data.batch),
        ("eval.batch", evaluation.batch),
        ("eval.stride", evaluation.stride),
    ):
        require(value >= 1, f"--config.{name} must be at least 1, got {value}")
    require(
        evaluation.stride <= config.model.length,
        f"--config.eval.stride={evaluation.stride} leaves out bytes: windows have"
        f" --config.model.length={config.model.length}",
    )
    require(
        evaluation.tokens >= 0,
        f"--config.eval.tokens must be at least 0, got {evaluation.tokens}",
    )
    require(
        evaluation.sample >= 0,
        f"--config.eval.sample must be at least 0, got {evaluation.sample}",
    )
    if evaluation.sample:
        room = config.model.length - len(as_bytes(evaluation.prompt))
        require(bool(evaluation.prompt), "--config.eval.prompt is empty")
        require(
            evaluation.sample <= room,
            f"--config.eval.sample={evaluation.sample} and --config.eval.prompt are longer than"
            f" --config.model.length={config.model.length}",
        )
    shares = data.shares
    require(
        len(shares) == 3 and min(shares) > 0 and abs(sum(shares) - 1) < 1e-6,
        f"--config.data.shares must be three shares that add up to 1, got {tuple(shares)}",
    )


class Objective(Task):
    """A language model of bytes and its loss, without data."""

    objective, mode, unit = "bits_per_byte", "min", "bytes"

    def __init__(self, config: ConfigDict, build: Build):
        self.config, self._build = config, build

    @classmethod
    def sketch(cls, config: ConfigDict, build: Build, multiple: int) -> Sketch:
        """`multiple` divides the rows of a batch."""
        rows, length = config.data.batch, config.model.length
        check_rows(rows, multiple)
        batch = {
            "tokens": integers(rows, length),
            "targets": integers(rows, length),
            "weights": jax.ShapeDtypeStruct((rows, length), np.float32),
        }
        return Sketch(config, cls(config, build), batch, rows * length)

    def build(self, rngs: nnx.Rngs) -> LanguageModel:
        return self._build(self.config.model, BYTES, rngs=rngs)

    def loss(
        self, model: LanguageModel, batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        loss_BL = cross_entropy(model(batch["tokens"], key), batch["targets"])
        return jnp.sum(loss_BL * batch["weights"]), jnp.sum(batch["weights"])


class LanguageModelling(Objective):
    """The task that the training loop sees."""

    def __init__(self, config: ConfigDict, build: Build, mesh: Mesh):
        """Reads the data.

        Raises:
          UserError: the configuration or the data are at fault.
        """
        validate(config)
        super().__init__(config, build)
        self.mesh = mesh
        self.splits = load_bytes(config.data)
        for split in ("valid", "test"):
            require(len(self.splits[split]) > 1, f"the {split} text has a single byte")
        if config.eval.tokens:
            self.splits["valid"] = self.splits["valid"][: config.eval.tokens + 1]
        for split in ("valid", "test"):
            require(
                not config.data.words or words(self.splits[split]) > 0,
                f"the {split} text has no words, of which --config.data.words asks the perplexity",
            )
        self.multiple = sharding.batch_ways(mesh) * config.train.accumulate
        self.crops = Crops(
            self.splits["train"],
            config.model.length,
            config.data.batch,
            multiple=self.multiple,
            seed=config.seed,
        )
        self._sums: Callable | None = None
        self._writer: Writer | None = None

    @property
    def batches_per_epoch(self) -> float:
        return len(self.splits["train"]) / (self.config.data.batch * self.config.model.length)

    def batches(self, start: dict | None) -> Iterator[tuple[Batch, dict]]:
        return iterate(self.crops, start)

    def evaluate(self, values: Values, split: str) -> dict[str, float | str]:
        """Bits and nats per byte of every byte but the first; for text in words, perplexity per word.

        With "valid" comes a `sample` of what the model writes, where one is asked for.
        """
        if self._sums is None:
            structure = values.structure
            self._sums = jax.jit(
                lambda trainable, frozen, batch: self.loss(
                    structure.build(trainable, frozen), batch, None
                ),
                out_shardings=sharding.replicated(self.mesh),
            )
        settings, text = self.config.eval, self.splits[split]
        length = self.config.model.length
        total = weight = 0.0
        for batch in scored_once(
            text, length, settings.stride, settings.batch, multiple=self.multiple
        ):
            sums = self._sums(values.trainable, values.frozen, put(batch, self.mesh))
            total, weight = total + float(sums[0]), weight + float(sums[1])
        metrics = {
            "bits_per_byte": total / weight / math.log(2),
            "nats_per_byte": total / weight,
        }
        if self.config.data.words:
            metrics["perplexity_per_word"] = math.exp(min(total / words(text), 700.0))
        if settings.sample and split == "valid":
            metrics["sample"] = self._sample(values)
        return metrics

    def _sample(self, values: Values) -> str:
        """What the model writes after the prompt now; always from the same random numbers."""
        settings = self.config.eval
        if self._writer is None:
            sampling = Sampling(0.8, top_p=0.95)
            self._writer = Writer(values.structure, self.mesh, self.config.model.length, sampling)
        prompt = as_bytes(settings.prompt)
        chunks = self._writer(values, prompt, settings.sample, 1, chunk=settings.sample)
        return (prompt + b"".join(chunks)).decode(errors="replace")

    def save(self, workdir: Path) -> None:
        del workdir  # bytes need no tokenizer


def words(text: np.ndarray) -> int:
    """As WikiText's perplexities count: what lies between blanks, and the end of each line."""
    raw = text.tobytes()
    return len(raw.split()) + raw.count(b"\n")
