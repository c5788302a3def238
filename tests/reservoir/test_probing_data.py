"""Probing tasks: SentEval's format, and tasks made from a text."""

import gzip
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from ml_collections import ConfigDict

from common.data.text import load_text
from common.errors import UserError
from reservoir.probing.data import load_task, task_path, write_task
from reservoir.probing.text import BINS, MAKERS, sentences

LINES = (
    "tr\tPAST\tHe went home .",
    "tr\tPRES\tHe goes home .",
    "va\tPAST\tShe\tleft at once .",
    "te\tPRES\tShe leaves .",
)


def write(folder: Path, *lines: str, name: str = "past_present") -> Path:
    path = folder / f"{name}.txt"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def test_reads_a_senteval_file(tmp_path):
    write(tmp_path, *LINES, "te\tPRES\tThey leave .")
    task = load_task(tmp_path, "past_present")
    assert task.labels == ("PAST", "PRES")
    assert task.sentences["train"] == ["He went home .", "He goes home ."]
    assert task.sentences["valid"] == ["left at once ."]  # the sentence is the last field
    assert {split: c.tolist() for split, c in task.classes.items()} == {
        "train": [0, 1],
        "valid": [0],
        "test": [1, 1],
    }


def test_reads_gzip_and_computes_the_majority(tmp_path):
    text = "\n".join((*LINES, "tr\tPRES\tI go .", "te\tPAST\tI went .", "te\tPAST\tYou went ."))
    (tmp_path / "past_present.txt.gz").write_bytes(gzip.compress(text.encode()))
    assert load_task(tmp_path, "past_present").majority() == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((*LINES, "tr\tPAST"), "line 5 must have a partition, a label and a sentence"),
        ((*LINES, ""), "line 5 must have a partition, a label and a sentence"),
        ((*LINES, "dev\tPAST\tIt was ."), "line 5: the partition is 'dev'; it must be one of tr"),
        ((*LINES, "tr\tPAST\t "), "line 5: the last field, the sentence, has no words"),
        ((*LINES, "tr\tPAST\tHe went .\t"), "line 5: the last field, the sentence, has no words"),
        ((*LINES, "tr\t\tHe went ."), "line 5: the label is missing"),
        (
            (*LINES, "te\tFUT\tIt will be ."),
            "line 5: the label 'FUT' is not in the partition tr",
        ),
        (LINES[:3], "has no line of the partition te"),
        ((LINES[0], *LINES[2:]), "has only the label 'PAST' in its partition tr"),
    ],
)
def test_malformed_lines_are_reported_with_file_and_line(tmp_path, lines, message):
    path = write(tmp_path, *lines)
    with pytest.raises(UserError) as caught:
        load_task(tmp_path, "past_present")
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_missing_task_file_lists_the_existing_tasks(tmp_path):
    write(tmp_path, *LINES, name="tree_depth")
    (tmp_path / "past_present").write_text("the suffix is missing")
    with pytest.raises(UserError, match=r"no past_present.txt .* --tasks=tree_depth$"):
        load_task(tmp_path, "past_present")
    with pytest.raises(UserError, match="nowhere is not a directory"):
        load_task(tmp_path / "nowhere", "past_present")


def test_sentence_splitting():
    text = [
        'He said "Go away, please!" and left at 3.5 p.m. today. Did she? No.',
        "= = A heading = =",
        "the <unk> 's well @-@ known role is n't over",
        "the <unk> 's well @-@ known role is n't over",
        "too short .",
        "well-known functions such as len(s) take 3,500 calls,or 0.5 seconds...",
        " ".join(["word"] * 29),
    ]
    assert [" ".join(s) for s in sentences(text)] == [
        'He said " Go away , please ! " and left at 3.5 p.m . today .',
        "the <unk> 's well @-@ known role is n't over",
        "well-known functions such as len ( s ) take 3,500 calls , or 0.5 seconds ...",
    ]


@pytest.fixture(scope="module")
def pool() -> list[tuple[str, ...]]:
    data = ConfigDict({"source": "embedded:python", "documents": "paragraph"})
    return sentences(load_text(data, "train"))


def make(pool, name: str, count: int = 300, seed: int = 1):
    return MAKERS[name](pool, count, np.random.default_rng(seed))


@pytest.mark.parametrize(("name", "labels"), [("sentence_length", 6), ("bigram_shift", 2)])
def test_labels_are_balanced_and_sentences_unique(pool, name, labels):
    examples = make(pool, name)
    assert {split: len(rows) for split, rows in examples.items()} == {
        "train": 300,
        "valid": 30,
        "test": 30,
    }
    for rows in examples.values():
        counts = Counter(label for label, _ in rows)
        assert len(counts) == labels and len(set(counts.values())) == 1
        # Lines are not sorted by label, so the beginning of the file has several labels.
        assert len({label for label, _ in rows[:30]}) > 1
    bags = [tuple(sorted(s.split())) for rows in examples.values() for _, s in rows]
    if name == "bigram_shift":  # no sentence occurs both as original and shifted
        assert len(set(bags)) == len(bags)
    every = [sentence for rows in examples.values() for _, sentence in rows]
    assert len(set(every)) == len(every)


