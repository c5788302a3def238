"""The encoder-decoder: outputs against NumPy, masks, and decoding with a cache."""

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict

from common.model.block import Context
from common.model.loss import cross_entropy
from common.model.transformer import compute_dtype
from common.train import flops
from common.variables import AbstractModel
from reservoir.attention_blocks import encoder_block
from reservoir.encoder_decoder import EncoderDecoder
from tests.model import helpers

# Source sentences of 6, 3 and 1 tokens, and target sentences of 5, 4 and 2 tokens.
SOURCE = np.array([[3, 4, 5, 6, 7, 2], [8, 9, 2, 0, 0, 0], [2, 0, 0, 0, 0, 0]])
TARGET = np.array([[1, 3, 4, 5, 6], [1, 7, 8, 9, 0], [1, 3, 0, 0, 0]])


@dataclass
class Case:
    """A model, its random weights and its compiled functions."""

    model: ConfigDict
    abstract_model: AbstractModel
    trainable: dict
    frozen: dict

    @property
    def built(self) -> EncoderDecoder:
        return self.abstract_model.build(self.trainable, self.frozen)

    @property
    def weights(self) -> dict:
        return self.trainable | self.frozen

    @cached_property
    def logits(self):
        """A compiled function (source, target) -> logits."""
        build = self.abstract_model.build
        compiled = jax.jit(lambda t, f, source, target: build(t, f)(source, target))
        return lambda source, target: np.asarray(
            compiled(self.trainable, self.frozen, source, target)
        )

    def loss(self, trainable, source):
        logits = self.abstract_model.build(trainable, self.frozen)(source, TARGET)
        return jnp.sum(cross_entropy(logits[:, :-1], TARGET[:, 1:]) * (TARGET[:, 1:] != 0))

    @cached_property
    def gradients(self):
        """A compiled function (source) -> gradients of the loss with TARGET."""
        compiled = jax.jit(jax.grad(self.loss))
        return lambda source: compiled(self.trainable, source)


def make_case(config: ConfigDict) -> Case:
    abstract_model = helpers.structure_of(config.model)
    values = (abstract_model.trainable, abstract_model.frozen)
    values = [jax.tree.map(jnp.asarray, helpers.random_values(v, 1)) for v in values]
    return Case(config.model, abstract_model, *values)


@pytest.fixture(scope="module")
def pre(make_config) -> Case:
    """Returns a pre-norm model with dropout, and with an FFN reservoir in the encoder."""
    return make_case(make_config("ffn", dropout=0.1, encoder_layers=2))


@pytest.fixture(scope="module")
def post(make_config) -> Case:
    """Returns a post-norm model with learned positions and without reservoirs."""
    return make_case(make_config(norm="post", positions="learned", decoder_layers=1))


@pytest.fixture(params=["pre", "post"])
def case(request) -> Case:
    return request.getfixturevalue(request.param)


def test_forward_matches_numpy(case: Case):
    expected = helpers.forward(case.weights, SOURCE, TARGET, case.model)
    ours = case.logits(SOURCE, TARGET)
    assert ours.dtype == np.float32
    assert expected.std() > 0.5
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)


def test_output_is_independent_of_padding_and_row_order(case: Case):
    padded = np.pad(SOURCE, ((0, 0), (0, 3)))
    np.testing.assert_allclose(
        case.logits(padded[::-1], TARGET[::-1]),
        case.logits(SOURCE, TARGET)[::-1],
        rtol=1e-4,
        atol=1e-4,
    )


def test_decoder_is_causal(case: Case):
    """The Jacobian of the logits with respect to the embedded target tokens is lower triangular over positions."""
    model = case.built
    context = jax.jit(model.encode)(SOURCE[:1])
    direction = np.random.default_rng(0).standard_normal(helpers.TARGET_VOCABULARY)

    def project(x_TD):
        return model.target_embed.logits(model.decoder(x_TD[None], context))[0] @ direction

    x = model.target_embed(TARGET[:1], jnp.float32)[0]
    jacobian_TSD = np.asarray(jax.jit(jax.jacrev(project))(x))
    seen = np.abs(jacobian_TSD).max(-1)
    length = len(x)
    assert np.all(seen[np.triu_indices(length, 1)] == 0)
    assert np.all(seen[np.tril_indices(length)] > 1e-6)


def test_cross_attention_ignores_source_padding(case: Case):
    model = case.built
    lengths = jnp.array([3])
    direction = np.random.default_rng(0).standard_normal(helpers.TARGET_VOCABULARY)
    x_BTD = model.target_embed(TARGET[1:2], jnp.float32)

    def project(x_SD):
        encoded = model.encoder(x_SD[None], Context(lengths_B=lengths))
        context = Context(encoded_BSD=encoded, encoded_lengths_B=lengths)
        return model.target_embed.logits(model.decoder(x_BTD, context))[0] @ direction

    x = model.source_embed(SOURCE[1:2], jnp.float32)[0]
    jacobian_TSD = np.asarray(jax.jit(jax.jacrev(project))(x))
    seen = np.abs(jacobian_TSD).max(-1)
    assert np.all(seen[:, :3] > 1e-6)
    assert np.all(seen[:, 3:] == 0)


