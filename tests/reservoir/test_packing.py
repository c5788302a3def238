"""Documents packed into rows: equality with a loop, completeness, and padding."""

import numpy as np
import pytest

from common.data.corpus import TokenizedCorpus
from common.data.special_ids import BOS, EOS, PAD
from reservoir.packing import PackedRows


def slow(documents: list[list[int]], length: int) -> list[list[int]]:
    """Packs documents into rows of at most `length` tokens by a loop, as a reference."""
    rows, row = [], []
    for document in documents:
        rest = [*document, EOS]
        if row and len(row) + len(rest) > length - 1:
            rows.append(row)
            row = []
        while len(rest) > length - 1:
            rows.append(rest[: length - 1])
            rest = rest[length - 1 :]
        row = row + rest
    return [[BOS, *row] for row in [*rows, row] if row]


def random_documents(seed: int, longest: int) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(4, 100, generator.integers(0, longest)).tolist() for _ in range(200)]


@pytest.mark.parametrize(("length", "longest"), [(16, 12), (16, 60), (8, 7), (64, 5)])
def test_packed_rows_match_a_reference_loop(length, longest):
    documents = random_documents(length, longest)
    rows = PackedRows(TokenizedCorpus.from_lists(documents), length)
    found = rows[np.arange(len(rows))]
    assert found.shape == (len(rows), length) and found.dtype == np.int32
    assert [[t for t in row.tolist() if t != PAD] for row in found] == slow(documents, length)


def test_packed_rows_contain_every_token_once():
    documents = random_documents(1, 40)
    rows = PackedRows(TokenizedCorpus.from_lists(documents), 16)
    found = rows[np.arange(len(rows))]
    text = found[(found != PAD) & (found != BOS)].tolist()
    assert text == [token for document in documents for token in (*document, EOS)]


def test_padding_is_at_the_end_and_fills_empty_rows():
    rows = PackedRows(TokenizedCorpus.from_lists([[5, 6], [7]]), 8)
    assert rows[np.array([0, -1])].tolist() == [[BOS, 5, 6, EOS, 7, EOS, PAD, PAD], [PAD] * 8]


def test_document_that_exactly_fits_is_not_cut():
    rows = PackedRows(TokenizedCorpus.from_lists([[5] * 6, [6] * 7]), 8)
    assert [row.tolist() for row in rows[np.arange(len(rows))]] == [
        [BOS, 5, 5, 5, 5, 5, 5, EOS],
        [BOS, 6, 6, 6, 6, 6, 6, 6],
        [BOS, EOS, PAD, PAD, PAD, PAD, PAD, PAD],
    ]
