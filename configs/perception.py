"""Is pretraining worth it? A text classifier from random or pretrained weights: all of them, LoRA, or the head.

    python -m perception.train --config=configs/perception.py --config.dataset=rotten_tomatoes
    python -m perception.train --config=configs/perception.py --config.dataset=sst2 \
        --config.backbone=openelm_270m --config.finetune=lora --config.pretrained=DIR
    python -m perception.train --config=configs/perception.py --config.data.source=files:DIR

Reproduces: Table 1, a cell for each backbone, data set and `--config.finetune=full|lora` (the paper has neither
`full_pretrained`, which trains all weights from the pretrained ones, nor `head`, which trains the classifier alone); it
says 76.0 for arctic_xs on rotten_tomatoes in full. `:paper` follows the authors' program, slips included: a head frozen
at random, premises without hypotheses, tables drawn anew, padding in the mean, one learning rate for all, and the step
chosen by the test; `:fixed`, the default, repairs all of these.
Hardware: one accelerator up to 1.1 billion parameters in full, several for more; not run here. `:laptop` (or
`:paper,laptop`) is arctic_xs on two CPU cores, rows of 128 tokens and 2,000 steps.
Data: TFDS's imdb_reviews, snli and glue/sst2, Hugging Face's by the package datasets, which is not among the
requirements, or files {train,validation,test}.jsonl (or .csv, or .gz) with the fields of the data set, by
--config.data.source=files:DIR. Without --config.dataset these are your own: text and label, or what
--config.data.fields and --config.data.label name.
`--config=configs/perception.py:tiny` is about paragraphs of embedded text: a minute on two CPU cores.
"""

from ml_collections import ConfigDict

from configs import training

RECIPES = ("fixed", "paper")
SIZES = ("laptop", "tiny")


def _base() -> ConfigDict:
    """The recipe "fixed" at the paper's scale: section 3.1 and the authors' program."""
    config = training.base("perception")
    config.update(
        {
            "backbone": "arctic_xs",
            "pretrained": "",
            "finetune": "full",
            "dataset": "",
            # What optimizer.learning_rate=0 stands for, by finetune.
            "learning_rates": {"full": 1e-4, "full_pretrained": 1e-4, "lora": 1e-3, "head": 1e-2},
            "freeze_head": False,
            "reinitialize": "",
            "pool": "masked",
            "quantize": "none",
            # "" is what the data set has of its own.
            "data": {
                "source": "",
                "splits": {"train": "", "valid": "", "test": ""},
                "fields": "",
                "label": "",
                "tfds_dir": "",
                "batch": 8,
                "buckets": (32, 64, 128, 256, 512, 1024),
                "max_length": 512,
                "tokenizer": "auto",
                "vocab_size": 32_000,
                "premise_only": False,  # of snli
                "cache_dir": ".cache",
            },
            "lora": {
                "rank": 32,
                "alpha": 0.0,  # the rank
                "dropout": 0.05,
                "stabilized": False,
                "targets": "",
            },
            "model": {"dtype": "auto", "remat": False, "dropout": -1.0},
        }
    )
    config.optimizer.update(
        {
            "name": "adafactor",
            "learning_rate": 0.0,  # the one of the way in learning_rates
            "schedule": "cosine",
            "warmup_steps": -1,
            "warmup_init": 0.0,
            "epsilon": 1e-30,
            "weight_decay": 1e-5,
            "decay": "all",  # as transformers' Adafactor does when it is given every parameter
            "clip": 1.0,
        }
    )
    # Adafactor has no use for beta1 and beta2: they are of adam and adamw, by optimizer.name.
    config.train.steps = 10_000
    config.eval.update({"steps": 500, "patience": 0, "tokens_per_batch": 16_384, "select": "valid"})
    config.checkpoint.steps = 500
    return config


def _paper(config: ConfigDict) -> ConfigDict:
    """What the authors' program does."""
    config.freeze_head, config.reinitialize, config.pool = True, "authors", "authors"
    config.data.update({"max_length": 1024, "premise_only": True})
    config.eval.select, config.model.dtype = "test", "authors"
    config.optimizer.learning_rate = 1e-4
    return config


def _laptop(config: ConfigDict) -> ConfigDict:
    """Shorter rows, a fifth of the steps."""
    config.data.max_length, config.model.dtype = 128, "bfloat16"
    config.data.buckets = (16, 32, 64, 128)
    config.train.steps = 2000
    config.eval.update({"steps": 200, "tokens_per_batch": 8192})
    config.checkpoint.steps = 200
    return config


def _tiny(config: ConfigDict) -> ConfigDict:
    """Paragraphs of the manual that comes with Python, for a model of two layers."""
    config.backbone, config.data.source = "tiny_bert", "embedded:python"
    config.data.update({"batch": 16, "buckets": (32, 64), "max_length": 64, "vocab_size": 1000})
    config.model.dtype = "float32"
    config.optimizer.update({"learning_rate": 3e-3, "warmup_steps": 20})
    config.train.steps = 300
    config.eval.update({"steps": 50, "tokens_per_batch": 4096})
    config.checkpoint.steps = 50
    return config


def get_config(argument: str = "") -> ConfigDict:
    """ "" is the recipe "fixed" at the paper's scale; "paper", "tiny", "paper,laptop" and so on."""
    words = [word for word in argument.split(",") if word]
    unknown = [word for word in words if word not in (*RECIPES, *SIZES)]
    sizes = [word for word in words if word in SIZES]
    if unknown or len(sizes) > 1 or len(words) - len(sizes) > 1:
        raise ValueError(
            f"unknown argument {argument!r}; there are {', '.join(RECIPES)} and {', '.join(SIZES)}, as in paper,tiny"
        )
    config = _paper(_base()) if "paper" in words else _base()
    return {"laptop": _laptop, "tiny": _tiny}[sizes[0]](config) if sizes else config
