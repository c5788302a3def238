"""Embedded classification examples: paragraphs of the manual that comes with Python."""

from collections.abc import Callable, Iterator

from common.data.text import cut

TOPICS = ("compound", "debugger", "formatstrings", "specialnames", "string-methods", "types")
"""Long topics with few shared paragraphs; a shared paragraph belongs to the first topic."""

SAME = ("same", "other")
_WORDS = 8  # Shorter paragraphs are headings and code.

Example = tuple[tuple[str, ...], str]


def _paragraphs(split: str) -> dict[str, list[str]]:
    """Returns the paragraphs of every topic: 8 of 10 for "train", 1 of 10 each for "valid" and "test"."""
    from pydoc_data.topics import topics

    place = {"valid": 8, "test": 9}

    def chosen(number: int) -> bool:
        return number % 10 == place[split] if split in place else number % 10 < 8

    found, seen = {}, set()
    for name in TOPICS:
        all_of_it = (p.strip() for p in cut(topics[name].split("\n"), "paragraph"))
        long = [p for p in dict.fromkeys(all_of_it) if len(p.split()) >= _WORDS and p not in seen]
        seen.update(long)
        found[name] = [p for number, p in enumerate(long) if chosen(number)]
    return found


def python(split: str) -> Iterator[Example]:
    """Yields paragraphs, labelled with their topic."""
    for topic, paragraphs in _paragraphs(split).items():
        for paragraph in paragraphs:
            yield (paragraph,), topic


def python_pairs(split: str) -> Iterator[Example]:
    """Yields pairs of paragraphs, labelled "same" or "other" topic."""
    found = list(_paragraphs(split).values())
    for number, paragraphs in enumerate(found):
        others = found[(number + 1) % len(found)]
        for place, first in enumerate(paragraphs):
            yield (first, paragraphs[(place + 1) % len(paragraphs)]), SAME[0]
            yield (first, others[place % len(others)]), SAME[1]


MANUAL: dict[str, tuple[Callable[[str], Iterator[Example]], int, tuple[str, ...]]] = {
    "python": (python, 1, TOPICS),
    "python_pairs": (python_pairs, 2, SAME),
}
"""By name: generator of the examples of a split, number of texts per example, classes."""
