"""Tokenizers: encoding and decoding, vocabularies, the cache of trained tokenizers, and atomic writes of files."""

import errno
import os
import threading

import pytest

from common.atomic import write_atomic
from common.data import tokenizer as module
from common.data.cache import fingerprint
from common.data.special_ids import BOS, EOS, PAD, UNK
from common.data.tokenizer import Tokenizer, build_tokenizer
from common.errors import UserError
from reservoir import parallel_text
from reservoir.parallel_text import ParallelText, build_tokenizers
from tests.data.helpers import settings, small_text


@pytest.fixture(scope="module")
def text():
    return small_text()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("dictionaries", ["shared", "separate"])
def test_round_trip(text, cache, dictionaries):
    source, target = build_tokenizers(settings(dictionaries=dictionaries), text, cache)
    for tokenizer, lines in ((source, text.source), (target, text.target)):
        ids = tokenizer.encode(lines)
        assert tokenizer.decode(ids) == lines
        flat = [i for row in ids for i in row]
        assert min(flat) >= 4
        assert max(flat) < tokenizer.size


def test_special_ids(text, cache):
    source, _ = build_tokenizers(settings(), text, cache)
    assert (PAD, BOS, EOS, UNK) == (0, 1, 2, 3)
    assert source.decode([[PAD], [BOS], [EOS], [UNK]]) == ["", "", "", " \u2047 "]


def test_decode_skips_special_ids(text, cache):
    _, target = build_tokenizers(settings(), text, cache)
    ids = target.encode(["The correct answer is twelve."])[0]
    assert target.decode([[BOS, *ids, EOS, PAD, PAD], []]) == ["The correct answer is twelve.", ""]


def test_shared_dictionary_has_all_pieces(text, cache):
    source, target = build_tokenizers(settings(dictionaries="shared"), text, cache)
    assert source.size == target.size == 400
    assert source.fingerprint == target.fingerprint


def test_separate_dictionaries_have_the_pieces_of_their_side(text, cache):
    shared, _ = build_tokenizers(settings(dictionaries="shared"), text, cache)
    source, target = build_tokenizers(settings(), text, cache)
    for tokenizer, lines in ((source, text.source), (target, text.target)):
        joint, own = shared.encode(lines), tokenizer.encode(lines)
        used = sorted({i for row in joint for i in row})
        assert tokenizer.size == 4 + len(used) < shared.size
        renumbered = {piece: 4 + rank for rank, piece in enumerate(used)}
        assert own == [[renumbered[i] for i in row] for row in joint]


def test_pieces_of_the_other_side_are_unknown(text, cache):
    _, target = build_tokenizers(settings(), text, cache)
    assert UNK in target.encode(["Nürnberg fährt"])[0]
    assert UNK in target.encode(["漢"])[0]


def test_saved_tokenizer_round_trip(text, cache, tmp_path):
    source, _ = build_tokenizers(settings(), text, cache)
    source.save(tmp_path / "tokenizer")
    loaded = Tokenizer.load(tmp_path / "tokenizer")
    assert loaded.encode(text.source) == source.encode(text.source)
    assert (loaded.size, loaded.fingerprint) == (source.size, source.fingerprint)


@pytest.mark.parametrize("content", [None, b"", b"no tokenizer", b"PK\x03\x04 cut off"])
def test_loading_an_invalid_file_raises_user_error(tmp_path, content):
    path = tmp_path / "tokenizer"
    if content is not None:
        path.write_bytes(content)
    reason = "No such file" if content is None else "the file is damaged or not a tokenizer"
    with pytest.raises(UserError, match=f"^cannot read a tokenizer from {path}: {reason}"):
        Tokenizer.load(path)


def test_trained_tokenizers_are_cached(text, tmp_path, monkeypatch):
    calls = []
    train = parallel_text.train_tokenizer

    def count(*args) -> Tokenizer:
        calls.append(args)
        return train(*args)

    monkeypatch.setattr(parallel_text, "train_tokenizer", count)
    first = build_tokenizers(settings(), text, tmp_path)
    again = build_tokenizers(settings(), text, tmp_path)
    assert len(calls) == 1
    assert [t.fingerprint for t in first] == [t.fingerprint for t in again]

    build_tokenizers(settings(vocab_size=399), text, tmp_path)
    changed = ParallelText([*text.source[:-1], "neu"], text.target)
    build_tokenizers(settings(), changed, tmp_path)
    assert len(calls) == 3


