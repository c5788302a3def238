"""Reads and writes probing tasks in SentEval's format: a file per task, with partition, label and sentence per line.

Conneau et al. (2018), "What you can cram into a single vector".
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.atomic import write_atomic
from common.data.files import read_lines
from common.errors import UserError, check
from common.storage.addresses import shown

TASKS = {
    "sentence_length": "SentLen",
    "tree_depth": "TreeDepth",
    "top_constituents": "TopConst",
    "bigram_shift": "BShift",
    "past_present": "Tense",
    "subj_number": "SubjNum",
    "obj_number": "ObjNum",
    "odd_man_out": "SOMO",
    "coordination_inversion": "CoordInv",
    "word_content": "WordContent",
}
"""Name of a task and of its file, without suffix -> column title in our tables. Table 4 of the reservoir paper has the
same titles, but no column for word content."""

TABLE_4 = tuple(TASKS)[:9]

PARTITIONS = {"tr": "train", "va": "valid", "te": "test"}


@dataclass(frozen=True)
class ProbingTask:
    """A probing task: sentences, and a linguistic property of each sentence as its class.

    Attributes:
      labels: class number -> label.
      sentences: split -> E tokenized sentences.
      classes: split -> class numbers, (E,) int32.
    """

    name: str
    labels: tuple[str, ...]
    sentences: Mapping[str, Sequence[str]]
    classes: Mapping[str, np.ndarray]

    def majority(self) -> float:
        """Returns the test accuracy of always predicting the most frequent training class."""
        (answer, _), *_ = Counter(self.classes["train"].tolist()).most_common(1)
        return float(np.mean(self.classes["test"] == answer))


def load_task(directory: Path, name: str) -> ProbingTask:
    """Reads NAME.txt or NAME.txt.gz. Ignores all fields between the label and the sentence.

    Raises:
      UserError: the file is missing or damaged; a line has too few fields, an unknown partition, no label or no words;
        a partition is empty; the training partition has only one label, or lacks a label of validation or test.
    """
    path = _find(directory, name)
    examples: dict[str, list[tuple[int, str, str]]] = {split: [] for split in PARTITIONS.values()}
    for number, line in enumerate(read_lines(path), start=1):
        fields = line.split("\t")
        where = f"{shown(path)}, line {number}"
        check(
            len(fields) >= 3,
            f"{where} must have a partition, a label and a sentence, with tabs between them, got {line!r:.80}",
        )
        partition, label, sentence = fields[0], fields[1], fields[-1]
        check(
            partition in PARTITIONS,
            f"{where}: the partition is {partition!r}; it must be one of {', '.join(PARTITIONS)}",
        )
        check(
            bool(label.strip()), f"{where}: the label is missing; add a label, or remove the line"
        )
        check(
            bool(sentence.strip()),
            f"{where}: the last field, the sentence, has no words; add a sentence, or remove the line",
        )
        examples[PARTITIONS[partition]].append((number, label, sentence))
    for partition, split in PARTITIONS.items():
        check(
            bool(examples[split]),
            f"{shown(path)} has no line of the partition {partition}: each of {', '.join(PARTITIONS)} needs a line",
        )
    labels = tuple(sorted({label for _, label, _ in examples["train"]}))
    check(
        len(labels) > 1,
        f"{shown(path)} has only the label {labels[0]!r} in its partition tr: add lines with another label",
    )
    numbers = {label: number for number, label in enumerate(labels)}
    for line, label, _ in (*examples["valid"], *examples["test"]):
        check(
            label in numbers,
            f"{shown(path)}, line {line}: the label {label!r} is not in the partition tr: add a line with this label to"
            " tr, or correct the label",
        )
    return ProbingTask(
        name,
        labels,
        {split: [sentence for *_, sentence in rows] for split, rows in examples.items()},
        {
            split: np.array([numbers[label] for _, label, _ in rows], np.int32)
            for split, rows in examples.items()
        },
    )


def _find(directory: Path, name: str) -> Path:
    check(
        directory.is_dir(),
        f"--data={shown(directory)} is not a directory: give the folder of the probing tasks",
    )
    if path := find_task(directory, name):
        return path
    plain = task_path(directory, name)
    known = ",".join(task for task in TASKS if find_task(directory, task))
    advice = f"choose among its tasks, --tasks={known}" if known else "give the folder of the tasks"
    raise UserError(f"--data={shown(directory)} has no {plain.name} or {plain.name}.gz: {advice}")


def find_task(directory: Path, name: str) -> Path | None:
    """Returns the path of NAME.txt or NAME.txt.gz; None if both are missing."""
    plain = task_path(directory, name)
    paths = plain, plain.with_name(f"{plain.name}.gz")
    return next((path for path in paths if path.is_file()), None)


def task_path(directory: Path, name: str) -> Path:
    """Returns the path of a task's file, named as in SentEval."""
    return directory / f"{name}.txt"


def write_task(path: Path, examples: Mapping[str, Sequence[tuple[str, str]]]) -> None:
    """Writes a task. `examples` maps "train", "valid" and "test" to (label, sentence) pairs.

    Raises:
      UserError: the file cannot be written.
    """
    text = "".join(
        f"{partition}\t{label}\t{sentence}\n"
        for partition, split in PARTITIONS.items()
        for label, sentence in examples[split]
    )
    write_atomic(path, lambda file: file.write(text.encode()))
