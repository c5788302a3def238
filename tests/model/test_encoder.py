"""The encoder and its output layers: outputs against NumPy, padding, and hidden states."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict

from common import variables
from common.variables import AbstractModel
from configs import masked
from reservoir import encoder
from tests.model.helpers import Weights, below, gelu, layer_norm, linear, random_values, stack

VOCABULARY, LENGTH = 23, 9
TOKENS = np.array(
    [[1, 7, 9, 22, 4, 2, 0, 0, 0], [1, 5, 5, 6, 22, 8, 9, 10, 2], [1, 2, 0, 0, 0, 0, 0, 0, 0]]
)
LENGTHS = np.array([6, 9, 2])
PLACES = np.array([[3, 1], [4, 8], [0, 1]])


def small(reservoir: str = "ffn", **fields: object) -> ConfigDict:
    model = masked.tiny(masked.roberta(reservoir)).model
    model.update({"width": 8, "hidden": 12, "heads": 2, "max_length": LENGTH, "dropout": 0.5})
    model.update(fields)
    return model


def made(model: ConfigDict) -> tuple[AbstractModel, dict, dict]:
    """Returns the abstract model, and random trainable and frozen values."""
    abstract_model = variables.abstract(
        lambda rngs: encoder.masked_lm(model, VOCABULARY, rngs=rngs)
    )
    return (
        abstract_model,
        jax.tree.map(jnp.asarray, random_values(abstract_model.trainable, 1)),
        jax.tree.map(jnp.asarray, random_values(abstract_model.frozen, 2)),
    )


def states(weights: Weights, model: ConfigDict, tokens: np.ndarray) -> list[np.ndarray]:
    """Returns the hidden states of one row without padding, from NumPy."""
    embed = below(weights, "encoder/embed")
    x = embed["table"][tokens] + embed["positions/table"][: len(tokens)]
    found = [layer_norm(below(weights, "encoder/norm"), x)]
    blocks = below(weights, "encoder/stack")
    for layer in range(model.encoder_layers):
        one = {n.replace(f"blocks/{layer}/", "blocks/0/"): v for n, v in blocks.items()
               if n.startswith(f"blocks/{layer}/")}  # fmt: skip
        found.append(stack(one, found[-1], model, len(tokens), None))
    return found


def logits(weights: Weights, x: np.ndarray) -> np.ndarray:
    head = below(weights, "head")
    hidden = layer_norm(below(head, "norm"), gelu(linear(below(head, "dense"), x)))
    return hidden @ np.asarray(weights["encoder/embed/table"], np.float64).T + head["bias"]


@pytest.mark.parametrize("reservoir", ["none", "transformer", "ffn"])
def test_masked_language_model_matches_numpy(reservoir):
    model = small(reservoir)
    abstract_model, trainable, frozen = made(model)
    assert bool(frozen) == (reservoir != "none")
    network = abstract_model.build(trainable, frozen)
    hidden = jax.jit(network.encoder.hidden)(TOKENS, LENGTHS)
    found = jax.jit(network)(TOKENS, LENGTHS, PLACES)
    assert len(hidden) == 1 + model.encoder_layers
    for row, (tokens, length, places) in enumerate(zip(TOKENS, LENGTHS, PLACES, strict=True)):
        expected = states({**trainable, **frozen}, model, tokens[:length])
        for one, other in zip(hidden, expected, strict=True):
            np.testing.assert_allclose(one[row, :length], other, rtol=1e-4, atol=1e-5)
        last = logits({**trainable, **frozen}, expected[-1])
        np.testing.assert_allclose(found[row], last[places], rtol=1e-4, atol=1e-5)


def test_encoder_ignores_padding():
    """The output does not depend on the length of the padding, nor on its tokens."""
    abstract_model, trainable, frozen = made(small())
    network = jax.jit(abstract_model.build(trainable, frozen).encoder)
    alone = network(jnp.asarray(TOKENS[:1, :6]), jnp.asarray([6]))
    for fill in (0, 13):
        padded = np.full((1, LENGTH), fill)
        padded[0, :6] = TOKENS[0, :6]
        beside = network(jnp.asarray(padded), jnp.asarray([6]))
        np.testing.assert_allclose(beside[0, :6], alone[0], rtol=1e-5, atol=1e-6)


def test_padding_row_is_finite_and_has_finite_gradients():
    abstract_model, trainable, frozen = made(small())

    def total(trainable):
        network = abstract_model.build(trainable, frozen)
        empty = jnp.zeros((1, LENGTH), jnp.int32)
        return jnp.square(network(empty, jnp.zeros(1, jnp.int32), jnp.asarray([[0, 1]]))).sum()

    gradients = jax.jit(jax.grad(total))(trainable)
    assert all(np.isfinite(g).all() for g in gradients.values())


def test_last_hidden_state_is_the_output_before_the_final_norm():
    tokens, lengths = jnp.asarray(TOKENS), jnp.asarray(LENGTHS)
    for norm in ("post", "pre"):
        abstract_model, trainable, frozen = made(small(norm=norm))
        network = abstract_model.build(trainable, frozen).encoder
        last = jax.jit(network.hidden)(tokens, lengths)[-1]
        last = last if norm == "post" else network.stack.norm(last)
        np.testing.assert_allclose(jax.jit(network)(tokens, lengths), last, rtol=1e-5, atol=1e-6)


def test_encoder_dropout_needs_a_key_and_includes_embeddings():
    abstract_model, trainable, frozen = made(small(encoder_layers=1, reservoir="none"))
    network = abstract_model.build(trainable, frozen).encoder
    embedded = network._enter(jnp.asarray(TOKENS), jax.random.key(0))
    assert 0.3 < float((embedded == 0).mean()) < 0.7
    assert not (np.asarray(network._enter(jnp.asarray(TOKENS), None)) == 0).any()


def test_initial_values_of_trained_and_frozen_layers():
    model = small("transformer", width=64, hidden=128)
    network = encoder.masked_lm(model, 500, rngs=nnx.Rngs(0))
    abstract_model = variables.split(network)
    for name, variable in abstract_model.trainable.items():
        value = np.asarray(variable.get_value())
        if name.endswith(("kernel", "table")):
            assert abs(value.std() - 0.02) < 0.002, name
        else:
            assert (value == (1 if name.endswith("scale") else 0)).all(), name
    kernel = abstract_model.frozen["encoder/stack/blocks/1/residuals/0/function/query/kernel"]
    assert kernel.get_metadata("draw") == ("orthogonal", 1.0)


@pytest.mark.medium
def test_parameter_count_of_roberta_base():
    """The published model has 124,697,433 parameters.

    These include embeddings of two positions and of a segment, which our model lacks.
    """
    abstract_model = variables.abstract(
        lambda rngs: encoder.masked_lm(masked.roberta("none").model, 50_265, rngs=rngs)
    )
    assert variables.count(abstract_model)["total"] == 124_697_433 - 3 * 768
