"""Small decoders with random weights on any mesh: beam search and sampling.

`python -m tests.decode.programs` decodes on the devices of all processes, with weights split over fsdp, and prints
the tokens.
"""

import json
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common import sharding, variables
from common.data.corpus import TokenizedCorpus
from common.decode.generate import Generator
from common.decode.sample import Sampling
from common.runtime import processes, program
from common.train.task import ModelState
from configs import language, translation
from gmlp_lm.model import language_model
from reservoir.model import translator
from reservoir.tasks.translation import Translator, search_of
from tests.model.helpers import random_values

VOCABULARY = 48
WIDTH = 16


class Ids:
    """A tokenizer whose texts are lists of token ids."""

    def decode(self, rows: list[list[int]]) -> list[list[int]]:
        return rows


def translation_config(dtype: str = "float32") -> ConfigDict:
    config = translation.tiny(translation.iwslt("ffn"))
    config.model.update({"width": WIDTH, "hidden": 32, "heads": 8, "dtype": dtype})
    config.model.update({"encoder_layers": 2, "decoder_layers": 1})
    config.eval.update({"buckets": (12,), "tokens_per_batch": 100})
    config.decode.update({"beams": 2, "extra": 4})
    return config


def language_config(kind: str, dtype: str = "float32") -> ConfigDict:
    config = language.choose(kind, "wikitext2", "fixed,tiny")
    config.model.update({"width": WIDTH, "hidden": 32, "length": 24, "layers": 1, "heads": 2})
    config.model.dtype = dtype
    return config


def model_state(build, mesh: Mesh) -> ModelState:
    model = variables.abstract(build)
    kinds = model.trainable, model.frozen
    values = [
        sharding.place(random_values(kind, 3), sharding.shardings(kind, mesh)) for kind in kinds
    ]
    return ModelState(model, *values, mesh)


def translation_state(config: ConfigDict, mesh: Mesh) -> ModelState:
    build = lambda rngs: translator(config.model, VOCABULARY, VOCABULARY, rngs=rngs)  # noqa: E731
    return model_state(build, mesh)


def translate(config: ConfigDict, mesh: Mesh, sentences: int = 13) -> list[list[int]]:
    """Returns the translations of random sentences of 1 to 11 tokens, as token ids that are not cut after EOS."""
    generator = np.random.default_rng(0)
    texts = [generator.integers(4, VOCABULARY, 1 + n % 11).tolist() for n in range(sentences)]
    state = translation_state(config, mesh)
    found = Translator(config, (Ids(), Ids()), mesh, search_of(config))
    with jax.set_mesh(mesh):
        return found.translate_corpus(state, TokenizedCorpus.from_lists(texts))


def language_state(config: ConfigDict, mesh: Mesh) -> ModelState:
    return model_state(lambda rngs: language_model(config.model, VOCABULARY, rngs=rngs), mesh)


def generator(config: ConfigDict, state: ModelState) -> Generator:
    sampling = Sampling(0.9, top_k=30, top_p=0.95)
    return Generator(state.abstract_model, state.mesh, config.model.length, sampling)


def write(
    config: ConfigDict, mesh: Mesh, prompts: Sequence[Sequence[int]] = ((5,), (9, 7, 4), (8, 8))
) -> list[list[int]]:
    """Returns 30 tokens after each prompt, more than the window of 24 tokens."""
    state = language_state(config, mesh)
    chunks = generator(config, state)(state, prompts, 30, seed=4, chunk=8)
    return [np.concatenate(row).tolist() for row in zip(*chunks, strict=True)]


def main() -> None:
    processes.initialize()
    mesh = sharding.make_mesh({"fsdp": -1})
    found = translate(translation_config(), mesh), write(language_config("gmlp_attn"), mesh)
    print(json.dumps(found))


if __name__ == "__main__":
    program.run(main, joins=True)
