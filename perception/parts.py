"""LoRA adapters and quantized kernels for any Flax NNX model.

    from perception import Frozen, lora, merge, quantize

    model = lora(model, ["query", "value"], rank=8, rngs=nnx.Rngs(0))
    model = quantize(model, bits=4)
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)  # updates the adapters only
    graphdef, trainable, frozen, rest = nnx.split(model, nnx.Param, Frozen, ...)

Linear layers are `nnx.Linear`, `nnx.LinearGeneral` (also inside `nnx.MultiHeadAttention`), this project's `Linear`, and
an `nnx.Einsum` whose equation is a matrix product. Kernels may have any number of dimensions, see
`common.flax_models.KernelAxes`.
"""

import math
import re
from collections.abc import Iterable
from string import ascii_letters
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from common.config import check_int, check_number, check_rate
from common.errors import UserError, check
from common.flax_models import (
    KernelAxes,
    Path,
    Use,
    change_parts,
    check_rngs,
    check_unstacked,
    frozen,
    kernel_axes,
    thaw,
)
from common.model import initializers
from common.model.low_rank import Lora, is_target
from common.variables import Frozen
from perception.quantized import QuantizedKernel

__all__ = ["Frozen", "LoraLayer", "QuantizedLayer", "lora", "merge", "quantize", "thaw"]

Model = TypeVar("Model", bound=nnx.Module)

KINDS = {4: "4bit", 8: "int8"}
"""Bits per element of a quantized kernel -> name of the format in `perception.quantized`."""


def lora(
    model: Model,
    targets: Iterable[str] | None = None,
    *,
    rank: int = 8,
    alpha: float = 8.0,
    dropout: float = 0.0,
    stabilized: bool = False,
    rngs: nnx.Rngs,
) -> Model:
    """Freezes a model and adds a trainable adapter to its target layers, in place; returns the model.

    Only the matrices of adapters stay trainable: float32 `nnx.LoRAParam`. Every other `nnx.Param` becomes a `Frozen`
    variable, which `nnx.grad` and `nnx.Optimizer(..., wrt=nnx.Param)` ignore. To train other parameters, such as a new
    head, add them after calling `lora`, or adapt only a part of the model: `lora(model.encoder, ...)`.

    Args:
      model: any module. If it is a linear layer, the adapted layer is returned.
      targets: last parts of the paths of linear layers, such as "query" or "mlp/up". None takes all linear layers. A
        shared layer is a target if any of its paths is.
      rank: rank R of the adapters.
      alpha: the output of an adapter is multiplied by alpha / R.
      dropout: dropout rate of an adapter's input. As in `nnx.Dropout`, `model.eval()` turns it off.
      stabilized: whether to multiply by alpha / sqrt(R) instead of alpha / R (rsLoRA; Kalajdzievski, 2023).
      rngs: source of the adapters' initial values (stream "params") and of the dropout (stream "dropout").

    Raises:
      ValueError: an argument is invalid, the model has no linear layer without an adapter, a target matches no such
        layer, `nnx.vmap` has stacked target layers, a parameter or target layer is in a tuple, or the model is abstract
        (outside of `nnx.eval_shape`). The model is then unchanged.
    """
    check_int("rank", rank)
    check_number("alpha", alpha, positive=True)
    check_rate("dropout", dropout)
    check_rngs(rngs, "params", *["dropout"] * bool(dropout))
    ends = None if targets is None else _checked_targets(targets)
    settings = Lora(rank, alpha, dropout, stabilized)
    layers = _linear_layers(model)
    adapted = any(isinstance(part, LoraLayer) for _, part in nnx.iter_modules(model))
    check(
        bool(layers),
        "all linear layers of the model have an adapter: call merge(model) first"
        if adapted
        else "the model has no linear layer to adapt: add one, such as nnx.Linear, nnx.LinearGeneral or nnx.Einsum",
    )
    for target in ends or ():
        check(
            any(is_target(path, target) for paths in layers.values() for path in paths),
            f"targets: {target!r} matches no linear layer without an adapter; choose among"
            f" {', '.join(dict.fromkeys(_suffix(path) for paths in layers.values() for path in paths))}",
        )

    def change(part: Any, uses: list[Use]) -> Any:
        if isinstance(part, nnx.Param) and not isinstance(part, nnx.LoRAParam):
            return frozen(part)
        paths = layers.get(id(part), ())
        if not paths or not (
            ends is None or any(is_target(path, target) for path in paths for target in ends)
        ):
            return part
        _check_unstacked(part, uses[0][0])
        return LoraLayer(part, settings, rngs=rngs)

    return change_parts(model, change)


