"""Text classification from random or pretrained weights: full training, LoRA or the head alone.

    python -m perception.train --config=configs/perception.py --config.dataset=rotten_tomatoes
    python -m perception.train --config=configs/perception.py --config.dataset=sst2 \
        --config.backbone=openelm_270m --config.finetune=lora --config.pretrained=DIR
    python -m perception.train --config=configs/perception.py --config.data.source=files:DIR

Reproduces: Table 1. `--config.backbone` and `--config.finetune=full|lora` choose a row, `--config.dataset` a column.
Not in the paper: `full_pretrained` (trains all weights of a pretrained model) and `head` (trains the head alone).
Recipes, appended to the file name: `:paper` follows the authors' program with its mistakes: LoRA freezes the head at
random values, SNLI has premises without hypotheses, embedding tables of some backbones are reinitialised, the mean over
tokens includes padding, all methods share a learning rate, and the best step is selected on the test set. `:fixed`
(default) repairs these mistakes.
Hardware: one accelerator for full training of up to 1.1 billion parameters, several for more; we have not run these
sizes. `:laptop` (or `:paper,laptop`) is arctic_xs on two CPU cores, 128 tokens per text, 2,000 steps.
Data: --config.dataset=NAME, from TFDS (imdb, snli, sst2) or Hugging Face (all others; needs the package datasets), or
your own {train,validation,test}.jsonl (or .csv, or .gz) with --config.data.source=files:DIR. Each row has the fields
"text" and "label", or the fields that --config.data.fields and --config.data.label name.
`--config=configs/perception.py:tiny` classifies paragraphs of the Python manual (no download): a minute on two cores.
"""

from ml_collections import ConfigDict

from configs import training
from perception import options
from perception.methods import METHODS

RECIPES = ("fixed", "paper")
SIZES = ("laptop", "tiny")


def _base() -> ConfigDict:
    """Returns the recipe "fixed" at full size: 10,000 steps with batches of 8, as in the paper (section 2.3)."""
    config = training.base("perception")
    config.update(
        {
            "backbone": "arctic_xs",
            "pretrained": "",
            "finetune": "full",
            "dataset": "",
            # {value of `finetune`: learning rate}, used if optimizer.learning_rate is 0.
            "learning_rates": {name: method.learning_rate for name, method in METHODS.items()},
            "reinitialize": "",
            "pool": "masked",
            "quantize": "none",
            # In `source`, `splits`, `fields` and `label`, "" means the data set's value in perception/datasets.py.
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
                "premise_only": False,  # for snli only
                "balance": False,
                "pair": False,
                "multi_label": False,
                "shots": 0,  # 0 selects all examples
                "cache_dir": ".cache",
            },
            "model": {"dtype": "auto", "remat": "none", "dropout": -1.0},
        }
    )
    config.optimizer.update(
        {
            "name": "adafactor",
            "learning_rate": 0.0,  # 0 means learning_rates[finetune]
            "schedule": "cosine",
            "warmup_steps": -1,
            "warmup_init": 0.0,
            "epsilon": 1e-30,
            "weight_decay": 1e-5,
            "decay": "all",  # transformers' Adafactor decays all parameters
            "clip": 1.0,
        }
    )
    options.add_to(config)
    config.train.steps = 10_000
    config.eval.update({"steps": 500, "patience": 0, "tokens_per_batch": 16_384, "select": "valid"})
    config.checkpoint.steps = 500
    return config.lock()


def _paper(config: ConfigDict) -> ConfigDict:
    config.freeze_head, config.reinitialize, config.pool = True, "authors", "authors"
    config.data.update({"max_length": 1024, "premise_only": True})
    config.eval.select, config.model.dtype = "test", "authors"
    config.optimizer.learning_rate = 1e-4
    return config


def _laptop(config: ConfigDict) -> ConfigDict:
    """Reduces texts to 128 tokens and training to a fifth of the steps, in bfloat16."""
    config.data.max_length, config.model.dtype = 128, "bfloat16"
    config.data.buckets = (16, 32, 64, 128)
    config.train.steps = 2000
    config.eval.update({"steps": 200, "tokens_per_batch": 8192})
    config.checkpoint.steps = 200
    return config


def _tiny(config: ConfigDict) -> ConfigDict:
    """Reduces the model to two layers and the data to paragraphs of the Python manual (embedded:python)."""
    config.backbone, config.data.source = "tiny_bert", "embedded:python"
    config.data.update({"batch": 16, "buckets": (32, 64), "max_length": 64, "vocab_size": 1000})
    config.model.dtype = "float32"
    config.optimizer.update({"learning_rate": 3e-3, "warmup_steps": 20})
    config.train.steps = 300
    config.eval.update({"steps": 50, "tokens_per_batch": 4096})
    config.checkpoint.steps = 50
    return config


def get_config(argument: str = "") -> ConfigDict:
    """Returns the configuration for an argument such as "paper", "tiny" or "paper,laptop". "" means "fixed".

    Raises the errors of `training.recipe_and_size`.
    """
    recipe, size = training.recipe_and_size(argument, RECIPES, SIZES)
    config = _paper(_base()) if recipe == "paper" else _base()
    return {"laptop": _laptop, "tiny": _tiny}[size](config) if size else config
