"""Writes and reads models with quantized kernels: Hugging Face format except for the kernels of linear layers.

The files have two tensors for each kernel, with the suffixes "/codes" and "/scales" (`perception.quantized`). The field
`quantization_config` of config.json names the format. Reading dequantizes the kernels, so a run can start from the
directory as from any pretrained model. If the run quantizes the kernels to the same format again, they change by
rounding errors at most. `write` refuses a model whose files are quantized already.

`write` also writes kernels in float32 or bfloat16, in plain Hugging Face format.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from common.errors import check
from common.runtime.processes import gather
from common.storage.addresses import shown
from perception.config_json import CONFIG, METHOD, QUANTIZATION
from perception.quantized import BLOCK, CODES, KINDS, SCALES, dequantize, quantize
from perception.safetensor_files import CODES as CODE_DTYPES
from perception.safetensor_files import Tensor, TensorFiles, staged
from perception.safetensor_files import write as write_tensors

if TYPE_CHECKING:
    from perception.hugging_face import Pretrained

FORMATS = ("float32", "bfloat16", *KINDS)
"""Formats of written kernels: two unquantized formats, and the formats of `perception.quantized`."""


@dataclass(frozen=True)
class PackedLocation:
    """Location of a quantized kernel in the files. `read` takes the arguments of `parameter_names.Location.read`."""

    name: str

    def check(self, files: TensorFiles, shape: tuple[int, ...]) -> None:
        """Checks the numbers of blocks and outputs of codes and scales for a kernel of `shape`.

        Raises:
          UserError: a tensor is missing, or has a wrong number of blocks or outputs.
        """
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
                f"{shown(files.directory)}: tensor {name} has shape {found}, but a kernel of shape {shape} needs"
                f" {blocks} block{'s' * (blocks != 1)} and {outputs} output{'s' * (outputs != 1)}: quantize the model"
                " again with perception.adapters quantize",
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


def check_unquantized(base: "Pretrained") -> None:
    """Raises a UserError if the kernels of the model --pretrained are quantized."""
    check(
        base.quantization is None,
        f"--pretrained={shown(base.directory)} is quantized already: use the directory of its unquantized weights",
    )


def write(
    directory: Path,
    base: "Pretrained",
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    kind: str,
    beside: tuple[str, ...],
    option: str = "--out",
) -> None:
    """Writes a model with its kernels in another format, one kernel in memory at a time.

    Args:
      wanted: names, shapes and shardings of the parameters of `base`.
      kind: one of FORMATS.
      beside: names of other files in the directory of `base` to copy, if they exist.
      option: command-line option that names `directory`, for error messages.

    Raises:
      UserError: the directory is a file, not empty or not writable; `base` is quantized already, or lacks a tensor; a
        tensor has an unsupported dtype; or, if `kind` is a quantized format, a kernel has the wrong shape or a value
        that is not finite.
    """
    check_unquantized(base)
    kernels = {name: one for name, one in wanted.items() if name.endswith("/kernel")}
    theirs = {name: base.found(name) for name in base.stored_names(kernels)}
    tensors = {n: base.files.tensor(n) for n in base.files.names - set(theirs.values())}
    dtype = np.dtype(jnp.bfloat16 if kind == "bfloat16" else np.float32)
    if kind not in KINDS:
        for name in theirs.values():
            tensors[name] = _cast(base.files.tensor(name), dtype)
    for name, one in kernels.items() if kind in KINDS else ():
        tensors |= _packed(base, name, one, kind)
    values = json.loads((base.directory / CONFIG).read_text())
    if kind in KINDS:
        values[QUANTIZATION] = {"quant_method": METHOD, "kind": kind, "base": base.fingerprint}
    else:
        values["torch_dtype"] = dtype.name
    with staged(directory, option) as folder:
        write_tensors(folder, tensors)
        (folder / CONFIG).write_text(json.dumps(values, indent=2) + "\n")
        for name in beside:
            if (base.directory / name).is_file():
                shutil.copyfile(base.directory / name, folder / name)


def _cast(tensor: Tensor, dtype: np.dtype) -> Tensor:
    return Tensor(tensor.shape, dtype, lambda: tensor.get().astype(dtype))


def _packed(
    base: "Pretrained", name: str, one: jax.ShapeDtypeStruct, kind: str
) -> dict[str, Tensor]:
    """Returns the tensors of codes and scales. Each tensor reads and quantizes the kernel only when it is written."""
    shapes = jax.eval_shape(lambda kernel: quantize(kernel, kind), one)

    def tensor(number: int) -> Tensor:
        def get() -> np.ndarray:
            return gather(quantize(base.load({name: one})[name], kind)[number])

        return Tensor(shapes[number].shape, np.dtype(shapes[number].dtype), get)

    return {f"{name}{CODES}": tensor(0), f"{name}{SCALES}": tensor(1)}