def _suffix(path: tuple[str, ...]) -> str:
    """Returns the last name of a layer's path, and the numbers after it, such as "query" or "layers/0"."""
    start = next((i for i in reversed(range(len(path))) if not path[i].isdigit()), 0)
    return "/".join(path[start:]) or "None (the model itself)"


def _checked_targets(targets: Any) -> tuple[str, ...]:
    ends = () if isinstance(targets, str) or not isinstance(targets, Iterable) else tuple(targets)
    check(
        bool(ends) and all(isinstance(end, str) for end in ends),
        f"targets must be a list of one or more names of layers, such as ['query'], or None for all, got {targets!r}",
    )
    return ends


def merge(model: Model) -> Model:
    """Merges every adapter into the kernel of its layer, in place; returns the model.

    Parameters stay `Frozen` (see `thaw`). A merged kernel that was quantized becomes an unquantized kernel of its
    original dtype. Quantized layers without an adapter stay quantized. Adapted layers that share a kernel get separate
    kernels, since their adapters differ. B of each adapter becomes 0, so that an adapted layer that was the whole
    `model`, and that another model still contains, does not add its adapter twice.

    Raises:
      ValueError: `nnx.vmap` has stacked adapted layers, an adapted layer is in a tuple, or the model is abstract. The
        model is then unchanged.
    """
    kernels = []

    def change(part: Any, uses: list[Use]) -> Any:
        if not isinstance(part, LoraLayer):
            return part
        path = (*uses[0][0], "lora_b")
        check_unstacked(part.lora_b, len(part.axes.batch + part.axes.outputs) + 1, path)
        kernels.append((part, part.merged_kernel()))
        return _plain(part.base)

    changed = change_parts(model, change)
    for adapted, kernel in kernels:
        _plain(adapted.base).kernel = kernel
        adapted.lora_b.set_value(jnp.zeros_like(adapted.lora_b.get_value()))
    return changed


def quantize(model: Model, bits: Literal[4, 8] = 4) -> Model:
    """Quantizes the `Frozen` kernels of all linear layers, in place; returns the model.

    Each output has a float32 scale for each block of 64 consecutive inputs, so a kernel takes 4.5 or 8.5 bits per
    element (more if the last block is padded). A kernel is dequantized in the forward pass, and again in the backward
    pass. The dtypes of products do not change. The quantized values and the scales are replicated on all devices of a
    mesh.

    Args:
      model: any module. If it is a linear layer, the quantized layer is returned.
      bits: 4 (4-bit NormalFloat, as in QLoRA) or 8 (signed integers).

    Raises:
      ValueError: an argument is invalid, no linear layer has a frozen kernel that is not quantized yet, `nnx.vmap` has
        stacked such layers, a layer to quantize is in a tuple, or the model is abstract. The model is then unchanged.
    """
    check(bits in tuple(KINDS), f"bits must be 4 or 8, got {bits!r}")
    found = []

    def change(part: Any, uses: list[Use]) -> Any:
        axes = kernel_axes(part)
        if axes is None or not isinstance(part.kernel, Frozen) or 0 in part.kernel.shape:
            return part
        _check_unstacked(part, uses[0][0])
        found.append((part, PackedKernel(part.kernel, axes, KINDS[bits])))
        return QuantizedLayer(part)

    changed = change_parts(model, change)
    if not found:
        if any(isinstance(part, QuantizedLayer) for _, part in nnx.iter_modules(model)):
            fault = (
                "all frozen kernels of linear layers are quantized already: call quantize only once"
            )
        elif _linear_layers(model):
            fault = (
                "no linear layer has a frozen kernel: freeze kernels first, for example with lora"
            )
        else:
            fault = "the model has no linear layer to quantize: add one, such as nnx.Linear"
        raise UserError(fault)
    for layer, kernel in found:
        layer.kernel = kernel
    return changed


