"""The bidirectional GRU equals torch.nn.GRU, whose outputs make_gru_golden.py wrote."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from common.model.block import Context
from common.model.low_rank import Lora, adapt, linear_layers
from reservoir.recurrent import GATES, BiGru

GOLDEN = Path(__file__).parent / "gru_golden.npz"


def golden() -> tuple[BiGru, dict[str, np.ndarray]]:
    """Returns our layer with PyTorch's weights, and the arrays of gru_golden.npz."""
    values = np.load(GOLDEN)
    width = values["x"].shape[-1]
    layer = BiGru(width, rngs=nnx.Rngs(0))
    for direction, suffix in ((layer.forward, ""), (layer.backward, "_reverse")):
        for gates, letter in ((direction.inputs, "ih"), (direction.states, "hh")):
            # PyTorch stacks the gates reset, update and new along the outputs, the first axis.
            kernels = np.split(values[f"weight_{letter}_l0{suffix}"], 3)
            biases = np.split(values[f"bias_{letter}_l0{suffix}"], 3)
            for name, kernel, bias in zip(GATES, kernels, biases, strict=True):
                gates[name].kernel[...] = jnp.asarray(kernel.T)
                gates[name].bias[...] = jnp.asarray(bias)
    # torch.nn.GRU has no output projection, so `out` is the identity.
    layer.out.kernel[...], layer.out.bias[...] = jnp.eye(width), jnp.zeros(width)
    return layer, values


def test_bigru_matches_pytorch():
    layer, values = golden()
    lengths = values["lengths"]
    found = layer(jnp.asarray(values["x"]), Context(lengths_B=jnp.asarray(lengths)))
    assert len(set(lengths)) == 3
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(
            found[row, :length], values["y"][row, :length], rtol=1e-5, atol=1e-5
        )


def test_bigru_is_independent_of_padding():
    layer, values = golden()
    x, lengths = values["x"], jnp.asarray(values["lengths"])
    changed = x.copy()
    for row, length in enumerate(values["lengths"]):
        changed[row, length:] = 100
    one, other = (layer(jnp.asarray(a), Context(lengths_B=lengths)) for a in (x, changed))
    for row, length in enumerate(values["lengths"]):
        np.testing.assert_array_equal(one[row, :length], other[row, :length])


def test_bigru_without_lengths_reads_every_position():
    layer, values = golden()
    x = jnp.asarray(values["x"])
    whole = Context(lengths_B=jnp.full(len(x), x.shape[1]))
    np.testing.assert_array_equal(layer(x, Context()), layer(x, whole))


@pytest.mark.medium
def test_lora_adapters_of_all_linear_layers_change_the_output():
    """A layer with adapters equals a layer whose kernels are the merged kernels."""
    (layer, values), (merged, _) = golden(), golden()
    x = jnp.asarray(values["x"])
    paths = linear_layers(layer)
    adapt(layer, {path[-1] for path in paths}, Lora(2, 2.0, rate=0.0), rngs=nnx.Rngs(1))
    parents = linear_layers(merged)
    for path, parent in paths.items():
        before, adapter = merged(x, Context()), getattr(parent, path[-1])
        adapter.lora_b[...] = jnp.ones_like(adapter.lora_b[...])
        getattr(parents[path], path[-1]).kernel[...] = adapter.merged()
        after = merged(x, Context())
        assert abs(np.asarray(after - before)).max() > 1e-3, path
        np.testing.assert_allclose(layer(x, Context()), after, rtol=1e-5, atol=1e-5)


def test_invalid_arguments_are_rejected():
    for width, hidden in ((8, 7), (7, 0)):
        with pytest.raises(ValueError, match="two directions has half of them, got 7: change"):
            BiGru(width, hidden=hidden, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="a bidirectional GRU reads later positions"):
        golden()[0].cache(1, None, Context())
