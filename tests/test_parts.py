"""The parts that users import into their own models: invalid and unusual arguments, and loaded libraries.

The tests of each paper check what its parts compute. `tests/explicit_opt/test_heads.py` checks the arguments of
`head_start`.
"""

import math
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from flax.core import FrozenDict

from gmlp_lm import GatedMLP, SpatialGating
from perception import lora, merge, quantize
from reservoir import Backskip, Frozen, freeze, is_skipping_step, thaw
from tests.programs import ROOT

D = 4
X_BD = np.ones((3, D), np.float32)
X_BLD = np.ones((2, 5, D), np.float32)


def rngs(**seeds: int) -> nnx.Rngs:
    return nnx.Rngs(**seeds or {"default": 0})


def model() -> nnx.Sequential:
    return nnx.Sequential(*(nnx.Linear(D, D, rngs=rngs()) for _ in range(2)))


def backskip(function=jnp.tanh, width=D, **options) -> Backskip:
    return Backskip(function, width, **{"rngs": rngs()} | options)


def gating(features=D, length=5, **options) -> SpatialGating:
    return SpatialGating(features, length, **{"rngs": rngs()} | options)


def block(width=D, hidden=2 * D, length=5, **options) -> GatedMLP:
    return GatedMLP(width, hidden, length, **{"rngs": rngs()} | options)


def adapt(targets=None, **options) -> nnx.Module:
    return lora(model(), targets, **{"rngs": rngs()} | options)


def step(x=X_BLD[:, :1], index=0, batch=2) -> object:
    made = block()
    return made.step(x, made.cache(batch), index)


