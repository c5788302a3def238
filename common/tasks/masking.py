"""BERT's random masking (Devlin et al., 2019).

M are positions that may be masked here.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from common.data.tokenizer import UNK

REPLACED, CHANGED = 0.8, 0.1
"""Shares of the masked tokens that are replaced by the mask token and by a random token; the rest stay."""

FIRST = UNK + 1
"""The first id of text; smaller ids (padding, end of document, unknown) are never masked."""


class Masked(NamedTuple):
    """Rows with some tokens hidden.

    inputs_BL: with the masks.
    places_BM: masked positions, all different.
    targets_BM: the original tokens there.
    weights_BM: 1 for a masked position, 0 for padding of rows with fewer than M.
    """

    inputs_BL: jax.Array
    places_BM: jax.Array
    targets_BM: jax.Array
    weights_BM: jax.Array


def most(length: int, rate: float) -> int:
    """The largest number of masks of a row, M."""
    return min(int(rate * length) + 1, length)


def mask(tokens_BL: jax.Array, keys_B: jax.Array, mask_id: int, rate: float) -> Masked:
    """Masks a share `rate` of the text tokens of every row, all with the same probability.

    A row with n text tokens gets floor(rate n + u) masks, u uniform in [0, 1): rate n on average, at most
    floor(rate n) + 1. Shapes are fixed. The masks of a row depend on its key only.

    Args:
      mask_id: the id of the mask; ids from FIRST below it are ordinary tokens.
    """

    def one(tokens_L: jax.Array, key: jax.Array) -> Masked:
        count_key, place_key, kind_key, token_key = jax.random.split(key, 4)
        text_L = tokens_L >= FIRST
        chosen = jnp.floor(rate * text_L.sum() + jax.random.uniform(count_key))
        scores_L = jnp.where(text_L, jax.random.uniform(place_key, tokens_L.shape), -1.0)
        _, places_M = jax.lax.top_k(scores_L, most(len(tokens_L), rate))
        weights_M = (jnp.arange(len(places_M)) < chosen).astype(jnp.float32)
        targets_M = tokens_L[places_M]
        kind_M = jax.random.uniform(kind_key, targets_M.shape)
        other_M = jax.random.randint(token_key, targets_M.shape, FIRST, mask_id)
        shown_M = jnp.where(kind_M < REPLACED + CHANGED, other_M, targets_M)
        shown_M = jnp.where(kind_M < REPLACED, mask_id, shown_M)
        shown_M = jnp.where(weights_M > 0, shown_M, targets_M)
        return Masked(tokens_L.at[places_M].set(shown_M), places_M, targets_M, weights_M)

    return jax.vmap(one)(tokens_BL, keys_B)
