"""Bucketed batches of training and evaluation, for any number of processes, and tokenized corpora."""

import json
from itertools import islice

import jax
import numpy as np
import pytest

from common.data import corpus as corpus_module
from common.data.batches import iterate
from common.data.buckets import BucketedBatches, check_buckets, evaluation_batches
from common.data.corpus import TokenizedCorpus, tokenize_corpus
from common.data.special_ids import BOS, EOS, PAD
from common.errors import UserError
from tests.data.helpers import small_corpora, small_text

SHAPE = {"buckets": (12, 16, 24, 48), "tokens_per_batch": 256, "multiple": 4}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    return small_corpora(tmp_path_factory.mktemp("cache"))[:2]


def corpus(*lengths: int) -> TokenizedCorpus:
    """Returns sentences with these numbers of tokens. Token ids begin at 4."""
    offsets = np.cumsum([0, *lengths])
    return TokenizedCorpus(np.arange(4, 4 + offsets[-1], dtype=np.uint16), offsets)


def sentence(corpus: TokenizedCorpus, i: int) -> list[int]:
    return corpus.tokens[corpus.offsets[i] : corpus.offsets[i + 1]].tolist()


def epoch(batches: BucketedBatches, number: int = 0) -> list[dict]:
    first = number * batches.batches_per_epoch
    return [batches[i] for i in range(first, first + batches.batches_per_epoch)]


def set_process(monkeypatch, index: int, count: int) -> None:
    monkeypatch.setattr(jax, "process_index", lambda: index)
    monkeypatch.setattr(jax, "process_count", lambda: count)


def ids_of(batches) -> list[int]:
    return [i for batch in batches for i in batch["ids"].tolist() if i >= 0]


def assert_equal(batch, other) -> None:
    assert batch.keys() == other.keys()
    for name in batch:
        np.testing.assert_array_equal(batch[name], other[name])


def test_batch_of_a_worked_example():
    batches = BucketedBatches(corpus(2, 3), corpus(3, 1), buckets=(4,), tokens_per_batch=12)
    (batch,) = epoch(batches)
    order = np.argsort(batch["ids"])
    assert batch["ids"].tolist().count(-1) == 1
    assert all(array.dtype == np.int32 for array in batch.values())
    by_id = {name: array[order].tolist() for name, array in batch.items()}
    assert by_id == {
        "ids": [-1, 0, 1],
        "source": [[0, 0, 0, 0], [4, 5, EOS, 0], [6, 7, 8, EOS]],
        "target_inputs": [[0, 0, 0, 0], [BOS, 4, 5, 6], [BOS, 7, 0, 0]],
        "target_outputs": [[0, 0, 0, 0], [4, 5, 6, EOS], [7, EOS, 0, 0]],
    }


def test_epoch_has_every_example_once(corpora):
    batches = BucketedBatches(*corpora, **SHAPE)
    first, second = ids_of(epoch(batches)), ids_of(epoch(batches, 1))
    assert sorted(first) == sorted(second) == list(range(500))
    assert first != second
    assert first != sorted(first)
    assert batches.dropped == 0


def test_epochs_are_shuffled_differently(corpora):
    batches = BucketedBatches(*corpora, **SHAPE)
    groups = [
        {frozenset(ids_of([batch])) for batch in epoch(batches, number)} for number in range(2)
    ]
    assert len(groups[0] & groups[1]) < batches.batches_per_epoch / 4


def test_rows_match_their_sentences(corpora):
    source, target = corpora
    for batch in epoch(BucketedBatches(source, target, **SHAPE)):
        for row, i in enumerate(batch["ids"]):
            expected = (
                ([], [], [])
                if i < 0
                else (
                    [*sentence(source, i), EOS],
                    [BOS, *sentence(target, i)],
                    [*sentence(target, i), EOS],
                )
            )
            names = ("source", "target_inputs", "target_outputs")
            for name, tokens in zip(names, expected, strict=True):
                padded = np.zeros(batch[name].shape[1], np.int32)
                padded[: len(tokens)] = tokens
                np.testing.assert_array_equal(batch[name][row], padded)


def test_shapes_respect_token_budget_and_multiple(corpora):
    batches = epoch(BucketedBatches(*corpora, **SHAPE))
    rows = {12: 20, 16: 16, 24: 8, 48: 4}
    shapes = {batch["source"].shape for batch in batches}
    assert {(rows[length], length) for _, length in shapes} == shapes
    assert len(shapes) >= 3
    assert max(b * length for b, length in shapes) <= SHAPE["tokens_per_batch"]