WHOLE, ABOVE_0, FROM_0 = (
    "must be a whole number of at least 1",
    "must be a finite number above 0",
    "of at least 0",
)
NO_LIST = r"targets must be a list of one or more names of layers, such as \['query'\], or None for all, got "
NO_INPUT = r"the input must have the shape \(..., 4\), without empty axes, got "
NO_ARRAY = (
    r"init must be a function \(key, shape\) -> array of .* for the shape \(4, 4\) it returns "
)
FLAX = (
    "the model must be a Flax NNX module or variable, or a list or dictionary of them"
    r" \(Flax Linen is not supported\), got "
)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        # freeze, thaw
        (lambda: freeze(model()), "pass rngs=nnx.Rngs"),
        (lambda: freeze(model(), rngs=0), "rngs must be nnx.Rngs.* 'params', got 0"),
        (lambda: freeze(model(), rngs=jax.random.key(0)), "rngs must be nnx.Rngs"),
        (lambda: freeze(model(), rngs=nnx.Rngs), "rngs must be nnx.Rngs"),
        (lambda: freeze(model(), rngs=rngs(dropout=0)), "with the stream 'params', got Rngs"),
        (lambda: freeze(None, rngs=rngs()), FLAX + "None"),
        (lambda: freeze(jnp.ones(2), rngs=rngs()), FLAX + "Array"),
        (lambda: thaw(jnp.tanh), FLAX),
        (lambda: freeze(nnx.Module(), rngs=rngs()), "the module has no nnx.Param"),
        (lambda: freeze(nnx.BatchStat(jnp.ones(2))), "the module has no nnx.Param"),
        (lambda: freeze(freeze(model(), None), None), "all are frozen already"),
        (lambda: freeze(model(), "kaiming", rngs=rngs()), "init='kaiming': choose one of ortho"),
        (lambda: freeze(model(), rngs()), r"init=Rngs\(.{0,75} draws new kernels: pass rngs="),
        (lambda: freeze(model(), 3, rngs=rngs()), "init=3: choose one of orthogonal, xavier"),
        (lambda: freeze(model(), nnx.initializers.orthogonal, rngs=rngs()), NO_ARRAY + "<function"),
        (
            lambda: freeze(model(), lambda key, shape: jnp.ones(3), rngs=rngs()),
            NO_ARRAY + r"an array .*\(3,\)",
        ),
        (lambda: freeze({"kernel": jnp.ones(2)}, None), FLAX + "{'kernel"),
        (
            lambda: freeze(model(), None, only="layers"),
            r"only='layers' selects no nnx.Param .* use nnx.PathContains\('layers'\)",
        ),
        (
            lambda: freeze(
                freeze(model(), None, only=nnx.PathContains(0)), only=nnx.PathContains(0), init=None
            ),
            r"selects no nnx.Param of the module \(a frozen parameter is not an nnx.Param\)",
        ),
        (lambda: freeze(model(), None, only=3), "only must be an NNX filter, .* got 3"),
        (lambda: freeze(model(), None, only=model()), "only must be an NNX filter, .* got Seq"),
        (lambda: freeze(model(), None, only=[0] * 99), r"an NNX filter, .* got \[0, .{76}$"),
        # Backskip
        (lambda: backskip(None), "function must be a function or a module with __call__, got None"),
        (lambda: backskip([0] * 99), r"a module with __call__, got \[0, .{76}$"),
        *[
            (lambda w=w: backskip(width=w), f"width {WHOLE}, got")
            for w in (0, 2.5, "4", None, True)
        ],
        (lambda: backskip(sigma=0.0), f"sigma {ABOVE_0}, got 0.0"),
        (lambda: backskip(sigma="1"), f"sigma {ABOVE_0}, got '1'"),
        (lambda: backskip(sigma=jnp.float32(1)), f"sigma {ABOVE_0}, got Array"),
        (lambda: backskip(scale=-1.0), f"scale .* {FROM_0}, got -1.0"),
        (lambda: backskip(scale=math.nan), f"scale .* {FROM_0}, got nan"),
        (lambda: backskip(estimator=None), "estimator=None: choose one of policy"),
        (lambda: backskip(estimator=["zero"]), "estimator=.* did you mean zero"),
        (lambda: backskip(reward="rms"), "reward='rms': choose one of signed, own_rms"),
        (lambda: backskip(rngs=0), "rngs must be nnx.Rngs"),
        (lambda: backskip(rngs=rngs(params=0)), "with the stream 'noise'"),
        (lambda: backskip(rngs=rngs(noise=0)), "with the stream 'params'"),
        (lambda: backskip(width=5, estimator="noise")(X_BD), r"shape \(..., 5\), .* got \(3, 4\)"),
        (lambda: backskip()(1.0), NO_INPUT + r"\(\)"),
        (lambda: backskip()(X_BD[:0]), NO_INPUT + r"\(0, 4\)"),
        (lambda: backskip()(None), "the input must be an array of real numbers, got None"),
        (
            lambda: backskip()(1j * X_BD),
            "the input must be an array of real numbers, got the dtype complex",
        ),
        (lambda: backskip(lambda x: x.sum(0))(X_BD), r"function must .* axes \(3,\) .* got \(4,\)"),
        (lambda: backskip(lambda x: x.T)(X_BD), r"function must .* axes \(3,\) .* got \(4, 3\)"),
        (lambda: backskip(lambda x: (x, x))(X_BD), "function must return an array"),
        (
            lambda: backskip(lambda x: x[:, :2], estimator="identity")(X_BD),
            r"estimator='identity' needs a function that keeps the shape \(3, 4\), got \(3, 2\)",
        ),
        (lambda: is_skipping_step(-1, 10), f"step .* {FROM_0}, got -1"),
        (lambda: is_skipping_step(2.5, 10), "step must be an int, got 2.5 of type float"),
        (
            lambda: jax.jit(lambda n: is_skipping_step(n, 1))(3),
            "step must be an int, .* if jit traces the step, call this function outside of jit",
        ),
        (lambda: is_skipping_step(20, -1), f"warmup_steps .* {FROM_0}, got -1"),
        (lambda: is_skipping_step(20, 10, anneal=2.0), "anneal must be from 0 to 1, got 2.0"),
        (lambda: is_skipping_step(20, 10, seed=-1), f"seed .* {FROM_0}, got -1"),
        # lora, merge
        *[(lambda r=r: adapt(rank=r), f"rank {WHOLE}, got") for r in (0, 2.5, 2.0, "8", True)],
        (lambda: adapt(alpha=0.0), f"alpha {ABOVE_0}, got 0.0"),
        (lambda: adapt(alpha=math.inf), f"alpha {ABOVE_0}, got inf"),
        *[
            (lambda d=d: adapt(dropout=d), "dropout must be a number from 0 to 0.99, got ")
            for d in (1.0, -0.1, math.nan, None, "0.1")
        ],
        (lambda: adapt("0"), NO_LIST + "'0'"),
        (lambda: adapt([]), NO_LIST + r"\[\]"),
        (lambda: adapt([0]), NO_LIST + r"\[0\]"),
        (lambda: adapt(0), NO_LIST + "0"),
        (lambda: adapt([nnx.Linear]), NO_LIST),
        (
            lambda: adapt(["1", "query"]),
            "targets: 'query' matches no linear layer without an adapter; choose among layers/0, layers/1",
        ),
        (lambda: adapt(rngs=0), "rngs must be nnx.Rngs"),
        (lambda: adapt(rngs=None), "rngs must be nnx.Rngs"),
        (lambda: adapt(dropout=0.1, rngs=rngs(params=0)), "with the stream 'dropout'"),
        (lambda: lora(None, rngs=rngs()), FLAX + "None"),
        (lambda: lora(nnx.Embed(3, 2, rngs=rngs()), rngs=rngs()), "the model has no linear layer"),
        (lambda: merge(jnp.ones(2)), FLAX + "Array"),
        # quantize
        *[
            (lambda b=b: quantize(adapt(), b), "bits must be 4 or 8, got")
            for b in (3, "4", [], None)
        ],
        (lambda: quantize(model()), "no linear layer has a frozen kernel"),
        (
            lambda: quantize(quantize(adapt())),
            "all frozen kernels of linear layers are quantized already",
        ),
        (lambda: quantize(None), FLAX + "None"),
        # SpatialGating, GatedMLP
        *[(lambda f=f: gating(f), f"features {WHOLE}, got") for f in (0, 4.0, "4", None)],
        (lambda: gating(9), r"must be a multiple of 2 \* heads = 2, got 9"),
        (lambda: gating(6, heads=2), r"must be a multiple of 2 \* heads = 4, got 6"),
        *[(lambda n=n: gating(length=n), f"length {WHOLE}, got") for n in (0, 2.5)],
        *[(lambda n=n: gating(heads=n), f"heads {WHOLE}, got") for n in (0, 1.0)],
        *[
            (lambda e=e: gating(epsilon=e), f"epsilon .* {FROM_0}, got")
            for e in (-1.0, math.nan, "a")
        ],
        (lambda: gating(rngs=0), "rngs must be nnx.Rngs"),
        *[(lambda w=w: block(w), f"width {WHOLE}, got") for w in (0, 2.5, "4")],
        (lambda: block(hidden=8.0), f"hidden {WHOLE}, got 8.0"),
        (lambda: block(activation="tanh"), "activation='tanh': choose one of"),
        (lambda: block(activation=jax.nn.gelu), "activation=.* choose one of"),
        *[
            (lambda d=d: block(dropout=d), "dropout must be a number from 0 to 0.99, got ")
            for d in (1.0, None)
        ],
        (lambda: block(rngs=0), "rngs must be nnx.Rngs"),
        (lambda: block(dropout=0.1, rngs=rngs(params=0)), "with the stream 'dropout'"),
        (lambda: gating()(None), "the input must be an array of real numbers, got None"),
        (
            lambda: gating()(1j * X_BLD),
            "the input must be an array of real numbers, got the dtype complex",
        ),
        *[
            (
                lambda make=make, x=x: make()(x),
                r"the input must have the shape \(batch, positions, 4\)",
            )
            for make in (gating, block)
            for x in (X_BD, X_BLD[..., :3], X_BLD[:0], X_BLD[:, :0])
        ],
        (lambda: gating(causal=False)(X_BLD, 3), r"lengths_B must have the shape \(2,\), got \(\)"),
        (lambda: block(causal=False)(X_BLD, X_BLD[0, :3, 0]), r"lengths_B .* got \(3,\)"),
        (lambda: block(length=4)(X_BLD), "5 positions, but the spatial map has only 4"),
        (lambda: block(causal=False).cache(1), "needs a causal spatial map"),
        (lambda: block().cache(0), f"batch {WHOLE}, got 0"),
        (
            lambda: block().prefill(X_BLD, block().cache(3)),
            r"the cache is for batch=3, but the input has the shape \(2, ",
        ),
        (
            lambda: step(batch=3),
            "the cache is for batch=3.*: make a cache with batch=2",
        ),
        (lambda: step(X_BLD), "a decoding step takes one position, got 5: use prefill"),
        (lambda: step(X_BLD[:, :1, :3]), "the input must have the shape"),
        *[
            (lambda i=i: step(index=i), "index must be a scalar of an integer dtype, from 0 to 4")
            for i in (5, -1, 1.5, jnp.float32(3))
        ],
    ],
)
def test_an_invalid_argument_raises_a_value_error_of_one_line(call: Callable, message: str):
    with pytest.raises(ValueError, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda: freeze(model(), lambda key, shape: np.ones(shape), rngs=rngs()),
        lambda: freeze([nnx.Linear(D, D, rngs=rngs())], rngs=rngs(params=0)),
        lambda: freeze(model(), None, only=nnx.Param),
        lambda: is_skipping_step(jnp.int32(100), np.int64(10)),
        lambda: backskip()(X_BD[0]),
        lambda: backskip()(X_BD.astype(int)),
        lambda: backskip()(X_BD.astype(float)),
        lambda: backskip()(X_BD.tolist()),
        lambda: backskip(estimator="zero", rngs=rngs(noise=0))(X_BD.astype(jnp.bfloat16)),
        lambda: adapt((name for name in ["0", "layers/1"]), rank=np.int64(2)).layers[0](
            X_BD.tolist()
        ),
        lambda: block(rngs=rngs(params=0))(X_BLD.tolist()),
        lambda: block(causal=False)(X_BLD, [3, 4]),
        lambda: step(index=np.int32(4)),
        lambda: jax.jit(lambda index: step(index=index))(4),
    ],
)
def test_unusual_arguments_work(call: Callable):
    call()


