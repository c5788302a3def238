"""Makes three probing tasks of Conneau et al. (2018) from any text: sentence length, bigram shift, word content."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from common.errors import check

Sentence = tuple[str, ...]
Examples = dict[str, list[tuple[str, str]]]
"""Split -> (label, sentence) pairs."""

BINS = ((5, 8), (9, 12), (13, 16), (17, 20), (21, 25), (26, 28))
"""Minimum and maximum number of tokens of each class of sentence_length. All tasks drop sentences outside of 5 to 28
tokens."""

TARGETS = 1000
"""Maximum number of target words of the task word_content."""

PER_TARGET = 100
"""Number of training sentences (--count) per target word. The task has at least 2 and at most TARGETS target words."""

HELD_OUT = 10
"""Number of training sentences per validation sentence and per test sentence. SentEval has 100,000, 10,000 and 10,000
sentences."""

# <unk>, @-@, 3,500, don't, well-known and a separate 's are one token each.
_TOKEN = re.compile(r"<\w+>|@\S@|\d+(?:[.,:]\d+)+|\w+(?:[-'’./@&]\w+)*|['’]\w\w?\b|\.\.+|[^\w\s]")
_ENDS = (".", "!", "?")
_CLOSING = ('"', "'", "”", "’", ")", "]")


def sentences(lines: Iterable[str]) -> list[Sentence]:
    """Returns the distinct sentences of a text, each as its tokens.

    Drops sentences with a length outside of `BINS`, or with a first token that is not a word or number. A sentence ends
    at the end of a line. It also ends after a full stop, exclamation mark or question mark with any closing quotes and
    brackets, unless a lower-case letter follows.
    """
    distinct: dict[Sentence, None] = {}
    for line in lines:
        tokens = _TOKEN.findall(line)
        start = 0
        for place in range(1, len(tokens) + 1):
            if place == len(tokens) or _begins(tokens, place):
                sentence = tuple(tokens[start:place])
                if BINS[0][0] <= len(sentence) <= BINS[-1][1] and sentence[0][0].isalnum():
                    distinct[sentence] = None
                start = place
    return list(distinct)


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
    """Makes the task sentence_length: six classes of the number of tokens."""
    groups: dict[str, list[Sentence]] = {str(label): [] for label in range(len(BINS))}
    longest = [high for _, high in BINS]
    for sentence in pool:
        groups[str(np.searchsorted(longest, len(sentence)))].append(sentence)
    return _balanced("sentence_length", groups, count, generator)


def bigram_shift(pool: Sequence[Sentence], count: int, generator: np.random.Generator) -> Examples:
    """Makes the task bigram_shift: are two adjacent words swapped (label "I", inverted) or not ("O", original)?

    Never swaps the first token or punctuation. Drops sentences with double quotes. Also drops sentences without two
    words to swap, because a classifier could recognise these sentences as originals. Drops a sentence if its swapped
    form is another sentence of the task or of the text.
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
    return _balanced("bigram_shift", groups, count, generator)


def _shiftable(sentence: Sentence) -> list[int]:
    """Returns the positions of words whose next token is a different word, except position 0."""
    return [
        place
        for place, (one, other) in enumerate(pairwise(sentence))
        if place > 0 and one[0].isalnum() and other[0].isalnum() and one.lower() != other.lower()
    ]


def word_content(pool: Sequence[Sentence], count: int, generator: np.random.Generator) -> Examples:
    """Makes the task word_content: which of n target words does a sentence contain? Each sentence has exactly one.

    Target words are the most frequent words of at least four letters, except the 2n most frequent tokens (words and
    punctuation marks) of the text. Words are compared in lower case.
    """
    size = min(TARGETS, max(2, count // PER_TARGET))
    lower = [[token.lower() for token in sentence] for sentence in pool]
    frequency = Counter(token for sentence in lower for token in sentence)
    ranked = sorted(frequency, key=lambda word: (-frequency[word], word))
    targets = [word for word in ranked[2 * size :] if len(word) >= 4 and word.isalpha()][:size]
    check(
        len(targets) == size,
        f"--tasks=word_content with --count={count} needs {size:,} target words (4 letters or more, without the"
        f" {2 * size:,} most frequent words and punctuation marks), but the sentences of {BINS[0][0]} to {BINS[-1][1]}"
        f" tokens have only {len(targets):,} such words: give more text{' or lower --count' if size > 2 else ''}",
    )
    groups: dict[str, list[Sentence]] = {word: [] for word in targets}
    for sentence, tokens in zip(pool, lower, strict=True):
        found = [token for token in tokens if token in groups]
        if len(found) == 1:
            groups[found[0]].append(sentence)
    return _balanced("word_content", groups, count, generator)


MAKERS: Mapping[str, Callable[[Sequence[Sentence], int, np.random.Generator], Examples]] = {
    "sentence_length": sentence_length,
    "bigram_shift": bigram_shift,
    "word_content": word_content,
}
"""Task -> function from (sentences, number of training sentences, random generator) to examples without duplicates.

The functions raise a UserError if the text has too few sentences or target words, or if the number of training
sentences is below the number of labels.
"""


def _balanced(
    task: str,
    groups: Mapping[str, Sequence[Sentence]],
    count: int,
    generator: np.random.Generator,
) -> Examples:
    """Draws examples in random order, with the same number of sentences per label within each split."""
    train = count // len(groups)
    held_out = max(1, train // HELD_OUT)
    label, fewest = min(((label, len(groups[label])) for label in groups), key=lambda g: g[1])
    check(
        train > 0,
        f"--count={count} must be at least {len(groups):,}, the number of labels of --tasks={task}",
    )
    kind = repr(label)
    if task == "sentence_length":
        low, high = BINS[int(label)]
        kind += f" ({low} to {high} tokens)"
    # Even the smallest --count needs three sentences of each label. With fewer, a lower --count helps only the task
    # word_content, which then has fewer and more frequent target words.
    fewer = fewest >= 3 or (task == "word_content" and len(groups) > 2)
    check(
        train + 2 * held_out <= fewest,
        f"--tasks={task} with --count={count} needs {train + 2 * held_out:,} sentences for each of its {len(groups):,}"
        f" labels, but the number of sentences for the label {kind} is {fewest:,}: give more text"
        f"{' or lower --count' if fewer else ''}",
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
