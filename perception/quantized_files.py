"""Writes models with quantized kernels: Hugging Face format except for the kernels of linear layers.

The files have two tensors for each kernel, with the suffixes "/codes" and "/scales" (`perception.quantized`). The field
`quantization_config` of config.json names the format. `Pretrained.load` dequantizes the kernels, so a run can start
from the directory as from any pretrained model. If the run quantizes the kernels to the same format again, they change
by rounding errors at most.

`write` also writes kernels in float32 or bfloat16, in plain Hugging Face format.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from common.errors import check
from common.storage.addresses import shown
from perception.config_json import CONFIG, METHOD, QUANTIZATION
from perception.hugging_face import Pretrained, write_files
from perception.quantized import CODES, KINDS, SCALES, quantize
from perception.safetensor_files import Tensor, staged

FORMATS = ("float32", "bfloat16", *KINDS)
"""Formats of written kernels: two unquantized formats, and the formats of `perception.quantized`."""


def write(
    directory: Path,
    base: Pretrained,
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    kind: str,
    option: str = "--out",
) -> None:
    """Writes a model with its kernels in another format, one kernel in memory at a time.

    Args:
      wanted: names, shapes and shardings of the parameters of `base`.
      kind: one of FORMATS.
      option: command-line option that names `directory`, for error messages.

    Raises:
      UserError: `directory` is not empty or not writable, `base` is quantized already, or a tensor of `base` is
        missing, damaged or not supported.
    """
    check(
        base.quantization is None,
        f"--pretrained={shown(base.directory)} is quantized already: use the directory of its unquantized weights",
    )
    kernels = {name: one for name, one in wanted.items() if name.endswith("/kernel")}
    theirs = {base.found(name) for name in base.stored_names(kernels)}
    tensors = {name: base.files.tensor(name) for name in base.files.names - theirs}
    values = json.loads((base.directory / CONFIG).read_text())
    if kind in KINDS:
        for name, one in kernels.items():
            tensors |= _packed(base, name, one, kind)
        values[QUANTIZATION] = {"quant_method": METHOD, "kind": kind, "base": base.fingerprint}
    else:
        tensors |= {name: _cast(base.files.tensor(name), jnp.dtype(kind)) for name in theirs}
        values["torch_dtype"] = kind
    with staged(directory, option) as folder:
        write_files(folder, tensors, values, base)


def _cast(tensor: Tensor, dtype: np.dtype) -> Tensor:
    return Tensor(tensor.shape, dtype, lambda: tensor.get().astype(dtype))


def _packed(base: Pretrained, name: str, one: jax.ShapeDtypeStruct, kind: str) -> dict[str, Tensor]:
    """Returns the tensors of codes and scales. Each tensor reads and quantizes the kernel only when it is written."""
    shapes = jax.eval_shape(lambda kernel: quantize(kernel, kind), one)

    def tensor(number: int) -> Tensor:
        def get() -> np.ndarray:
            return np.asarray(quantize(base.load({name: one})[name], kind)[number])

        return Tensor(shapes[number].shape, np.dtype(shapes[number].dtype), get)

    return {f"{name}{CODES}": tensor(0), f"{name}{SCALES}": tensor(1)}
