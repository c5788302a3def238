"""The paper's models in all recipes: parameter counts, causality, decoding, validation."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from common import variables
from common.errors import UserError
from common.model.block import Context
from common.model.decode_cache import settle
from common.train import optimizer
from configs import language
from gmlp_lm.model import language_model, validate

KINDS = ("gpt", "gmlp", "gmlp_attn")


def parameters(recipe, kind: str) -> int:
    model = recipe(kind, "enwik8").model
    abstract_model = variables.abstract(lambda rngs: language_model(model, 256, rngs=rngs))
    return variables.count(abstract_model)["total"]


def test_authors_code_has_a_tenth_of_the_printed_parameters():
    """Table 1 prints 71 and 72 million parameters; the models of the authors' code have 7.18 and 7.20 million."""
    assert parameters(language.code, "gmlp") == 7_178_864
    assert parameters(language.code, "gmlp_attn") == 7_203_440
    # The authors' "GPT_base" has an unused layer of 512 x 2048 per block. Our model has no such layer.
    unused = 4 * (512 * 2048 + 2048)
    assert parameters(language.code, "gpt") + unused == 6_593_792


def test_parameters_of_the_paper_recipe():
    """Parameters counted by hand for 4 layers, 768 positions and a tied byte embedding. The paper prints 66 to 72 M."""
    width, hidden, length = 768, 2048, 768
    attention = 4 * (width * width + width)
    feed_forward = 2 * width * hidden + hidden + width
    ends = 256 * width + 2 * width  # embedding table and final norm
    gpt = 4 * (attention + feed_forward + 4 * width) + length * width + ends
    half = hidden // 2
    spatial = length * length + length + hidden
    gmlp = 4 * (width * hidden + hidden + spatial + half * width + width + 2 * width) + ends
    tiny = 4 * (3 * width * 64 + 64 * half + half)
    found = [parameters(language.paper, kind) for kind in KINDS]
    assert found == [gpt, gmlp, gmlp + tiny]
    assert max(found) < 25e6


@pytest.mark.parametrize("size", ["", *language.SIZES])
def test_fixed_recipe_has_equal_parameters(size):
    configs = [language.choose(kind, "enwik8", f"fixed,{size}") for kind in KINDS]
    found = [
        variables.count(
            variables.abstract(lambda rngs, c=c: language_model(c.model, 256, rngs=rngs))
        )["total"]
        for c in configs
    ]
    assert max(found) / min(found) < 1.005
    gpt = configs[0].model
    assert gpt.kind == "gpt" and gpt.hidden == 4 * gpt.width and gpt.width % gpt.heads == 0


def test_the_code_recipe_reads_the_same_bytes_of_enwik8_and_enwik9():
    """enwik9 begins with enwik8. The authors train on the first 90 million bytes and validate on the next 5 million."""
    for corpus in ("enwik8", "enwik9"):
        data = language.choose("gmlp", corpus, "code").data
        ends = [round(data.limit * share) for share in data.shares[:2]]
        assert ends == [90_000_000, 5_000_000]
    assert language.choose("gmlp", "enwik9", "paper").data.limit == 0


class Made:
    """A tiny model and its compiled methods. Random weights make every parameter affect the output."""

    def __init__(self, model):
        self.model = model
        self.whole, self.step, self.prefill = map(jax.jit, (model, model.step, model.prefill))


# The quick tests have each recipe and each kind of model once.
QUICK = (("paper", "gpt"), ("code", "gmlp"), ("fixed", "gmlp_attn"))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(pair, marks=[] if pair in QUICK else [pytest.mark.medium])
        for pair in itertools.product(language.RECIPES, KINDS)
    ],
    ids=str,
)
def made(request) -> Made:
    recipe, kind = request.param
    config = language.choose(kind, "enwik8", f"{recipe},tiny").model
    config.update({"width": 16, "hidden": 32, "length": 20, "heads": 2, "dtype": "float32"})
    if config.windows:
        config.windows = (4, 20)
    config.attention = min(config.attention, 3)
    model = language_model(config, 11, rngs=nnx.Rngs(0))
    generator = np.random.default_rng(0)
    abstract_model = variables.split(model)
    values = {
        name: variable.get_value() + 0.3 * generator.normal(size=variable.shape).astype(np.float32)
        for name, variable in abstract_model.trainable.items()
    }
    return Made(abstract_model.build(values, {}))


