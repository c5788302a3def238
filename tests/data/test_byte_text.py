"""Texts of bytes: plain and compressed files, splits by position, random crops, and windows for evaluation."""

import gzip
import zipfile
from pathlib import Path

import numpy as np
import pytest
from ml_collections import ConfigDict

from common.data.byte_text import load_bytes
from common.data.windows import Crops, crop, scored_once
from common.errors import UserError

TEXT = bytes(range(200))


def data(directory: Path, **fields: object) -> ConfigDict:
    settings = {
        "source": f"files:{directory}",
        "file": "enwik8",
        "shares": (0.9, 0.05, 0.05),
        "splits": {"train": "a.txt", "valid": "b.txt", "test": "c.txt"},
    }
    return ConfigDict({**settings, **fields})


def pack(path: Path, how: str) -> None:
    match how:
        case "plain":
            path.write_bytes(TEXT)
        case "gz":
            path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(TEXT))
        case "zip":
            with zipfile.ZipFile(path.with_name(f"{path.name}.zip"), "w") as archive:
                archive.writestr("enwik8", TEXT)


@pytest.mark.parametrize("how", ["plain", "gz", "zip"])
def test_one_file_is_split_90_5_5_by_position(tmp_path, how):
    pack(tmp_path / "enwik8", how)
    parts = [part.tobytes() for part in load_bytes(data(tmp_path)).values()]
    assert [len(part) for part in parts] == [180, 10, 10]
    assert b"".join(parts) == TEXT


def test_limit_reads_only_the_first_bytes(tmp_path):
    pack(tmp_path / "enwik8", "gz")
    parts = [part.tobytes() for part in load_bytes(data(tmp_path, limit=100)).values()]
    assert b"".join(parts) == TEXT[:100] and [len(part) for part in parts] == [90, 5, 5]


def test_three_files_are_three_splits(tmp_path):
    for name, text in (("a.txt", b"one"), ("b.txt", b"two"), ("c.txt", b"\xff\x00")):
        (tmp_path / name).write_bytes(text)
    found = [part.tobytes() for part in load_bytes(data(tmp_path, file="")).values()]
    assert found == [b"one", b"two", b"\xff\x00"]


def test_first_existing_file_name_is_used(tmp_path):
    pack(tmp_path / "wiki.raw", "gz")
    splits = dict.fromkeys(("train", "valid", "test"), "wiki.tokens|wiki.raw|train.txt")
    assert load_bytes(data(tmp_path, file="", splits=splits))["train"].tobytes() == TEXT


def test_python_manual_has_three_distinct_splits(tmp_path):
    parts = list(load_bytes(data(tmp_path, source="embedded:python")).values())
    assert all(len(part) > 10_000 for part in parts)
    assert parts[0][:1000].tobytes() != parts[1][:1000].tobytes()


def _wrong_zip(path: Path) -> None:
    (path / "enwik8.zip").write_bytes(b"PK and then nothing")


def _two_in_a_zip(path: Path) -> None:
    with zipfile.ZipFile(path / "enwik8.zip", "w") as archive:
        archive.writestr("a", b"a")
        archive.writestr("b", b"b")


def _cut_gzip(path: Path) -> None:
    (path / "enwik8.gz").write_bytes(gzip.compress(TEXT * 100)[:-20])


@pytest.mark.parametrize(
    ("fault", "damage", "fields"),
    [
        (
            r"config.data.file=enwik8: there is no file enwik8 or enwik8.gz or enwik8.zip in",
            lambda path: None,
            {},
        ),
        (r"enwik8.zip is damaged or truncated", _wrong_zip, {}),
        ("contains 2 files instead of exactly one", _two_in_a_zip, {}),
        (r"enwik8.gz is damaged or truncated", _cut_gzip, {}),
        (
            r"or not a \.gz file: Not a gzipped .*, or remove \.gz from its name",
            lambda path: (path / "enwik8.gz").write_bytes(TEXT),
            {},
        ),
        ("the train split of .* has no bytes", lambda path: (path / "enwik8").write_bytes(b""), {}),
        ("no directory", lambda path: None, {"source": "files:/nowhere"}),
        (
            "must be embedded:python .*, files:DIR or import:",
            lambda path: None,
            {"source": "http://x"},
        ),
        (
            "must be embedded:python",
            lambda path: None,
            {"source": "embedded:latin"},
        ),
    ],
)
def test_errors_are_one_line(tmp_path, fault, damage, fields):
    damage(tmp_path)
    with pytest.raises(UserError, match=fault) as caught:
        load_bytes(data(tmp_path, **fields))
    assert "\n" not in str(caught.value)


def test_crop_has_tokens_and_next_tokens():
    tokens = np.arange(10, dtype=np.uint8)
    batch = crop(tokens, np.array([0, 7]), 4)
    np.testing.assert_array_equal(batch["tokens"][0], [0, 1, 2, 3])
    np.testing.assert_array_equal(batch["targets"][0], [1, 2, 3, 4])
    np.testing.assert_array_equal(batch["weights"], [[1, 1, 1, 1], [1, 1, 0, 0]])


def test_crops_have_random_access_and_cover_the_text():
    crops = Crops(np.arange(20, dtype=np.uint8), 5, 8, seed=3)
    np.testing.assert_array_equal(crops[4]["tokens"], crops[4]["tokens"])
    assert not np.array_equal(crops[4]["tokens"], crops[5]["tokens"])
    seen = np.concatenate([crops[i]["targets"].ravel() for i in range(50)])
    assert set(seen) == set(range(1, 20))
    assert all((crops[i]["weights"] == 1).all() for i in range(50))


@pytest.mark.parametrize(("length", "stride"), [(8, 8), (8, 4), (8, 3), (8, 1), (50, 7)])
def test_windows_score_every_token_once_with_enough_context(length, stride):
    tokens = np.arange(43, dtype=np.uint8)  # Each token's value is the token's position.
    scored = []
    for batch in scored_once(tokens, length, stride, rows=3):
        assert batch["tokens"].shape == (3, length)
        for row in range(3):
            for place in np.flatnonzero(batch["weights"][row]):
                target = int(batch["targets"][row, place])
                assert batch["tokens"][row, place] == target - 1
                assert place + 1 >= min(length - stride, target)
                scored.append(target)
    assert sorted(scored) == list(range(1, 43))


@pytest.mark.parametrize(
    ("fault", "arguments"),
    [
        ("model.length=20 needs a training text of at least 21 tokens", (20, 4, 1)),
        ("positive multiple of 3", (5, 4, 3)),
    ],
)
def test_invalid_crops_raise_user_errors(fault, arguments):
    length, rows, multiple = arguments
    with pytest.raises(UserError, match=fault):
        Crops(np.zeros(20, np.uint8), length, rows, multiple=multiple)
