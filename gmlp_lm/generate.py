"""Bytes from a trained model, a few at a time."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from common.config import require
from common.decode.sample import Sampling, read, write
from common.train.task import Values


def generate(
    model: ConfigDict,
    values: Values,
    prompt: bytes,
    length: int,
    sampling: Sampling,
    seed: int,
    *,
    chunk: int = 16,
) -> Iterator[bytes]:
    """`length` bytes after the prompt, `chunk` at a time; the same whatever the chunk is.

    Raises:
      UserError: the prompt is empty, or with `length` more bytes longer than the model's longest sequence.
    """
    require(bool(prompt), "the prompt is empty: --prompt needs at least one byte")
    require(
        len(prompt) + length <= model.length,
        f"a prompt of {len(prompt)} bytes and {length} more are longer than the model's"
        f" {model.length} positions (--prompt, --length)",
    )
    return _chunks(model, values, prompt, length, sampling, seed, chunk)


def _chunks(model, values, prompt, length, sampling, seed, chunk) -> Iterator[bytes]:
    # One program serves all chunks. What the last one writes beyond the room comes after all that is kept.
    room = min(len(prompt) + -(-length // chunk) * chunk, model.length)
    made = values.structure.build

    @jax.jit
    def begin(trainable, frozen, tokens):
        network = made(trainable, frozen)
        return read(network.step, tokens, network.cache(1, room), 0)

    @partial(jax.jit, donate_argnums=(3,))
    def go_on(trainable, frozen, logits, cache, start, key):
        network = made(trainable, frozen)
        return write(network.step, logits, cache, start, chunk, sampling, key)

    given = values.trainable, values.frozen
    logits, cache = begin(*given, jnp.asarray(np.frombuffer(prompt, np.uint8), jnp.int32)[None])
    key = jax.random.key(seed)
    for done in range(0, length, chunk):
        start = jnp.int32(len(prompt) + done)
        tokens, logits, cache = go_on(*given, logits, cache, start, key)
        yield np.asarray(tokens[0], np.uint8).tobytes()[: length - done]
