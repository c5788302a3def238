"""Frozen layers and backskipping for any Flax NNX model.

    from reservoir import Frozen, freeze

    freeze(model.layers[1], rngs=nnx.Rngs(1))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)  # no state for frozen values
    graphdef, trainable, frozen, rest = nnx.split(model, nnx.Param, Frozen, ...)

Shape letters of this module: X any leading axes, D features of the input of a reservoir, N features of its output.
"""

import math
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from common.config import check_choice, check_int, check_number
from common.errors import UserError, check
from common.flax_models import (
    KernelAxes,
    Path,
    Use,
    change_parts,
    check_rngs,
    check_unstacked,
    floating,
    frozen,
    kernel_axes,
    thaw,
)
from common.model.initializers import Initializer
from common.variables import Frozen
from reservoir.backskip import ESTIMATORS, REWARDS, Rule, Value, estimate, is_skipping_step
from reservoir.redraw import INITIALIZERS

__all__ = ["Backskip", "Frozen", "freeze", "is_skipping_step", "thaw"]

Model = TypeVar("Model", bound=nnx.Module | nnx.Variable)

INITS = ("orthogonal", "xavier")


def freeze(
    module: Model,
    init: Literal["orthogonal", "xavier"] | Initializer | None = "orthogonal",
    *,
    only: nnx.filterlib.Filter = ...,
    rngs: nnx.Rngs | None = None,
) -> Model:
    """Turns every `nnx.Param` that `only` selects into a `Frozen` variable, in place, and returns the module.

    `nnx.grad` and `nnx.Optimizer(..., wrt=nnx.Param)` ignore a `Frozen` variable, because it is not an `nnx.Param`. A
    `Frozen` variable has no gradient, no optimizer state, no weight decay and no share in the gradient norm. optax
    needs no mask.

    Kernels of linear layers and convolutions are drawn anew. All other parameters, such as biases, embeddings and
    scales of norms, keep their values. But a layer with a method `frozen_init()` (see `common/model/linear.py`) chooses
    the distributions of its parameters. Batch statistics are not parameters, so training still changes them.

    Args:
      module: any module, or one `nnx.Param`. For an `nnx.Param`, the new `Frozen` variable is returned.
      init: distribution of a kernel with M inputs and N outputs. "orthogonal" (as in the paper): a (semi-)orthogonal
        matrix. "xavier": uniform in [-a, a] with a = sqrt(6 / (M + N)). A function (key, shape) -> array, such as an
        initializer of `nnx.initializers`, is called with the shape (M, N). None keeps all values.
      only: an NNX filter that selects parameters by path and variable. `nnx.PathContains("encoder")` freezes the
        parameters below "encoder" only. A shared parameter is selected if the filter selects any of its paths.
      rngs: source of the random keys. Not needed if `init` is None, or if `module` is one `nnx.Param`, because the
        value stays.

    Raises:
      ValueError: an argument has the wrong type, `init` is unknown or returns an array of the wrong shape, `rngs` is
        missing, `nnx.vmap` has stacked a selected kernel (unless `init` is None), the module has no `nnx.Param` (for
        example, because all parameters are frozen already), `only` selects no `nnx.Param`, a selected `nnx.Param` is in
        a tuple or a Flax Linen module, or the module is abstract (outside of `nnx.eval_shape`). The module is then
        unchanged.

    Warns:
      UserWarning: `init` is given, but the selected parameters contain no kernel to draw.
    """
    draw = _initializer(init)
    if draw is not None and not isinstance(module, nnx.Variable):
        check(
            rngs is not None,
            f"init={init!r:.80} draws new kernels: pass rngs=nnx.Rngs(SEED), or init=None to keep the values",
        )
        check_rngs(rngs, "params")
    selected = _predicate(only)
    found = Counter()

    def change(part: Any, uses: list[Use]) -> Any:
        found["frozen"] += isinstance(part, Frozen)
        found["param"] += isinstance(part, nnx.Param)
        if not isinstance(part, nnx.Param) or not any(selected(path, part) for path, _ in uses):
            return part
        found["selected"] += 1
        new, old = frozen(part), part.get_value()
        drawn = (_drawn(parent, path, part, draw, rngs) for path, parent in uses)
        value = next((value for value in drawn if value is not None), None)
        if value is not None:
            found["drawn"] += 1
            value = value.astype(part.dtype)
            # A traced array has no devices, and an uncommitted array may move to others.
            sharded = not isinstance(old, jax.core.Tracer) and getattr(old, "committed", False)
            new.set_value(jax.device_put(value, old.sharding) if sharded else value)
        return new

    changed = change_parts(module, change)
    check(
        bool(found["param"]),
        "no parameter to freeze: "
        + (
            "all are frozen already; to draw them again, call thaw first"
            if found["frozen"]
            else "the module has no nnx.Param; pass a module with parameters"
        ),
    )
    check(
        bool(found["selected"]),
        f"only={only!r:.80} selects no nnx.Param of the module (a frozen parameter is not an nnx.Param): "
        + (
            f"to select by path, use nnx.PathContains({only!r:.80})"
            if isinstance(only, str)
            else "choose another filter"
        ),
    )
    if draw is not None and not found["drawn"] and not isinstance(module, nnx.Variable):
        warnings.warn(
            f"init={init!r:.80} drew no value, because no selected parameter is the kernel of a linear layer or"
            " convolution: all values are kept, as with init=None",
            stacklevel=2,
        )
    return changed


