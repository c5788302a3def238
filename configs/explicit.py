"""What the experiments of explicit optimization share. Imported by the experiments beside it; not one itself."""

from ml_collections import ConfigDict

from configs import training


def _base() -> ConfigDict:
    """Trains epoch by epoch and stops at the first that does not improve, from any start."""
    config = training.base("explicit_opt")
    config.start = "warm"
    config.solution = ConfigDict({"exponent": -1.0, "sign": -1})
    config.optimizer.update({"schedule": "constant", "warmup_steps": 0})
    config.train.update({"steps": 0, "epochs": 32, "batch": 1024})
    config.eval.update({"start": True, "steps": 0, "patience": 1})
    config.checkpoint.steps = 0
    return config


def babylm(aggregate: str) -> ConfigDict:
    """The language models of section 3.1: 10 million words of BabyLM, 2^12 pieces, `<oov>` and `<pad>`."""
    config = _base()
    config.data = ConfigDict(
        {
            "source": "files:data/babylm",
            "splits": {"train": "train/*.txt", "valid": "dev/*.txt", "test": "test/*.txt"},
            "documents": "line",
            "vocab_size": 4098,
            "tokens": 0,
            "held_out_share": 0.1,
            "cache_dir": ".cache",
        }
    )
    config.model = ConfigDict({"aggregate": aggregate, "context": 1, "cold": "torch"})
    config.optimizer.update({"name": "adagrad", "learning_rate": 0.01, "epsilon": 1e-10})
    # Training perplexity is measured on every n-th token, this many of the whole text.
    config.eval.train_tokens = 100_000
    return config


def tiny_text(config: ConfigDict) -> ConfigDict:
    """The same on the manual that comes with Python: seconds on two CPU cores."""
    config.data.source, config.data.documents = "embedded:python", "paragraph"
    config.data.vocab_size, config.data.held_out_share = 514, 1.0
    config.model.context = 2
    config.train.epochs = 8
    return config


def mnist() -> ConfigDict:
    """The digit classifiers of sections 3.2 and 3.3; optimizer and cold start as fit the printed numbers."""
    config = _base()
    # The last 10,000 training images decide when to stop, so that the test images choose nothing.
    config.data = ConfigDict({"source": "files:data/mnist", "held_out": 10_000})
    config.model = ConfigDict({"layers": 1, "cold": "normal"})
    config.solution.priming = 0.0
    config.optimizer.update({"name": "adam", "learning_rate": 1e-3, "beta2": 0.999})
    config.train.update({"epochs": 100, "batch": 64})
    return config


def tiny_digits(config: ConfigDict) -> ConfigDict:
    """The same on the 1,797 digits of scikit-learn: seconds on two CPU cores."""
    config.data.source, config.data.held_out = "embedded:digits", 200
    config.train.epochs = 10
    return config


def choose_text(config: ConfigDict, argument: str) -> ConfigDict:
    return training.choose(config, argument, tiny=tiny_text)


def choose_digits(config: ConfigDict, argument: str) -> ConfigDict:
    return training.choose(config, argument, tiny=tiny_digits)
