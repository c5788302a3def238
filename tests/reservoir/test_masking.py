"""Random masking: the frequencies of masked tokens and of replacements over many draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common.data.special_ids import BOS, EOS, PAD, UNK
from reservoir import masking
from reservoir.masking import FIRST, most

MASK, RATE, LENGTH = 50, 0.15, 40

mask = jax.jit(masking.mask, static_argnums=(2, 3))


def rows(count: int) -> np.ndarray:
    """Returns rows of equal layout: <s>, two documents that end with </s>, the first token of a third, and padding.

    The text is random. The second document has an unknown token. A row has 27 text tokens.
    """
    generator = np.random.default_rng(0)
    tokens = np.full((count, LENGTH), PAD, np.int32)
    tokens[:, :30] = generator.integers(FIRST, MASK, (count, 30))
    tokens[:, 0], tokens[:, 12], tokens[:, 29], tokens[:, 20] = BOS, EOS, EOS, UNK
    tokens[:, 21], tokens[:, 30] = 7, 9
    return tokens


TEXT = 27
"""Number of text tokens in each row of `rows`."""


@pytest.fixture(scope="module")
def drawn() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns 20,000 rows: the tokens, the tokens after masking, and whether a position is masked."""
    tokens = rows(20_000)
    assert ((tokens >= FIRST).sum(1) == TEXT).all()
    found = mask(jnp.asarray(tokens), jax.random.split(jax.random.key(1), len(tokens)), MASK, RATE)
    chosen = np.zeros(tokens.shape, bool)
    for row, (places, weights) in enumerate(
        zip(np.asarray(found.places_BM), np.asarray(found.weights_BM), strict=True)
    ):
        chosen[row, places[weights > 0]] = True
    at = np.asarray(found.places_BM)
    assert (np.take_along_axis(tokens, at, 1) == np.asarray(found.targets_BM)).all()
    assert chosen.sum() == found.weights_BM.sum()  # the positions of a row are all different
    return tokens, np.asarray(found.inputs_BL), chosen


def test_fifteen_percent_of_the_text_is_masked(drawn):
    _, _, chosen = drawn
    counts = chosen.sum(1)
    assert set(counts.tolist()) == {4, 5}  # 0.15 * 27 = 4.05 masked tokens on average
    assert counts.mean() == pytest.approx(RATE * TEXT, abs=0.02)


def test_text_tokens_are_masked_uniformly_and_special_tokens_never(drawn):
    tokens, _, chosen = drawn
    share = chosen.mean(0)
    text = tokens[0] >= FIRST
    # The tolerance is six standard deviations of the fraction of 20,000 rows in which a position is masked.
    assert np.abs(share[text] - RATE).max() < 6 * np.sqrt(RATE * (1 - RATE) / len(tokens))
    assert (share[~text] == 0).all()


def test_masked_tokens_are_replaced_eighty_ten_ten(drawn):
    tokens, shown, chosen = drawn
    masked = (shown == MASK)[chosen].mean()
    other = ((shown != MASK) & (shown != tokens))[chosen].mean()
    pieces = MASK - FIRST
    assert masked == pytest.approx(0.8, abs=0.01)
    assert other == pytest.approx(
        0.1 * (1 - 1 / pieces), abs=0.006
    )  # a random token may be the original token
    assert (shown == tokens)[chosen].mean() == pytest.approx(0.1 + 0.1 / pieces, abs=0.006)


def test_the_tokens_of_a_row_are_masked_independently(drawn):
    """A masked token becomes the mask token with probability 0.8, and all n masked tokens of a row with 0.8^n."""
    _, shown, chosen = drawn
    counts = chosen.sum(1)
    hidden = (chosen & (shown == MASK)).sum(1) == counts
    for count in (4, 5):
        assert hidden[counts == count].mean() == pytest.approx(0.8**count, abs=0.02)


def test_random_replacements_are_never_special_tokens(drawn):
    tokens, shown, chosen = drawn
    others = shown[chosen & (shown != MASK) & (shown != tokens)]
    assert set(others.tolist()) == set(range(FIRST, MASK))
    counts = np.bincount(others, minlength=MASK)[FIRST:]
    assert counts.max() < 1.5 * counts.min()


def test_unmasked_tokens_do_not_change(drawn):
    tokens, shown, chosen = drawn
    assert (shown == tokens)[~chosen].all()


@pytest.mark.parametrize(("length", "rate"), [(8, 0.15), (20, 0.15), (512, 0.15), (20, 0.99)])
def test_maximum_number_of_masks_is_sufficient(length, rate):
    tokens = jnp.full((500, length), FIRST, jnp.int32)
    found = mask(tokens, jax.random.split(jax.random.key(0), 500), MASK, rate)
    assert found.places_BM.shape[1] == most(length, rate)
    # `most` limits the number of masked tokens in a row. If this limit were too low, rows would on average have fewer
    # than rate * length masked tokens.
    assert float(found.weights_BM.sum(1).mean()) == pytest.approx(rate * length, abs=0.15)


@pytest.mark.parametrize(("length", "rate"), [(8, 0.15), (512, 0.15), (20, 0.99)])
def test_largest_number_of_masks_in_a_row_equals_its_limit(length, rate):
    tokens = jnp.full((500, length), FIRST, jnp.int32)
    found = mask(tokens, jax.random.split(jax.random.key(0), 500), MASK, rate)
    assert found.weights_BM.sum(1).max() == found.places_BM.shape[1] == most(length, rate)
    assert found.inputs_BL.dtype == jnp.int32 and found.weights_BM.dtype == jnp.float32


def test_masks_of_a_row_depend_on_its_key_only():
    tokens = jnp.asarray(rows(4))
    keys = jax.random.split(jax.random.key(3), 4)
    together = mask(tokens, keys, MASK, RATE)
    alone = mask(tokens[2:3], keys[2:3], MASK, RATE)
    assert (together.inputs_BL[2] == alone.inputs_BL[0]).all()
