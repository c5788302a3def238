"""Frozen layers and backskipping in users' Flax models."""

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
from reservoir import Backskip, Frozen, freeze, is_skipping_step, thaw
from tests.tiny_runs import write_tiny_run

ROOT = Path(__file__).parents[2]
D, H = 6, 8


class Model(nnx.Module):
    """A user's model: single parameters, lists, dictionaries, attention, tied weights."""

    def __init__(self, rngs: nnx.Rngs):
        self.token = nnx.Param(jnp.arange(float(D)))
        self.layers = nnx.List([nnx.Linear(D, D, rngs=rngs) for _ in range(3)])
        self.heads = nnx.data({"attention": nnx.MultiHeadAttention(2, D, decode=False, rngs=rngs)})
        self.norm = nnx.LayerNorm(D, rngs=rngs)
        self.tied = self.layers[1].kernel

    def __call__(self, x_BD: jax.Array) -> jax.Array:
        x_BD = x_BD + self.token[...]
        for layer in self.layers:
            x_BD = jnp.tanh(layer(x_BD))
        return self.norm(self.heads["attention"](x_BD[:, None])[:, 0]) @ self.tied[...]


X_BD = np.random.default_rng(0).standard_normal((5, D)).astype(np.float32)


def model() -> Model:
    return Model(nnx.Rngs(0))


def values(module: nnx.Module, kind: type[nnx.Variable]) -> dict[str, np.ndarray]:
    flat = nnx.to_flat_state(nnx.state(module, kind))
    return {"/".join(map(str, path)): np.array(v.get_value()) for path, v in flat}


def error(model: nnx.Module) -> jax.Array:
    return jnp.square(model(X_BD) - 1).mean()


# Freezing.


def test_freeze_draws_orthogonal_kernels_and_keeps_other_parameters():
    before, made = values(model(), nnx.Param), model()
    assert freeze(made, rngs=nnx.Rngs(1)) is made
    after = values(made, Frozen)
    assert not values(made, nnx.Param)
    assert set(after) == set(before)
    for name, value in after.items():
        if not name.endswith("kernel"):
            np.testing.assert_array_equal(value, before[name])
            continue
        assert not np.allclose(value, before[name])
        # Attention kernels have the shape (D, heads, D / heads); the output kernel has (heads, D / heads, D).
        inputs = D
        matrix = value.reshape(inputs, D)
        np.testing.assert_allclose(matrix @ matrix.T, np.eye(inputs), atol=1e-5)
    assert made.tied is made.layers[1].kernel
    twice = [made.layers[0].kernel[...], made.layers[2].kernel[...]]
    assert not np.allclose(*twice)


@pytest.mark.parametrize(
    ("layer", "matrices"),
    [
        (lambda r: nnx.Linear(3, H, rngs=r), lambda k: [k]),
        (
            lambda r: nnx.LinearGeneral((2, 3), (4, 5), axis=(1, -1), rngs=r),
            lambda k: [k.reshape(6, 20)],
        ),
        (
            lambda r: nnx.LinearGeneral(3, 4, batch_axis={0: 2}, rngs=r),
            lambda k: list(k),
        ),
        (
            lambda r: nnx.Einsum("nta,hab->nthb", (4, 3, 5), rngs=r),
            lambda k: [k.transpose(1, 0, 2).reshape(3, 20)],
        ),
        (
            lambda r: nnx.Einsum("ebd,edf->ebf", (2, 3, 4), rngs=r),
            lambda k: list(k),
        ),
        (lambda r: nnx.Conv(3, 4, (2, 2), rngs=r), lambda k: [k.reshape(12, 4)]),
    ],
)
def test_a_kernel_of_any_shape_is_orthogonal_from_inputs_to_outputs(layer, matrices):
    made = freeze(layer(nnx.Rngs(0)), rngs=nnx.Rngs(1))
    for matrix in matrices(np.asarray(made.kernel[...])):
        small = matrix @ matrix.T if len(matrix) <= len(matrix.T) else matrix.T @ matrix
        np.testing.assert_allclose(small, np.eye(len(small)), atol=1e-5)


