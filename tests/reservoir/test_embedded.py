"""The German-English text that `reservoir.embedded` generates: sentences, splits, and equal text for equal seeds."""

import re
import subprocess
import sys

import pytest

from common.errors import UserError
from reservoir.embedded import numbers_de_en

SPLITS = ("train", "valid", "test")
GOLDEN = [
    ("Mein Bruder kam am 27. Mai 2006 nach Berlin.", "My brother came to Berlin on May 27, 2006."),
    ("Der Zug nach Leipzig fährt um 09:20 Uhr ab.", "The train to Leipzig leaves at 9:20 AM."),
    (
        "Bitte rufen Sie uns am 7. Januar um 07:20 Uhr an.",
        "Please call us on January 7 at 7:20 AM.",
    ),
    ("Die Zahl 92 schreibt man zweiundneunzig.", "The number 92 is written ninety-two."),
    (
        "War der Arzt am 28. September 2019 in Hamburg?",
        "Was the doctor in Hamburg on September 28, 2019?",
    ),
    ("Die Rechnung vom 04.03.1997 beträgt 39,25 €.", "The bill of 03/04/1997 comes to €39.25."),
]


@pytest.fixture(scope="module")
def text():
    return {split: numbers_de_en(split) for split in SPLITS}


def test_number_of_pairs_in_each_split(text):
    assert {s: (len(de), len(en)) for s, (de, en) in text.items()} == {
        "train": (20_000, 20_000),
        "valid": (500, 500),
        "test": (500, 500),
    }


def test_generated_text_is_deterministic_across_processes(text):
    script = "from reservoir.embedded import *; print(*zip(*numbers_de_en('test')), sep='\\n')"
    other = subprocess.run(
        [sys.executable, "-X", "utf8", "-c", script], capture_output=True, check=True
    )
    here = "\n".join(str(pair) for pair in zip(*text["test"], strict=True))
    assert other.stdout.decode().split("\n") == [*here.split("\n"), ""]


def test_generated_text_depends_on_the_seed(text):
    assert numbers_de_en("test", seed=1) != text["test"]


def test_golden_sentences(text):
    assert list(zip(*text["test"], strict=True))[:6] == GOLDEN


@pytest.mark.parametrize("side", [0, 1])
def test_generated_sentences_are_distinct(text, side):
    everything = [sentence for split in SPLITS for sentence in text[split][side]]
    assert len(set(everything)) == len(everything)


def test_large_numbers_are_in_one_split_only(text):
    pattern = re.compile(r"(?:number|had|sold|do) ([\d,]+) ")
    numbers = {}
    for split in SPLITS:
        found = (match for line in text[split][1] for match in pattern.findall(line))
        numbers[split] = {n for n in (int(match.replace(",", "")) for match in found) if n >= 100}
        assert len(numbers[split]) > 20
    assert not numbers["train"] & numbers["test"]
    assert not numbers["train"] & numbers["valid"]
    assert not numbers["valid"] & numbers["test"]


def test_test_words_occur_in_training(text):
    def words(split):
        return {word for line in text[split][1] for word in re.findall(r"[A-Za-z]+", line)}

    assert words("test") | words("valid") <= words("train")


def test_sentences_are_short_and_clean(text):
    for german, english in (pair for split in SPLITS for pair in zip(*text[split], strict=True)):
        assert 3 <= len(german.split()) <= 20
        assert 3 <= len(english.split()) <= 20
        assert german.isprintable() and english.isprintable()
        assert not re.search(r"[\xa0\u202f{}]|  ", german + english)


def test_two_cities_in_a_sentence_differ(text):
    pattern = re.compile(r"from (\w+) to (\w+)|in (\w+), it is .* in (\w+)")
    found = [match for line in text["train"][1] if (match := pattern.search(line))]
    assert len(found) > 1000
    assert all(match[1] != match[2] or match[3] != match[4] for match in found)


def test_unknown_split_raises_user_error():
    with pytest.raises(UserError, match="train"):
        numbers_de_en("dev")
