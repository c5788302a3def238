"""RoBERTa's fine-tuning recipe for GLUE (section 4.3 of the reservoir paper), and two smaller sizes."""

from ml_collections import ConfigDict

from common import user_parts
from configs import training
from reservoir import methods


def _base() -> ConfigDict:
    config = training.base("reservoir")
    config.update(
        {
            "task": "classification",
            "pretrained": "",
            # Step of the pretraining snapshot that fine-tuning starts from. 0 means the best checkpoint.
            "pretrained_step": 0,
            # Method of fine-tuning: a key of `reservoir.methods.METHODS`, or "MODULE:NAME" of a user's method.
            "reservoirs": "keep",
            "data": {"tfds_dir": "", "buckets": (16, 32, 64, 128, 256), "batch": 32},
            # The pretraining run provides all other fields of `model`.
            "model": {
                "dropout": 0.1,
                "attention_dropout": 0.1,
                "head_dropout": 0.0,
                "remat": "none",
                "dtype": "auto",
            },
        }
    )
    user_parts.add_options(config, methods.declared(config))
    config.optimizer.update(
        {"learning_rate": 1e-5, "schedule": "linear", "warmup_init": 0.0, "epsilon": 1e-6}
    )
    config.optimizer.update({"weight_decay": 0.1, "decay": "all"})  # as in fairseq
    config.eval.update({"patience": 0, "tokens_per_batch": 16_384})
    return config


def sst2() -> ConfigDict:
    """Returns the recipe of SST-2 (the sentiment of a sentence): about ten epochs."""
    config = _base()
    config.data.update({"source": "tfds:glue/sst2", "fields": "text|sentence"})
    # GLUE hides the labels of its test split.
    config.data.splits = {"train": "train", "valid": "validation", "test": "validation"}
    config.train.steps, config.optimizer.warmup_steps = 20_935, 1256
    return config.lock()


def mnli() -> ConfigDict:
    """Returns the recipe of MultiNLI-matched (whether a sentence follows from another): about ten epochs."""
    config = _base()
    config.data.update({"source": "tfds:glue/mnli", "fields": "premise hypothesis"})
    matched = "validation_matched"
    config.data.splits = {"train": "train", "valid": matched, "test": matched}
    config.train.steps, config.optimizer.warmup_steps = 123_873, 7432
    config.eval.steps = config.checkpoint.steps = 5000
    return config.lock()


def laptop(config: ConfigDict) -> ConfigDict:
    """Shortens a recipe to 1,500 steps, less than an epoch, with a higher learning rate for a small model."""
    config.freeze_now, config.model.dtype = 2, "bfloat16"
    config.optimizer.update({"learning_rate": 2e-4, "warmup_steps": 150})
    config.train.steps = 1500
    config.eval.update({"steps": 250, "tokens_per_batch": 8192})
    config.checkpoint.steps = 250
    return config


def tiny(config: ConfigDict) -> ConfigDict:
    """Reduces a recipe to paragraphs, or pairs of paragraphs, of the Python manual: a minute on two CPU cores."""
    pairs = len(config.data.fields.split()) == 2
    config.data.source = "embedded:python_pairs" if pairs else "embedded:python"
    config.data.buckets, config.freeze_now, config.model.dtype = (32,), 1, "float32"
    config.optimizer.update({"learning_rate": 1e-3, "warmup_steps": 30})
    config.train.steps = 300
    config.eval.update({"steps": 50, "tokens_per_batch": 4096})
    config.checkpoint.steps = 50
    return config


def choose(config: ConfigDict, argument: str) -> ConfigDict:
    return training.choose(config, argument, laptop=laptop, tiny=tiny)
