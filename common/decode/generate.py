"""Continues prompts with a trained language model, to any length."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh

from common.decode.rows import ROWS, by_rows, gather_weights, row_specs
from common.decode.sample import Rows, Sampling, sample
from common.errors import check
from common.sharding import replicated
from common.train.task import Decoding, ModelState, integers
from common.variables import AbstractModel


class Generator:
    """Continues prompts of tokens. The rows are split over all devices of the mesh (`common.decode.rows`).

    Decoding and prefill are compiled again if the number of rows, the chunk size or the cache length changes. Prefill
    is also compiled again if the number of prefilled tokens changes (see `_window`).

    Args:
      window: the model's maximum length in tokens.

    Raises:
      UserError: `window` is less than 2.
    """

    def __init__(self, abstract_model: AbstractModel, mesh: Mesh, window: int, sampling: Sampling):
        check(
            window > 1,
            f"--config.model.length of the model is {window}, but generation needs at least 2: use a model with a"
            " greater length",
        )
        self.window, self.sampling = window, sampling
        self._abstract_model, self._mesh = abstract_model, mesh

        def prefill_rows(trainable, frozen, tokens_BL, cache):
            return abstract_model.build(trainable, frozen).prefill(tokens_BL, cache)

        @partial(jax.jit, static_argnames=("cache_length", "chunk"))
        def prefill(trainable, frozen, tokens_BL, cache_length, chunk):
            model = abstract_model.build(trainable, frozen)
            cache = model.cache(len(tokens_BL), cache_length, chunk)
            apply = by_rows(prefill_rows, mesh, (ROWS, row_specs(cache)))
            return apply(trainable, frozen, tokens_BL, cache)

        @partial(jax.jit, donate_argnames="cache")
        def decode(trainable, frozen, logits, cache, start, given_BL, numbers_B, key):
            apply = by_rows(self._rows(len(given_BL)), mesh, (ROWS, ROWS, row_specs(cache)))
            inputs = logits, cache, start, given_BL, numbers_B, key
            tokens_BL, *rest = apply(trainable, frozen, *inputs)
            # Replicate the tokens, because every process reads the generated text.
            return jax.lax.with_sharding_constraint(tokens_BL, replicated(mesh)), *rest

        self._gather = gather_weights(abstract_model, mesh)
        self._prefill, self._decode = prefill, decode

    def _rows(self, count: int) -> Callable:
        """Returns the decoding function of one device, for its rows of a global batch with `count` rows."""

        def decode(trainable, frozen, logits, cache, start, given_BL, numbers_B, key):
            step, rows = self._abstract_model.build(trainable, frozen).step, Rows(numbers_B, count)
            return sample(step, logits, cache, start, given_BL, self.sampling, key, rows)

        return decode

    def decoding(self, rows: int, chunk: int = 16) -> Decoding:
        """Returns the program that draws the next `chunk` tokens of each row, with a cache for a whole window.

        The number of devices must divide `rows`.
        """
        prefill = partial(self._prefill, cache_length=self.window, chunk=chunk)
        shapes = self._abstract_model.shapes()
        logits, cache = jax.eval_shape(prefill, *shapes, integers(rows, 1))
        key = jax.eval_shape(jax.random.key, 0)
        inputs = logits, cache, integers(), integers(rows, chunk), integers(rows), key
        return Decoding(self._decode, self._rows(rows), inputs, chunk, self.window)

    def __call__(
        self,
        state: ModelState,
        prompts: Sequence[Sequence[int]],
        length: int,
        seed: int,
        *,
        chunk: int = 16,
    ) -> Iterator[list[np.ndarray]]:
        """Yields lists with the next tokens of each prompt: at most `chunk` tokens at a time, and `length` in all.

        A text that fills the window continues in a new window, which begins with the last half of the full window. A
        prompt of at least `window` tokens is cut to its last `window` // 2 tokens. A text depends on the seed, on its
        prompt and on the index of the prompt, but, apart from rounding, not on the other prompts, the chunk size or the
        mesh.

        Raises:
          UserError: there are no prompts, or a prompt is empty.
        """
        check(len(prompts) > 0, "there are no prompts: give at least one prompt")
        for number, prompt in enumerate(prompts, start=1):
            check(len(prompt) > 0, f"prompt {number} is empty: give it at least one token")
        contexts = [np.asarray(prompt, np.int32) for prompt in prompts]
        missing = np.full(len(contexts), length)
        key = jax.random.key(seed)
        weights = self._gather(state.trainable, state.frozen)
        while True:
            contexts = [x if len(x) < self.window else x[-(self.window // 2) :] for x in contexts]
            longest = max(map(len, contexts)) + length
            parts = [[context] for context in contexts]
            for tokens in self._window(weights, contexts, longest, key, chunk):
                yield [new[:count] for new, count in zip(tokens, missing, strict=True)]
                for row, new in zip(parts, tokens, strict=True):
                    row.append(new)
                missing = np.maximum(missing - [len(new) for new in tokens], 0)
                if not missing.any():
                    return
            contexts = [np.concatenate(row) for row in parts]
            key = jax.random.fold_in(key, 0)

    def _window(self, weights, contexts, longest, key, chunk) -> Iterator[list[np.ndarray]]:
        """Yields the tokens after each context until the window is full. `longest` limits the length of the cache."""
        lengths = [len(context) for context in contexts]
        # The number of devices must divide the number of rows: pad the batch with repeated prompts, whose output is
        # unused.
        rows = -(-len(contexts) // self._mesh.size) * self._mesh.size
        given_BL = np.full((rows, self.window + chunk), -1, np.int32)
        for row, context in zip(given_BL, itertools.cycle(contexts), strict=False):
            row[: len(context)] = context
        # Prefill reads the first `begin` tokens of every prompt. `begin` is a multiple of the chunk size, so that
        # prompts of similar lengths share a compilation; if the shortest prompt fits into a chunk, `begin` is its
        # number of tokens. Decoding then reads the rest of the prompts token by token, while the rows of shorter
        # prompts already draw tokens.
        shortest = min(lengths)
        begin = shortest - shortest % chunk if shortest > chunk else shortest
        cache_length = min(-(-longest // chunk) * chunk, self.window)
        logits, cache = self._prefill(
            *weights, given_BL[:, :begin], cache_length=cache_length, chunk=chunk
        )
        numbers_B = np.arange(rows)
        for start in range(begin, self.window, chunk):
            given = given_BL[:, start : start + chunk]
            tokens, logits, cache = self._decode(
                *weights, logits, cache, np.int32(start), given, numbers_B, key
            )
            tokens_BL = np.asarray(tokens)[: len(contexts), : self.window - start]
            yield [row[max(0, x - start) :] for row, x in zip(tokens_BL, lengths, strict=True)]