def _linear_layers(model: nnx.Module) -> dict[int, list[tuple[str, ...]]]:
    """Returns {id: all paths} for all linear layers without an adapter. The layer may be a `QuantizedLayer`."""
    layers: dict[int, list[tuple[str, ...]]] = {}

    def collect(part: Any, uses: list[Use]) -> Any:
        is_inner = any(isinstance(parent, LoraLayer | QuantizedLayer) for _, parent in uses)
        if not is_inner and kernel_axes(_plain(part)) is not None:
            layers[id(part)] = [tuple(map(str, path)) for path, _ in uses]
        return part

    change_parts(model, collect)
    return layers


def _check_unstacked(layer: nnx.Module, path: Path) -> None:
    kernel = _plain(layer).kernel
    if isinstance(kernel, PackedKernel):
        check_unstacked(kernel.codes, 3, (*path, "layer", "kernel", "codes"))
    else:
        check_unstacked(kernel, kernel_axes(layer).ndim, (*path, "kernel"))


def _plain(layer: Any) -> Any:
    return layer.layer if isinstance(layer, QuantizedLayer) else layer


def low_rank_equations(axes: KernelAxes, ndim: int) -> tuple[str, str]:
    """Returns the einsum equations of x A and (x A) B for low-rank factors A and B of a kernel.

    A has the axes (batch, inputs, R), B has the axes (batch, R, outputs), and x has `ndim` dimensions.
    """
    x, kernel, y = _letters(axes, ndim)
    batch, inputs, outputs = (
        "".join(kernel[axis] for axis in part) for part in (axes.batch, axes.inputs, axes.outputs)
    )
    rank = next(letter for letter in reversed(ascii_letters) if letter not in x + kernel + y)
    middle = "".join(letter for letter in x if letter not in inputs) + rank
    return f"{x},{batch}{inputs}{rank}->{middle}", f"{middle},{batch}{rank}{outputs}->{y}"


def _letters(axes: KernelAxes, ndim: int) -> tuple[str, str, str]:
    """Returns the einsum letters of x, kernel and y for an x of `ndim` dimensions."""
    if axes.equation:
        x, kernel, y = re.split(",|->", axes.equation)
        return x, kernel, y
    x, rest = ascii_letters[:ndim], ascii_letters[ndim:]
    inputs = "".join(x[axis] for axis in sorted(axis % ndim for axis in axes.contracted))
    batch, outputs = x[: len(axes.batch)], rest[: len(axes.outputs)]
    kept = "".join(letter for letter in x if letter not in inputs)
    return x, batch + inputs + outputs, kept + outputs