@pytest.mark.parametrize("count", [1, 2])
def test_samples_have_every_shape_of_an_epoch_once(corpora, count, monkeypatch):
    """`samples` yields one batch of each bucket that has examples.

    With two processes, the batch has the rows of one process only.
    """
    set_process(monkeypatch, 0, count)
    batches = BucketedBatches(*corpora, **SHAPE | {"buckets": (1, *SHAPE["buckets"])})
    shapes = [{name: x.shape for name, x in batch.items()} for batch in batches.samples()]
    expected = [{name: x.shape for name, x in batch.items()} for batch in epoch(batches)]
    assert len(shapes) > 1 and all(shapes.count(shape) == 1 for shape in expected)
    assert all(shape in expected for shape in shapes)


def test_examples_are_in_the_first_bucket_that_fits(corpora):
    source, target = corpora
    for batch in epoch(BucketedBatches(source, target, **SHAPE)):
        present = batch["ids"][batch["ids"] >= 0]
        needed = np.maximum(source.lengths[present], target.lengths[present]) + 1
        length = batch["source"].shape[1]
        shorter = max([b for b in SHAPE["buckets"] if b < length], default=0)
        assert needed.max() <= length
        assert needed.min() > shorter


def test_small_token_budget_gives_one_multiple_of_rows():
    batches = BucketedBatches(corpus(9), corpus(9), buckets=(10,), tokens_per_batch=1, multiple=4)
    assert batches[0]["source"].shape == (4, 10)
    assert batches[0]["ids"].tolist().count(-1) == 3


def test_order_depends_only_on_the_seed(corpora):
    one, same = (BucketedBatches(*corpora, **SHAPE, seed=1) for _ in range(2))
    other = BucketedBatches(*corpora, **SHAPE, seed=2)
    assert_equal(one[7], same[7])
    assert ids_of(epoch(one)) != ids_of(epoch(other))


def test_random_access(corpora):
    walked = BucketedBatches(*corpora, **SHAPE)
    batches = [walked[i] for i in range(3 * walked.batches_per_epoch)]
    for i in (len(batches) - 1, 0, walked.batches_per_epoch):
        assert_equal(BucketedBatches(*corpora, **SHAPE)[i], batches[i])
        assert_equal(walked[i], batches[i])


@pytest.mark.parametrize("count", [2, 4])
def test_processes_split_global_batches(corpora, count, monkeypatch):
    batches = BucketedBatches(*corpora, **SHAPE)
    whole = [batches[i] for i in range(2 * batches.batches_per_epoch)]
    parts = []
    for process in range(count):
        set_process(monkeypatch, process, count)
        parts.append([batches[i] for i in range(len(whole))])
    for i in range(len(whole)):
        shares = [part[i] for part in parts]
        assert len({share["ids"].shape for share in shares}) == 1
        joined = {name: np.concatenate([s[name] for s in shares]) for name in shares[0]}
        assert_equal(joined, whole[i])


def test_long_examples_are_dropped_and_counted():
    source, target = corpus(3, 4, 2, 9), corpus(3, 2, 4, 1)
    batches = BucketedBatches(source, target, buckets=(2, 4), tokens_per_batch=8)
    assert batches.dropped == 3
    assert ids_of(epoch(batches)) == [0]


def test_data_without_short_enough_examples_raise_user_error():
    with pytest.raises(UserError, match="all training examples are longer than"):
        BucketedBatches(corpus(4, 5), corpus(1, 1), buckets=(4,), tokens_per_batch=8)


@pytest.mark.parametrize("buckets", [(), (8, 4), (4, 4), (0, 4)])
def test_buckets_must_ascend(buckets):
    with pytest.raises(UserError, match=r"--config\.data\.buckets must be .* ascending"):
        check_buckets("--config.data.buckets", buckets)


def test_endless_epochs(corpora):
    batches = BucketedBatches(*corpora, **SHAPE)
    read = [batch for batch, _ in islice(iterate(batches), 3 * batches.batches_per_epoch)]
    assert sorted(ids_of(read)) == sorted([*range(500)] * 3)
    assert_equal(read[-1], batches[len(read) - 1])


@pytest.mark.parametrize("threads", [1, 4])
def test_iterator_resume_is_exact(corpora, threads, monkeypatch):
    monkeypatch.setattr("common.data.batches.THREADS", threads)
    batches = BucketedBatches(*corpora, **SHAPE)
    stop = batches.batches_per_epoch + 3
    steps = list(islice(iterate(batches), stop + 30))
    state = json.loads(json.dumps(steps[stop - 1][1]))
    resumed = iterate(BucketedBatches(*corpora, **SHAPE), state)
    for (batch, after), (other, other_after) in zip(steps[stop:], resumed, strict=False):
        assert_equal(batch, other)
        assert after == other_after


