"""Reads predictions of any kind, and lists for each metric whether larger or smaller values are better."""

import json
from dataclasses import fields
from pathlib import Path

import numpy as np

from common.errors import UserError, check, file_error
from common.metrics.classes import Classes
from common.metrics.label_sets import LabelSets
from common.metrics.losses import Losses
from common.metrics.predictions import TEST_AGAIN, Predictions, stem
from common.metrics.translations import Translations
from common.storage.addresses import shown

KINDS: dict[str, type[Predictions]] = {
    cls.kind: cls for cls in (Classes, LabelSets, Losses, Translations)
}

MODES = {
    "accuracy": "max",
    "weighted_f1": "max",
    "micro_f1": "max",
    "macro_f1": "max",
    "bleu": "max",
    "loss": "min",
    "perplexity": "min",
    "bits_per_byte": "min",
    "nats_per_byte": "min",
    "perplexity_per_word": "min",
}
"""Metric -> "max" if larger values are better, "min" if smaller values are better."""


def load(path: Path) -> Predictions:
    """Reads predictions that `Predictions.save` has written.

    Raises a UserError if the file cannot be read, is damaged, contains NaN, or contains no examples.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            # In files from before 24 November 2026, the names of arrays end in shape letters, which `stem` removes.
            saved = {stem(name): archive[name] for name in archive.files}
        record = json.loads(saved.pop("record").tobytes().decode())
        kind = KINDS[record.pop("kind")]
        plain = {name: tuple(x) if isinstance(x, list) else x for name, x in record.items()}
        names = {stem(field.name): field.name for field in fields(kind)}
        arrays = {names[name]: x for name, x in saved.items()}
        made = kind(**plain, **arrays)
        lengths = {n: len(x) for n, x in saved.items() if len(x) or n not in ("hits", "words")}
        if wrong := [name for name, length in lengths.items() if length != len(made)]:
            raise ValueError(
                f"not all of its arrays have {len(made)} entries, one for each example (wrong: {', '.join(wrong)})"
            )
        if not len(made):
            raise ValueError("it contains no examples")
    except Exception as error:  # Reading a damaged file may raise any exception.
        # NumPy's error for other formats advises unsafe loading. A .npy file opens as an array, which `with` refuses.
        other = any(words in str(error) for words in ("unsafely", "context manager"))
        fault = ValueError("it is not an .npz file") if other else error
        raise UserError(f"{file_error(shown(path), fault)}, or {TEST_AGAIN}") from error
    with_nan = [n for n, x in saved.items() if x.dtype.kind == "f" and np.isnan(x).any()]
    check(
        not with_nan,
        f"{shown(path)} has NaN in {len(with_nan)} of its arrays ({', '.join(with_nan)}): the model gave NaN on a test"
        " example, or the file has changed since the run; train the run again, restore the file, or leave out this run",
    )
    return made
