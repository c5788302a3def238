"""Fixtures: a small pretrained model, and configurations of short runs that use this model."""

from pathlib import Path

import jax
import pytest
from ml_collections import ConfigDict

from common.sharding import make_mesh
from configs import perception as recipes
from tests.perception.helpers import small_bert, write_small_bert

LORA = {"finetune": "lora", "optimizer.schedule": "constant"}
TUNED = {
    "finetune": "full_pretrained",
    "optimizer.schedule": "constant",
    "optimizer.learning_rate": 0.0,
    "learning_rates.full_pretrained": 2e-3,
}


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"data": 1}, jax.devices()[:1])


@pytest.fixture(scope="module")
def weights() -> dict[str, jax.Array]:
    return small_bert()


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory, weights) -> Path:
    """Returns a directory in Hugging Face format: a BERT with the fixture `weights`, and a tokenizer."""
    return write_small_bert(tmp_path_factory.mktemp("weights") / "model", weights)


@pytest.fixture(scope="module")
def make(pretrained, tmp_path_factory):
    """Returns a function that returns the configuration of a short run with the pretrained model.

    Its arguments are the argument of the configuration file, such as "tiny" or "paper,tiny", and overrides of fields.
    """
    cache = tmp_path_factory.mktemp("cache")

    def config(argument: str = "tiny", **fields: object) -> ConfigDict:
        made = recipes.get_config(argument)
        made.wandb.mode = "disabled"
        made.backbone, made.pretrained = "auto", str(pretrained)
        made.data.update({"max_length": 16, "buckets": (16,), "cache_dir": str(cache)})
        made.data.vocab_size = 290
        made.train.steps, made.train.log_steps = 4, 1
        made.eval.steps = made.checkpoint.steps = 2
        made.update_from_flattened_dict(fields)
        return made

    return config