def test_resume_with_a_different_process_count_gives_the_same_batch(corpora, monkeypatch):
    batches, states, halves = BucketedBatches(*corpora, **SHAPE), [], []
    for process in range(2):
        set_process(monkeypatch, process, 2)
        states.append(list(islice(iterate(batches), 5))[-1][1])
        halves.append(batches[5]["ids"])
    assert states[0] == states[1]
    set_process(monkeypatch, 0, 1)
    batch, _ = next(iterate(BucketedBatches(*corpora, **SHAPE), states[0]))
    ids = np.concatenate(halves)
    np.testing.assert_array_equal(batch["ids"], ids)


def test_evaluation_batches_have_every_example_once(corpora):
    source, target = corpora
    batches = list(evaluation_batches(source, target, **SHAPE))
    assert sorted(ids_of(batches)) == list(range(500))
    batch = batches[0]
    row = batch["ids"].tolist().index(ids_of([batch])[0])
    i = batch["ids"][row]
    output = batch["target_outputs"][row].tolist()[: target.lengths[i] + 1]
    assert output == [*sentence(target, i), EOS]


def test_evaluation_batches_keep_long_examples():
    source, target = corpus(2, 50, 9), corpus(2, 1, 20)
    batches = evaluation_batches(source, target, buckets=(4, 8), tokens_per_batch=32, multiple=2)
    assert [(b["ids"].tolist(), b["source"].shape) for b in batches] == [
        ([0, -1, -1, -1, -1, -1, -1, -1], (8, 4)),
        ([2, -1], (2, 32)),
        ([1, -1], (2, 64)),
    ]


def test_evaluation_batches_without_targets(corpora):
    batches = list(evaluation_batches(corpora[0], None, **SHAPE))
    assert all(batch.keys() == {"source", "ids"} for batch in batches)
    assert sorted(ids_of(batches)) == list(range(500))


def test_processes_split_evaluation_batches(corpora, monkeypatch):
    whole = list(evaluation_batches(*corpora, **SHAPE))
    parts = []
    for process in range(4):
        set_process(monkeypatch, process, 4)
        parts.append(list(evaluation_batches(*corpora, **SHAPE)))
    for i, batch in enumerate(whole):
        shares = [part[i] for part in parts]
        assert_equal({n: np.concatenate([s[n] for s in shares]) for n in batch}, batch)


def test_corpus_equals_the_encoded_text(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "_BLOCK", 128)
    source, _, tokenizer, _ = small_corpora(tmp_path)
    encoded = tokenizer.encode(small_text().source)
    assert len(source) == len(encoded) == 500
    assert [sentence(source, i) for i in range(len(source))] == encoded
    assert source.lengths.tolist() == [len(ids) for ids in encoded]
    assert source.tokens.dtype == np.uint16


def test_tokenized_corpus_is_cached(tmp_path, monkeypatch):
    source, _, tokenizer, other = small_corpora(tmp_path)
    lines = small_text().source

    def fail(*_):
        raise AssertionError("tokenized again")

    monkeypatch.setattr(type(tokenizer), "encode", fail)
    again = tokenize_corpus(lines, tokenizer, tmp_path)
    assert isinstance(again.tokens, np.memmap)
    np.testing.assert_array_equal(again.tokens, source.tokens)
    for changed in ((lines[1:], tokenizer), (lines, other)):
        with pytest.raises(AssertionError, match="tokenized again"):
            tokenize_corpus(*changed, tmp_path)


def test_end_and_padding_tokens_of_the_corpus() -> None:
    """By default, sentences end with EOS and are padded with PAD. `end` and `pad` are for pretrained tokenizers."""
    texts = [[7, 8, 9], [5]]
    plain = TokenizedCorpus.from_lists(texts)
    (batch,) = evaluation_batches(plain, None, buckets=(4,), tokens_per_batch=12)
    assert batch["source"].tolist() == [[7, 8, 9, EOS], [5, EOS, PAD, PAD], [0] * 4]
    own = TokenizedCorpus.from_lists(texts, end=None, pad=6)
    (batch,) = evaluation_batches(own, None, buckets=(3,), tokens_per_batch=9)
    assert batch["source"].tolist() == [[7, 8, 9], [5, 6, 6], [0] * 3]