def test_causality(made):
    """A position's logit has the gradient 0 for embeddings of later tokens, but not for its own token's embedding."""
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 11, (1, 20)))

    model = made.model

    def logit(change_LD):
        x = model.embed(tokens, jnp.float32) + change_LD
        hidden = model.stack(x, Context())
        return model._logits(hidden)[0, :, 0]

    width = model.embed.table.shape[1]
    size = np.abs(np.asarray(jax.jit(jax.jacobian(logit))(jnp.zeros((20, width))))).sum(-1)
    assert (size[np.triu_indices(20, 1)] == 0).all()
    assert (np.diag(size) > 0).all()


@pytest.mark.parametrize("recent", [0, 4])
def test_decoding_matches_the_full_forward_pass(made, recent):
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 11, (2, 20)))
    whole = made.whole(tokens)
    cache = made.model.cache(2, 20, recent)
    for index in range(20):
        logits, cache = made.step(tokens[:, index], cache, index)
        np.testing.assert_allclose(logits, whole[:, index], rtol=1e-3, atol=1e-4)
        if recent and index % 4 == 3:
            cache = settle(cache, 4)


@pytest.mark.parametrize("recent", [0, 4])
@pytest.mark.parametrize("length", [1, 3, 13])
def test_prefill_matches_stepwise_decoding(made, length, recent):
    tokens = jnp.asarray(np.random.default_rng(4).integers(0, 11, (2, 20)))
    whole = made.whole(tokens)
    logits, cache = made.prefill(tokens[:, :length], made.model.cache(2, 20, recent))
    np.testing.assert_allclose(logits, whole[:, length - 1], rtol=1e-3, atol=1e-4)
    for index in range(length, length + 4):
        logits, cache = made.step(tokens[:, index], cache, index)
        np.testing.assert_allclose(logits, whole[:, index], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("length", [1, 3, 13])
def test_logits_of_a_prefix_match_the_longer_text(made, length):
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, 11, (1, 20)))
    np.testing.assert_allclose(
        made.whole(tokens[:, :length]), made.whole(tokens)[:, :length], rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize(
    ("fault", "field", "value"),
    [
        ("one of gpt, gmlp, tiny_attention", "kind", "rnn"),
        ("one of full, toeplitz", "spatial", "fourier"),
        ("one of gpt2, torch", "init", "zeros"),
        ("hidden=33 must be a multiple of 2, which is twice", "hidden", 33),
        ("model.layers must be at least 1", "layers", 0),
        ("model.attention must be at least 0", "attention", -1),
        ("dropout must be a number from 0 to 0.99", "dropout", 1.0),
        (r"windows=4 must have one window length for each .*=2\), got 1", "windows", (4,)),
        ("windows=0,4: all lengths must be whole numbers of at least 1", "windows", (0, 4)),
        ("windows=a,b: all lengths must be whole numbers", "windows", ("a", "b")),
    ],
)
def test_invalid_model_fields_are_rejected(fault, field, value):
    model = language.choose("gmlp", "enwik8", "tiny").model
    with model.ignore_type():
        model[field] = value
    with pytest.raises(UserError, match=fault):
        validate(model)


def test_gpt_rejects_windows_and_odd_width_for_sinusoidal_positions():
    """A GPT must have no windows, so the error does not ask for another number of windows."""
    model = language.choose("gpt", "enwik8", "tiny").model
    model.windows = (4,)
    with pytest.raises(
        UserError, match=r"windows=4 is for .*: set --config.model.windows= \(empty\)"
    ):
        validate(model)
    model.update({"windows": (), "positions": "sinusoidal", "width": 33, "heads": 3})
    with pytest.raises(UserError, match=r"width=33 must be even for .*positions=sinusoidal"):
        validate(model)


@pytest.mark.parametrize(
    "kind", ["gpt", *(pytest.param(kind, marks=pytest.mark.medium) for kind in KINDS[1:])]
)
def test_fixed_recipe_applies_weight_decay_to_matrices_only(kind):
    """A step with zero gradients changes only kernels, matrices over positions and the token embeddings."""
    config = language.choose(kind, "enwik8", "fixed,tiny")

    @jax.jit
    def started():
        model = language_model(config.model, 11, rngs=nnx.Rngs(0))
        return {name: v.get_value() for name, v in variables.split(model).trainable.items()}

    values = started()
    config.optimizer.update({"schedule": "constant"})
    update, _ = optimizer.make(config.optimizer, 10)
    zeros = jax.tree.map(jnp.zeros_like, values)
    updates, _ = jax.jit(update.update)(zeros, update.init(values), values)
    moved = {name.split("/")[-1] for name, change in updates.items() if np.any(change)}
    assert moved == ({"kernel", "table"} if kind == "gpt" else {"kernel", "table", "weight"})
    still = {name for name, change in updates.items() if not np.any(change)}
    assert still == {name for name in values if name.endswith(("bias", "scale", "positions/table"))}
