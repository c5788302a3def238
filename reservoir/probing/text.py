"""Makes three probing tasks from any text, as defined by Conneau et al. (2018) and their data description."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from common.config import check

Sentence = tuple[str, ...]
Examples = dict[str, list[tuple[str, str]]]
"""Split -> (label, sentence) pairs."""

BINS = ((5, 8), (9, 12), (13, 16), (17, 20), (21, 25), (26, 28))
"""Minimum and maximum tokens of each sentence-length class. All tasks leave out other lengths."""

TARGETS = 1000
"""Number of target words of the word content task: the words of frequency rank 2 * TARGETS and above."""

PER_TARGET = 100
"""Training sentences per target word. Fewer sentences have fewer target words, from proportionally lower ranks."""

HELD_OUT = 10
"""Training sentences per validation sentence and per test sentence, as in SentEval (100,000, 10,000, 10,000)."""

# One token each: <unk>, @-@, 3,500, don't, well-known, a lone 's. So tokenized text stays unchanged.
_TOKEN = re.compile(r"<\w+>|@\S@|\d+(?:[.,:]\d+)+|\w+(?:[-'’./@&]\w+)*|['’]\w\w?\b|\.\.+|[^\w\s]")
_ENDS = (".", "!", "?")
_CLOSING = ('"', "'", "”", "’", ")", "]")


def sentences(lines: Iterable[str]) -> list[Sentence]:
    """Returns the distinct sentences of a text as tokens, if they begin with a word and have a length in `BINS`.

    A sentence ends after a full stop, exclamation or question mark and closing quotes or brackets, unless a lower-case
    letter follows.
    """
    found: dict[Sentence, None] = {}
    for line in lines:
        tokens = _TOKEN.findall(line)
        start = 0
        for place in range(1, len(tokens) + 1):
            if place == len(tokens) or _begins(tokens, place):
                sentence = tuple(tokens[start:place])
                if BINS[0][0] <= len(sentence) <= BINS[-1][1] and sentence[0][0].isalnum():
                    found[sentence] = None
                start = place
    return list(found)


def _begins(tokens: Sequence[str], place: int) -> bool:
    if tokens[place] in _CLOSING or tokens[place] in _ENDS or tokens[place][0].islower():
        return False
    before = place - 1
    while before > 0 and tokens[before] in _CLOSING:
        before -= 1
    return tokens[before] in _ENDS


def sentence_length(
    pool: Sequence[Sentence], count: int, generator: np.random.Generator
) -> Examples:
    """Makes the task "how many tokens", in six classes."""
    groups: dict[str, list[Sentence]] = {str(label): [] for label in range(len(BINS))}
    longest = [high for _, high in BINS]
    for sentence in pool:
        groups[str(np.searchsorted(longest, len(sentence)))].append(sentence)
    return _balanced(groups, count, generator)


def bigram_shift(pool: Sequence[Sentence], count: int, generator: np.random.Generator) -> Examples:
    """Makes the task "are two adjacent words swapped" ("I", inverted) or not ("O", original).

    Never swaps the first token or punctuation. Leaves out sentences with double quotes, and sentences without a pair to
    swap, which would reveal themselves as originals.
    """
    known = set(pool)
    groups: dict[str, list[Sentence]] = {"I": [], "O": []}
    for number in generator.permutation(len(pool)):
        sentence = pool[number]
        places = [] if '"' in sentence else _shiftable(sentence)
        if not places:
            continue
        place = places[generator.integers(len(places))]
        first, second = sentence[place : place + 2]
        shifted = (*sentence[:place], second, first, *sentence[place + 2 :])
        if shifted in known:
            continue
        known.add(shifted)
        label = min(groups, key=lambda label: len(groups[label]))
        groups[label].append(shifted if label == "I" else sentence)
    return _balanced(groups, count, generator)


def _shiftable(sentence: Sentence) -> list[int]:
    """Returns the positions of words whose next token is a different word."""
    return [
        place
        for place, (one, other) in enumerate(pairwise(sentence))
        if place > 0 and one[0].isalnum() and other[0].isalnum() and one.lower() != other.lower()
    ]


def word_content(pool: Sequence[Sentence], count: int, generator: np.random.Generator) -> Examples:
    """Makes the task "which target word does the sentence contain", from sentences with exactly one.

    Targets are words of at least four letters and middle frequency, compared in lower case.
    """
    size = min(TARGETS, max(2, count // PER_TARGET))
    lower = [[token.lower() for token in sentence] for sentence in pool]
    frequency = Counter(token for sentence in lower for token in sentence)
    ranked = sorted(frequency, key=lambda word: (-frequency[word], word))
    targets = [word for word in ranked[2 * size :] if len(word) >= 4 and word.isalpha()][:size]
    check(
        len(targets) == size,
        f"the text has {len(ranked):,} different words, too few for the {size:,} target words of"
        f" --count={count}; lower --count or give more text",
    )
    groups: dict[str, list[Sentence]] = {word: [] for word in targets}
    for sentence, tokens in zip(pool, lower, strict=True):
        found = [token for token in tokens if token in groups]
        if len(found) == 1:
            groups[found[0]].append(sentence)
    return _balanced(groups, count, generator)


MAKERS: Mapping[str, Callable[[Sequence[Sentence], int, np.random.Generator], Examples]] = {
    "sentence_length": sentence_length,
    "bigram_shift": bigram_shift,
    "word_content": word_content,
}
"""Functions (sentences, number of training sentences, generator) -> Examples. No sentence occurs twice.

They raise a UserError if the text has too few sentences.
"""


def _balanced(
    groups: Mapping[str, Sequence[Sentence]], count: int, generator: np.random.Generator
) -> Examples:
    """Returns equally many random sentences of each label in each split, in random order."""
    train = count // len(groups)
    held_out = max(1, train // HELD_OUT)
    label, fewest = min(((label, len(groups[label])) for label in groups), key=lambda g: g[1])
    check(
        train > 0 and train + 2 * held_out <= fewest,
        f"the text has {fewest:,} sentences for the label {label!r}, and --count={count} asks for"
        f" {train + 2 * held_out:,} of each of the {len(groups):,} labels; "
        + ("raise --count" if train == 0 else "lower --count or give more text"),
    )
    examples: Examples = {"train": [], "valid": [], "test": []}
    for label, group in groups.items():
        chosen = generator.permutation(len(group))[: train + 2 * held_out]
        parts = np.split(chosen, [train, train + held_out])
        for split, numbers in zip(examples, parts, strict=True):
            examples[split] += [(label, " ".join(group[number])) for number in numbers]
    return {
        split: [rows[number] for number in generator.permutation(len(rows))]
        for split, rows in examples.items()
    }