def test_sample_of_a_long_text_is_deterministic(text, monkeypatch):
    monkeypatch.setattr(module, "_MOST_LINES", 100)
    sides = (text.source, text.target)
    lines = list(module._sample(sides))
    assert len(lines) == 100
    assert lines == list(module._sample(sides))
    assert set(lines[::2]) <= set(text.source)
    assert set(lines[1::2]) <= set(text.target)
    assert lines[::2] != text.source[:50]


def test_vocabulary_too_large_raises_user_error(tmp_path):
    text = ParallelText(["hallo welt"] * 5, ["hello world"] * 5)
    with pytest.raises(UserError, match=r"1000 is too large .* possible is \d+$") as caught:
        build_tokenizers(settings(vocab_size=1000), text, tmp_path)
    largest = int(str(caught.value).split()[-1])
    source, _ = build_tokenizers(
        settings(vocab_size=largest, dictionaries="shared"), text, tmp_path
    )
    assert source.size == largest


def test_blank_text_error_does_not_mention_the_vocabulary(tmp_path):
    with pytest.raises(UserError, match=r"every line of the training text is blank, .*: add text"):
        build_tokenizers(settings(vocab_size=30), ParallelText([" "] * 5, [" "] * 5), tmp_path)


def test_vocabulary_too_small_raises_user_error(tmp_path):
    text = ParallelText(["hallo welt"] * 5, ["hello world"] * 5)
    with pytest.raises(UserError, match=r"5 is too small .* possible is \d+$") as caught:
        build_tokenizers(settings(vocab_size=5), text, tmp_path)
    smallest = int(str(caught.value).split()[-1])
    build_tokenizers(settings(vocab_size=smallest), text, tmp_path)


def test_fingerprint_depends_on_boundaries():
    prints = [
        fingerprint(["ab", "c"]),
        fingerprint(["a", "bc"]),
        fingerprint(["ab"], ["c"]),
        fingerprint(["ab\nc"]),
        fingerprint(["ab1:c"]),
        fingerprint(["c", "ab"]),
    ]
    assert len(set(prints)) == len(prints)
    assert fingerprint(["ab", "c"]) == prints[0]


def test_interrupted_write_leaves_no_file(tmp_path):
    def stop(file):
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomic(tmp_path / "file", stop)
    assert os.listdir(tmp_path) == []


def test_concurrent_writers_leave_a_complete_file(tmp_path):
    barrier = threading.Barrier(4)

    def write(content):
        def slowly(file):
            file.write(content[:1000])
            barrier.wait()
            file.write(content[1000:])

        write_atomic(tmp_path / "new" / "file", slowly)

    contents = [bytes([i]) * 2000 for i in range(4)]
    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert os.listdir(tmp_path / "new") == ["file"]
    assert (tmp_path / "new" / "file").read_bytes() in contents


@pytest.mark.parametrize("full", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_or_quota_error_says_to_free_space(tmp_path, full):
    def write(file):
        raise OSError(full, os.strerror(full))

    told = f"{tmp_path / 'file'}: {os.strerror(full)}; free space, then repeat the command"
    with pytest.raises(UserError, match=f"^cannot write to {told}$"):
        write_atomic(tmp_path / "file", write)
    with pytest.raises(
        UserError, match=rf"^cannot write to --cache={tmp_path} \(file\): {os.strerror(full)}; free"
    ):
        write_atomic(tmp_path / "file", write, "--cache")


def test_unwritable_cache_raises_user_error(text, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write to"):
        build_tokenizers(settings(), text, tmp_path / "file")


def test_tokenizer_of_one_text_is_cached(text, tmp_path, monkeypatch):
    first = build_tokenizer(200, text.source, tmp_path)
    monkeypatch.setattr(module, "train_tokenizer", None)  # A second training would fail.
    again = build_tokenizer(200, text.source, tmp_path)
    assert first.size == 200 and again.fingerprint == first.fingerprint
    assert first.decode(first.encode(text.source[:5])) == list(text.source[:5])
