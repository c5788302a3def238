"""RoBERTa's pretraining recipe (section 4.3 of the reservoir paper), and two smaller sizes."""

from ml_collections import ConfigDict

from configs import reservoirs, training


def roberta(reservoir: str) -> ConfigDict:
    """Returns the configuration of RoBERTa base, with fairseq's recipe: 125,000 updates with batches of 2,048 rows."""
    config = training.base("reservoir")
    config.update(
        {
            "task": "masked_lm",
            "data": {
                "source": "files:data/pretraining",
                "splits": {"train": "train.txt", "valid": "valid.txt", "test": "test.txt"},
                "documents": "line",
                # RoBERTa has 50,265. An embedding table with an odd number of rows cannot be sharded over two devices.
                "vocab_size": 50_264,
                "masked": 0.15,
                "batch": 2048,
                "cache_dir": ".cache",
            },
            "model": {
                "encoder_layers": 12,
                "width": 768,
                "hidden": 3072,
                "heads": 12,
                "activation": "gelu",
                "dropout": 0.1,
                "attention_dropout": 0.1,
                "norm": "post",
                "positions": "learned",
                "max_length": 512,
                "remat": "none",
                "dtype": "auto",
                **reservoirs.fields(),
                "reservoir": reservoir,
                "reservoirs": 4,
            },
        }
    )
    config.optimizer.update(
        {"schedule": "linear", "warmup_steps": 10_000, "warmup_init": 0.0, "epsilon": 1e-6}
    )
    config.optimizer.update({"weight_decay": 0.01, "decay": "all"})  # as in fairseq
    config.train.steps = 125_000
    config.eval.update({"steps": 2500, "patience": 0, "sequences": 0, "batch": 256})
    config.checkpoint.steps = 2500
    return config.lock()


def laptop(config: ConfigDict) -> ConfigDict:
    """Reduces a recipe to a third of the width, half the layers and 128-token rows."""
    config.data.source, config.data.vocab_size, config.data.batch = "files:data/reviews", 8000, 32
    config.model.update({"encoder_layers": 6, "width": 256, "hidden": 1024, "heads": 4})
    config.model.update({"max_length": 128, "reservoirs": 2, "dtype": "bfloat16"})
    config.optimizer.update({"learning_rate": 5e-4, "warmup_steps": 200})
    config.train.steps = 2000
    config.eval.update({"steps": 200, "sequences": 512, "batch": 64})
    config.checkpoint.steps = 200
    return config


def tiny(config: ConfigDict) -> ConfigDict:
    """Reduces a recipe to a small model on the Python manual (embedded:python): about a minute on two CPU cores."""
    config.data.update({"source": "embedded:python", "documents": "paragraph"})
    config.data.vocab_size, config.data.batch = 1000, 32
    config.model.update({"encoder_layers": 3, "width": 128, "hidden": 256, "heads": 4})
    config.model.update({"max_length": 64, "reservoirs": 1, "dtype": "float32"})
    config.optimizer.update({"learning_rate": 2e-3, "warmup_steps": 100})
    config.train.steps = 800
    config.eval.update({"steps": 100, "batch": 64})
    config.checkpoint.steps = 100
    return config


def choose(config: ConfigDict, argument: str) -> ConfigDict:
    return training.choose(config, argument, laptop=laptop, tiny=tiny)