def _initializer(init: Any) -> Initializer | None:
    if init is None:
        return None
    if not callable(init):
        check_choice("init", init, INITS)
        return INITIALIZERS[init](1.0)

    def draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        value = init(key, shape)
        found = getattr(value, "shape", None)
        returned = f"{value!r:.80}" if found is None else f"an array of the shape {found}"
        check(
            found == shape,
            f"init must be a function (key, shape) -> array of this shape, such as nnx.initializers.orthogonal(), but"
            f" for the shape {shape} it returns {returned}",
        )
        return jnp.asarray(value)

    return draw


def _predicate(only: Any) -> Callable[[Path, Any], bool]:
    with suppress(TypeError, ValueError):
        if not isinstance(only, nnx.Module):  # NNX would take a module with __call__ as a predicate
            return nnx.filterlib.to_predicate(only)
    raise UserError(
        f"only must be an NNX filter, such as nnx.PathContains('encoder'), got {only!r:.80}"
    )


def _drawn(
    layer: Any, path: Path, variable: nnx.Param, matrix: Initializer | None, rngs: nnx.Rngs | None
) -> jax.Array | None:
    """Returns a new value for a variable of a layer, or None to keep the present value."""
    name, shape = path[-1] if path else None, variable.shape
    if matrix is None or not isinstance(layer, nnx.Module):
        return None
    if hasattr(layer, "frozen_init"):
        kind, *numbers = layer.frozen_init().get(name, (None,))
        if kind is None:
            return None
        if kind == "matrix":
            check_unstacked(variable, 2, path)
        return (matrix if kind == "matrix" else INITIALIZERS[kind](*numbers))(rngs.params(), shape)
    axes = _kernel_axes(layer)
    if name != "kernel" or axes is None or 0 in shape:
        return None
    check_unstacked(variable, axes.ndim, path)
    batch, inputs, outputs = map(math.prod, axes.shapes(shape))
    keys = jax.random.split(rngs.params(), batch)
    return axes.from_matrices(jnp.stack([matrix(key, (inputs, outputs)) for key in keys]), shape)


def _kernel_axes(layer: nnx.Module) -> KernelAxes | None:
    if isinstance(layer, nnx.Conv | nnx.ConvTranspose):
        last = len(layer.kernel_size) + 1
        return KernelAxes((), tuple(range(last)), (last,))
    return kernel_axes(layer)


