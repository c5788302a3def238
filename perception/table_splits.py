"""Splits labelled examples. Removes copies, and keeps near-duplicates in the same split."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from common.errors import UserError, check
from perception import near_duplicates
from perception.datasets import SEED
from perception.table_reader import WHOLE

LEAST = 3
"""A class is divided among training, validation and test if at least this number of texts count for it; otherwise these
texts are only in training. Near-duplicates count once. A text with several classes counts only for its rarest class.
"""

SHARES = {"test": (0.2, 5000), "valid": (0.1, 2000)}
"""Split -> fraction that it gets of the different texts of divided classes (see LEAST), and maximum number of texts. A
split exceeds this number if it would otherwise lack a class."""

FEW = 5
"""A note names the classes with fewer validation or test examples, because chance determines their scores."""

SHOWN = 3
"""Maximum number of rows or classes that a message lists."""


Label = str | tuple[str, ...]
"""The class of a text or, multi-label, the alphabetically sorted classes of a text."""


def classes_of(label: Label) -> tuple[str, ...]:
    return label if isinstance(label, tuple) else (label,)


@dataclass(frozen=True, slots=True)
class Example:
    """A labelled text or pair of texts, and the location of its row."""

    place: str
    texts: tuple[str, ...]
    label: Label

    @property
    def text(self) -> str:
        """The texts of the example, joined by a space."""
        return " ".join(self.texts)


def counted(number: int, noun: str) -> str:
    """Formats a number with its noun, such as "1 row" or "1,200 rows"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def shown(faults: Sequence[str]) -> str:
    """Joins the first SHOWN faults, and states the number of others."""
    more = len(faults) - SHOWN
    return "; ".join(faults[:SHOWN]) + (f"; and {more:,} more" if more > 0 else "")


@dataclass
class Notes:
    """What happened to the data.

    Attributes:
      sentences: notes to print, which list at most SHOWN rows.
      rows: "location: reason" of every row that was skipped or removed.
    """

    sentences: list[str] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)


def without_copies(
    split: str, examples: Sequence[Example], notes: Notes, strict: bool
) -> list[Example]:
    """Keeps one example of each text: the first example with the most frequent label of this text.

    If two labels of a text are equally frequent and no label is more frequent, all examples with this text are removed.
    Texts are compared as `near_duplicates.normalise` returns them. Adds to `notes`.

    Raises:
      UserError: a text has different labels and `strict` is set, or no example is left.
    """
    copies: dict[str, list[Example]] = defaultdict(list)
    for example in examples:
        copies[near_duplicates.normalise(example.text)].append(example)
    kept, unclear, contradicted = [], 0, []
    for same in copies.values():
        (label, most), *others = Counter(e.label for e in same).most_common(2)
        if others:
            other = next(e for e in same if e.label != same[0].label)
            contradicted.append(f"{same[0].place} and {other.place}")
        if others and others[0][1] == most:
            unclear += len(same)
            notes.rows += [f"{e.place}: no label of this text is the most frequent" for e in same]
            continue
        first = next(e for e in same if e.label == label)
        kept.append(first)
        notes.rows += [f"{e.place}: same text as {first.place}" for e in same if e is not first]
    of = "" if split == WHOLE else f" of the split {split}"
    if contradicted:
        check(
            not strict,
            f"--strict refuses {counted(len(contradicted), 'text')}{of}, each in several rows with different labels"
            f" ({shown(contradicted)}): correct the labels, or remove --strict",
        )
        notes.sentences.append(
            f"{counted(len(contradicted), 'text')}{of} with different labels ({shown(contradicted)}): kept with"
            f" the most frequent label; {counted(unclear, 'row')} without a most frequent label removed."
        )
    removed = len(examples) - len(kept) - unclear
    if removed:
        notes.sentences.append(
            f"Removed {counted(removed, 'row')}{of} with the same text as another row."
        )
    check(
        bool(kept),
        f"--data has no usable row{of}, because every text occurs equally often with different labels"
        f" ({shown(contradicted)}): correct the labels, or name other columns with --text and --label",
    )
    return kept


def similar_groups(found: Mapping[str, Sequence[Example]]) -> dict[str, int]:
    """Returns {location of an example: index of the example's group of near-duplicates}."""
    examples = [e for some in found.values() for e in some]
    numbers = near_duplicates.groups([e.text for e in examples])
    return {e.place: int(n) for e, n in zip(examples, numbers, strict=True)}


def without_leaks(
    found: Mapping[str, list[Example]], group: Mapping[str, int], notes: Notes
) -> dict[str, list[Example]]:
    """Removes near-duplicates of test examples from the other splits, and of validation examples from training.

    Adds to `notes`. Raises a UserError if no example of a split is left.
    """
    kept: dict[str, list[Example]] = {}
    for split in ("test", "valid", "train"):
        if split not in found:
            continue
        seen = {group[e.place]: e.place for examples in kept.values() for e in examples}
        kept[split] = [e for e in found[split] if group[e.place] not in seen]
        notes.rows += [
            f"{e.place}: equal or nearly equal to {seen[group[e.place]]}"
            for e in found[split]
            if group[e.place] in seen
        ]
        check(
            bool(kept[split]),
            f"--data has no usable example of the split {split}, because all are equal or nearly equal to examples of"
            f" {' or '.join(name for name in kept if name != split)}: add other examples to the split {split}",
        )
        removed = len(found[split]) - len(kept[split])
        if removed:
            notes.sentences.append(
                f"Removed {counted(removed, 'example')} of the split {split}, equal or nearly equal to examples of"
                f" {' or '.join(name for name in kept if name != split)}."
            )
    return kept


