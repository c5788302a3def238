"""Reads and writes models in Hugging Face format: a local directory with config.json and safetensors."""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from common import variables
from common.data import cache
from common.errors import check
from common.storage.addresses import shown
from common.variables import Params
from perception import config_json, hub, safetensor_files
from perception.backbones import Backbone
from perception.config_json import CONFIG, QUANTIZATION, Quantization, differences
from perception.families.table import FAMILIES
from perception.model import backbone
from perception.parameter_names import OLD, Location, PackedLocation, locate, their_name
from perception.quantized import CODES, SCALES
from perception.safetensor_files import Tensor, TensorFiles
from perception.subword import TOKENIZER

BESIDE = (
    *(TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.txt", "vocab.json", "merges.txt", "tokenizer.model", "generation_config.json"),
)
"""Files that an export copies from the base model if they exist."""


@dataclass(frozen=True)
class Pretrained:
    """A pretrained model in a directory. The method `load` reads the weights.

    Attributes:
      quantization: how the kernels are quantized; None for an unquantized model.
    """

    directory: Path
    shape: Backbone
    files: TensorFiles
    quantization: Quantization | None = None

    @property
    def fingerprint(self) -> str:
        """SHA-256 (64 hex digits) of the weight files and config.json."""
        config = (self.directory / CONFIG).read_text()
        return cache.fingerprint([self.files.fingerprint, config])

    def found(self, name: str) -> str:
        """Returns the name of the tensor `name` in the files, where the family's prefix may precede the name.

        Also finds norms under their names in early BERT files (`parameter_names.OLD`). Raises a UserError if the files
        lack the tensor.
        """
        *module, leaf = name.split(".")
        old = ".".join([*module, OLD[leaf]]) if module[-1] == "LayerNorm" else name
        prefix = FAMILIES[self.shape.family].names.prefix
        known = (p + n for p in ("", prefix) for n in (name, old) if p + n in self.files.names)
        found = next(known, None)
        check(
            found is not None,
            f"{shown(self.directory)} has neither tensor {name} nor {prefix}{name}, which its config.json needs: use"
            " the config.json and all weight files of one model",
        )
        return found

    def written(self, name: str) -> str:
        """Returns the name under which an export stores the tensor `name`.

        The files of a quantized model have no tensor with the name of a kernel. The kernel then gets the family's
        prefix if other tensors have this prefix. Raises a UserError if the files of an unquantized model lack the
        tensor.
        """
        prefix = FAMILIES[self.shape.family].names.prefix
        prefixed = any(n.startswith(prefix) for n in self.files.names)
        whole = prefix + name if prefixed else name
        return self.found(name) if not self.quantization or whole in self.files.names else whole

    def stored_names(self, ours: Iterable[str]) -> set[str]:
        """Converts parameter names to tensor names in unquantized files, without the prefix of the model's family."""
        return {their_name(self.shape.family, name) for name in ours}

    def load(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> Params:
        """Loads arrays with the requested dtypes and shardings. A process loads only the shards of its devices.

        Args:
          wanted: name of a parameter of the encoder, such as "embed/table" -> its shape, dtype and sharding.

        Raises:
          UserError: a tensor is missing, has the wrong shape or an unsupported dtype, or contains a value that is not
            finite.
        """
        # Check all names and shapes before reading any values.
        locations = {ours: self._locate(ours, want.shape) for ours, want in wanted.items()}

        def load(ours: str, want: jax.ShapeDtypeStruct) -> jax.Array:
            def part(index: tuple[slice, ...]) -> np.ndarray:
                found = locations[ours].read(self.files, index, want.shape)
                check(
                    bool(np.isfinite(found).all()),
                    f"{shown(self.directory)}: tensor {locations[ours].name} contains values that are not finite: use"
                    " an undamaged copy of the model",
                )
                return found.astype(want.dtype)

            return jax.make_array_from_callback(want.shape, want.sharding, part)

        return {ours: load(ours, want) for ours, want in wanted.items()}

    def _locate(self, ours: str, shape: tuple[int, ...]) -> Location | PackedLocation:
        if self.quantization and ours.endswith("/kernel"):
            packed = PackedLocation(ours)
            packed.check(self.files, shape)
            return packed
        location = locate(self.shape.family, ours, shape)
        name = self.found(location.name)
        found = self.files.shape(name)
        check(
            found == location.stored,
            f"{shown(self.directory)}: tensor {name} has shape {found}, but config.json needs {location.stored}:"
            " use the config.json and the weights of one model",
        )
        return replace(location, name=name)


def open_model(name: Path, option: str = "--config.pretrained", advice: str = "") -> Pretrained:
    """Opens a model without reading its weights. `hub.locate` documents the arguments.

    Raises:
      UserError: the model does not exist, the family or a field is not supported, or a file is damaged.
    """
    directory = hub.locate(name, option, advice)
    shape, quantization = config_json.read(directory / CONFIG, option)
    return Pretrained(directory, shape, TensorFiles(directory), quantization)


def check_shape(model: str, name: str, given: Backbone, found: Backbone, advice: str) -> None:
    """Checks that the architecture in the files equals the backbone `name`, except in the fields `config_json.FREE`.

    Args:
      model: option that names the model, with its value, for the error message.
      given: the backbone `name`.
      found: the architecture in the files.
      advice: end of the error message.

    Raises:
      UserError: the architectures differ.
    """
    lost = differences(found, given)
    more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
    check(
        not lost,
        f"{model} is not --config.backbone={name}, because it has {', '.join(lost[:3])}{more}: {advice}",
    )


def export(
    directory: Path,
    shape: Backbone,
    values: Params,
    tokenizer_json: str | None = None,
    like: Pretrained | None = None,
    beside: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Atomically writes a directory that transformers can read.

    Args:
      values: all encoder parameters by name.
      tokenizer_json: content of tokenizer.json; None copies the file of `like`, if it exists.
      like: base model of the parameters. The export keeps the base model's tensor names, dtypes and tokenizer files,
        and the fields of its config.json that `shape` does not set, except `quantization_config`, which is removed, and
        `torch_dtype`, which becomes the dtype of the largest tensor. Tensors that are missing in `values`, such as
        output layers, are copied from the base model. Kernels that are quantized in the base model become float32.
      beside: function that writes more files to the directory.

    Raises:
      UserError: the directory is not empty or not writable, config.json cannot express the backbone, or `like` lacks a
        tensor or has a tensor of an unsupported dtype.
      ValueError: the parameters do not match the backbone.
    """
    safetensor_files.require_empty(directory)
    abstract_model = variables.abstract(lambda rngs: backbone(shape, rngs=rngs))
    needed = {(name, v.shape) for name, v in abstract_model.trainable.items()}
    given = {(name, x.shape) for name, x in values.items()}
    if needed != given:
        raise ValueError(
            "names or shapes of parameters do not match the backbone; the first missing:"
            f" {sorted(needed - given)[:1]}, the first unexpected: {sorted(given - needed)[:1]}; pass the parameters"
            " of this backbone"
        )
    parts: dict[str, list[str]] = {}
    for ours in sorted(values):
        name = their_name(shape.family, ours)
        parts.setdefault(like.written(name) if like else name, []).append(ours)
    tensors = {name: _tensor(shape.family, ours, values) for name, ours in parts.items()}
    if like:
        known = {
            n: like.files.tensor(n) for n in like.files.names if not n.endswith((CODES, SCALES))
        }
        float32 = np.dtype(np.float32)  # written dtype of kernels that are quantized in `like`
        dtypes = {name: known[name].dtype if name in known else float32 for name in tensors}
        tensors = {name: replace(tensor, dtype=dtypes[name]) for name, tensor in tensors.items()}
    config = _settings(shape, like)
    config["torch_dtype"] = max(tensors.values(), key=lambda t: t.size).dtype.name
    if like:
        tensors = known | tensors
    with safetensor_files.staged(directory) as folder:
        write_files(folder, tensors, config, like)
        if tokenizer_json is not None:
            (folder / TOKENIZER).write_text(tokenizer_json)
        beside(folder)


def write_files(
    folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], like: Pretrained | None
) -> None:
    """Writes the weights and the fields of config.json, and copies the files BESIDE that `like` has."""
    safetensor_files.write(folder, tensors)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    for name in BESIDE if like else ():
        if (like.directory / name).is_file():
            shutil.copyfile(like.directory / name, folder / name)


def _settings(shape: Backbone, like: Pretrained | None) -> dict[str, Any]:
    """Returns the fields of config.json for `shape`. Keeps the other fields of `like`, except its quantization."""
    if like is None:
        return config_json.to_json(shape)
    base = json.loads((like.directory / CONFIG).read_text())
    base.pop(QUANTIZATION, None)
    if shape == like.shape:
        return base
    changed = config_json.to_json(shape)
    return base | {n: value for n, value in changed.items() if n != "architectures"}


def _tensor(family: str, parts: list[str], values: Params) -> Tensor:
    """Returns the tensor to write: the concatenation of the parameters `parts`."""
    locations = [locate(family, ours, values[ours].shape) for ours in parts]

    def get() -> np.ndarray:
        whole = [np.asarray(values[ours]) for ours in parts]
        return np.concatenate(
            [x.T if p.transposed else x for x, p in zip(whole, locations, strict=True)]
        )

    return Tensor(locations[0].stored, np.dtype(values[parts[0]].dtype), get)
