"""Three probing tasks made from any text, as Conneau et al. (2018) and the description of their data define them."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from common.config import check

Sentence = tuple[str, ...]
Examples = dict[str, list[tuple[str, str]]]
"""(label, sentence) of "train", "valid" and "test"."""

BINS = ((5, 8), (9, 12), (13, 16), (17, 20), (21, 25), (26, 28))
"""Shortest and longest sentence of each class of the sentence length, in tokens; no task has others."""

TARGETS = 1000
"""Words of the word content task, which are those of the ranks from 2 * TARGETS on."""

PER_TARGET = 100
"""Training sentences of each of them; of fewer sentences there are fewer words, of lower ranks in proportion."""

HELD_OUT = 10
"""Validation and test have a sentence each for so many training sentences (SentEval: 100,000, 10,000 and 10,000)."""

# <unk>, @-@, 3,500, don't, well-known and a lone 's are one token each: text that is tokenized already stays as it is.
_TOKEN = re.compile(r"<\w+>|@\S@|\d+(?:[.,:]\d+)+|\w+(?:[-'’./@&]\w+)*|['’]\w\w?\b|\.\.+|[^\w\s]")
_ENDS = (".", "!", "?")
_CLOSING = ('"', "'", "”", "’", ")", "]")


def sentences(lines: Iterable[str]) -> list[Sentence]:
    """The different sentences of a text that begin with a word and have a length of `BINS`, in their order, as tokens.

    A line is cut after a full stop, exclamation or question mark (and quotes or brackets that close there) unless it
    goes on with a lower-case letter.
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
    """The number of tokens, in six classes."""
    groups: dict[str, list[Sentence]] = {str(label): [] for label in range(len(BINS))}
    longest = [high for _, high in BINS]
    for sentence in pool:
        groups[str(np.searchsorted(longest, len(sentence)))].append(sentence)
    return _balanced(groups, count, generator)


def bigram_shift(pool: Sequence[Sentence], count: int, generator: np.random.Generator) -> Examples:
    """Whether two neighbours have changed places ("I", inverted) or not ("O", original).

    The first token and punctuation stay in their places; sentences with double quotes are left out, and so are those
    with no two neighbours to change, lest these be known for originals.
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
    """Places of words whose next neighbour is another word."""
    return [
        place
        for place, (one, other) in enumerate(pairwise(sentence))
        if place > 0 and one[0].isalnum() and other[0].isalnum() and one.lower() != other.lower()
    ]


def word_content(pool: Sequence[Sentence], count: int, generator: np.random.Generator) -> Examples:
    """Which of the target words is in the sentence, where one of them is, and once.

    Targets are words of four letters or more and of middle frequency; small and capital letters are the same.
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
"""From (sentences, number of training sentences, generator) to a task. No sentence is used twice.

Raise:
  UserError: there are too few sentences.
"""


def _balanced(
    groups: Mapping[str, Sequence[Sentence]], count: int, generator: np.random.Generator
) -> Examples:
    """As many sentences of each label in each split, at random, in random order."""
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