def cut_splits(
    examples: Sequence[Example],
    group: Mapping[str, int],
    wanted: Sequence[str],
    notes: Notes,
) -> dict[str, list[Example]]:
    """Cuts the splits `wanted` from examples, stratified by class.

    Each split has an example of each divided class (see LEAST). An example with several classes is stratified by its
    rarest class. All near-duplicates of a group go to one split. Validation and test keep one example of each group,
    because near-duplicates are not independent.

    Args:
      group: location of an example -> index of its group of near-duplicates.
      wanted: names of the splits to cut; each is "valid" or "test".
      notes: the function adds rare classes and removed examples.

    Returns:
      The splits in `wanted`, and "train" with all examples of the remaining groups.

    Raises:
      UserError: a split is wanted, but fewer than two classes have LEAST different texts.
    """
    from sklearn.model_selection import train_test_split

    members: dict[int, list[Example]] = defaultdict(list)
    for example in examples:
        members[group[example.place]].append(example)
    strata = _strata(examples)
    label = {
        n: Counter(strata[e.label] for e in some).most_common(1)[0][0]
        for n, some in members.items()
    }
    counts = Counter(label.values())
    rare = {name for name, count in counts.items() if count < LEAST}
    several = any(isinstance(e.label, tuple) for e in examples)
    if rare and wanted:
        some = ", ".join(sorted(rare)[:SHOWN])
        notes.sentences.append(
            f"{len(rare):,} of {len(counts):,} classes, with fewer than {LEAST} different texts"
            f" each{' (a text counts only for its rarest class)' * several}, {'are' if len(rare) > 1 else 'is'} only in"
            f" training{', except in texts that count for another class' * several}: {some}"
            f"{', ...' * (len(rare) > SHOWN)}."
        )
    classes = sorted(counts.keys() - rare)
    check(
        len(classes) > 1 or not wanted,
        f"--data has too few texts: {f'only the class {classes[0]!r}' if classes else 'no class'} has {LEAST} or more"
        f" different texts, where nearly equal texts count once{', and a text only for its rarest class' * several}:"
        f" add texts until at least two classes have {LEAST} such texts",
    )
    left = [n for n, name in label.items() if name not in rare]
    whole, found, dropped = len(left), {}, 0
    for split in wanted:
        share, most = SHARES[split]
        # `train_test_split` needs two examples of each class, and in both parts at least as many examples as there are
        # classes. LEAST and the lower bound of `count` ensure this.
        count = max(min(math.ceil(share * whole), most), len(classes))
        left, cut = train_test_split(
            left, test_size=count, random_state=SEED, stratify=[label[n] for n in left]
        )
        # The draw may miss a class with few texts: add a text of the class.
        drawn = {label[n] for n in cut}
        missed = {label[n]: n for n in left if label[n] not in drawn}
        left = [n for n in left if missed.get(label[n]) != n]
        cut = [*cut, *missed.values()]
        found[split] = [members[n][0] for n in cut]
        others = [(first, e) for first, *more in map(members.get, cut) for e in more]
        notes.rows += [f"{e.place}: nearly equal to {first.place}" for first, e in others]
        dropped += len(others)
    if dropped:
        notes.sentences.append(
            f"Of each group of near-duplicates in {' or '.join(wanted)}, one text is kept: {counted(dropped, 'other')}"
            " removed."
        )
    taken = {group[e.place] for some in found.values() for e in some}
    return found | {"train": [e for e in examples if group[e.place] not in taken]}


def _strata(examples: Sequence[Example]) -> dict[Label, str]:
    """Returns {label: stratum}. The stratum is the label's class with the fewest examples; "(none)" without classes."""
    counts = Counter(name for e in examples for name in classes_of(e.label))
    return {
        e.label: min(classes_of(e.label), key=counts.__getitem__, default="(none)")
        for e in examples
    }


def check_splits(found: Mapping[str, Sequence[Example]], classes: Sequence[str]) -> None:
    """Raises a UserError if a class of validation or test has no training example."""
    for split, examples in found.items():
        unknown = Counter(c for e in examples for c in classes_of(e.label) if c not in classes)
        if unknown:
            name, count = unknown.most_common(1)[0]
            raise UserError(
                f"--data: the label {name!r} of {counted(count, 'example')} of the split {split} occurs in no training"
                " example, apart from texts nearly equal to validation or test texts; add training examples with this"
                " label, or correct the label"
            )


def rare_classes(found: Mapping[str, Sequence[Example]], classes: Sequence[str]) -> list[str]:
    """Returns [a note on the classes with fewer than FEW validation or test examples], or [] without such classes."""
    tests, valid = (
        Counter(c for e in found[split] for c in classes_of(e.label)) for split in ("test", "valid")
    )
    few = [
        f"{name!r} ({tests[name]:,} test, {valid[name]:,} validation)"
        for name in sorted(classes, key=lambda name: tests[name] + valid[name])
        if min(tests[name], valid[name]) < FEW
    ]
    return (
        [f"Classes with few examples, so their scores depend on chance: {shown(few)}."]
        if few
        else []
    )
