"""Beam search against exhaustive search, a greedy loop, and fairseq's rules in plain Python.

Shape letters of this module: K hypotheses of a beam, N hypotheses of all sentences.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reservoir import beam
from reservoir.beam import Search, beam_search
from tests.model import helpers

PAD, BOS, EOS = 0, 1, 2
# (tokens of a hypothesis including its end, score)
Hypothesis = tuple[tuple[int, ...], float]
# Tokens so far, including begin of sentence -> log-probabilities of the next token.
LogProbabilities = Callable[[tuple[int, ...]], np.ndarray]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = np.asarray(logits, np.float64)
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


@dataclass(frozen=True)
class Recurrence:
    """A tiny recurrent model: h' = tanh(A h + e[token]), logits = W h'."""

    recurrent: np.ndarray
    embedding: np.ndarray
    output: np.ndarray

    @classmethod
    def random(cls, seed: int, vocabulary: int = 5, width: int = 4) -> "Recurrence":
        generator = np.random.default_rng(seed)
        shapes = (width, width), (vocabulary, width), (width, vocabulary)
        return cls(*(1.5 * generator.standard_normal(s).astype(np.float32) for s in shapes))

    def step(self, tokens_N, cache, index):
        state_ND, shared = cache
        state_ND = jnp.tanh(state_ND @ self.recurrent + jnp.asarray(self.embedding)[tokens_N])
        return state_ND @ self.output + shared.sum(), (state_ND, shared)

    def cache(self, rows: int) -> tuple:
        """Returns a cache with the state of each hypothesis, and a leaf that all hypotheses share."""
        return jnp.zeros((rows, len(self.recurrent))), jnp.zeros((1,))

    def logp(self, tokens: tuple[int, ...]) -> np.ndarray:
        state = np.zeros(len(self.recurrent))
        for token in tokens:
            state = np.tanh(state @ self.recurrent + self.embedding[token])
        return log_softmax(state @ self.output)

    def search(self, search: Search, limits: list[int], longest: int = 0) -> list[list[Hypothesis]]:
        found = beam_search(
            self.step,
            self.cache(len(limits) * search.beams),
            jnp.array(limits),
            longest=longest or max(limits),
            search=search,
            bos=BOS,
            eos=EOS,
            never=(PAD, BOS),
        )
        return unpack(*found)


def unpack(tokens_BKT: jax.Array, scores_BK: jax.Array) -> list[list[Hypothesis]]:
    """Returns (tokens up to the end of sentence, score) of the finished hypotheses of each sentence."""
    result = []
    for tokens_KT, scores_K in zip(np.asarray(tokens_BKT), np.asarray(scores_BK), strict=True):
        result.append([])
        for tokens, score in zip(tokens_KT.tolist(), scores_K.tolist(), strict=True):
            if score > beam.IMPOSSIBLE / 2:
                end = tokens.index(EOS) + 1
                assert set(tokens[end:]) <= {EOS}
                result[-1].append((tuple(tokens[:end]), score))
    return result


def assert_same(ours: list[Hypothesis], expected: list[Hypothesis]) -> None:
    assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in expected]
    np.testing.assert_allclose([s for _, s in ours], [s for _, s in expected], rtol=1e-4, atol=1e-5)


def exhaustive(logp: LogProbabilities, words: list[int], limit: int, penalty: float):
    """Returns (tokens, score) of every finished sequence of up to `limit` tokens, best first."""
    found = []
    for length in range(limit):
        for prefix in itertools.product(words, repeat=length):
            tokens = (*prefix, EOS)
            total = sum(logp((BOS, *tokens[:i]))[token] for i, token in enumerate(tokens))
            found.append((tokens, total / len(tokens) ** penalty))
    return sorted(found, key=lambda hypothesis: -hypothesis[1])


def fairseq(
    logp: LogProbabilities, search: Search, limit: int, never: tuple[int, ...] = (PAD, BOS)
) -> list[Hypothesis]:
    """Returns the hypotheses of fairseq's SequenceGenerator for one sentence, best first.

    One rule differs. If more hypotheses end in a step than are needed, fairseq keeps the hypotheses found first. This
    function and our search keep the best. The best hypothesis of all is the same.
    """
    live: list[Hypothesis] = [((), 0.0)]
    finished: list[Hypothesis] = []
    for index in range(limit):
        candidates = []
        for tokens, score in live:
            lprobs = logp((BOS, *tokens))
            for token, lprob in enumerate(lprobs):
                if token not in never and (token == EOS or index + 1 < limit):
                    candidates.append(((*tokens, token), score + lprob))
        candidates = sorted(candidates, key=lambda c: -c[1])[: 2 * search.beams]
        for tokens, score in candidates[: search.beams]:
            if tokens[-1] == EOS:
                finished.append((tokens, score / len(tokens) ** search.length_penalty))
        if len(finished) >= search.beams:
            break
        live = [c for c in candidates if c[0][-1] != EOS][: search.beams]
    return sorted(finished, key=lambda hypothesis: -hypothesis[1])[: search.beams]


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_wide_beam_finds_all_sequences_in_order(penalty: float):
    """A beam of 24 finds all 15 sequences: up to three words, then the end of sentence.

    The vocabulary has two words. The sequences are sorted, best first.
    """
    model = Recurrence.random(0)
    expected = exhaustive(model.logp, [3, 4], 4, penalty)
    assert len(expected) == 15
    (ours,) = model.search(Search(beams=24, length_penalty=penalty), [4])
    assert_same(ours, expected)


def test_length_penalty():
    """In `Recurrence.random(0)`, the length penalties 0 and 1 have different best hypotheses."""
    model = Recurrence.random(0)
    best = [exhaustive(model.logp, [3, 4], 4, penalty)[0][0] for penalty in (0.0, 1.0)]
    assert best[0] != best[1]


@pytest.mark.parametrize("seed", range(3))
def test_beam_of_one_is_greedy(seed: int):
    model = Recurrence.random(seed, vocabulary=7)
    limit = 6
    tokens: tuple[int, ...] = ()
    total = 0.0
    while not tokens or tokens[-1] != EOS:
        logp = model.logp((BOS, *tokens))
        logp[[PAD, BOS]] = -np.inf
        token = EOS if len(tokens) + 1 == limit else int(np.argmax(logp))
        tokens, total = (*tokens, token), total + logp[token]
    (ours,) = model.search(Search(beams=1, length_penalty=1.0), [limit])
    assert_same(ours, [(tokens, total / len(tokens))])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_recurrent_model_matches_fairseq_rules(seed: int, penalty: float):
    """A state is reordered with its hypothesis. The sentences of the batch have different length limits."""
    model = Recurrence.random(10 + seed, vocabulary=8)
    search = Search(beams=3, length_penalty=penalty)
    limits = [7, 2, 1, 4]
    ours = model.search(search, limits, longest=9)
    for limit, hypotheses in zip(limits, ours, strict=True):
        expected = fairseq(model.logp, search, limit)
        assert_same(hypotheses, expected)
        assert all(len(tokens) <= limit for tokens, _ in hypotheses)


def test_length_limits_force_the_end():
    """The logit of the end of sentence is so low that only the length limit ends a hypothesis."""
    random = Recurrence.random(0, vocabulary=6)
    # The first unit of the state is always 1 and keeps the logit of the end near -60.
    embedding, output = np.zeros_like(random.embedding), random.output.copy()
    embedding[:, 0], output[0, EOS] = 50.0, -60.0
    endless = Recurrence(random.recurrent, embedding, output)
    ours = endless.search(Search(beams=2), [5, 1, 3])
    assert [{len(tokens) for tokens, _ in hypotheses} for hypotheses in ours] == [{5}, {1}, {3}]
    # A sentence with the limit 1 has only one hypothesis.
    assert [len(hypotheses) for hypotheses in ours] == [2, 1, 2]


def test_forbidden_tokens_are_never_generated():
    """The two likeliest tokens are forbidden. The probabilities of the allowed tokens do not change."""
    logits = jnp.array([5.0, 4.0, 1.0, 0.5, 0.0])
    tokens, scores = beam_search(
        lambda tokens, cache, index: (jnp.tile(logits, (len(tokens), 1)), cache),
        (),
        jnp.array([3]),
        longest=3,
        search=Search(beams=2, length_penalty=0.0),
        bos=BOS,
        eos=EOS,
        never=(PAD, BOS),
    )
    logp = log_softmax(logits)
    ((best, score), _) = unpack(tokens, scores)[0]
    assert best == (EOS,)
    assert score == pytest.approx(logp[EOS], abs=1e-5)
    assert not set(np.asarray(tokens).reshape(-1).tolist()) & {PAD, BOS}


def test_longest_translation_of_a_source():
    assert Search(ratio=1.2, extra=10).longest(7) == 18
    assert Search(ratio=0.0, extra=3).longest(100) == 3


@pytest.mark.medium
@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_encoder_decoder_matches_fairseq_rules(translator, penalty: float):
    """The reference is the NumPy transformer in tests/model/helpers.py.

    The three hypotheses of a sentence share the encoder output.
    """
    model, weights, decode = translator
    sources = np.array([[3, 4, 5, 6, 2], [7, 8, 2, 0, 0], [9, 10, 11, 2, 0], [12, 2, 0, 0, 0]])
    limits = [8, 3, 6, 7]
    search = Search(beams=3, length_penalty=penalty)
    ours = unpack(*decode(search, sources, np.array(limits)))
    lengths = set()
    for source, limit, hypotheses in zip(sources, limits, ours, strict=True):
        encoded = helpers.encode(weights, source, model)

        def logp(tokens: tuple[int, ...], encoded=encoded) -> np.ndarray:
            return log_softmax(helpers.decode(weights, encoded, np.array(tokens), model)[-1])

        assert_same(hypotheses, fairseq(logp, search, limit))
        lengths |= {len(tokens) - limit for tokens, _ in hypotheses}
    assert 0 in lengths and min(lengths) < 0, (
        "some translations must end before the limit, and some at the limit"
    )


@pytest.fixture(scope="module")
def translator(make_config) -> tuple:
    """Returns a model configuration, random weights, and a function that compiles and runs beam search."""
    model = make_config(encoder_layers=1, decoder_layers=2).model
    abstract_model = helpers.structure_of(model)
    weights = helpers.random_values(abstract_model.trainable, 5)

    def decode(search: Search, sources: np.ndarray, limits: np.ndarray):
        longest = int(limits.max())

        def run(weights, sources, limits):
            built = abstract_model.build(weights, {})
            context = built.encode(sources)
            return beam_search(
                lambda tokens, cache, index: built.step(tokens, cache, index, context),
                built.cache(len(sources) * search.beams, longest, context),
                limits,
                longest=longest,
                search=search,
                bos=BOS,
                eos=EOS,
                never=(PAD, BOS),
            )

        return jax.jit(run)(weights, sources, limits)

    return model, weights, decode
