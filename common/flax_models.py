"""Changes variables and linear layers of any Flax NNX model in place, and checks arguments and inputs of modules.

The model may come from another library. The papers' modules `parts`, whose classes and functions a user applies to such
a model, import this module.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike

from common.errors import UserError, check
from common.model.linear import Linear
from common.variables import Frozen

Path = tuple[str | int, ...]
Change = Callable[[Path, Any, Any], Any]
"""Function (path, part, parent) -> replacement of the part, or the part itself to keep it.

A part is a module or a variable. Its parent is the module, list, tuple or dictionary that contains it, and None for the
whole model.
"""


def change_parts(model: Any, change: Change) -> Any:
    """Replaces every part (module or variable) of a model, in place, by the result of `change`.

    Calls `change` once for a part with several parents, such as tied weights, and not for parts that a replacement
    adds. Replaces nothing before all calls have returned, so an exception leaves the model unchanged. Returns the
    model, or the result of `change` for the whole model.

    Raises:
      UserError: the model is not an NNX module, variable, list or dictionary, or a replaced part is in a tuple.
    """
    check(
        isinstance(model, nnx.Pytree | nnx.Variable | list | dict),
        f"the model must be a Flax NNX module, variable, list or dictionary, got {model!r:.80}",
    )
    changed: dict[int, Any] = {}

    def new(path: Path, part: Any, parent: Any) -> Any:
        if not isinstance(part, nnx.Module | nnx.Variable):
            return part
        if id(part) not in changed:
            changed[id(part)] = change(path, part, parent)
        return changed[id(part)]

    root = new((), model, None)
    replacements = []
    # `change` may itself replace a variable of the model. The list keeps the old variable alive, so that Python does
    # not reuse its id, a key of `changed`, for a new part.
    for path, parent in list(nnx.iter_graph(model)):
        for name, part in _parts(parent):
            replacement = new((*path, name), part, parent)
            if replacement is not part:
                where = "/".join(map(str, (*path, name)))
                check(
                    not isinstance(parent, tuple),
                    f"cannot replace {where} of the model, because it is in a tuple: make the tuple a list",
                )
                replacements.append((parent, name, replacement))
    for replacement in replacements:
        _set(*replacement)
    return root


def _parts(parent: Any) -> Iterator[tuple[str | int, Any]]:
    match parent:
        case nnx.List() | list() | tuple():
            yield from enumerate(list(parent))
        case dict():
            yield from list(parent.items())
        case nnx.Pytree():
            yield from list(vars(parent).items())


def _set(parent: Any, name: str | int, part: Any) -> None:
    if isinstance(parent, nnx.List | list | dict):
        parent[name] = part
    else:
        setattr(parent, name, part)


def check_rngs(rngs: nnx.Rngs, *streams: str) -> None:
    """Raises a UserError unless `rngs` has all random streams `streams`."""
    for stream in streams:
        check(
            callable(getattr(rngs, stream, None)),
            f"rngs must be nnx.Rngs(SEED) with the stream {stream!r}, got {rngs!r:.80}",
        )


def floating(x: ArrayLike) -> jax.Array:
    """Returns the input x of a module as a floating-point array. Integers and booleans become float32.

    Raises a UserError if the input is not an array of real numbers.
    """
    try:
        array = jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise UserError(f"the input must be an array of real numbers, got {x!r:.80}") from error
    check(
        not jnp.iscomplexobj(array),
        f"the input must be an array of real numbers, got the dtype {array.dtype}",
    )
    return array if jnp.issubdtype(array.dtype, jnp.floating) else array.astype(jnp.float32)


def frozen(variable: nnx.Variable) -> Frozen:
    """Returns a Frozen variable with the value and the metadata of `variable`, marked as loaded (see `Frozen`)."""
    return Frozen.from_metadata(variable.get_value(), variable.get_metadata() | {"draw": None})


def thaw(model: Any) -> Any:
    """Turns Frozen variables, except codes and scales of quantized kernels, into Params in place. Returns the model."""

    def change(path: Path, part: Any, parent: Any) -> Any:
        if not isinstance(part, Frozen) or part.get_metadata("holds", None) is not None:
            return part
        metadata = {name: x for name, x in part.get_metadata().items() if name != "draw"}
        return nnx.Param.from_metadata(part.get_value(), metadata)

    return change_parts(model, change)


@dataclass(frozen=True)
class KernelAxes:
    """The axes of a kernel of any number of dimensions, in a linear layer that maps x to y.

    Attributes:
      batch: kernel axes that are axes of both x and y.
      inputs: kernel axes that are axes of x but not of y; the layer sums over these axes.
      outputs: kernel axes that are axes of y but not of x.
      equation: the layer as an einsum "x,kernel->y"; "" if the batch axes of x and y are their first axes, and the
        outputs are the last axes of y.
      contracted: axes of x that the layer sums over; unused if `equation` is given.
    """

    batch: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    equation: str = ""
    contracted: tuple[int, ...] = (-1,)

    def shapes(self, shape: tuple[int, ...]) -> tuple[tuple, tuple, tuple]:
        """Returns the sizes of the batch, input and output axes of a kernel of shape `shape`."""
        return tuple(
            tuple(shape[axis] for axis in axes) for axes in (self.batch, self.inputs, self.outputs)
        )

    def to_matrices(self, kernel: jax.Array) -> jax.Array:
        """Reshapes a kernel to (batch, M, N): the products of the sizes of its batch, input and output axes."""
        order = self.batch + self.inputs + self.outputs
        sizes = [math.prod(sizes) for sizes in self.shapes(kernel.shape)]
        return kernel.transpose(order).reshape(sizes)

    def from_matrices(self, matrices: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Inverse of `to_matrices`: returns a kernel of shape `shape`.

        `matrices` may have any shape, as long as the order of its elements is batch, inputs, outputs.
        """
        order = self.batch + self.inputs + self.outputs
        back = sorted(range(len(order)), key=order.__getitem__)
        return matrices.reshape([shape[axis] for axis in order]).transpose(back)