class Backskip(nnx.Module):
    """Backskipping (section 4.4 of the paper) for a function F: some training steps do not differentiate F.

    With the estimator "policy", training adds noise to the input of F. In a skipping step, the layers below F learn
    from a policy gradient, whose reward depends on the gradient at the output of F. The parameters of F get no gradient
    in a skipping step, so F should be frozen. `reservoir/backskip.py` has the formulas. The training loop chooses the
    skipping steps, for example:

        model.set_attributes(skipping=is_skipping_step(step, warmup_steps=500))

    `skipping` is static, so a jitted step is compiled twice. As in `nnx.Dropout`, `model.eval()` turns the noise off,
    and the noise needs NNX's transformations (`nnx.vmap` instead of `jax.vmap`). Rewards are scaled by a statistic of
    all positions of a call, so call the module on whole batches. Under `nnx.vmap`, a call has one example only.

    Attributes:
      function: the function F.
      baseline: the value network, a trainable MLP; None unless the estimator is "policy".
      skipping: whether calls do not differentiate F.
      deterministic: whether calls return F(x), without noise.

    Args:
      function: F, a module or function (X, D) -> (X, N) that keeps the axes X. Each index of the axes X is a position,
        which has one reward.
      width: number D of input features.
      estimator: "policy", or a control. In skipping steps, "identity" gives the layers below F the gradient at the
        output of F (needs D = N), and "zero" gives them no gradient. "noise" adds noise, but never skips F.
      sigma: standard deviation of the noise of "policy" and "noise".
      reward: "signed" (as in the paper): minus the mean over N of the gradient at the output of F. This reward is 0 up
        to rounding if LayerNorm reads the output of F. "own_rms": minus the root mean square over N of this gradient.
      scale: factor of the policy gradient.
      rngs: source of the value network's parameters (stream "params") and of the noise (stream "noise").

    Raises:
      ValueError: an argument has the wrong type or is out of range.
    """

    def __init__(
        self,
        function: Callable[..., jax.Array],
        width: int,
        *,
        estimator: Literal["policy", "identity", "zero", "noise"] = "policy",
        sigma: float = 1.0,
        reward: Literal["signed", "own_rms"] = "signed",
        scale: float = 1.0,
        rngs: nnx.Rngs,
    ):
        check_choice("estimator", estimator, ESTIMATORS)
        check_choice("reward", reward, REWARDS)
        check(
            callable(function),
            f"function must be a function or a module with __call__, got {function!r:.80}",
        )
        check_int("width", width)
        check_number("sigma", sigma, positive=True)
        check_number("scale", scale)
        check_rngs(rngs, "noise", *["params"] * (estimator == "policy"))
        self.function, self.width, self.estimator = function, width, estimator
        self.rule = Rule(reward, sigma, scale)
        self.baseline = Value(width, rngs=rngs) if estimator == "policy" else None
        self.rngs = rngs.noise.fork()
        self.skipping, self.deterministic = False, False

    def set_view(self, deterministic: bool | None = None, skipping: bool | None = None) -> None:
        """Sets each attribute whose argument is not None. `nnx.view` calls this method on the view that it makes."""
        if deterministic is not None:
            self.deterministic = deterministic
        if skipping is not None:
            self.skipping = skipping

    def __call__(self, x_XD: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        """Returns F(x, *args, **kwargs), (X, N). In training, the estimators "policy" and "noise" add noise to x.

        Raises:
          ValueError: the input is empty or not an array of real numbers, its last axis does not have D features, F
            returns no array or changes the axes X, or the estimator is "identity" and F changes D.
        """
        x_XD = floating(x_XD)
        check(
            x_XD.shape[-1:] == (self.width,) and 0 not in x_XD.shape,
            f"the input must have the shape (..., {self.width}), without empty axes, got {x_XD.shape}",
        )

        def function(x_XD: jax.Array) -> jax.Array:
            y_XN = self.function(x_XD, *args, **kwargs)
            found = getattr(y_XN, "shape", None)
            check(
                found is not None and found[:-1] == x_XD.shape[:-1] and len(found) == x_XD.ndim,
                f"function must return an array with the leading axes {x_XD.shape[:-1]} of its input and one axis of"
                f" features, got {y_XN if found is None else found!r:.80}",
            )
            check(
                self.estimator != "identity" or found == x_XD.shape,
                f"estimator='identity' needs a function that keeps the shape {x_XD.shape}, got {found}",
            )
            return y_XN

        if self.deterministic:
            return function(x_XD)
        return estimate(
            function,
            x_XD,
            self.rngs(),
            estimator=self.estimator,
            rule=self.rule,
            value=self.baseline,
            skipping=self.skipping,
        )
