"""The translation recipes of the reservoir paper's section 3.1, a recipe for Multi30k, and two smaller sizes."""

from ml_collections import ConfigDict

from configs import reservoirs, training


def base() -> ConfigDict:
    """Returns the fields of all translation recipes. Layers have the sizes of fairseq's transformer_iwslt_de_en."""
    config = training.base("reservoir")
    config.update(
        {
            "task": "translation",
            "data": {
                "source": "",
                "source_language": "de",
                "target_language": "en",
                "splits": {"train": "train", "valid": "valid", "test": "test"},
                "tfds_dir": "",
                "vocab_size": 10000,
                "dictionaries": "separate",
                "buckets": (16, 24, 32, 48, 64, 96, 128, 176),
                "tokens_per_batch": 4096,
                "cache_dir": ".cache",
            },
            "model": {
                "encoder_layers": 6,
                "decoder_layers": 2,
                "width": 512,
                "hidden": 1024,
                "heads": 4,
                "activation": "relu",
                "dropout": 0.3,
                "attention_dropout": 0.0,
                "norm": "pre",
                "positions": "sinusoidal",
                "max_length": 1024,
                "remat": "none",
                "dtype": "auto",
                **reservoirs.fields(),
                "decoder_reservoirs": 0,
                "decoder_placement": "alternate",
            },
            "train": {"label_smoothing": 0.1},
            "eval": {
                "sentences": 0,
                "buckets": (32, 64, 128),
                "tokens_per_batch": 4096,
                "lowercase": False,
                "tokenize": "13a",
            },
            "decode": {"beams": 5, "length_penalty": 1.0, "ratio": 1.2, "extra": 10},
        }
    )
    return config.lock()


def iwslt(reservoir: str) -> ConfigDict:
    """Returns the configuration for IWSLT'14 de-en with 2 decoder layers (Table 1). Table 5 has 6 decoder layers."""
    config = base()
    config.data.source = "files:data/iwslt14_de_en"
    config.model.encoder_layers = 6
    config.model.reservoir = reservoir
    config.optimizer.update({"weight_decay": 1e-4, "decay": "all"})  # as in fairseq
    return config


def wmt(reservoir: str) -> ConfigDict:
    """Returns the configuration for WMT'16 en-de (Table 2)."""
    config = base()
    config.data.source = "tfds:wmt16_translate/de-en"
    config.data.source_language, config.data.target_language = "en", "de"
    config.data.splits = {"train": "train", "valid": "validation", "test": "test"}
    config.data.vocab_size = 32768
    config.data.dictionaries = "shared"
    config.data.tokens_per_batch = 4096 * 16
    config.data.buckets = (16, 24, 32, 48, 64, 96, 128, 256)
    config.model.encoder_layers, config.model.decoder_layers = 12, 1
    config.model.hidden, config.model.heads = 2048, 8
    config.model.dropout = 0.2
    config.model.reservoir = reservoir
    config.model.reservoirs = 4
    config.train.steps = 300_000
    config.eval.steps, config.eval.tokens_per_batch = 2500, 16384
    config.checkpoint.steps, config.checkpoint.keep_best = 2500, 5
    return config


def multi30k(reservoir: str) -> ConfigDict:
    """Returns the configuration for Multi30k de-en, a complete small task for a laptop. Not in the paper."""
    config = base()
    config.data.source = "files:data/multi30k_de_en"
    config.data.splits.test = "test2016"
    config.data.vocab_size = 8000
    config.data.dictionaries = "shared"
    config.data.buckets = (12, 16, 20, 26, 40)
    config.data.tokens_per_batch = 2560
    config.model.width, config.model.hidden = 256, 1024
    config.model.dtype = "bfloat16"
    config.model.reservoir = reservoir
    config.optimizer.learning_rate, config.optimizer.warmup_steps = 1.5e-3, 800
    config.train.steps = 12_000
    config.eval.steps, config.eval.buckets = 250, (20, 40)
    # Stop after 5 evaluations (1,250 steps, about 6 epochs) without a new best.
    config.eval.patience = 5
    config.checkpoint.steps = 250
    return config


def laptop(config: ConfigDict) -> ConfigDict:
    """Changes a recipe to Multi30k, width 256 and a cosine schedule of 2,000 steps, for two CPU cores."""
    small = multi30k(config.model.reservoir)
    for group in ("data", "eval"):
        config[group] = small[group]
    config.model.update({"width": 256, "hidden": 1024, "heads": 4, "dropout": 0.3})
    config.model.dtype = "bfloat16"
    config.optimizer.update({"learning_rate": 2e-3, "schedule": "cosine", "warmup_steps": 300})
    config.train.steps = 2000
    config.eval.update({"steps": 200, "patience": 0})
    config.checkpoint.steps = 200
    return config


def tiny(config: ConfigDict) -> ConfigDict:
    """Reduces a recipe to a small model on generated sentences (embedded:numbers_de_en): two minutes on two cores."""
    config.data.source = "embedded:numbers_de_en"
    config.data.source_language, config.data.target_language = "de", "en"
    config.data.splits = {"train": "train", "valid": "valid", "test": "test"}
    config.data.vocab_size = 1000
    config.data.buckets = (32,)
    config.data.tokens_per_batch = 2048
    config.model.encoder_layers, config.model.decoder_layers = 3, 1
    config.model.width, config.model.hidden, config.model.heads = 128, 256, 4
    config.model.dropout, config.model.dtype = 0.1, "float32"
    config.model.reservoirs = 1
    config.optimizer.learning_rate, config.optimizer.warmup_steps = 3e-3, 200
    config.train.steps = 800
    config.eval.steps, config.eval.sentences, config.eval.patience = 100, 100, 0
    config.eval.buckets = (32,)
    config.checkpoint.steps = 100
    return config


def choose(config: ConfigDict, argument: str) -> ConfigDict:
    return training.choose(config, argument, laptop=laptop, tiny=tiny)