def test_a_backskip_of_float64_stays_in_float64():
    with jax.enable_x64(True):
        assert backskip()(X_BD.astype(float)).dtype == np.float64


def test_layers_without_inputs_or_outputs_are_adapted_and_frozen():
    def made() -> nnx.Sequential:
        sizes, options = (0, D, D, 0), {"kernel_init": nnx.initializers.zeros, "rngs": rngs()}
        return nnx.Sequential(*(nnx.Linear(*pair, **options) for pair in pairwise(sizes)))

    for changed in (freeze(made(), rngs=rngs()), quantize(lora(made(), rngs=rngs()))):
        assert changed(np.ones((2, 0))).shape == (2, 0)


def test_a_rejected_argument_does_not_change_the_model():
    made = model()
    for call in (
        lambda: lora(made, [], rngs=rngs()),
        lambda: lora(made, rngs=0),
        lambda: freeze(made, rngs=0),
        lambda: quantize(made),
    ):
        with pytest.raises(ValueError):
            call()
    assert not nnx.to_flat_state(nnx.state(made, Frozen))


@pytest.mark.parametrize("change", [lambda m: freeze(m, rngs=rngs()), thaw, merge, quantize])
def test_layers_in_other_containers_are_refused(change):
    """A layer in such a container would keep its parameters without a word."""
    whole = nnx.Sequential(nnx.Linear(D, D, rngs=rngs()))
    whole.others = nnx.data(FrozenDict({"a": nnx.Linear(D, D, rngs=rngs())}))
    with pytest.raises(
        ValueError, match=r"^others/a(/\w+)? is in a container that is not supported"
    ):
        change(whole)


