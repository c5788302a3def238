"""Parallel text and its error messages."""

import gzip
import os
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from common.data.files import read_lines
from common.errors import UserError
from reservoir.parallel_text import ParallelText, load_parallel
from reservoir.tasks.translation import validate
from tests.data.helpers import settings


def write(directory: Path, split: str, german: str, english: str, zipped: bool = False) -> None:
    for language, text in (("de", german), ("en", english)):
        if zipped:
            path = directory / f"{split}.{language}.gz"
            path.write_bytes(gzip.compress(text.encode()))
        else:
            (directory / f"{split}.{language}").write_bytes(text.encode())


def fault(data, split: str = "train") -> str:
    """Returns the error message of `load_parallel`, and checks that the message is one line."""
    with pytest.raises(UserError) as caught:
        load_parallel(data, split)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("zipped", [False, True])
def test_plain_and_gzipped_files_give_the_same_text(tmp_path, zipped):
    write(tmp_path, "train", "Müll\nzwei\n", "waste\ntwo\n", zipped)
    text = load_parallel(settings(f"files:{tmp_path}"), "train")
    assert text == ParallelText(["Müll", "zwei"], ["waste", "two"])


def test_split_names(tmp_path):
    write(tmp_path, "test2016", "eins\n", "one\n")
    data = settings(f"files:{tmp_path}")
    data.splits.test = "test2016"
    assert load_parallel(data, "test").target == ["one"]


def test_languages_choose_the_direction(tmp_path):
    write(tmp_path, "train", "eins\n", "one\n")
    data = settings(f"files:{tmp_path}", source_language="en", target_language="de")
    assert load_parallel(data, "train") == ParallelText(["one"], ["eins"])


def test_pairs_with_an_empty_side_are_dropped_from_training_only(tmp_path, capsys):
    for split in ("train", "valid"):
        write(tmp_path, split, "eins\n\ndrei\nvier\n", "one\ntwo\n \nfour\n")
    data = settings(f"files:{tmp_path}")
    assert load_parallel(data, "train") == ParallelText(["eins", "vier"], ["one", "four"])
    said = (
        "number of sentence pairs with a blank side in split {}: 2 of 4, the first is pair 2; {}\n"
    )
    assert capsys.readouterr().out == said.format("train", "they are left out")
    assert len(load_parallel(data, "valid")) == 4
    assert capsys.readouterr().out == said.format("valid", "scores count them")


def test_pairs_that_are_also_training_pairs_are_counted():
    train = ParallelText(["eins", "zwei", "drei"], ["one", "two", "three"])
    valid = ParallelText(["eins", "zwei", "eins", "vier"], ["one", "2", "one", "four"])
    assert valid.repeated(train) == 2


def test_lines_end_at_line_feeds_only(tmp_path):
    path = tmp_path / "text"
    path.write_bytes("\ufeffone\r\ntwo\u2028still two\x0cand here\n\nlast".encode())
    assert read_lines(path) == ["one", "two\u2028still two\x0cand here", "", "last"]


def test_unknown_source_error_lists_the_kinds():
    message = fault(settings("hub:wmt14"))
    assert "hub:wmt14" in message
    assert all(kind in message for kind in ("embedded:", "files:", "tfds:"))


def test_unknown_generated_text_error_lists_the_names():
    assert "numbers_de_en" in fault(settings("embedded:letters"))


def test_generated_text_has_its_own_languages():
    assert "de-en" in fault(settings(target_language="fr"))


def test_generated_text_has_its_own_splits():
    data = settings()
    data.splits.test = "test2016"
    assert "test2016" in fault(data, "test")


def test_missing_directory_raises_user_error(tmp_path):
    assert str(tmp_path / "none") in fault(settings(f"files:{tmp_path / 'none'}"))


def test_missing_file_error_lists_the_splits(tmp_path):
    write(tmp_path, "dev", "eins\n", "one\n")
    write(tmp_path, "eval", "eins\n", "one\n", zipped=True)
    message = fault(settings(f"files:{tmp_path}"))
    assert "train.de or train.de.gz" in message
    assert message.endswith("splits in 'de': dev, eval; or add the missing file")


