"""Reads the twelve data sets of Table 1, and the user's own data."""

import math
from dataclasses import dataclass, field

import numpy as np
from ml_collections import ConfigDict

from common.config import check_choice
from common.data.labelled import LabelledText, load_labelled
from common.errors import check
from common.runtime.processes import is_main

SPLITS = {"train": "train", "valid": "validation|valid|dev|val", "test": "test"}

SHARES = {"test": 0.3, "valid": 0.1}
"""Split -> fraction of the training examples that becomes the split if it is missing. "test" is cut first, then "valid"
from the remaining training examples."""

SEED = 42
"""Seed that selects the examples of a split that is cut from the training examples."""


@dataclass(frozen=True)
class DataSet:
    """Source and field names of a data set.

    Attributes:
      column: column of Table 1.
      source: "tfds:NAME" (TensorFlow Datasets) or "hf:NAME" (Hugging Face).
      fields: name of the text field, or names of two text fields. "a|b" takes the first field that exists.
      label: name of the label field.
      classes: required number of classes (see `load_labelled`); 0 accepts any number.
      unlabelled: whether the label -1 means no label. Examples with this label are then dropped.
      splits: split -> its name in the source; "a|b" takes the first split that exists. A split "valid" or "test" that
        has the name "" or does not exist is cut from the training examples.
    """

    column: str = ""
    source: str = ""
    fields: str = "text"
    label: str = "label"
    classes: int = 0
    unlabelled: bool = False
    splits: dict[str, str] = field(default_factory=lambda: SPLITS)


USER = DataSet(fields="text|sentence")
"""Default field names of the user's data."""

DATASETS = {
    "dbpedia": DataSet("DBP", "hf:DeveloperOats/DBPedia_Classes", label="l1|label", classes=9),
    "bias": DataSet(
        "Bias", "hf:PriyaPatel/Bias_identification", "context|text", "bias_type|label", 10
    ),
    # The paper reports 15 classes for Bias in Bios, but the data set has 28.
    "bias_in_bios": DataSet(
        "b-in-b", "hf:LabHC/bias_in_bios", "hard_text|text", "profession|label", 28
    ),
    "climate": DataSet("climate", "hf:climatebert/climate_sentiment", classes=3),
    "emotion": DataSet("emot.", "hf:dair-ai/emotion", classes=6),
    "imdb": DataSet("imdb", "tfds:imdb_reviews", classes=2),
    "clickbait": DataSet(
        "c-bait",
        "hf:marksverdhei/clickbait_title_classification",
        "title|text",
        "clickbait|label",
        2,
    ),
    "rotten_tomatoes": DataSet("rotten", "hf:rotten_tomatoes", classes=2),
    "snli": DataSet("snli", "tfds:snli", "premise hypothesis", classes=3, unlabelled=True),
    # GLUE's test labels are not public, so GLUE's validation split is used as the test split.
    "sst2": DataSet(
        "sst2",
        "tfds:glue/sst2",
        "sentence|text",
        classes=2,
        splits={"train": "train", "valid": "", "test": "validation|test"},
    ),
    "wiki_toxic": DataSet("w-tox", "hf:OxAISH-AL-LLM/wiki_toxic", "comment_text|text", classes=2),
    # TFDS has these reviews only with two classes.
    "yelp": DataSet("yelp", "hf:yelp_review_full", classes=5),
}
"""Value of `config.dataset` -> data set."""


def validate(config: ConfigDict) -> None:
    """Checks the fields `dataset`, `data.source`, `data.multi_label` and `data.shots` of the configuration.

    Raises:
      UserError: a field is invalid, two fields contradict each other, or both `dataset` and `data.source` are empty.
    """
    if config.dataset:
        check_choice("--config.dataset", config.dataset, DATASETS)
    check(
        not (config.dataset and config.data.source.startswith("embedded:")),
        f"--config.dataset={config.dataset} cannot be read from --config.data.source={config.data.source}: set"
        " --config.data.source=files:DIR, set --config.data.source= (empty) to load the published data set, or"
        " remove --config.dataset",
    )
    check(
        bool(config.dataset or config.data.source),
        f"no data: set --config.dataset=NAME to one of the paper's data sets ({', '.join(DATASETS)}), or"
        " --config.data.source=files:DIR to your own data",
    )
    check(
        not config.data.multi_label or config.eval.select == "valid",
        "--config.data.multi_label=true chooses thresholds on the validation examples: set --config.eval.select=valid"
        f" instead of {config.eval.select}",
    )
    shots = config.data.shots
    check(shots >= 0, f"--config.data.shots must be at least 1, or 0 for all examples, got {shots}")


