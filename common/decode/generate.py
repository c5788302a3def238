"""Continues prompts with a trained language model, to any length."""

from collections.abc import Iterator, Sequence
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh

from common.config import check
from common.decode.sample import Sampling, sample
from common.sharding import replicated
from common.train.task import ModelState
from common.variables import AbstractModel


class Generator:
    """Continues prompts of tokens.

    The compiled functions do not depend on the values of the parameters. `prefill` is compiled again if the length of
    the shortest prompt, rounded down to a multiple of the chunk size, changes.
    """

    def __init__(self, abstract_model: AbstractModel, mesh: Mesh, window: int, sampling: Sampling):
        """Makes a generator.

        Args:
          window: the model's maximum length in tokens, at least 2.
        """
        check(
            window > 1, f"the model's maximum length is {window} token: generation needs at least 2"
        )
        self.window, self.sampling = window, sampling

        @partial(jax.jit, static_argnames=("cache_length", "chunk"))
        def prefill(trainable, frozen, tokens_BL, cache_length, chunk):
            model = abstract_model.build(trainable, frozen)
            return model.prefill(tokens_BL, model.cache(len(tokens_BL), cache_length, chunk))

        @partial(jax.jit, donate_argnames="cache")
        def decode(trainable, frozen, logits, cache, start, given_BL, key):
            model = abstract_model.build(trainable, frozen)
            tokens_BL, *rest = sample(model.step, logits, cache, start, given_BL, sampling, key)
            # Replicate the tokens, because every process reads the generated text.
            return jax.lax.with_sharding_constraint(tokens_BL, replicated(mesh)), *rest

        self._prefill, self._decode = prefill, decode

    def __call__(
        self,
        state: ModelState,
        prompts: Sequence[Sequence[int]],
        length: int,
        seed: int,
        *,
        chunk: int = 16,
    ) -> Iterator[list[np.ndarray]]:
        """Yields, for every prompt, the next tokens: at most `chunk` at a time, and `length` in all.

        A text that fills the window continues in a new window, which begins with the last half of the full window. A
        prompt that does not fit into the window is cut to its last half window. The texts do not depend on the chunk
        size, and a text does not depend on the other prompts.

        Raises:
          UserError: there are no prompts, or a prompt is empty.
        """
        check(len(prompts) > 0, "there are no prompts")
        check(all(map(len, prompts)), "the prompt is empty: it needs at least one token")
        return self._texts(state, prompts, length, seed, chunk)

    def _texts(self, state, prompts, length, seed, chunk) -> Iterator[list[np.ndarray]]:
        contexts = [np.asarray(prompt, np.int32) for prompt in prompts]
        missing = np.full(len(contexts), length)
        key = jax.random.key(seed)
        while True:
            contexts = [x if len(x) < self.window else x[-(self.window // 2) :] for x in contexts]
            longest = max(map(len, contexts)) + length
            parts = [[context] for context in contexts]
            for tokens in self._window(state, contexts, longest, key, chunk):
                yield [new[:count] for new, count in zip(tokens, missing, strict=True)]
                for row, new in zip(parts, tokens, strict=True):
                    row.append(new)
                missing = np.maximum(missing - [len(new) for new in tokens], 0)
                if not missing.any():
                    return
            contexts = [np.concatenate(row) for row in parts]
            key = jax.random.fold_in(key, 0)

    def _window(self, state, contexts, longest, key, chunk) -> Iterator[list[np.ndarray]]:
        """Yields the tokens after each context until the window is full.

        Args:
          longest: maximum number of tokens that the caller needs in the window, including the context.
        """
        lengths = [len(context) for context in contexts]
        given_BL = np.full((len(contexts), self.window + chunk), -1, np.int32)
        for row, context in zip(given_BL, contexts, strict=True):
            row[: len(context)] = context
        # All rows decode the same position: at a position within a long prompt, its row reads a token, and the rows of
        # shorter prompts draw a token. Prefill reads whole chunks only, so prompts of similar lengths share a
        # compilation.
        shortest = min(lengths)
        begin = shortest - shortest % chunk if shortest > chunk else shortest
        cache_length = min(-(-longest // chunk) * chunk, self.window)
        parameters = (state.trainable, state.frozen)
        logits, cache = self._prefill(
            *parameters, given_BL[:, :begin], cache_length=cache_length, chunk=chunk
        )
        for start in range(begin, self.window, chunk):
            given = given_BL[:, start : start + chunk]
            tokens, logits, cache = self._decode(
                *parameters, logits, cache, np.int32(start), given, key
            )
            tokens_BL = np.asarray(tokens)[:, : self.window - start]
            yield [row[max(0, x - start) :] for row, x in zip(tokens_BL, lengths, strict=True)]
