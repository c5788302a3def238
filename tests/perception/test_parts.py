"""Adapters and quantized kernels in users' Flax models, compared with NumPy."""

import ast
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from common.errors import UserError
from common.model.linear import Linear
from gmlp_lm import GatedMLP
from perception import Frozen, LoraLayer, QuantizedLayer, lora, merge, quantize, thaw
from tests.perception.test_quantized import slowly
from tests.tiny_runs import write_tiny_run

RANK, ALPHA = 2, 6.0

ZEROS = nnx.initializers.zeros

LAYERS = {
    "Linear": (lambda **o: nnx.Linear(70, 5, **o), (3, 70), "mr,rn->mn"),
    "heads": (lambda **o: nnx.LinearGeneral(70, (2, 3), **o), (4, 70), "mr,rhk->mhk"),
    "output": (
        lambda **o: nnx.LinearGeneral((2, 3), 4, axis=(-2, -1), **o),
        (5, 2, 3),
        "hkr,rn->hkn",
    ),
    "axes": (
        lambda **o: nnx.LinearGeneral((3, 3), (4, 5), axis=(-1, 1), **o),
        (6, 3, 7, 3),
        "abr,rcd->abcd",
    ),
    "batch": (
        lambda **o: nnx.LinearGeneral(3, 4, batch_axis={0: 2}, **o),
        (2, 5, 3),
        "emr,ern->emn",
    ),
    "Einsum": (
        lambda **o: nnx.Einsum("nta,hba->nthb", (4, 5, 70), (4, 5), **o),
        (2, 3, 70),
        "ar,rhb->hba",
    ),
    "experts": (
        lambda **o: nnx.Einsum("...ed,edf->...ef", (2, 3, 4), **o),
        (5, 2, 3),
        "edr,erf->edf",
    ),
    "ours": (lambda **o: Linear(70, 5, (None, None), **o), (3, 70), "mr,rn->mn"),
}
"""Name -> (function that makes the layer, shape of the layer's input, einsum of the adapter's product A B)."""