def kernel_axes(layer: Any) -> KernelAxes | None:
    """Returns the axes of a linear layer's kernel; None for all other layers.

    Linear layers are `nnx.Linear`, `nnx.LinearGeneral`, this project's `Linear`, and an `nnx.Einsum` whose equation is
    a matrix product, possibly batched. Raises a UserError if `nnx.vmap` has stacked several layers into one kernel.
    """
    axes = _axes_by_type(layer)
    if axes is not None and isinstance(layer.kernel, nnx.Variable):
        check_unstacked(layer, axes)
    return axes


def check_unstacked(layer: nnx.Module, axes: KernelAxes) -> None:
    """Raises a UserError unless a layer's kernel has one dimension for each of `axes`; `nnx.vmap` adds a dimension."""
    ndim, expected = layer.kernel.ndim, len(axes.batch + axes.inputs + axes.outputs)
    check(
        ndim == expected,
        f"the kernel of a {type(layer).__name__} has {ndim} dimensions instead of {expected}: freeze, adapt or"
        " quantize the layers before nnx.vmap stacks them",
    )


def _axes_by_type(layer: Any) -> KernelAxes | None:
    match layer:
        case nnx.Linear() | Linear():
            return KernelAxes((), (0,), (1,))
        case nnx.LinearGeneral():
            batch, inputs = len(layer.batch_axis), len(layer.in_features)
            end = batch + inputs
            axes = tuple(range(end + len(layer.out_features)))
            return KernelAxes(axes[:batch], axes[batch:end], axes[end:], contracted=layer.axis)
        case nnx.Einsum(einsum_str=str() as equation):
            return _einsum_axes(equation)
    return None


def _einsum_axes(equation: str) -> KernelAxes | None:
    x, kernel, y = re.split(",|->", equation)
    roles: dict[tuple[bool, bool], list[int]] = {}
    for axis, letter in enumerate(kernel):
        roles.setdefault((letter in x, letter in y), []).append(axis)
    batch, inputs, outputs = (
        tuple(roles.pop(role, ())) for role in ((True, True), (True, False), (False, True))
    )
    if "." in kernel or roles or not inputs or not outputs:
        return None
    return KernelAxes(batch, inputs, outputs, equation)
