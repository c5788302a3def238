"""Recipes of the gMLP paper's language models: GPT, gMLP and gMLP with attention, three recipes each."""

from ml_collections import ConfigDict

from configs import training

SIZES = ("laptop", "tiny")  # smaller sizes for two CPU cores

RECIPES = ("paper", "code", "fixed")
"""Recipes: "paper" follows the paper's text, "code" the authors' program, "fixed" is ours."""

FIXED = {
    "": {
        "gpt": {"width": 416, "hidden": 1664, "heads": 8},
        "gmlp": {"width": 512, "hidden": 2032},
        "gmlp_attn": {"width": 512, "hidden": 1826},
    },
    "laptop": {
        "gpt": {"width": 96, "hidden": 384, "heads": 4},
        "gmlp": {"width": 128, "hidden": 494},
        "gmlp_attn": {"width": 128, "hidden": 316},
    },
    "tiny": {
        "gpt": {"width": 48, "hidden": 192, "heads": 4},
        "gmlp": {"width": 64, "hidden": 240},
        "gmlp_attn": {"width": 64, "hidden": 192},
    },
}
"""Size ("" is the full size) -> kind of model -> fields of `model` in the recipe "fixed".

With a vocabulary of 256 bytes, parameter counts within a size differ by at most 0.5 %. As in GPT-2, the GPT's hidden
size is four times its width.
"""

CORPORA = {
    "enwik8": {"source": "files:data/enwik8", "file": "enwik8", "words": False},
    "enwik9": {"source": "files:data/enwik9", "file": "enwik9", "words": False},
    "wikitext2": {"source": "files:data/wikitext2", "file": "", "words": True},
    "wikitext103": {"source": "files:data/wikitext103", "file": "", "words": True},
}
"""Corpus -> fields of `config.data`. With `words`, evaluations also report the perplexity per word."""

LENGTH = 768
"""Number of tokens (by default bytes) in a window of the gMLP paper's models, at full size."""


