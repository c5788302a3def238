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
Use = tuple[Path, Any]
"""A path of a part, and its parent: the module, list, tuple or dictionary that contains it, None for the whole model.

A part is a module or a variable. A shared part, such as tied weights, has several uses.
"""
Change = Callable[[Any, list[Use]], Any]
"""Function (part, all uses of the part) -> replacement of the part, or the part itself to keep it."""


def change_parts(model: Any, change: Change) -> Any:
    """Replaces every part of a model, in place, by the result of `change`.

    Calls `change` once for each part of the model, and not for parts that a replacement adds. Replaces nothing before
    all calls have returned, so an exception leaves the model unchanged. Returns the model, or the result of `change`
    for the whole model.

    Raises:
      UserError: the model is not an NNX module or variable, or a list or dictionary of them; a variable is abstract; or
        a replaced part is in a tuple or a Flax Linen module.
    """
    parts = _parts(model) if isinstance(model, nnx.Pytree | nnx.Variable | list | dict) else []
    if not parts:
        raise UserError(
            "the model must be a Flax NNX module or variable, or a list or dictionary of them (Flax Linen is not"
            f" supported), got {model!r:.80}"
        )
    for part, uses in parts:
        check(
            not isinstance(part, nnx.Variable)
            or not isinstance(part.get_value(), jax.ShapeDtypeStruct),
            f"{path_text(uses[0][0])} has no value, because nnx.eval_shape made the model: change the model inside"
            " nnx.eval_shape, in the function that makes it",
        )
    replacements = [(part, change(part, uses), uses) for part, uses in parts]
    linen = [path for part, uses in parts if isinstance(part, nnx.bridge.ToNNX) for path, _ in uses]
    changed = [(new, *use) for part, new, uses in replacements if new is not part for use in uses]
    for _, path, parent in changed:
        check(
            not isinstance(parent, tuple),
            f"cannot replace {path_text(path)} of the model, because it is in a tuple: make the tuple a list",
        )
        check(
            all(path[: len(above)] != above for above in linen),
            f"cannot replace {path_text(path)} of the model, because it is in a Flax Linen module, which is not"
            " supported: use Flax NNX",
        )
    for new, path, parent in changed:
        if parent is not None:
            _set(parent, path[-1], new)
    return next((new for part, new, _ in replacements if part is model), model)


def path_text(path: Path) -> str:
    """Returns a path as text, such as "layers/0/kernel"."""
    return "/".join(map(str, path)) or "the model"


def _parts(model: Any) -> list[tuple[Any, list[Use]]]:
    """Returns all parts of a model, and the uses of each part."""
    parts = [model]
    places: dict[int, list[tuple[str | int, Any]]] = {id(model): []}  # id -> (name, parent)
    nodes = list(nnx.iter_graph(model))
    for _, parent in nodes:
        for name, child in _children(parent):
            if id(child) not in places:
                places[id(child)] = []
                parts.append(child)
            places[id(child)].append((name, parent))
    for path, node in nodes:
        check(
            id(node) in places or not isinstance(node, nnx.Module | nnx.Variable),
            f"{path_text(path)} is in a container that is not supported: use a list or a dictionary",
        )

    def uses(part: Any, below: tuple[int, ...] = ()) -> list[Use]:
        found: list[Use] = [((), None)] if part is model else []
        for name, parent in places[id(part)]:
            if id(parent) not in below:  # a module may contain its parent
                above = uses(parent, (*below, id(part)))
                found += [((*path, name), parent) for path, _ in above]
        return found

    return [(part, uses(part)) for part in parts if isinstance(part, nnx.Module | nnx.Variable)]


def _children(parent: Any) -> Iterator[tuple[str | int, Any]]:
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
    """Returns a Frozen variable with the value and the metadata of `variable`, marked as loaded (see `Frozen`).

    Its metadata `thawed` is the class of `variable`, for `thaw`.
    """
    metadata = variable.get_metadata() | {"draw": None, "thawed": type(variable)}
    return Frozen.from_metadata(variable.get_value(), metadata)


def thaw(model: Any) -> Any:
    """Turns Frozen variables, except codes and scales of quantized kernels, into Params in place. Returns the model.

    A variable of a subclass of `nnx.Param`, such as `nnx.LoRAParam`, gets its class back.
    """

    def change(part: Any, uses: list[Use]) -> Any:
        if not isinstance(part, Frozen) or part.get_metadata("holds", None) is not None:
            return part
        metadata = dict(part.get_metadata())
        metadata.pop("draw", None)
        return metadata.pop("thawed", nnx.Param).from_metadata(part.get_value(), metadata)

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

    @property
    def ndim(self) -> int:
        return len(self.batch + self.inputs + self.outputs)

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


def check_unstacked(variable: nnx.Variable, ndim: int, path: Path) -> None:
    """Raises a UserError unless the variable has `ndim` dimensions; `nnx.vmap` adds a dimension."""
    check(
        variable.ndim == ndim,
        f"{path_text(path)} has {variable.ndim} dimensions instead of {ndim}, because nnx.vmap stacked the layer:"
        " freeze, adapt, quantize or merge stacked layers inside nnx.vmap, as in nnx.vmap(lambda x: merge(x))"
        "(model.layers)",
    )


def kernel_axes(layer: Any) -> KernelAxes | None:
    """Returns the axes of a linear layer's kernel, not stacked by `nnx.vmap`; None for all other layers.

    Linear layers are `nnx.Linear`, `nnx.LinearGeneral`, this project's `Linear`, and an `nnx.Einsum` whose equation is
    a matrix product, possibly batched.
    """
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
