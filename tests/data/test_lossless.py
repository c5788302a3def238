"""Tokenizers that keep every byte: round trips, bytes of tokens, tokenizer files of libraries, and the cache."""

from pathlib import Path

import numpy as np
import pytest
import tokenizers
from ml_collections import ConfigDict
from tokenizers import decoders, models, pre_tokenizers, trainers

from common.data import lossless, subwords
from common.data.byte_text import load_bytes
from common.data.lossless_tokenizer import LosslessTokenizer
from common.errors import UserError

HARD = [
    b"",
    b"\n",
    b"  two  spaces, a tab\t and no line end",
    "Grüße, ŋ and 😀\r\n\r\n".encode(),
    b"a \xe2\x96\x81 that is text, not a space\n",
    b"\xff\x00 is not UTF-8\nbut this line is\n",
    b"<0x41> <unk> </s>\n",
]


@pytest.fixture(scope="module")
def text() -> np.ndarray:
    return load_bytes(ConfigDict({"source": "embedded:python", "file": ""}))["train"]


def settings(cache: Path, **fields: object) -> ConfigDict:
    return ConfigDict(
        {"tokenizer": "sentencepiece", "vocab_size": 600, "cache_dir": str(cache), **fields}
    )


def trained_json(path: Path, text: np.ndarray) -> Path:
    """Writes a byte-level BPE of the `tokenizers` library with a special token, like GPT-2's tokenizer."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": ["<|endoftext|>"], "initial_alphabet": alphabet}
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, **options)
    made.train_from_iterator(text[:50_000].tobytes().decode(errors="ignore").split("\n"), trainer)
    made.save(str(path))
    return path


@pytest.fixture(scope="module", params=["bytes", "sentencepiece", "tokenizer.json"])
def tokenizer(request, tmp_path_factory, text) -> LosslessTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    kind = request.param
    if kind == "tokenizer.json":
        kind = str(trained_json(folder / "tokenizer.json", text))
    return lossless.choose(settings(folder, tokenizer=kind), text)


def test_every_text_survives_a_round_trip(tokenizer, text):
    for whole in (*HARD, text[:3000].tobytes(), b"".join(HARD)):
        tokens = tokenizer.encode(whole)
        assert tokenizer.decode(tokens) == whole
        assert tokenizer.lengths_V[tokens].sum() == len(whole)
        assert tokens.max(initial=0) < tokenizer.size


def test_subwords_are_fewer_than_bytes(tokenizer, text):
    count = len(tokenizer.encode(text[:20_000].tobytes()))
    assert count == 20_000 if not tokenizer.name else count < 12_000


def test_a_saved_tokenizer_gives_the_same_ids(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    again = lossless.in_run(tmp_path)
    assert again.fingerprint == tokenizer.fingerprint and again.size == tokenizer.size
    line = b"The value of the expression\n"
    np.testing.assert_array_equal(again.encode(line), tokenizer.encode(line))


def test_pieces_equal_the_library(tmp_path, text):
    path = trained_json(tmp_path / "tokenizer.json", text)
    line = "The value of the expression, naïve\n"
    expected = tokenizers.Tokenizer.from_file(str(path)).encode(line).ids
    assert subwords.load(path).encode(line.encode()).tolist() == expected


def test_tokens_are_read_from_the_cache(tmp_path, text):
    data = settings(tmp_path)
    tokenizer = lossless.choose(data, text)
    tokens = tokenizer.cached_tokens(text[:5000], data)
    np.testing.assert_array_equal(tokens, tokenizer.encode(text[:5000].tobytes()))
    [path] = tmp_path.glob("text-*.npy")
    assert isinstance(tokenizer.cached_tokens(text[:5000], data), np.memmap)
    path.write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"text-\w+\.npy is damaged"):
        tokenizer.cached_tokens(text[:5000], data)
    path.unlink()
    path.mkdir()
    with pytest.raises(
        UserError, match=r"^cannot read .*text-\w+\.npy: Is a directory; correct the path"
    ):
        tokenizer.cached_tokens(text[:5000], data)


def test_invalid_tokenizers_are_rejected(tmp_path, text):
    words = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1}, unk_token="[UNK]"))
    words.save(str(tmp_path / "words.json"))
    (tmp_path / "damaged.model").write_bytes(b"damaged")
    (tmp_path / "damaged.json").write_text("{}")
    for kind, fault in (
        (
            f"{tmp_path}/absent.json",
            "--config.data.tokenizer=.*absent.json: there is no such file; choose bytes, sentencepiece",
        ),
        (
            f"{tmp_path}/damaged.model",
            "tokenizer from .*damaged.model: .*; restore it, choose another",
        ),
        (f"{tmp_path}/damaged.json", "cannot read a tokenizer from .*damaged.json"),
        (f"{tmp_path}/words.json", "has no piece for 256 of the 256 bytes"),
    ):
        with pytest.raises(UserError, match=fault):
            lossless.choose(settings(tmp_path, tokenizer=kind), text)
    for unusable in (b"\n\n", b"\xff\xfe\n", b"a long line " * 400):
        with pytest.raises(UserError, match="is blank, not UTF-8 or longer than 4,192 bytes"):
            lossless.choose(settings(tmp_path), np.frombuffer(unusable, np.uint8))


@pytest.mark.parametrize(
    ("size", "fault"),
    [
        (-1, "small"),
        (100, "small"),
        (10**6, "large"),
        pytest.param(2**31, "large", marks=pytest.mark.medium),  # SentencePiece takes 25 s.
    ],
)
def test_impossible_sizes_of_the_vocabulary_are_rejected(tmp_path, text, size, fault):
    fault = f"--config.data.vocab_size={size} is too {fault} for the training text"
    with pytest.raises(UserError, match=fault) as caught:
        lossless.choose(settings(tmp_path, vocab_size=size), text[:20_000])
    assert "\n" not in str(caught.value)