def test_padding_row_is_finite_and_has_finite_gradients(post: Case):
    source = np.concatenate([SOURCE[:2], np.zeros_like(SOURCE[:1])])
    # A row without keys gets one key, because some attention kernels fail on a row without keys.
    lengths = jax.jit(lambda source: post.built.encode(source).encoded_lengths_B)(source)
    np.testing.assert_array_equal(lengths, [6, 3, 1])
    assert np.all(np.isfinite(post.logits(source, TARGET)))
    assert all(np.all(np.isfinite(g)) for g in post.gradients(source).values())


def test_learned_positions_get_gradients_at_used_positions(post: Case):
    gradients = post.gradients(SOURCE)
    rows = np.abs(gradients["source_embed/positions/table"]).max(-1)
    assert rows.shape == (32,)
    assert np.all(rows[:6] > 0) and np.all(rows[6:] == 0)


def test_cached_decoding_equals_teacher_forcing(case: Case):
    """Two hypotheses per sentence share the encoder output."""
    beams, longest = 2, 7
    targets = np.random.default_rng(0).integers(3, 11, (3 * beams, longest))
    model = case.built

    @jax.jit
    def decode(targets):
        context = model.encode(SOURCE)

        def step(cache, tokens_and_index):
            tokens, index = tokens_and_index
            logits, cache = model.step(tokens, cache, index, context)
            return cache, logits

        cache = model.cache(len(targets), longest, context)
        return jax.lax.scan(step, cache, (targets.T, jnp.arange(longest)))[1]

    expected = case.logits(np.repeat(SOURCE, beams, axis=0), targets)
    np.testing.assert_allclose(decode(targets).swapaxes(0, 1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.medium
@pytest.mark.parametrize("policy", ["dots", "full"])
def test_remat_does_not_change_gradients(make_config, policy):
    """The model has dropout: the recomputed dropout masks must equal the masks of the forward pass."""
    key = jax.random.key(3)
    x = np.random.default_rng(0).standard_normal((3, 6, 16)).astype(np.float32)
    results = []
    for remat in ("none", policy):
        case = make_case(make_config(dropout=0.3, remat=remat, encoder_layers=2))

        def loss(trainable, case=case):
            encoder = case.abstract_model.build(trainable, {}).encoder
            return jnp.sum(encoder(x, Context(lengths_B=jnp.array([6, 3, 1])), key)[..., 0])

        function = jax.value_and_grad(loss)
        results.append(
            (
                *jax.jit(function)(case.trainable),
                flops.count(jax.make_jaxpr(function)(case.trainable)),
            )
        )
    (loss, gradients, work), (loss_remat, gradients_remat, work_remat) = results
    # FLOPs of the recomputation are not counted.
    assert work_remat == work
    np.testing.assert_allclose(loss, loss_remat, rtol=1e-6)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, gradients_remat[name], rtol=1e-4, atol=1e-5)


def test_dropout_needs_a_key(pre: Case):
    model = pre.built
    run = jax.jit(lambda key: model(SOURCE, TARGET, key))
    first, second = (run(jax.random.key(i)) for i in range(2))
    assert np.abs(first - second).max() > 0.1
    np.testing.assert_array_equal(first, run(jax.random.key(0)))
    plain = pre.logits(SOURCE, TARGET)
    assert np.abs(first - plain).max() > 0.1
    np.testing.assert_array_equal(plain, pre.logits(SOURCE, TARGET))


def test_bfloat16_activations_with_float32_logits_and_gradients(make_config, pre: Case):
    case = make_case(make_config("ffn", dtype="bfloat16", encoder_layers=2))
    assert jax.eval_shape(case.built.encode, SOURCE).encoded_BSD.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        case.logits(SOURCE, TARGET), pre.logits(SOURCE, TARGET), atol=0.3, rtol=0
    )
    gradients = jax.eval_shape(jax.grad(case.loss), case.trainable, SOURCE)
    assert {g.dtype for g in gradients.values()} == {jnp.dtype("float32")}


def test_auto_dtype_is_float32_on_a_cpu(monkeypatch):
    for backend, expected in (("cpu", "float32"), ("gpu", "bfloat16"), ("tpu", "bfloat16")):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        assert compute_dtype("auto") == expected
        assert compute_dtype("bfloat16") == "bfloat16"


def test_heads_must_divide_the_width(make_config):
    with pytest.raises(ValueError, match="not divisible by 3 heads"):
        encoder_block(make_config(heads=3).model, rngs=nnx.Rngs(0))