def load(config: ConfigDict) -> tuple[dict[str, LabelledText], tuple[str, ...]]:
    """Returns the splits and the class names. Examples have one text or, with `config.data.pair`, two texts.

    Fields of `config.data` override the fields of the `DataSet`. Without `config.data.pair`, two text fields are joined
    with a space. `config.data.premise_only` drops the hypothesis of SNLI. The authors' program drops it by mistake,
    except in every 1000th example. With `eval.select=test`, the split "valid" is not read. With `config.data.shots`,
    `draw` selects training and validation examples with the seed `config.seed`. The test split keeps all examples.

    Raises:
      UserError: the data are missing or invalid, or `config.data.pair` contradicts the text fields or `premise_only`.
    """
    data, known = config.data, DATASETS[config.dataset] if config.dataset else USER
    fields = data.fields or known.fields
    count = len(fields.split())
    premise_only = data.premise_only and config.dataset == "snli"
    read = ConfigDict(
        {
            "source": data.source or known.source,
            "splits": {split: data.splits[split] or known.splits[split] for split in SPLITS},
            "fields": fields.split()[0] if premise_only and count else fields,
            "label": data.label or known.label,
            "multi_label": data.multi_label,
            "tfds_dir": data.tfds_dir,
        }
    )
    check(
        not data.pair or count == 2,
        "--config.data.pair=true needs two text fields, separated by a space, such as --config.data.fields='premise"
        f" hypothesis', got {count} ({fields}): name two fields, or set --config.data.pair=false",
    )
    check(
        not (data.pair and premise_only),
        "--config.data.pair=true needs two text fields, but --config.data.premise_only=true reads only the first: set"
        " --config.data.premise_only=false",
    )
    splits = ("train", "test") if config.eval.select == "test" else ("train", "valid", "test")
    # A split that the user names must exist. A split "valid" or "test" that the user does not name is cut from the
    # training examples if it is missing.
    cut = tuple(split for split in ("valid", "test") if not data.splits[split])
    found, classes = load_labelled(
        read, classes=known.classes, unlabelled=known.unlabelled, optional=cut, splits=splits
    )
    for split in SHARES:
        if split in splits and split not in found:
            check(
                split in cut,
                f"--config.data.splits.{split}={read.splits[split]} names no split of --config.data.source="
                f"{read.source}, a single file: leave out --config.data.splits.{split} to cut the split from this file,"
                " or set --config.data.source=files:DIR to a folder with a file for each split",
            )
            _cut(found, split, read.source)
    # Sort the splits, because a resumed run compares them, order included, with the splits that it has saved.
    found = {split: found[split] for split in splits}
    if not data.pair:
        found = {
            split: LabelledText([(" ".join(parts),) for parts in text.texts], text.labels_E)
            for split, text in found.items()
        }
    if data.shots:
        for split in found.keys() - {"test"}:
            found[split] = draw(found[split], data.shots, config.seed)
    return found, classes


def _cut(splits: dict[str, LabelledText], split: str, source: str) -> None:
    """Moves random training examples to the split `split`, as Hugging Face's `train_test_split` with the same seed."""
    train = splits["train"]
    count = math.ceil(SHARES[split] * len(train))
    check(
        count < len(train),
        f"--config.data.source={source} has only {count} training example left, too few to cut the split {split!r}"
        f" from it: add examples, or add a split {split!r}",
    )
    order = np.random.default_rng(SEED).permutation(len(train))
    for name, ids in ((split, order[:count]), ("train", order[count:])):
        splits[name] = LabelledText([train.texts[i] for i in ids], train.labels_E[ids])
    if is_main():
        print(
            f"{source} has no split {split!r}: using {count:,} of its {len(train):,} training examples,"
            f" chosen with seed {SEED}"
        )


def draw(split: LabelledText, shots: int, seed: int) -> LabelledText:
    """Returns `shots` random examples of each class, in their original order. A smaller class keeps all examples.

    If an example may have several classes, the examples without a class count as one more class. A class may then keep
    more than `shots` examples, because an example that is kept for one class also belongs to other classes.
    """
    order = np.random.default_rng(seed).permutation(len(split))
    labels = split.labels_E[order]
    if labels.ndim == 1:
        members = [labels == c for c in np.unique(labels)]
    else:
        members = [*labels.T.astype(bool), ~labels.any(axis=1)]
    kept = np.unique(np.concatenate([order[inside][:shots] for inside in members]))
    return LabelledText([split.texts[i] for i in kept], split.labels_E[kept])
