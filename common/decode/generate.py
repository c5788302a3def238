"""Generates bytes from a trained language model, in chunks."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from common.config import check
from common.decode.sample import Sampling, sample
from common.sharding import replicated
from common.train.task import ModelState
from common.variables import AbstractModel


def as_bytes(prompt: str) -> bytes:
    """Returns the bytes of a command-line argument, also if they are not valid UTF-8."""
    return prompt.encode("utf-8", "surrogateescape")


class Generator:
    """Continues prompts. Its compiled functions serve all values of a model's parameters and prompts of one length."""

    def __init__(self, abstract_model: AbstractModel, mesh: Mesh, longest: int, sampling: Sampling):
        """`longest` is the model's maximum length of prompt and continuation together."""
        self.longest, self.sampling = longest, sampling

        @partial(jax.jit, static_argnames=("cache_length", "chunk"))
        def prefill(trainable, frozen, tokens_1L, cache_length, chunk):
            model = abstract_model.build(trainable, frozen)
            return model.prefill(tokens_1L, model.cache(1, cache_length, chunk))

        @partial(jax.jit, static_argnames="count", donate_argnames="cache")
        def decode(trainable, frozen, logits, cache, start, key, count):
            model = abstract_model.build(trainable, frozen)
            tokens_1L, *rest = sample(model.step, logits, cache, start, count, sampling, key)
            # Every process reads the tokens.
            return jax.lax.with_sharding_constraint(tokens_1L, replicated(mesh)), *rest

        self._prefill, self._decode = prefill, decode

    def __call__(
        self, state: ModelState, prompt: bytes, length: int, seed: int, *, chunk: int = 16
    ) -> Iterator[bytes]:
        """Yields `length` bytes after the prompt, `chunk` at a time; the chunk size does not change the bytes.

        Raises:
          UserError: the prompt is empty, or the prompt and `length` are longer than the model's longest sequence.
        """
        check(bool(prompt), "the prompt is empty: --prompt needs at least one byte")
        check(
            len(prompt) + length <= self.longest,
            f"a prompt of {len(prompt)} bytes and --length={length} need {len(prompt) + length} positions;"
            f" the model has {self.longest}",
        )
        return self._chunks(state, prompt, length, seed, chunk)

    def _chunks(
        self, state: ModelState, prompt: bytes, length: int, seed: int, chunk: int
    ) -> Iterator[bytes]:
        # A multiple of the chunk, so that lengths that differ little share a cache shape.
        chunks = -(-len(prompt) // chunk) + -(-length // chunk)
        cache_length = min(chunks * chunk, self.longest)
        parameters: tuple[Any, Any] = (state.trainable, state.frozen)
        tokens_1L = np.frombuffer(prompt, np.uint8).astype(np.int32)[None]
        logits, cache = self._prefill(
            *parameters, tokens_1L, cache_length=cache_length, chunk=chunk
        )
        key = jax.random.key(seed)
        for done in range(0, length, chunk):
            start = np.int32(len(prompt) + done)
            tokens, logits, cache = self._decode(
                *parameters, logits, cache, start, key, count=chunk
            )
            yield np.asarray(tokens)[0].astype(np.uint8).tobytes()[: length - done]
