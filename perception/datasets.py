"""The twelve data sets of Table 1, as the authors' program reads them, and the user's own."""

from dataclasses import dataclass, field

from ml_collections import ConfigDict

from common.config import check, check_choice
from common.data.labelled import LabelledText, Rules, load_labelled

SPLITS = {"train": "train", "valid": "validation|valid|dev|val", "test": "test"}


@dataclass(frozen=True)
class DataSet:
    """Where examples come from and what their fields are called.

    Attributes:
      column: of Table 1.
      source: TFDS where it has the very same set, otherwise Hugging Face.
      fields: of the text, or of its two parts; of "a|b" the first that is there.
      classes: how many; 0 where only the examples say.
      unlabelled: some examples have the label -1, and are left out.
      splits: what they are called; where one has no name or is not there, it is cut from the training examples.
    """

    column: str = ""
    source: str = ""
    fields: str = "text"
    label: str = "label"
    classes: int = 0
    unlabelled: bool = False
    splits: dict[str, str] = field(default_factory=lambda: SPLITS)


OWN = DataSet(fields="text|sentence")

DATASETS = {
    "dbpedia": DataSet("DBP", "hf:DeveloperOats/DBPedia_Classes", label="l1|label", classes=9),
    "bias": DataSet(
        "Bias", "hf:PriyaPatel/Bias_identification", "context|text", "bias_type|label", 10
    ),
    # The paper says 15 classes; the data have 28.
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
    # GLUE hides the labels of its test, so what it calls validation is the test here.
    "sst2": DataSet(
        "sst2",
        "tfds:glue/sst2",
        "sentence|text",
        classes=2,
        splits={"train": "train", "valid": "", "test": "validation|test"},
    ),
    "wiki_toxic": DataSet("w-tox", "hf:OxAISH-AL-LLM/wiki_toxic", "comment_text|text", classes=2),
    # TFDS has the polarity of these reviews only.
    "yelp": DataSet("yelp", "hf:yelp_review_full", classes=5),
}
"""By the name that `config.dataset` has."""


def validate(config: ConfigDict) -> None:
    """The names of data set and source."""
    if config.dataset:
        check_choice("--config.dataset", config.dataset, DATASETS)
    check(
        not (config.dataset and config.data.source.startswith("embedded:")),
        f"--config.dataset={config.dataset} is not what --config.data.source={config.data.source} has: name its files"
        " (files:DIR), or leave one of the two out",
    )
    check(
        bool(config.dataset or config.data.source),
        "what is to be learned? --config.dataset=NAME for one of the paper's data sets"
        f" ({', '.join(DATASETS)}), or --config.data.source=files:DIR for your own",
    )


def load(config: ConfigDict) -> tuple[dict[str, LabelledText], tuple[str, ...]]:
    """The splits, a single text per example, and the names of the classes. Where the test chooses the best step there
    is no "valid", and none is cut from the training examples.

    What `config.data` says comes before what the data set has of its own. Of pairs the texts are joined by a space; of
    SNLI's, with `config.data.premise_only`, the second one is left out, as a slip in the authors' program does (but for
    every thousandth example).

    Raises:
      UserError: the data are missing or at fault.
    """
    data, known = config.data, DATASETS[config.dataset] if config.dataset else OWN
    fields = data.fields or known.fields
    premise_only = data.premise_only and config.dataset == "snli"
    read = ConfigDict(
        {
            "source": data.source or known.source,
            "splits": {split: data.splits[split] or known.splits[split] for split in SPLITS},
            "fields": fields.split()[0] if premise_only else fields,
            "label": data.label or known.label,
            "tfds_dir": data.tfds_dir,
        }
    )
    splits = ("train", "test") if config.eval.select == "test" else ("train", "valid", "test")
    # A split that the user names has to be there.
    cut = tuple(split for split in ("valid", "test") if not data.splits[split])
    rules = Rules(known.classes, known.unlabelled, cut, splits)
    found, classes = load_labelled(read, rules)
    joined = {
        split: LabelledText([(" ".join(parts),) for parts in text.texts], text.labels_M)
        for split, text in found.items()
    }
    return joined, classes
