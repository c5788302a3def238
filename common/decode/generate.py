"""Bytes from a trained language model, a few at a time."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from common.config import check
from common.decode.sample import Sampling, write
from common.sharding import replicated
from common.train.task import ModelState
from common.variables import AbstractModel


def as_bytes(prompt: str) -> bytes:
    """What the command line gave, whether it is UTF-8 or not."""
    return prompt.encode("utf-8", "surrogateescape")


class Writer:
    """Writes on after a prompt; what it compiled serves all values of one model and prompts of one length."""

    def __init__(self, abstract_model: AbstractModel, mesh: Mesh, longest: int, sampling: Sampling):
        """`longest` is the model's maximum of prompt and text together."""
        self.longest, self.sampling = longest, sampling

        @partial(jax.jit, static_argnames=("room", "chunk"))
        def begin(trainable, frozen, tokens_1L, room, chunk):
            model = abstract_model.build(trainable, frozen)
            return model.prefill(tokens_1L, model.cache(1, room, chunk))

        @partial(jax.jit, static_argnames="count", donate_argnames="cache")
        def go_on(trainable, frozen, logits, cache, start, key, count):
            model = abstract_model.build(trainable, frozen)
            tokens_1L, *rest = write(model.step, logits, cache, start, count, sampling, key)
            # Whole on every process, whatever the model is spread over.
            return jax.lax.with_sharding_constraint(tokens_1L, replicated(mesh)), *rest

        self._begin, self._go_on = begin, go_on

    def __call__(
        self, values: ModelState, prompt: bytes, length: int, seed: int, *, chunk: int = 16
    ) -> Iterator[bytes]:
        """`length` bytes after the prompt, `chunk` at a time; the same whatever the chunk is.

        Raises:
          UserError: the prompt is empty, or with `length` more bytes longer than the model's longest sequence.
        """
        check(bool(prompt), "the prompt is empty: --prompt needs at least one byte")
        check(
            len(prompt) + length <= self.longest,
            f"a prompt of {len(prompt)} bytes and {length} more are longer than the model's"
            f" {self.longest} positions (--prompt, --length)",
        )
        return self._chunks(values, prompt, length, seed, chunk)

    def _chunks(
        self, values: ModelState, prompt: bytes, length: int, seed: int, chunk: int
    ) -> Iterator[bytes]:
        # One program serves all chunks; of the last one not all may be wanted.
        room = min(len(prompt) + -(-length // chunk) * chunk, self.longest)
        given: tuple[Any, Any] = (values.trainable, values.frozen)
        tokens_1L = np.frombuffer(prompt, np.uint8).astype(np.int32)[None]
        logits, cache = self._begin(*given, tokens_1L, room=room, chunk=chunk)
        key = jax.random.key(seed)
        for done in range(0, length, chunk):
            start = np.int32(len(prompt) + done)
            tokens, logits, cache = self._go_on(*given, logits, cache, start, key, count=chunk)
            yield np.asarray(tokens)[0].astype(np.uint8).tobytes()[: length - done]
