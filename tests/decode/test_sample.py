"""Sampling: allowed tokens, their frequencies, equal tokens in parts of a batch and in several calls, and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common.decode.sample import Rows, Sampling, draw, restrict, sample
from common.errors import UserError

PROBABILITIES = np.array([0.05, 0.4, 0.1, 0.3, 0.15])
LOGITS = jnp.log(jnp.asarray(PROBABILITIES))[None]


def all_rows(count: int) -> Rows:
    return Rows(np.arange(count), count)


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (Sampling(), {0, 1, 2, 3, 4}),
        (Sampling(top_k=2), {1, 3}),
        (Sampling(top_k=99), {0, 1, 2, 3, 4}),
        (Sampling(top_p=0.4), {1}),
        (Sampling(top_p=0.41), {1, 3}),
        (Sampling(top_p=0.001), {1}),
        (Sampling(top_p=1e-60), {1}),
        (Sampling(top_k=3, top_p=0.8), {1, 3}),
        (Sampling(temperature=0.5, top_p=0.5), {1}),
    ],
)
def test_top_k_and_top_p_restrict_the_tokens(sampling, allowed):
    kept = np.isfinite(np.asarray(restrict(LOGITS, sampling)))[0]
    assert set(np.flatnonzero(kept)) == allowed


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sample_frequencies_match_the_probabilities(temperature):
    many = jnp.tile(LOGITS, (20_000, 1))
    tokens = draw(many, Sampling(temperature), jax.random.key(0), all_rows(20_000))
    drawn = np.bincount(tokens, minlength=5)
    expected = PROBABILITIES ** (1 / temperature)
    np.testing.assert_allclose(drawn / drawn.sum(), expected / expected.sum(), atol=0.015)


def test_temperature_0_is_greedy():
    assert draw(LOGITS, Sampling(0.0), jax.random.key(5), all_rows(1)).tolist() == [1]
    assert draw(LOGITS, Sampling(1e-40), jax.random.key(5), all_rows(1)).tolist() == [1]


def test_tokens_of_a_row_do_not_depend_on_the_batch():
    """A row number gives the same token if only a part of the batch is sampled, or if the batch is larger."""
    logits, key = jax.random.normal(jax.random.key(1), (6, 50)), jax.random.key(3)
    whole = draw(logits, Sampling(), key, all_rows(6))
    for numbers, count in (([3, 4], 6), ([5, 0], 6), ([4], 9)):
        some = np.array(numbers)
        found = draw(logits[some], Sampling(), key, Rows(some, count))
        np.testing.assert_array_equal(found, whole[some])


def test_tokens_equal_jax_random_categorical():
    logits, key = jax.random.normal(jax.random.key(1), (6, 50)), jax.random.key(3)
    expected = jax.random.categorical(key, logits / 0.7)
    np.testing.assert_array_equal(draw(logits, Sampling(0.7), key, all_rows(6)), expected)


def counting(tokens_B, cache, index):
    """Takes a decoding step. The logits depend on the position and on the sum of all tokens so far."""
    cache = cache + tokens_B
    return jnp.sin(cache[:, None] * jnp.arange(1.0, 8.0) + index), cache


def test_tokens_do_not_depend_on_the_number_of_calls():
    logits, cache = counting(jnp.array([4]), jnp.array([3 + 1]), 2)
    key, sampling = jax.random.key(2), Sampling(0.9, top_k=5)
    free = np.full((1, 12), -1)
    row = all_rows(1)
    whole, _, _ = sample(counting, logits, cache, 3, free, sampling, key, row)
    parts = []
    for start in (3, 7, 11):
        given = free[:, :4]
        tokens, logits, cache = sample(counting, logits, cache, start, given, sampling, key, row)
        parts.append(tokens)
    np.testing.assert_array_equal(whole, np.concatenate(parts, 1))


@pytest.mark.parametrize(
    ("fault", "sampling"),
    [
        ("temperature must be a finite number of at least 0", Sampling(-1.0)),
        ("top_k must be a whole number of at least 0", Sampling(top_k=-1)),
        ("top_p must be above 0 and at most 1", Sampling(top_p=0.0)),
        ("top_p must be above 0 and at most 1", Sampling(top_p=1.5)),
    ],
)
def test_invalid_options_raise_user_errors(fault, sampling):
    with pytest.raises(UserError, match=f"^{fault}"):
        sampling.validate()
    with pytest.raises(UserError, match=f"^--{fault}"):
        sampling.validate("--")
