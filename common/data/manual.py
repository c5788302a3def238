"""Classification examples without a download: paragraphs of the manual that Python installs (`pydoc_data`)."""

from collections.abc import Callable, Iterator

from common.data.text_sources import cut, in_split

TOPICS = ("compound", "debugger", "formatstrings", "specialnames", "string-methods", "types")
"""Long topics of the manual that share few paragraphs. A shared paragraph is an example of the first topic only."""

SAME = ("same", "other")
_WORDS = 8  # Minimum number of words in a paragraph. Shorter paragraphs are often headings or code.

Example = tuple[tuple[str, ...], str]


def _paragraphs(split: str) -> dict[str, list[str]]:
    """Returns {topic: paragraphs} for a split."""
    from pydoc_data.topics import topics

    by_topic, seen = {}, set()
    for name in TOPICS:
        distinct = dict.fromkeys(p.strip() for p in cut(topics[name].split("\n"), "paragraph"))
        long = [p for p in distinct if len(p.split()) >= _WORDS and p not in seen]
        seen.update(long)
        by_topic[name] = [p for number, p in enumerate(long) if in_split(number, split)]
    return by_topic


def python(split: str) -> Iterator[Example]:
    """Yields the paragraphs of a split, labelled with their topics."""
    for topic, paragraphs in _paragraphs(split).items():
        for paragraph in paragraphs:
            yield (paragraph,), topic


def python_pairs(split: str) -> Iterator[Example]:
    """Yields pairs of paragraphs. The label is "same" if both paragraphs are from one topic, else "other"."""
    topics = list(_paragraphs(split).values())
    for number, paragraphs in enumerate(topics):
        others = topics[(number + 1) % len(topics)]
        for i, first in enumerate(paragraphs):
            yield (first, paragraphs[(i + 1) % len(paragraphs)]), SAME[0]
            yield (first, others[i % len(others)]), SAME[1]


MANUAL: dict[str, tuple[Callable[[str], Iterator[Example]], int, tuple[str, ...]]] = {
    "python": (python, 1, TOPICS),
    "python_pairs": (python_pairs, 2, SAME),
}
"""Data set name -> (generator of a split's examples, number of texts per example, class names)."""