def test_other_initializers():
    wide = freeze(nnx.Linear(100, 60, rngs=nnx.Rngs(0)), "xavier", rngs=nnx.Rngs(1))
    bound = (6 / 160) ** 0.5
    assert 0.98 * bound < np.abs(wide.kernel[...]).max() <= bound
    ones = freeze(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.initializers.ones, rngs=nnx.Rngs(1))
    np.testing.assert_array_equal(ones.kernel[...], np.ones((2, 3)))
    kept = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    kernel = np.array(kept.kernel[...])
    np.testing.assert_array_equal(freeze(kept, None).kernel[...], kernel)
    half = nnx.Linear(2, 3, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert freeze(half, rngs=nnx.Rngs(1)).kernel.dtype == jnp.bfloat16


def test_frozen_init_of_a_layer_replaces_the_default_distributions():
    """In a trained gMLP, the matrix over positions starts near 0. A matrix frozen near 0 would never mix positions."""
    made = freeze(GatedMLP(D, H, length=7, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    frozen = values(made, Frozen)
    (spatial,) = (value for name, value in frozen.items() if name.endswith("spatial/weight"))
    assert 0.8 < np.square(spatial).sum(-1).mean() < 1.2
    assert not values(made, nnx.Param)


def test_argument_only_selects_parameters_and_metadata_are_kept():
    made = model()
    made.layers[1].kernel.set_metadata(note="mine")
    freeze(made, only=nnx.PathContains(1), rngs=nnx.Rngs(1))
    assert set(values(made, Frozen)) == {"layers/1/bias", "layers/1/kernel"}
    assert made.layers[1].kernel.get_metadata("note") == "mine"
    thaw(made)
    assert set(values(made, nnx.Param)) == set(values(model(), nnx.Param))
    assert made.layers[1].kernel.get_metadata("note") == "mine"


@pytest.mark.parametrize("name", ["first", "second", "again"])
def test_a_shared_parameter_is_selected_by_each_of_its_paths(name: str):
    first, second = (nnx.Linear(D, D, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    second.kernel = first.kernel
    made = nnx.Dict(first=first, second=second, other=nnx.Dict(again=second))
    freeze(made, None, only=nnx.PathContains(name))
    assert isinstance(made.first.kernel, Frozen) and made.second.kernel is made.first.kernel
    assert made.other.again is made.second
    assert isinstance(made.first.bias, Frozen) == (name == "first")
    assert isinstance(made.second.bias, Frozen) == (name != "first")


def test_a_module_that_contains_its_parent_is_frozen():
    made = nnx.Dict(child=nnx.Dict(layer=nnx.Linear(D, D, rngs=nnx.Rngs(0))))
    made.child.parent = made
    assert isinstance(freeze(made, None).child.layer.kernel, Frozen)


def test_a_drawn_kernel_keeps_its_sharding():
    layer = nnx.Linear(D, H, rngs=nnx.Rngs(0))
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.P(None, "model"))
    layer.kernel.set_value(jax.device_put(layer.kernel.get_value(), sharding))
    before = np.array(layer.kernel[...])
    freeze(layer, rngs=nnx.Rngs(1))
    assert layer.kernel.get_value().sharding == sharding
    assert not np.array_equal(layer.kernel[...], before)
    plain = freeze(nnx.Linear(D, H, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    assert not plain.kernel.get_value().committed
    np.testing.assert_array_equal(plain.kernel[...], layer.kernel[...])


def test_thaw_restores_the_class_of_a_variable():
    made = nnx.Dict(a=nnx.LoRAParam(jnp.ones(2), note="mine"), b=nnx.Param(jnp.ones(2)))
    metadata = made.a.get_metadata()
    thaw(freeze(made, None))
    assert type(made.a) is nnx.LoRAParam and type(made.b) is nnx.Param
    assert made.a.get_metadata() == metadata


def test_freeze_warns_if_its_initializer_draws_nothing():
    with pytest.warns(UserWarning, match="init='orthogonal' drew no value") as caught:
        freeze(nnx.LayerNorm(D, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    assert caught[0].filename == __file__


def test_a_single_parameter_is_frozen_at_its_value():
    made = model()
    made.token = freeze(made.token)
    assert isinstance(made.token, Frozen)
    np.testing.assert_array_equal(made.token[...], np.arange(D))


@pytest.mark.medium
def test_an_optimizer_without_a_mask_does_not_change_frozen_values():
    """Frozen values have no weight decay, no moments and no share in the gradient norm."""
    made = freeze(model(), only=nnx.PathContains("layers"), rngs=nnx.Rngs(1))
    before = values(made, Frozen)
    update = optax.chain(optax.clip_by_global_norm(1e-3), optax.adamw(0.1, weight_decay=0.5))
    optimizer = nnx.Optimizer(made, update, wrt=nnx.Param)
    moments = {x.shape for x in jax.tree.leaves(optimizer.opt_state) if x.ndim}
    assert moments == {value.shape for value in values(made, nnx.Param).values()}

    @nnx.jit
    def step(model, optimizer):
        loss, gradients = nnx.value_and_grad(error)(model)
        optimizer.update(model, gradients)
        return loss, optax.global_norm(nnx.state(gradients))

    first, norm = step(made, optimizer)
    graphdef, _, frozen = nnx.split(made, nnx.Param, Frozen)
    assert {path[0] for path, _ in nnx.to_flat_state(frozen)} == {
        "layers"
    }  # `tied` is the frozen kernel of layers/1, and NNX lists a shared variable once.

    def loss(trainable, frozen):
        return error(nnx.merge(graphdef, trainable, frozen))

    fresh = freeze(model(), only=nnx.PathContains("layers"), rngs=nnx.Rngs(1))
    start = nnx.split(fresh, nnx.Param, Frozen)[1:]
    gradients = jax.jit(jax.grad(loss))(*start)
    np.testing.assert_allclose(norm, optax.global_norm(gradients), rtol=1e-5)
    for _ in range(20):
        last, _ = step(made, optimizer)
    assert last < first
    after = values(made, Frozen)
    assert all(np.array_equal(after[name], value) for name, value in before.items())
    # `nnx.split` and `nnx.update` restore the values in a new model.
    other = freeze(Model(nnx.Rngs(5)), only=nnx.PathContains("layers"), rngs=nnx.Rngs(6))
    nnx.update(other, *nnx.split(made, nnx.Param, Frozen)[1:])
    np.testing.assert_array_equal(other(X_BD), made(X_BD))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (lambda rngs: nnx.Linear(2, 3, rngs=rngs), "^kernel has 3 dimensions instead of 2"),
        (lambda rngs: nnx.Conv(2, 3, (2,), rngs=rngs), "^kernel has 4 dimensions instead of 3"),
        (
            lambda rngs: Linear(2, 3, ("embed", "mlp"), rngs=rngs),
            "^kernel has 3 dim.* instead of 2",
        ),
    ],
)
def test_stacked_layers_raise_user_errors(layer, message):
    stacked = nnx.vmap(layer)(nnx.Rngs(0).fork(split=2))
    with pytest.raises(UserError, match=message):
        freeze(stacked, rngs=nnx.Rngs(1))
    assert isinstance(freeze(stacked, None).kernel, Frozen)


def test_stacked_layers_are_frozen_inside_vmap():
    layers = nnx.vmap(lambda rngs: nnx.Linear(D, D, rngs=rngs))(nnx.Rngs(0).fork(split=2))
    nnx.vmap(lambda layer, rngs: freeze(layer, rngs=rngs))(layers, nnx.Rngs(1).fork(split=2))
    first, second = np.asarray(layers.kernel[...])
    assert isinstance(layers.kernel, Frozen) and not np.allclose(first, second)
    for kernel in (first, second):
        np.testing.assert_allclose(kernel @ kernel.T, np.eye(D), atol=1e-5)


def test_unknown_name_of_a_package_raises_an_import_error():
    with pytest.raises(ImportError, match="thawed"):
        from reservoir import thawed  # noqa: F401


def test_parameter_in_a_tuple_raises_user_error():
    made = nnx.Module()
    made.pair = nnx.data((nnx.Param(jnp.ones(2)),))
    with pytest.raises(UserError, match="pair/0 of the model, because it is in a tuple"):
        freeze(made, None)


# Backskipping.


class Below(nnx.Module):
    """A trained layer, a reservoir that may be skipped, and a trained layer."""

    def __init__(self, reservoir: nnx.Module, rngs: nnx.Rngs, width: int = D, **options):
        self.below = nnx.Linear(D, D, rngs=rngs)
        self.reservoir = Backskip(reservoir, D, rngs=rngs, **options)
        self.above = nnx.Linear(width, D, rngs=rngs)

    def __call__(self, x_BD: jax.Array) -> jax.Array:
        return self.above(self.reservoir(self.below(x_BD)))


def skipped(estimator: str, reservoir=None, **options) -> Below:
    reservoir = reservoir or freeze(nnx.Linear(D, D, rngs=nnx.Rngs(1)), rngs=nnx.Rngs(2))
    return Below(reservoir, nnx.Rngs(3), estimator=estimator, **options)


gradients_of = nnx.jit(nnx.grad(lambda model, x: jnp.square(model(x)).mean()))


def gradients(made: Below, *, skipping: bool) -> dict[str, np.ndarray]:
    made.set_attributes(skipping=skipping)
    made.reservoir.rngs.count[...] = jnp.uint32(0)
    found = nnx.to_flat_state(gradients_of(made, X_BD))
    return {"/".join(map(str, path)): np.array(v.get_value()) for path, v in found}


@pytest.mark.parametrize("estimator", ["policy", "identity", "zero", "noise"])
def test_a_skipping_step_changes_only_the_gradients_below_the_reservoir(estimator: str):
    made = skipped(estimator, reward="own_rms")
    ordinary, skipping = (gradients(made, skipping=skipping) for skipping in (False, True))
    assert set(ordinary) == set(skipping)
    assert any("baseline" in name for name in ordinary) == (estimator == "policy")
    for name, gradient in ordinary.items():
        same = not name.startswith("below") or estimator == "noise"
        assert np.allclose(gradient, skipping[name], rtol=1e-4, atol=1e-7) == same, name
    assert np.any(skipping["below/kernel"]) == (estimator != "zero")


@pytest.mark.parametrize("estimator", ["policy", "zero", "noise"])
def test_output_may_have_another_width_than_the_input(estimator: str):
    reservoir = freeze(nnx.Linear(D, D // 2, rngs=nnx.Rngs(1)), rngs=nnx.Rngs(2))
    made = skipped(estimator, reservoir, width=D // 2, reward="own_rms")
    assert np.any(gradients(made, skipping=True)["below/kernel"]) == (estimator != "zero")


def test_estimator_identity_is_exact_for_an_identity_reservoir():
    made = skipped("identity", lambda x: x)
    ordinary, skipping = (gradients(made, skipping=skipping) for skipping in (False, True))
    for name, gradient in ordinary.items():
        np.testing.assert_allclose(skipping[name], gradient, rtol=1e-5, atol=1e-7)


def test_evaluation_adds_no_noise():
    made = skipped("policy")
    made.eval()
    plain = made.above(made.reservoir.function(made.below(X_BD)))
    np.testing.assert_allclose(made(X_BD), plain, rtol=1e-6)
    made.train()
    assert not np.allclose(made(X_BD), made(X_BD))
    seen = nnx.view(made, deterministic=True)
    np.testing.assert_allclose(seen(X_BD), plain, rtol=1e-6)
    assert nnx.view(made, skipping=True).reservoir.skipping and not made.reservoir.skipping


def test_remat_changes_no_gradient_of_a_skipping_step():
    made = skipped("policy", reward="own_rms")
    expected = gradients(made, skipping=True)
    made.reservoir.rngs.count[...] = jnp.uint32(0)
    block = nnx.remat(lambda model, x: model(x))
    found = nnx.jit(nnx.grad(lambda model: jnp.square(block(model, X_BD)).mean()))(made)
    for path, gradient in nnx.to_flat_state(found):
        name = "/".join(map(str, path))
        np.testing.assert_allclose(gradient[...], expected[name], rtol=1e-4, atol=1e-7)


def test_a_scan_over_batches_equals_a_loop():
    made, other = skipped("policy"), skipped("policy")
    batches = np.stack([X_BD, 2 * X_BD, 3 * X_BD])
    axes = (nnx.Carry, 0)
    scan = nnx.scan(lambda model, x: (model, model(x)), in_axes=axes, out_axes=axes)
    _, found = scan(made, batches)
    np.testing.assert_allclose(found, [other(x) for x in batches], rtol=1e-4, atol=1e-5)


def test_vmap_draws_noise_for_each_example_if_the_random_keys_are_split():
    made, same = skipped("noise"), np.repeat(X_BD[:1], 4, axis=0)
    axes = nnx.StateAxes({nnx.RngState: 0, ...: None})
    examples = nnx.vmap(lambda model, x: model(x), in_axes=(axes, 0))
    found = nnx.split_rngs(splits=4)(examples)(made, same)
    assert len(np.unique(found.round(4), axis=0)) == 4


def test_a_shard_of_the_batch_gets_its_rows_of_the_noise():
    """The mesh has no axis "fsdp". All our meshes have this axis, but a user's mesh may lack it."""
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    graphdef, state = nnx.split(skipped("policy"))
    x_BD = np.concatenate([X_BD, X_BD[:1]])

    def apply(state: nnx.State, x_BD: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, state)(x_BD)

    spec = jax.P("data")
    sharded = jax.shard_map(apply, mesh=mesh, in_specs=(jax.P(), spec), out_specs=spec)
    found = jax.jit(sharded)(state, x_BD)
    np.testing.assert_allclose(found, jax.jit(apply)(state, x_BD), rtol=1e-4, atol=1e-5)


def test_steps_of_the_warm_up_never_skip_and_late_steps_always_do():
    found = [is_skipping_step(step, 10, anneal=0.9) for step in range(80)]
    assert not any(found[:11]) and all(found[10 + 44 :]) and not all(found[11:54])
    assert found != [is_skipping_step(step, 10, anneal=0.9, seed=1) for step in range(80)]


@pytest.mark.medium
def test_examples_run(capsys, tmp_path, monkeypatch):
    write_tiny_run("reservoir", tmp_path)
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "reservoir" / "PYTHON.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict = {}
    for code in examples:
        exec(compile(code, "PYTHON.md", "exec"), names)
    *losses, _ = capsys.readouterr().out.splitlines()  # The last line is a translation.
    first, *_, last = map(float, " ".join(losses).split())
    assert last < 0.5 * first
