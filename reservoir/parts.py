"""Frozen layers and backskipping for any Flax NNX model.

    from reservoir import Frozen, freeze

    freeze(model.layers[1], rngs=nnx.Rngs(1))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)  # no state for frozen values
    graphdef, trainable, frozen, rest = nnx.split(model, nnx.Param, Frozen, ...)

Suffixes: X any leading axes, D features of the input of a reservoir, N features of its output.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from common.config import check, check_choice
from common.flax_models import (
    KernelAxes,
    Path,
    change_parts,
    check_unstacked,
    frozen,
    kernel_axes,
    thaw,
)
from common.model.initializers import Initializer
from common.variables import Frozen
from reservoir.backskip import Rule, Value, estimate
from reservoir.redraw import INITIALIZERS
from reservoir.skipping import ESTIMATORS, REWARDS, is_skipping_step

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
    """Turns every `nnx.Param` of a module into a `Frozen` variable, in place, and returns the module.

    `nnx.grad` and `nnx.Optimizer(..., wrt=nnx.Param)` ignore a `Frozen` variable, because it is not an `nnx.Param`. So
    it has no gradient, no optimizer state, no weight decay and no share in the gradient norm. optax needs no mask.

    Kernels of linear layers and convolutions are drawn anew. All other parameters keep their values: biases,
    embeddings, scales of norms, and every `nnx.Param` outside a layer. A layer with a method `frozen_init()` (see
    `common/model/linear.py`) chooses the distributions of its parameters. Batch statistics are not parameters, so
    training still changes them.

    Args:
      module: any module, or one `nnx.Param`, whose `Frozen` replacement is returned.
      init: distribution of a kernel with M inputs and N outputs. "orthogonal" (as in the paper): a (semi-)orthogonal
        matrix. "xavier": uniform in [-a, a] with a = sqrt(6 / (M + N)). A function (key, shape) -> array, such as an
        initializer of `nnx.initializers`, is called with the shape (M, N). None keeps all values.
      only: an NNX filter that selects parameters by path and variable. `nnx.PathContains("encoder")` freezes the
        parameters below "encoder" only.
      rngs: source of the random keys. Needed unless `init` is None.

    Raises:
      UserError: `init` is unknown, `rngs` is missing, or `only` selects no parameter.
    """
    draw = _initializer(init)
    check(
        draw is None or rngs is not None or isinstance(module, nnx.Variable),
        f"init={init!r} draws new kernels: pass rngs=nnx.Rngs(SEED), or init=None to keep the values",
    )
    selected = nnx.filterlib.to_predicate(only)
    frozen_paths = []

    def change(path: Path, part: Any, parent: Any) -> Any:
        if not isinstance(part, nnx.Param) or not selected(path, part):
            return part
        frozen_paths.append(path)
        new = frozen(part)
        if draw is not None and isinstance(parent, nnx.Module):
            value = _drawn(parent, path[-1], part.shape, draw, rngs)
            if value is not None:
                new.set_value(value.astype(part.dtype))
        return new

    changed = change_parts(module, change)
    check(bool(frozen_paths), "no parameter to freeze: the module has none, or `only` selects none")
    return changed


def _initializer(init: Any) -> Initializer | None:
    if callable(init) or init is None:
        return init
    check_choice("init", init, INITS)
    return INITIALIZERS[init](1.0)


def _drawn(
    layer: nnx.Module,
    name: str | int,
    shape: tuple[int, ...],
    matrix: Initializer,
    rngs: nnx.Rngs,
) -> jax.Array | None:
    """Returns a new value for the parameter `name` of a layer, or None to keep the present value."""
    if hasattr(layer, "frozen_init"):
        kind, *numbers = layer.frozen_init().get(name, (None,))
        if kind is None:
            return None
        return (matrix if kind == "matrix" else INITIALIZERS[kind](*numbers))(rngs.params(), shape)
    axes = _kernel_axes(layer)
    if name != "kernel" or axes is None:
        return None
    batch, inputs, outputs = map(math.prod, axes.shapes(shape))
    keys = jax.random.split(rngs.params(), batch)
    return axes.from_matrices(jnp.stack([matrix(key, (inputs, outputs)) for key in keys]), shape)


def _kernel_axes(layer: nnx.Module) -> KernelAxes | None:
    if isinstance(layer, nnx.Conv | nnx.ConvTranspose):
        last = len(layer.kernel_size) + 1
        axes = KernelAxes((), tuple(range(last)), (last,))
        check_unstacked(layer, axes)
        return axes
    return kernel_axes(layer)


class Backskip(nnx.Module):
    """Backskipping (section 4.4 of the paper) for a function F: some training steps do not differentiate F.

    In training the input of F gets noise. In a skipping step the layers below F learn from a policy gradient, whose
    reward depends on the gradient at the output of F. The parameters of F get no gradient, so F should be frozen.
    `reservoir/backskip.py` has the formulas. The training loop chooses the skipping steps, for example:

        model.set_attributes(skipping=is_skipping_step(step, warmup_steps=500))

    `skipping` is static, so a jitted step is compiled twice. As in `nnx.Dropout`, `model.eval()` turns the noise off.

    Attributes:
      function: F.
      baseline: the value network, a trainable MLP; None unless the estimator is "policy".
      skipping: whether calls do not differentiate F.
      deterministic: whether calls return F(x), without noise.

    Args:
      function: F, a module or function (X, D) -> (X, N). Each element of X is one position with one reward.
      width: D.
      estimator: "policy", or a control: "identity" (the layers below F get the gradient at the output of F; needs
        D = N), "zero" (the layers below F get no gradient), or "noise" (noise, but exact gradients in all steps).
      sigma: standard deviation of the noise of "policy" and "noise".
      reward: "signed" (as in the paper): minus the mean of the gradient over N; 0 up to rounding if a norm that ignores
        shifts reads the output of F. "own_rms": minus the root mean square of the gradient over N.
      scale: factor of the policy gradient.
      rngs: source of the value network's parameters (stream "params") and of the noise (stream "noise").

    Raises:
      UserError: an argument is out of range.
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
        check(width >= 1, f"width must be at least 1, got {width}")
        check(sigma > 0, f"sigma must be above 0, got {sigma}")
        check(scale >= 0, f"scale must not be negative, got {scale}")
        self.function, self.estimator = function, estimator
        self.rule = Rule(reward, sigma, scale)
        self.baseline = Value(width, rngs=rngs) if estimator == "policy" else None
        self.rngs = rngs["noise"].fork()
        self.skipping, self.deterministic = False, False

    def set_view(self, deterministic: bool | None = None, skipping: bool | None = None) -> None:
        """Sets attributes for `nnx.view`.

        Args:
          deterministic: whether calls return F(x), without noise.
          skipping: whether calls do not differentiate F.
        """
        if deterministic is not None:
            self.deterministic = deterministic
        if skipping is not None:
            self.skipping = skipping

    def __call__(self, x_XD: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        """Returns F(x, *args, **kwargs), (X, N). In training, x gets noise."""
        if self.deterministic:
            return self.function(x_XD, *args, **kwargs)
        return estimate(
            lambda a_XD: self.function(a_XD, *args, **kwargs),
            x_XD,
            self.rngs(),
            estimator=self.estimator,
            rule=self.rule,
            value=self.baseline,
            skipping=self.skipping,
        )