class Model(nnx.Module):
    """A user's model."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(9, 6, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 6, decode=False, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(6, 6, rngs=rngs) for _ in range(2)])

    def __call__(self, tokens_BL: jax.Array) -> jax.Array:
        x = self.embed(tokens_BL)
        x = x + self.attention(x)
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return x.mean((1, 2))


TOKENS_BL = np.random.default_rng(0).integers(0, 9, (8, 5))


def normal(shape: tuple[int, ...], seed: int = 0) -> jax.Array:
    # NumPy's random numbers need no compiled program for each shape.
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def plain_layer(name: str) -> nnx.Module:
    """Returns a layer with a random kernel."""
    layer = LAYERS[name][0](rngs=nnx.Rngs(0), kernel_init=ZEROS)
    layer.kernel.set_value(normal(layer.kernel.shape, 2))
    return layer


def adapted(name: str) -> tuple[LoraLayer, np.ndarray]:
    """Returns a layer with an adapter whose B is not 0, and the merged kernel, computed by NumPy."""
    equation = LAYERS[name][2]
    layer = lora(plain_layer(name), rank=RANK, alpha=ALPHA, rngs=nnx.Rngs(1))
    layer.lora_b[...] = normal(layer.lora_b.shape)
    a, b = np.asarray(layer.lora_a[...]), np.asarray(layer.lora_b[...])
    kernel = np.asarray(layer.base.kernel[...])
    return layer, kernel + ALPHA / RANK * np.einsum(equation, a, b)


# Adapters.


@pytest.mark.parametrize("name", LAYERS)
def test_adapter_equals_a_changed_kernel(name: str):
    layer, kernel = adapted(name)
    plain, x = plain_layer(name), normal(LAYERS[name][1], 1)
    plain.kernel.set_value(jnp.asarray(kernel))
    wanted = plain(x)
    np.testing.assert_allclose(layer(x), wanted, rtol=1e-3, atol=1e-4)
    merged = merge(layer)
    assert type(merged) is type(plain)
    np.testing.assert_allclose(merged.kernel[...], kernel, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(merged(x), wanted, rtol=1e-3, atol=1e-4)


def test_an_adapted_model_begins_unchanged_and_trains_adapters_only():
    """As in peft, A is uniform in [-1/sqrt(inputs), 1/sqrt(inputs)], and B is 0."""
    plain = Model(nnx.Rngs(0))(TOKENS_BL)
    model = Model(nnx.Rngs(0))
    assert lora(model, ["query", "layers/1"], rngs=nnx.Rngs(1)) is model
    np.testing.assert_array_equal(model(TOKENS_BL), plain)
    trainable = nnx.to_flat_state(nnx.state(model, nnx.Param))
    assert {path for path, _ in trainable} == {
        *((*layer, name) for layer in [("attention", "query"), ("layers", 1)] for name in AB)
    }
    assert all(isinstance(v, nnx.LoRAParam) for _, v in trainable)
    a = np.asarray(model.attention.query.lora_a[...])
    assert a.shape == (6, 8) and 0.8 * 6**-0.5 < np.abs(a).max() <= 6**-0.5


AB = ("lora_a", "lora_b")


def test_rslora_scale():
    layer = plain_layer("Linear")
    assert lora(layer, rank=2, alpha=6.0, stabilized=True, rngs=nnx.Rngs(0)).scale == 6 / 2**0.5


def test_dropout_affects_only_the_adapter_and_only_in_training():
    layer = lora(plain_layer("Linear"), rank=RANK, dropout=0.5, rngs=nnx.Rngs(1))
    x = normal((3, 70))
    np.testing.assert_array_equal(layer(x), layer.base(x))  # B is 0
    layer.lora_b[...] = normal(layer.lora_b.shape)
    assert not np.allclose(layer(x), layer(x))
    layer.eval()
    np.testing.assert_allclose(layer(x), merge(layer)(x), rtol=1e-4, atol=1e-5)


def test_the_output_keeps_its_dtype():
    layer = plain_layer("Linear")
    layer.dtype = jnp.bfloat16
    assert lora(layer, rank=RANK, rngs=nnx.Rngs(1))(normal((3, 70))).dtype == jnp.bfloat16


def test_a_second_call_adapts_other_layers_and_keeps_the_first_adapters():
    model = lora(Model(nnx.Rngs(0)), ["query"], rank=2, rngs=nnx.Rngs(1))
    lora(model, ["layers/0"], rank=3, rngs=nnx.Rngs(2))
    ranks = {v.shape[-1] for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    assert {2, 3} <= ranks
    with pytest.raises(UserError, match="'query' matches no linear layer without an adapter"):
        lora(model, ["query"], rngs=nnx.Rngs(3))
    lora(model, rngs=nnx.Rngs(4))  # adapts all layers that are not adapted yet
    with pytest.raises(
        UserError, match="all linear layers of the model have an adapter: call merge"
    ):
        lora(model, ["query"], rngs=nnx.Rngs(5))


@pytest.mark.slow
def test_a_gated_mlp_of_this_project_can_be_adapted_and_quantized():
    block = lora(GatedMLP(6, 8, 5, rngs=nnx.Rngs(0)), ["up", "down"], rngs=nnx.Rngs(1))
    x, plain = normal((2, 5, 6)), GatedMLP(6, 8, 5, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(block(x), plain(x))
    np.testing.assert_allclose(quantize(block, bits=8)(x), plain(x), atol=0.05)


# Quantization.


@pytest.mark.parametrize(
    ("name", "bits"), [("Linear", 4), ("output", 4), ("Einsum", 4), ("batch", 8), ("ours", 8)]
)
def test_a_quantized_kernel_matches_a_slow_reference(name: str, bits: int):
    """For a kernel of any shape, a quantization block consists of consecutive inputs of one output."""
    plain, quantized = plain_layer(name), plain_layer(name)
    quantized.kernel = Frozen(quantized.kernel[...])
    quantized = quantize(quantized, bits)
    axes = quantized.layer.kernel.axes
    matrices = axes.to_matrices(np.asarray(plain.kernel[...]))
    slow = np.stack([slowly(matrix, {4: "4bit", 8: "int8"}[bits]) for matrix in matrices])
    wanted = axes.from_matrices(np.float32(slow), plain.kernel.shape)
    np.testing.assert_allclose(quantized.layer.kernel[...], wanted, rtol=1e-5, atol=1e-6)
    plain.kernel.set_value(jnp.asarray(wanted))
    x = normal(LAYERS[name][1], 1)
    np.testing.assert_allclose(quantized(x), plain(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("bits", "bytes_per_weight"), [(4, 4.5 / 8), (8, 8.5 / 8)])
def test_size_of_a_quantized_kernel_in_bytes(bits: int, bytes_per_weight: float):
    layer = nnx.Linear(128, 32, use_bias=False, kernel_init=ZEROS, rngs=nnx.Rngs(0))
    layer.kernel = Frozen(layer.kernel[...])
    state = nnx.state(quantize(layer, bits))
    assert sum(x.nbytes for x in jax.tree.leaves(state)) == bytes_per_weight * 128 * 32


def test_the_backward_pass_stores_codes_not_the_kernel():
    layer = nnx.Linear(128, 32, use_bias=False, kernel_init=ZEROS, rngs=nnx.Rngs(0))
    layer.kernel = Frozen(layer.kernel[...])
    graphdef, state = nnx.split(quantize(layer, 4))
    _, backward = jax.vjp(lambda x: nnx.merge(graphdef, state)(x), jnp.ones((8, 128)))
    kept = [x for x in jax.tree.leaves(backward) if x.shape != (8, 128)]
    assert sum(x.nbytes for x in kept) < 128 * 32  # the unquantized kernel has 4 * 128 * 32 bytes


@pytest.mark.medium
def test_adapters_may_be_added_before_and_after_quantization():
    first = quantize(lora(Model(nnx.Rngs(0)), ["query", "layers/0"], rngs=nnx.Rngs(1)), 4)
    second = Model(nnx.Rngs(0))
    lora(second, ["value"], rngs=nnx.Rngs(3))  # freezes the model
    merge(second)
    quantize(second, 4)
    lora(second, ["query", "layers/0"], rngs=nnx.Rngs(1))
    assert isinstance(first.attention.query.base, QuantizedLayer)
    for model in (first, second):
        model.layers[0].lora_b[...] = normal(model.layers[0].lora_b.shape)
    np.testing.assert_allclose(first(TOKENS_BL), second(TOKENS_BL), rtol=1e-5)
    merged = thaw(merge(first))
    np.testing.assert_allclose(merged(TOKENS_BL), second(TOKENS_BL), rtol=1e-4, atol=1e-5)
    assert type(merged.layers[0]) is nnx.Linear
    assert isinstance(merged.layers[0].kernel, nnx.Param)
    assert isinstance(merged.layers[1].layer.kernel.codes, Frozen)


@pytest.mark.medium
def test_adapters_train_while_quantized_kernels_stay():
    model = quantize(lora(Model(nnx.Rngs(0)), dropout=0.1, rngs=nnx.Rngs(1)), 4)
    before = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model, Frozen)))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2, weight_decay=0.1), wrt=nnx.Param)

    def error(model: Model) -> jax.Array:
        return jnp.square(model(TOKENS_BL) - 1).mean()

    @nnx.jit
    def step(model, optimizer):
        loss, gradients = nnx.value_and_grad(error)(model)
        optimizer.update(model, gradients)
        return loss

    losses = [step(model, optimizer) for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]
    after = nnx.to_pure_dict(nnx.state(model, Frozen))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    # jax.jit on the parts of nnx.split gives the same gradients.
    model.eval()
    graphdef, trainable, rest = nnx.split(model, nnx.Param, ...)
    pure = jax.jit(jax.grad(lambda t, r: error(nnx.merge(graphdef, t, r))))(trainable, rest)
    wanted = nnx.grad(error)(model)
    for (_, ours), (_, theirs) in zip(*map(nnx.to_flat_state, (pure, wanted)), strict=True):
        np.testing.assert_allclose(ours[...], theirs[...], rtol=1e-4, atol=1e-6)
    # Load the adapters into another model with the same structure.
    other = quantize(lora(Model(nnx.Rngs(0)), dropout=0.1, rngs=nnx.Rngs(9)), 4)
    other.eval()
    nnx.update(other, trainable)
    np.testing.assert_allclose(other(TOKENS_BL), model(TOKENS_BL), rtol=1e-6)


# Errors and examples.


def test_einsum_without_a_kernel_matrix_is_not_adapted():
    """The einsum of the model is an elementwise product."""
    model = nnx.Module()
    model.scale = nnx.Einsum("bd,d->bd", (4,), rngs=nnx.Rngs(0), kernel_init=nnx.initializers.ones)
    with pytest.raises(UserError, match="no linear layer to adapt"):
        lora(model, ["scale"], rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match="no linear layer to quantize"):
        quantize(model)


def test_quantize_refuses_trained_and_quantized_kernels():
    model = nnx.Dict(layer=nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    with pytest.raises(UserError, match="no linear layer has a frozen kernel: freeze"):
        quantize(model)
    model.layer.kernel = Frozen(model.layer.kernel[...])
    quantize(model)
    with pytest.raises(UserError, match="quantized already: call quantize only once"):
        quantize(model)


@pytest.mark.medium
def test_examples_run(capsys, tmp_path, monkeypatch):
    write_tiny_run("perception", tmp_path)
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "perception" / "PYTHON.md").read_text()
    names: dict = {}
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(code, "PYTHON.md", "exec"), names)
    *accuracies, labels = capsys.readouterr().out.split(maxsplit=3)
    before, after, merged = map(float, accuracies)
    full, empty = ast.literal_eval(labels)
    assert full["label"] and not empty["label"]
    assert after > before + 0.1
    assert abs(merged - after) < 0.02


class Tied(nnx.Module):
    """Two linear layers that share one kernel variable."""

    def __init__(self):
        self.first, self.second = (nnx.Linear(6, 6, rngs=nnx.Rngs(seed)) for seed in (0, 1))
        self.second.kernel = self.first.kernel

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(jnp.tanh(self.first(x)))


@pytest.mark.medium
def test_merging_into_a_shared_kernel_keeps_the_outputs():
    model = Tied()
    lora(model, rank=2, rngs=nnx.Rngs(3))
    nnx.update(model, jax.tree.map(lambda value: value + 0.1, nnx.state(model, nnx.LoRAParam)))
    x = jnp.linspace(-1, 1, 12).reshape(2, 6)
    before = model(x)
    merge(model)
    np.testing.assert_allclose(model(x), before, rtol=1e-5, atol=1e-5)
    assert model.first.kernel is not model.second.kernel


def stacked(make) -> nnx.Module:
    return nnx.vmap(make)(nnx.Rngs(0).fork(split=2))


def part_types(model) -> list[tuple]:
    return [(path, type(part)) for path, part in nnx.iter_graph(model)]


def test_a_merged_layer_that_its_model_still_contains_adds_no_second_adapter():
    layer, kernel = adapted("Linear")
    model = nnx.Dict(layer=layer)
    x = normal((3, 70))
    before = model.layer(x)
    for part in (model.layer, model):
        merge(part)
        np.testing.assert_allclose(model.layer(x), before, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(model.layer.kernel[...], kernel, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bits", [None, 8])
def test_stacked_adapters_are_merged_inside_vmap_only(bits: int | None):
    def make(rngs: nnx.Rngs) -> nnx.Dict:
        layer = lora(nnx.Linear(6, 6, rngs=rngs), rank=2, rngs=rngs)
        layer.lora_b[...] = jnp.ones((2, 6))
        return nnx.Dict(up=quantize(layer, bits) if bits else layer)

    single = lora(nnx.Linear(6, 6, rngs=nnx.Rngs(0)), rank=2, rngs=nnx.Rngs(0))
    single.lora_b[...] = jnp.ones((2, 6))
    model = nnx.Dict(single=single, stack=stacked(make))
    x, run = normal((3, 6)), nnx.vmap(lambda layer, x: layer.up(x), in_axes=(0, None))
    before, types, first = run(model.stack, x), part_types(model), model.single(x)
    with pytest.raises(
        UserError, match=r"^stack/up/lora_b has 3 dim.* nnx.vmap\(lambda x: merge\(x\)\)"
    ):
        merge(model)
    assert part_types(model) == types
    np.testing.assert_array_equal(model.single(x), first)
    nnx.vmap(lambda x: merge(x))(model.stack)
    assert type(model.stack.up) is nnx.Linear
    np.testing.assert_allclose(run(model.stack, x), before, rtol=1e-4, atol=1e-5)


def test_stacked_layers_that_are_not_selected_do_not_matter():
    model = nnx.Dict(emb=nnx.Linear(6, 6, rngs=nnx.Rngs(0)))
    model.stack = stacked(lambda rngs: nnx.Dict(up=nnx.Linear(6, 6, rngs=rngs)))
    model.emb.kernel = Frozen(model.emb.kernel[...])
    assert isinstance(quantize(model).emb, QuantizedLayer)
    lora(model, ["emb"], rngs=nnx.Rngs(0))
    assert isinstance(model.emb, LoraLayer) and type(model.stack.up) is nnx.Linear
    with pytest.raises(UserError, match=r"^stack/up/kernel has 3 dimensions instead of 2"):
        lora(model, ["up"], rngs=nnx.Rngs(0))
    quantized = stacked(lambda rngs: quantize(lora(nnx.Linear(6, 6, rngs=rngs), rngs=rngs)).base)
    with pytest.raises(UserError, match=r"^up/layer/kernel/codes has 4 dimensions instead of 3"):
        lora(nnx.Dict(up=quantized), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("target", ["a", "layers/0"])
def test_a_shared_layer_is_a_target_by_each_of_its_paths(target: str):
    layer = nnx.Linear(6, 6, rngs=nnx.Rngs(0))
    layers = nnx.List([layer, nnx.Linear(6, 6, rngs=nnx.Rngs(1))])
    model = nnx.Dict(a=layer, layers=layers)
    with pytest.raises(UserError, match="choose among layers/0, a, layers/1"):
        lora(model, ["b"], rngs=nnx.Rngs(0))
    lora(model, [target], rngs=nnx.Rngs(0))
    assert isinstance(model.a, LoraLayer) and model.layers[0] is model.a
    assert type(model.layers[1]) is nnx.Linear


def test_a_missing_attribute_of_a_changed_layer_tells_where_the_layer_is():
    layer = lora(plain_layer("Linear"), rngs=nnx.Rngs(0))
    with pytest.raises(AttributeError, match=r"'kernel': its attribute `base` .* merge\(model\)"):
        _ = layer.kernel
    with pytest.raises(AttributeError, match="'kernel': its attribute `layer`"):
        _ = quantize(layer).base.kernel
