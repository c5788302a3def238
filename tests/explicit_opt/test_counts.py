"""Co-occurrences, noisy embeddings and tables of eq. (3) against dense NumPy matrices, on one and on eight devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from common import sharding
from explicit_opt.counts import TABLE_AXES, Noise, count_pairs, language_solution, text_sharding
from explicit_opt.language import FeedForward
from explicit_opt.solution import FLOOR

V, W, L = 12, 3, 400
MESHES = [(1, 1, 1), (8, 1, 1), (2, 2, 2), (1, 4, 2)]


@pytest.fixture(scope="module")
def text() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns contexts (W, L), targets (L,) and the number of times that each token is a target (V,).

    Token 0, the padding, is never a target. Token V - 1 is neither a target nor a context.
    """
    generator = np.random.default_rng(0)
    targets = generator.choice(np.arange(1, V - 1), L)
    contexts = np.stack([np.roll(targets, lag) for lag in range(1, W + 1)])
    for lag in range(W):
        contexts[lag, : lag + 1] = 0
    return contexts.astype(np.int32), targets.astype(np.int32), np.bincount(targets, minlength=V)


def mesh(sizes):
    names = dict(zip(sharding.MESH_AXES, sizes, strict=True))
    return sharding.make_mesh(names, jax.devices()[: int(np.prod(sizes))])


def counted(text, sizes) -> jax.Array:
    here = mesh(sizes)
    contexts, targets = (
        jax.device_put(x, place) for x, place in zip(text[:2], text_sharding(here), strict=True)
    )
    return count_pairs(contexts, targets, V, here)


def dense_noise(targets_V: np.ndarray) -> np.ndarray:
    """Builds the noisy embeddings of section 3.1.1. Row v is q_v e_v + (1 - q_v) p, with the unit vector e_v.

    q_v = f_v / (f_v + 1) and p = (1 - f / L) / (V - 1), where f_v is the number of times that token v is a target.
    """
    share = targets_V / targets_V.sum()
    p = (1 - share) / (V - 1)
    rows = [f / (f + 1) * np.eye(V)[n] + (1 - f / (f + 1)) * p for n, f in enumerate(targets_V)]
    return np.array(rows)


def dense_inputs(text, concatenate: bool) -> np.ndarray:
    """Builds the dense matrix of inputs H: (L, V) for a sum, (L, W V) for a concatenation."""
    contexts, _, targets_V = text
    parts = dense_noise(targets_V)[contexts]
    return np.concatenate(list(parts), axis=1) if concatenate else parts.sum(0)


def test_noisy_embedding_rows_sum_to_one(text):
    np.testing.assert_allclose(dense_noise(text[2]).sum(1), 1, atol=1e-12)


@pytest.mark.parametrize("sizes", MESHES)
def test_counts_are_exact_on_every_mesh(text, sizes):
    contexts, targets, _ = text
    expected = np.zeros((W, V, V), int)
    for lag in range(W):
        np.add.at(expected[lag], (contexts[lag], targets), 1)
    found = counted(text, sizes)
    np.testing.assert_array_equal(found, expected)
    place = NamedSharding(mesh(sizes), sharding.spec(TABLE_AXES, (W, V, V), mesh(sizes)))
    assert found.sharding.is_equivalent_to(place, 3)


def test_padding_targets_are_not_counted(text):
    contexts, targets = text[0][:, :8], text[1][:8].copy()
    targets[5:] = -1
    found = count_pairs(jnp.asarray(contexts), jnp.asarray(targets), V, mesh((1, 1, 1)))
    assert int(found.sum()) == 5 * W


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("concatenate", [False, True])
def test_tables_equal_formula_on_dense_inputs(text, concatenate, sizes):
    h, y = dense_inputs(text, concatenate), np.eye(V)[text[1]]
    found_DV = h.T @ y
    totals_V = np.maximum(found_DV.sum(0), FLOOR)
    expected = np.log(np.maximum(found_DV, FLOOR)) - (W - 1) / W * np.log(totals_V)
    noise = Noise.of(text[2])
    tables = language_solution(counted(text, sizes), noise, text[2], concatenate=concatenate)
    assert tables.dtype == jnp.float32
    np.testing.assert_allclose(tables.reshape(-1, V), expected, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("aggregate", ["sum", "cat"])
def test_logits_and_gradients_match_dense_inputs(text, aggregate):
    contexts, targets, targets_V = text
    noise, model = Noise.of(targets_V), FeedForward(V, W, aggregate, "normal", rngs=nnx.Rngs(0))
    h, tables = jnp.asarray(dense_inputs(text, aggregate == "cat")), model.tables.get_value()
    graph, _ = nnx.split(model)

    def fast(tables):
        logits = nnx.merge(graph, nnx.State({"tables": tables}))(contexts.T, noise)
        return -jax.nn.log_softmax(logits)[jnp.arange(L), targets].sum(), logits

    def dense(tables):
        logits = h @ tables.reshape(-1, V)
        return -jax.nn.log_softmax(logits)[jnp.arange(L), targets].sum(), logits

    (_, logits), gradient = jax.value_and_grad(fast, has_aux=True)(tables)
    (_, expected), dense_gradient = jax.value_and_grad(dense, has_aux=True)(tables)
    np.testing.assert_allclose(logits, expected, atol=2e-5)
    np.testing.assert_allclose(gradient, dense_gradient, atol=2e-4)
    # The noise gives every row of the table a gradient, even the row of a token that is never a context.
    assert float(jnp.abs(gradient[:, V - 1]).min()) > 0


def test_32k_vocabulary_fits_when_sharded():
    """Compiles the counting for eight devices, without running it. Each device holds an eighth of a 4 GiB table."""
    here, vocabulary, tokens = mesh((1, 4, 2)), 32768, 2**20
    contexts, targets = (
        jax.ShapeDtypeStruct(shape, jnp.int32, sharding=place)
        for shape, place in zip(((1, tokens), (tokens,)), text_sharding(here), strict=True)
    )
    with jax.enable_x64(True):
        compiled = (
            jax.jit(lambda c, t: count_pairs(c, t, vocabulary, here))
            .lower(contexts, targets)
            .compile()
        )
    used = compiled.memory_analysis()
    table = vocabulary**2 * 4
    assert used.output_size_in_bytes == table // 8
    assert used.temp_size_in_bytes < table // 8 + 2**28


def test_tables_follow_logical_axis_rules():
    axes = (AxisType.Auto,) * 3
    abstract = AbstractMesh((2, 4, 8), sharding.MESH_AXES, axis_types=axes)
    shape = (4, 32768, 32768)
    assert tuple(sharding.spec(TABLE_AXES, shape, abstract)) == (None, "fsdp", "tensor")
