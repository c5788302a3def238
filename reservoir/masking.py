"""BERT's random masking (Devlin et al., 2019).

Shape letter of this module: M masked positions of a row, padded to a fixed number.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from common.data.special_ids import UNK

REPLACED, CHANGED = 0.8, 0.1
"""Probabilities that a masked token becomes the mask token (0.8) or a random token (0.1). Otherwise, the masked token
is left unchanged."""

FIRST = UNK + 1
"""Smallest id of a text token. Smaller ids (padding, begin, end, unknown) are never masked."""


class Masked(NamedTuple):
    """Masked rows and the tokens to predict.

    Attributes:
      inputs_BL: the rows after masking.
      places_BM: M different positions of each row: first the masked positions, then positions that are not masked.
      targets_BM: original tokens at `places_BM`.
      weights_BM: 1 for masked positions, 0 for positions that are not masked.
    """

    inputs_BL: jax.Array
    places_BM: jax.Array
    targets_BM: jax.Array
    weights_BM: jax.Array


def most(length: int, rate: float) -> int:
    """Returns M, an upper bound of the number of masked positions in a row of `length` tokens (see `mask`)."""
    return min(int(rate * length) + 1, length)


def mask(tokens_BL: jax.Array, keys_B: jax.Array, mask_id: int, rate: float) -> Masked:
    """Masks a fraction `rate` of the text tokens of every row. Each text token has the same probability.

    A row with n text tokens has floor(rate * n + u) masked tokens, with u uniform in [0, 1). The average is rate * n,
    and the number is at most floor(rate * n) + 1. The masked positions of a row depend only on the row and its key.

    Args:
      mask_id: id of the mask token. Text tokens have the ids from FIRST to `mask_id` - 1.
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
