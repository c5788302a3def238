"""Data configurations and texts for several test modules."""

from pathlib import Path

from ml_collections import ConfigDict

from common.data.corpus import TokenizedCorpus, tokenize_corpus
from common.data.tokenizer import Tokenizer
from reservoir.parallel_text import ParallelText, build_tokenizers, load_parallel


def settings(source: str = "embedded:numbers_de_en", **changes) -> ConfigDict:
    """Returns `config.data` for the source, with overrides."""
    return ConfigDict(
        {
            "source": source,
            "source_language": "de",
            "target_language": "en",
            "splits": {"train": "train", "valid": "valid", "test": "test"},
            "tfds_dir": "",
            "vocab_size": 400,
            "dictionaries": "separate",
        }
        | changes
    )


def small_text() -> ParallelText:
    """Returns 500 sentence pairs."""
    return load_parallel(settings(), "test")


def small_corpora(
    cache: Path,
) -> tuple[TokenizedCorpus, TokenizedCorpus, Tokenizer, Tokenizer]:
    """Returns both sides of `small_text` as token ids, and their tokenizers."""
    text = small_text()
    source, target = build_tokenizers(settings(), text, cache)
    return (
        tokenize_corpus(text.source, source, cache),
        tokenize_corpus(text.target, target, cache),
        source,
        target,
    )