def test_missing_test_file_error_does_not_offer_the_training_split(tmp_path):
    for split in ("train", "valid"):
        write(tmp_path, split, "eins\n", "one\n")
    message = fault(settings(f"files:{tmp_path}"), "test")
    assert message.endswith("splits in 'de': valid; or add the missing file")


def test_unequal_line_counts_raise_user_error(tmp_path):
    write(tmp_path, "train", "eins\nzwei\ndrei\n", "one\ntwo\n")
    message = fault(settings(f"files:{tmp_path}"))
    assert "train.de and" in message and "train.en must have the same number of lines" in message
    assert message.endswith("got 3 and 2 lines: correct the files")
    write(tmp_path, "train", "eins\n", "one\n\n \n")
    assert fault(settings(f"files:{tmp_path}")).endswith(
        "got 1 and 3 lines: remove the 2 blank lines at the end of the longer file"
    )


def test_empty_file_raises_user_error(tmp_path):
    write(tmp_path, "train", "", "")
    assert "train.de is empty" in fault(settings(f"files:{tmp_path}"))


def test_training_text_of_empty_pairs_raises_user_error(tmp_path):
    write(tmp_path, "train", "eins\n\n", "\ntwo\n")
    assert "split train" in fault(settings(f"files:{tmp_path}"))


def test_invalid_utf8_raises_user_error(tmp_path):
    write(tmp_path, "train", "eins\nzwei\ndrei\n", "one\ntwo\nthree\n")
    (tmp_path / "train.de").write_bytes("eins\nMüll\ndrei\n".encode("latin-1"))
    assert "train.de line 2" in fault(settings(f"files:{tmp_path}"))


@pytest.mark.parametrize("spoil", [lambda raw: raw[:-6], lambda raw: b"no gzip at all"])
def test_damaged_gzip_raises_user_error(tmp_path, spoil):
    write(tmp_path, "train", "eins\n" * 100, "one\n" * 100, zipped=True)
    path = tmp_path / "train.en.gz"
    path.write_bytes(spoil(path.read_bytes()))
    message = fault(settings(f"files:{tmp_path}"))
    assert str(path) in message
    assert "damaged" in message


@pytest.mark.parametrize("place", [10, -8])
def test_gzip_with_a_changed_byte_raises_user_error(tmp_path, place):
    """The changed byte is in the compressed text or in the checksum."""
    raw = bytearray(gzip.compress(b"one two three\n" * 100))
    raw[place] ^= 0xFF
    path = tmp_path / "text.gz"
    path.write_bytes(raw)
    with pytest.raises(UserError, match="damaged"):
        read_lines(path)


def test_unreadable_path_raises_user_error(tmp_path):
    with pytest.raises(UserError, match="cannot read"):
        read_lines(tmp_path)


def test_unknown_dictionaries_raise_user_error(make_config):
    config = make_config("ffn")
    config.data.dictionaries = "own"
    with pytest.raises(UserError, match=r"data.dictionaries='own': choose one of shared, separate"):
        validate(config)


@pytest.mark.parametrize("size", [None, 24.5, "24"])
def test_sizes_that_are_no_whole_numbers_raise_user_errors(make_config, size):
    config = make_config("ffn")
    config.model = ConfigDict({**config.model.to_dict(), "hidden": size})
    with pytest.raises(UserError, match=r"model\.hidden must be a whole number of at least 1, got"):
        validate(config)


@pytest.mark.skipif("TRAINLESS_DATA" not in os.environ, reason="TRAINLESS_DATA is not set")
def test_number_of_pairs_in_multi30k():
    data = settings(f"files:{os.environ['TRAINLESS_DATA']}/multi30k_de_en")
    data.splits.test = "test2016"
    sizes = [len(load_parallel(data, split)) for split in ("train", "valid", "test")]
    assert sizes == [29000, 1014, 1000]