@pytest.mark.parametrize(
    "change",
    [lambda made: freeze(made, rngs=rngs()), lambda made: lora(made, rngs=rngs()), quantize],
)
@pytest.mark.parametrize("last", ["in a tuple", "stacked"])
def test_a_layer_that_cannot_change_leaves_the_whole_model_unchanged(change: Callable, last: str):
    def layer(rngs: nnx.Rngs) -> nnx.Linear:
        return nnx.Linear(D, D, rngs=rngs)

    made = {"a": layer(rngs()), "b": (layer(rngs()), nnx.Param(jnp.ones(2)))}
    if last == "stacked":
        made["b"] = nnx.vmap(layer)(nnx.Rngs(0).fork(split=2))
    if change is quantize:
        freeze(made, None, only=nnx.PathContains("kernel"))
    before = [(path, type(part)) for path, part in nnx.iter_graph(made)]
    with pytest.raises(ValueError, match=r"is in a tuple|has 3 dimensions instead of 2"):
        change(made)
    assert [(path, type(part)) for path, part in nnx.iter_graph(made)] == before


@pytest.mark.parametrize(
    "change",
    [
        lambda made: freeze(made, None),
        lambda made: lora(made, rngs=rngs()),
        quantize,
        merge,
        thaw,
    ],
)
def test_an_abstract_model_is_changed_only_inside_eval_shape(change: Callable):
    def make() -> nnx.Module:
        return lora(model(), ["layers/0"], rngs=rngs())

    made = nnx.eval_shape(make)
    before = [(path, type(part)) for path, part in nnx.iter_graph(made)]
    with pytest.raises(ValueError, match=r"^layers/0/\S+ has no value, because nnx.eval_shape"):
        change(made)
    assert [(path, type(part)) for path, part in nnx.iter_graph(made)] == before
    nnx.eval_shape(lambda: change(make()))