class LoraLayer(nnx.Module):
    """A linear layer with an adapter: layer(x) + scale * dropout(x) A B, in the dtype of layer(x).

    Attributes:
      base: the linear layer.
      lora_a: A, (batch, inputs, R), initially U(-1/sqrt(M), 1/sqrt(M)) for M inputs, as in PEFT. "batch" stands for the
        axes of the kernel that occur in both the input and the output of the layer.
      lora_b: B, (batch, R, outputs), initially 0.
    """

    def __init__(self, base: nnx.Module, lora: Lora, *, rngs: nnx.Rngs):
        self.base, self.scale = base, lora.scale
        self.axes: KernelAxes = kernel_axes(_plain(base))
        batch, inputs, outputs = self.axes.shapes(_plain(base).kernel.shape)
        draw = initializers.uniform(max(math.prod(inputs), 1) ** -0.5)
        self.lora_a = nnx.LoRAParam(draw(rngs.params(), (*batch, *inputs, lora.rank)))
        self.lora_b = nnx.LoRAParam(jnp.zeros((*batch, lora.rank, *outputs)))
        self.dropout = nnx.Dropout(lora.rate, rngs=rngs) if lora.rate else None

    def __call__(self, x: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        x = jnp.asarray(x)
        y = self.base(x, *args, **kwargs)
        down, up = low_rank_equations(self.axes, x.ndim)
        x = x if self.dropout is None else self.dropout(x)
        low = jnp.einsum(down, x.astype(y.dtype), self.lora_a[...].astype(y.dtype))
        return y + self.scale * jnp.einsum(up, low, self.lora_b[...].astype(y.dtype))

    def merged_kernel(self) -> nnx.Variable:
        """Returns the kernel of the linear layer with the adapter merged into it. See `merge`."""
        layer, axes = _plain(self.base), self.axes
        shape, kernel = layer.kernel.shape, layer.kernel[...]
        batch, inputs, outputs = map(math.prod, axes.shapes(shape))
        a = self.lora_a[...].reshape(batch, inputs, -1)
        b = self.lora_b[...].reshape(batch, -1, outputs)
        change = self.scale * axes.from_matrices(a @ b, shape)
        value = (kernel.astype(jnp.float32) + change).astype(kernel.dtype)
        if isinstance(layer.kernel, nnx.Variable):
            # Return a new variable, because layers with different adapters may share the old variable.
            return layer.kernel.replace(value)
        return Frozen(value, draw=None)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"an adapted layer has no attribute {name!r}: its attribute `base` is the linear layer without the adapter,"
            " and merge(model) replaces the adapted layer by a linear layer"
        )


class PackedKernel(QuantizedKernel):
    """A quantized kernel of any shape. `kernel[...]` returns the dequantized kernel in its original dtype."""

    def __init__(self, kernel: nnx.Variable, axes: KernelAxes, kind: str):
        matrices = axes.to_matrices(kernel[...])
        _, inputs, _ = matrices.shape
        # Concatenate the matrices of a batch along the outputs. If they were concatenated along the inputs, a block of
        # 64 inputs that share a scale could belong to two matrices.
        matrix_MN = matrices.transpose(1, 0, 2).reshape(inputs, -1)
        super().__init__(Frozen(matrix_MN), kind)
        self.axes, self.shape, self.dtype = axes, kernel.shape, kernel.dtype

    def __getitem__(self, key: object) -> jax.Array:
        batch, inputs, outputs = map(math.prod, self.axes.shapes(self.shape))
        matrix_MN = super().__getitem__(...).reshape(inputs, batch, outputs)
        kernel = self.axes.from_matrices(matrix_MN.transpose(1, 0, 2), self.shape)
        return kernel.astype(self.dtype)[key]


class QuantizedLayer(nnx.Module):
    """A linear layer with a quantized kernel. The backward pass dequantizes the kernel again.

    Attributes:
      layer: the linear layer, whose kernel is a `PackedKernel`.
    """

    def __init__(self, layer: nnx.Module):
        self.layer = layer

    def __call__(self, x: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        graphdef, state = nnx.split(self.layer)

        @jax.checkpoint
        def call(state: nnx.State, x: jax.Array) -> jax.Array:
            return nnx.merge(graphdef, state)(x, *args, **kwargs)

        return call(state, x)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a quantized layer has no attribute {name!r}: its attribute `layer` is the linear layer, whose"
            " kernel[...] is the dequantized kernel"
        )
