"""Saves the tokenizer of a run in its workdir."""

from pathlib import Path
from typing import Protocol, Self

from common.errors import check
from common.storage.addresses import shown
from common.train.workdir import has_checkpoints


class SavedTokenizer(Protocol):
    """A tokenizer that a run saves in its workdir. Tokenizers with equal fingerprints give equal ids."""

    fingerprint: str

    def save(self, path: Path) -> None: ...

    @classmethod
    def load(cls, path: Path) -> Self: ...


def save_tokenizer(tokenizer: SavedTokenizer, path: Path) -> None:
    """Writes the tokenizer of a run to `path`.

    Raises a UserError if the run is resumed with another tokenizer, or if the saved tokenizer is damaged.
    """
    check(
        not path.exists()
        or not has_checkpoints(path.parent)
        or type(tokenizer).load(path).fingerprint == tokenizer.fingerprint,
        f"the tokenizer differs from {shown(path)}, because the training text, the file of the tokenizer or the"
        " pretraining run has changed since the run began: undo the change, or choose another --workdir",
    )
    tokenizer.save(path)
