"""Maps parameter names of this project to tensors in Hugging Face files, including transposed and fused tensors.

Kernels have the shape (inputs, outputs) in this project and (outputs, inputs) in the files.
"""

import re
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from common.errors import check
from common.storage.addresses import shown
from perception.families.table import FAMILIES
from perception.quantized import BLOCK, CODES, SCALES, dequantize
from perception.safetensor_files import CODES as CODE_DTYPES
from perception.safetensor_files import TensorFiles

_LEAVES = {"kernel": "weight", "bias": "bias", "scale": "weight", "table": "weight"}
OLD = {"weight": "gamma", "bias": "beta"}
"""Current name of a norm parameter -> name in early BERT files."""


def their_name(family: str, ours: str) -> str:
    """Converts a parameter name of this project to the name in Hugging Face files.

    The result, such as "layers.0.self_attn.q_proj.weight", lacks the family's prefix, such as "model.".
    """
    names = FAMILIES[family].names
    module, _, leaf = ours.rpartition("/")
    # A parameter whose whole name is in `outside`, such as "embed/types", is an embedding table.
    if ours in names.outside:
        module, leaf = ours, "table"
    layer = re.fullmatch(r"stack/blocks/(\d+)/(.*)", module)
    where = (
        f"{names.layers}.{layer[1]}.{names.inside[layer[2]]}" if layer else names.outside[module]
    )
    return f"{where}.{_LEAVES[leaf]}"


def our_layer(family: str, theirs: str) -> str | None:
    """Converts a module name in the files, such as "model.layers.0.self_attn.q_proj", to a path of this project.

    The family's prefix, such as "model.", may be missing. Returns None if the module is unknown, is outside the
    transformer layers, or fuses several linear layers of this project.
    """
    names = FAMILIES[family].names
    found = re.fullmatch(
        rf"{re.escape(names.layers)}\.(\d+)\.(.+)", theirs.removeprefix(names.prefix)
    )
    inside = [ours for ours, module in names.inside.items() if found and module == found[2]]
    return f"stack/blocks/{found[1]}/{inside[0]}" if len(inside) == 1 else None


@dataclass(frozen=True)
class Location:
    """Location of a parameter in the files.

    Attributes:
      name: name of the stored tensor.
      stored: shape of the stored tensor.
      start: index of the layer's first output in a tensor that fuses layers; otherwise 0.
      transposed: whether the stored tensor is transposed.
    """

    name: str
    stored: tuple[int, ...]
    start: int
    transposed: bool

    def read(
        self, files: TensorFiles, index: tuple[slice, ...], shape: tuple[int, ...]
    ) -> np.ndarray:
        """Reads the slice `index` of the parameter, whose full shape in this project is `shape`."""
        bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
        (first, last), *inputs = bounds[::-1] if self.transposed else bounds
        outputs = slice(self.start + first, self.start + last)
        part = files.read(self.name, (outputs, *(slice(*ends) for ends in inputs)))
        return part.T if self.transposed else part


def locate(family: str, ours: str, shape: tuple[int, ...]) -> Location:
    """Returns the location in the files of the parameter `ours`, which has the shape `shape` in this project."""
    name, transposed = their_name(family, ours), ours.endswith("/kernel")
    stored = shape[::-1] if transposed else shape
    parts = _fused(family, ours)
    start = parts.index(ours) * stored[0]
    return Location(name, (len(parts) * stored[0], *stored[1:]), start, transposed)


def _fused(family: str, ours: str) -> list[str]:
    """Returns the parameters that the files store in the same tensor as `ours`, in the order of the tensor."""
    layer = re.fullmatch(r"(stack/blocks/\d+/)(.*)/(\w+)", ours)
    inside = FAMILIES[family].names.inside
    if not layer:
        return [ours]
    start, module, leaf = layer.groups()
    return [f"{start}{n}/{leaf}" for n, theirs in inside.items() if theirs == inside[module]]


@dataclass(frozen=True)
class PackedLocation:
    """Location of a quantized kernel in the files. `read` takes the arguments of `Location.read`."""

    name: str

    def check(self, files: TensorFiles, shape: tuple[int, ...]) -> None:
        """Raises a UserError if codes or scales are missing, or do not fit a kernel of shape `shape`."""
        for part in (CODES, SCALES):
            name = f"{self.name}{part}"
            check(
                name in files.names,
                f"{shown(files.directory)} has no tensor {name}: quantize the model again with perception.adapters"
                " quantize",
            )
            found = files.shape(name)
            blocks, outputs = -(-shape[0] // BLOCK), shape[1]
            check(
                (*found[:1], *found[-1:]) == (blocks, outputs),
                f"{shown(files.directory)}: tensor {name} has shape {found}, which does not fit a kernel of shape"
                f" {shape} ({blocks} block{'s' * (blocks != 1)} of inputs, {outputs} output{'s' * (outputs != 1)}):"
                " quantize the model again with perception.adapters quantize",
            )

    def read(
        self, files: TensorFiles, index: tuple[slice, ...], shape: tuple[int, ...]
    ) -> np.ndarray:
        """Reads the slice `index` of the kernel, dequantized to float32."""
        (first, last), outputs = (
            part.indices(size)[:2] for part, size in zip(index, shape, strict=True)
        )
        start, end = first // BLOCK, -(-last // BLOCK)
        where = (slice(start, end), slice(None), slice(*outputs))
        codes = files.read(f"{self.name}{CODES}", where, CODE_DTYPES)
        scales = f"{self.name}{SCALES}"
        where = where if len(files.shape(scales)) == 3 else where[::2]
        rows = dequantize(
            jnp.asarray(codes), jnp.asarray(files.read(scales, where)), len(codes) * BLOCK
        )
        return np.asarray(rows)[first - start * BLOCK : last - start * BLOCK]