class Mixed(nnx.Module):
    """A model with a Flax Linen module."""

    def __init__(self):
        self.linen = nnx.bridge.ToNNX(linen.Dense(D), rngs=rngs())
        self.linen.lazy_init(X_BD)
        self.layer = nnx.Linear(D, D, rngs=rngs())


def test_parameters_of_a_linen_module_stay_unchanged():
    made = Mixed()
    for call in (lambda: freeze(made, None), lambda: lora(made, rngs=rngs())):
        with pytest.raises(ValueError, match=r"cannot replace linen/.* is in a Flax Linen module"):
            call()
    freeze(made, None, only=nnx.PathContains("layer"))
    assert isinstance(made.layer.kernel, Frozen)
    assert made.linen(X_BD).shape == X_BD.shape


HEAVY = (
    *("orbax", "tensorstore", "tensorflow", "tensorflow_datasets", "datasets", "wandb", "pandas"),
    *("sentencepiece", "tokenizers", "transformers", "torch", "sklearn", "matplotlib", "pyarrow"),
)


@pytest.mark.medium
@pytest.mark.parametrize("name", ["reservoir", "gmlp_lm", "explicit_opt", "perception"])
def test_importing_a_part_loads_no_large_library(name: str):
    """Importing the package alone does not even load JAX. `load_run` needs the libraries of a training run."""
    code = f"""
import sys, {name}
assert "jax" not in sys.modules
assert set({name}.__all__) <= set(dir({name}))
for part in set({name}.__all__) - {{"load_run"}}:
    getattr({name}, part)
assert "jax" in sys.modules
print(*sorted({{module.partition(".")[0] for module in sys.modules}} & set({HEAVY})))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.split() == []