def base(paper: str, corpus: str) -> ConfigDict:
    """Returns the fields that all recipes of byte language models share, without `model`."""
    config = training.base(paper)
    config.data = ConfigDict(
        {
            **CORPORA[corpus],
            "limit": 0,
            "shares": (0.9, 0.05, 0.05),
            "splits": {
                split: f"wiki.{split}.tokens|wiki.{split}.raw|{split}.txt"
                for split in ("train", "valid", "test")
            },
            "batch": 64,
            "tokenizer": "bytes",
            "vocab_size": 8192,
            "cache_dir": ".cache",
        }
    )
    config.optimizer.update(
        {
            "name": "adam",
            "learning_rate": 2e-4,
            "schedule": "constant",
            "warmup_steps": 0,
            "beta2": 0.999,
        }
    )
    # The first window scores its first half. Each later window scores its second half; the first half is context.
    config.eval.update({"patience": 0, "stride": LENGTH // 2, "batch": 16, "tokens": 0})
    config.eval.update({"sample": 0, "prompt": "The "})
    # "MODULE:FUNCTION", such as "explicit_opt:head_start": a function that computes the initial output layer from
    # features and next tokens of the training text; needs model.tied=False. "" keeps the model's initialization.
    config.head_start = ""
    return config


def _model(kind: str) -> ConfigDict:
    """Returns `config.model` of the recipe "paper", without the field `width`."""
    return ConfigDict(
        {
            "kind": "gpt" if kind == "gpt" else "gmlp",
            "layers": 4,
            "length": LENGTH,
            "hidden": 2048,
            "heads": 12,
            "gate_heads": 1,
            "spatial": "full",
            "windows": (),
            "attention": 64 if kind == "gmlp_attn" else 0,
            "keys_as_values": False,
            "epsilon": 1e-3,
            "positions": "learned" if kind == "gpt" else "none",
            "tied": True,
            "norm": "pre",
            "activation": "gelu",
            "init": "gpt2",
            "dropout": 0.1,
            "dtype": "auto",
            "remat": "none",
        }
    )


def paper(kind: str, corpus: str) -> ConfigDict:
    """Returns the recipe "paper" with the values of Tables 1 and 2. The paper's GPT_base is a GPT-2 of four layers."""
    config = base("gmlp_lm", corpus)
    config.model = _model(kind)
    config.model.width = 768
    return config.lock()


def code(kind: str, corpus: str) -> ConfigDict:
    """Returns the recipe "code", the settings of the authors' program.

    Gates and attention work in windows of 16, 32 and 64 positions in layers 1 to 3, and on the whole sequence in layer
    4. Attention heads have width 2, in "GPT_base" and in gMLP with attention. No layer has dropout, and "GPT_base" has
    no feed-forward layers.

    The authors' program trains on the first 90 million bytes of enwik8 or enwik9 and validates on the next 5 million.
    These 95 million bytes are the same in both files. Our program tests on the next 5 million bytes.
    """
    config = base("gmlp_lm", corpus)
    config.model = _model(kind)
    config.model.update(
        {
            "kind": "tiny_attention" if kind == "gpt" else "gmlp",
            "width": 512,
            "windows": (16, 32, 64, LENGTH),
            "attention": 0 if kind == "gmlp" else 2,
            "keys_as_values": True,
            "epsilon": 0.0,
            "positions": "none",
            "tied": False,
            "init": "torch",
            "dropout": 0.0,
        }
    )
    if corpus in ("enwik8", "enwik9"):
        config.data.limit = 100_000_000
    # The authors' program sums the gradients of four batches of 16 rows and clips the sum at norm 0.5. Our gradient,
    # the mean over 64 rows, is a quarter of that sum, so we clip it at a quarter of that norm.
    config.optimizer.clip = 0.5 / 4
    return config.lock()


def fixed(kind: str, corpus: str) -> ConfigDict:
    """Returns our recipe "fixed": sizes of FIXED, and one schedule for all models. No learning rate was tuned."""
    config = base("gmlp_lm", corpus)
    config.model = _model(kind)
    config.model.update(FIXED[""][kind])
    config.optimizer.update(
        {
            "name": "adamw",
            "learning_rate": 1e-3,
            "schedule": "cosine",
            "warmup_steps": 1000,
            "beta2": 0.95,
            "weight_decay": 0.1,
            "clip": 1.0,
        }
    )
    return config.lock()


def tiny(config: ConfigDict) -> ConfigDict:
    """Reduces a recipe to a small model on the Python manual (embedded:python): seconds on two CPU cores."""
    config.data.update({"source": "embedded:python", "file": "", "batch": 16})
    model, length = config.model, 64
    model.update({"width": 64, "hidden": 256, "heads": 4, "length": length})
    model.layers, model.dropout = 2, 0.0
    if model.windows:
        model.windows = (16, length)
    model.attention = min(model.attention, 16)
    config.optimizer.update({"learning_rate": 3e-3, "warmup_steps": 0})
    config.train.steps = 400
    config.eval.update({"steps": 100, "stride": length // 2, "batch": 64, "tokens": 20_000})
    config.checkpoint.steps = 100
    return config


def laptop(config: ConfigDict) -> ConfigDict:
    """Reduces a recipe to width 128, sequences of 128 bytes and 1,500 steps: a few minutes on two CPU cores."""
    model, length = config.model, 128
    model.hidden = 2048 * 128 // model.width // 2 * 2
    model.update({"width": 128, "heads": 4, "length": length, "dropout": 0.0})
    if model.windows:
        model.windows = (*model.windows[:-1], length)
    config.data.batch = 16
    config.optimizer.learning_rate *= 2
    if config.optimizer.warmup_steps:
        config.optimizer.warmup_steps = 100
    config.train.steps = 1500
    config.eval.update(
        {"steps": 150, "stride": length // 2, "batch": 64, "tokens": 100_000, "sample": 120}
    )
    config.checkpoint.steps = 150
    return config


def choose(kind: str, corpus: str, argument: str) -> ConfigDict:
    """Returns the configuration for an argument such as "code", "tiny" or "code,tiny". "" means "paper".

    Raises the errors of `training.recipe_and_size`.
    """
    recipe, size = training.recipe_and_size(argument, RECIPES, SIZES)
    make = {"paper": paper, "code": code, "fixed": fixed}[recipe or "paper"]
    config = make(kind, corpus)
    if not size:
        return config
    config = {"laptop": laptop, "tiny": tiny}[size](config)
    if recipe == "fixed":
        config.model.update(FIXED[size][kind])
    return config