@pytest.mark.parametrize("name", ["sentence_length", "bigram_shift"])
def test_tasks_are_deterministic_in_the_seed(pool, name):
    assert make(pool, name) == make(pool, name)
    assert make(pool, name)["train"] != make(pool, name, seed=2)["train"]


def test_sentence_length_classes(pool):
    assert BINS == ((5, 8), (9, 12), (13, 16), (17, 20), (21, 25), (26, 28))
    seen = defaultdict(set)
    for rows in make(pool, "sentence_length").values():
        for label, sentence in rows:
            seen[label].add(len(sentence.split(" ")))
    for label, (low, high) in enumerate(BINS):
        assert min(seen[str(label)]) >= low and max(seen[str(label)]) <= high
    assert {5, 8, 9, 12, 13, 16, 17, 20, 21, 25, 26, 28} <= set().union(*seen.values())


def test_shifted_sentences_differ_by_one_swap(pool):
    known = {" ".join(sentence) for sentence in pool}
    places = Counter()
    for rows in make(pool, "bigram_shift").values():
        for label, sentence in rows:
            tokens = sentence.split(" ")
            assert '"' not in tokens
            origins = []
            for place in range(len(tokens) - 1):
                undone = list(tokens)
                undone[place], undone[place + 1] = undone[place + 1], undone[place]
                if undone != tokens and " ".join(undone) in known:
                    origins.append(place)
            if label == "O":
                assert sentence in known
                continue
            assert sentence not in known
            (place,) = origins
            assert place > 0 and all(t[0].isalnum() for t in tokens[place : place + 2])
            places[min(place, 6)] += 1
    assert len(places) == 6  # positions 1 to 5, and one entry for all later positions


def test_originals_contain_a_swappable_pair():
    """Unshifted sentences also need two words to swap. Otherwise, a classifier could ignore the order of the words."""
    text = [f"Number {n} is here , now ." for n in range(40)]
    with pytest.raises(
        UserError, match=r"number of sentences for the label .* is 0: give more text$"
    ):
        make(sentences([f"a , {n} , b ." for n in range(1000, 1400)]), "bigram_shift", count=20)
    assert make(sentences(text), "bigram_shift", count=20)


def test_word_content():
    """The target words are the first two words of at least four letters from frequency rank 5 on.

    They are alpha (41 occurrences) and beta (36).
    """
    often = "often never of"  # these words and the full stop have ranks 1 to 4
    text = [f"{often} Alpha {n} ." for n in range(30)] + [f"{often} beta {n} ." for n in range(25)]
    text += [f"{often} alpha , beta {n} ." for n in range(5)]
    text += [f"{often} Alpha alpha gamma {n} ." for n in range(3)]
    text += [f"{often} beta beta gamma {n} ." for n in range(3)]
    text += [f"{often} gamma {n} ." for n in range(25)] + [f"{often} too {n} ." for n in range(80)]
    examples = make(sentences(text), "word_content", count=40)
    for split, size in (("train", 40), ("valid", 4), ("test", 4)):
        labels = Counter(label for label, _ in examples[split])
        assert labels == {"alpha": size // 2, "beta": size // 2}
        for label, sentence in examples[split]:
            tokens = sentence.lower().split()
            assert [token for token in tokens if token in ("alpha", "beta")] == [label]


def test_number_of_target_words_scales_with_count(pool):
    """SentEval has 1,000 target words from rank 2,001 on for 100,000 sentences.

    So a task of 200 sentences has 2 target words from rank 5 on.
    """
    examples = make(pool, "word_content", count=200)
    assert len({label for label, _ in examples["train"]}) == 2
    lower = Counter(token.lower() for sentence in pool for token in sentence)
    ranked = sorted(lower, key=lambda token: (-lower[token], token))
    chosen = {label for label, _ in examples["train"]}
    assert chosen == set([t for t in ranked[4:] if len(t) >= 4 and t.isalpha()][:2])


def test_too_little_text_is_rejected(pool):
    with pytest.raises(
        UserError, match=r"--count=30000 needs 6,000 sentences for each of its 6 labels"
    ):
        make(pool, "sentence_length", count=30_000)
    with pytest.raises(UserError, match=r"--count=3 must be at least 6, the number of labels"):
        make(pool, "sentence_length", count=3)
    with pytest.raises(
        UserError, match=r"needs 2 target words .* have only 0 such words: give more text$"
    ):
        make(pool[:1], "word_content", count=10)


def test_written_task_reads_back(pool, tmp_path):
    examples = make(pool, "sentence_length")
    write_task(task_path(tmp_path, "sentence_length"), examples)
    task = load_task(tmp_path, "sentence_length")
    for split, rows in examples.items():
        read = [task.labels[number] for number in task.classes[split]]
        assert list(zip(read, task.sentences[split], strict=True)) == rows
