"""Chooses the lossless tokenizer of a configuration or of a run."""

import os
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from common.data.lossless_tokenizer import FILES, LosslessTokenizer
from common.errors import check

BYTES, SENTENCEPIECE = "bytes", "sentencepiece"
"""Values of `data.tokenizer`. Any other value is the path of a tokenizer.json or a SentencePiece .model file."""


def in_run(workdir: Path) -> LosslessTokenizer:
    """Returns the tokenizer of the run in `workdir`. Raises a UserError if `common.data.subwords.load` fails."""
    paths = (workdir / name for name in FILES)
    path = next(filter(Path.is_file, paths), None)
    if path is None:
        return LosslessTokenizer()
    from common.data import subwords

    return subwords.load(path)


def choose(data: ConfigDict, training_text: np.ndarray | None) -> LosslessTokenizer:
    """Returns the tokenizer of a configuration.

    Args:
      data: a configuration with the fields `tokenizer`, `vocab_size` and `cache_dir`. Without `tokenizer`, tokens are
        bytes.
      training_text: (bytes,) uint8. Used only by `tokenizer` "sentencepiece", see `common.data.subwords.trained`.

    Raises:
      UserError: the tokenizer's file is missing or damaged, one of the 256 byte values is not a piece, training
        fails (`common.data.tokenizer.train_model`), or the cache cannot be written.
    """
    kind = data.get("tokenizer", BYTES)
    if kind == BYTES:
        return LosslessTokenizer()
    from common.data import subwords

    if kind == SENTENCEPIECE:
        return subwords.trained(data, training_text)
    path = Path(os.path.expanduser(kind))
    check(
        path.is_file(),
        f"--config.data.tokenizer={kind}: there is no such file; choose {BYTES}, {SENTENCEPIECE}, or the path of a"
        " SentencePiece model or tokenizer.json",
    )
    return subwords.load(path)
