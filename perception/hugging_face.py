"""Reads and writes models in Hugging Face format: a local directory with config.json and safetensors."""

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from common import variables
from common.config import check
from common.data import cache
from common.runtime.processes import barrier, gather, is_main
from common.variables import Params
from perception import config_json, safetensor_files
from perception.backbones import Backbone
from perception.config_json import CONFIG, differences
from perception.model import backbone
from perception.parameter_names import NAMES, OLD, Location, locate, their_name
from perception.safetensor_files import Tensor, TensorFiles

TOKENIZER = "tokenizer.json"
BESIDE = (
    *(TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.txt", "vocab.json", "merges.txt", "tokenizer.model", "generation_config.json"),
)
"""Files beside weights and config.json that an export copies from the base model."""


@dataclass(frozen=True)
class Pretrained:
    """A pretrained model in a directory. `load` reads its weights."""

    directory: Path
    shape: Backbone
    files: TensorFiles

    @property
    def fingerprint(self) -> str:
        """SHA-256 (64 hex digits) of the weight files and config.json."""
        config = (self.directory / CONFIG).read_text()
        return cache.fingerprint([self.files.fingerprint, config])

    def found(self, name: str) -> str:
        """Returns the stored name of a tensor: with or without the family's prefix, or BERT's older name.

        Raises:
          UserError: the files lack the tensor.
        """
        *module, leaf = name.split(".")
        old = ".".join([*module, OLD[leaf]]) if module[-1] == "LayerNorm" else name
        prefix = NAMES[self.shape.family].prefix
        known = (p + n for p in ("", prefix) for n in (name, old) if p + n in self.files.names)
        found = next(known, None)
        check(found is not None, f"{self.directory} has neither tensor {name} nor {prefix}{name}")
        return found

    def load(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> Params:
        """Loads arrays with the requested dtypes and shardings. Each device reads only its shard.

        Args:
          wanted: parameter name of the encoder, such as "embed/table" -> shape, dtype and sharding.

        Raises:
          UserError: a tensor is missing, has another shape, or contains a value that is not finite.
        """
        # Check all names and shapes before reading any values.
        locations = {ours: self._locate(ours, want.shape) for ours, want in wanted.items()}

        def load(ours: str, want: jax.ShapeDtypeStruct) -> jax.Array:
            def part(index: tuple[slice, ...]) -> np.ndarray:
                found = locations[ours].read(self.files, index, want.shape)
                check(
                    bool(np.isfinite(found).all()),
                    f"{self.directory}: tensor {locations[ours].name} contains values that are not finite",
                )
                return found.astype(want.dtype)

            return jax.make_array_from_callback(want.shape, want.sharding, part)

        return {ours: load(ours, want) for ours, want in wanted.items()}

    def _locate(self, ours: str, shape: tuple[int, ...]) -> Location:
        location = locate(self.shape.family, ours, shape)
        name = self.found(location.name)
        found = self.files.shape(name)
        check(
            found == location.stored,
            f"{self.directory}: tensor {name} has shape {found}, the model needs {location.stored}",
        )
        return Location(name, found, location.start, location.transposed)


def open_model(
    directory: Path, option: str = "--config.pretrained", advice: str = ""
) -> Pretrained:
    """Opens the model in a directory without reading its weights.

    Args:
      option: command-line option that names the directory, for error messages.
      advice: appended to the error if the directory does not exist.

    Raises:
      UserError: the directory does not exist, the family or a field is not supported, or a file is damaged.
    """
    directory = directory.expanduser()
    check(directory.is_dir(), f"{option}={directory} is not a directory{advice}")
    return Pretrained(directory, config_json.read(directory / CONFIG), TensorFiles(directory))


def check_shape(name: str, given: Backbone, found: Backbone) -> None:
    """Checks that the files hold the backbone `name`.

    Raises:
      UserError: the backbones differ; the message lists the first differences.
    """
    lost = differences(found, given)
    more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
    check(
        not lost,
        f"the pretrained model is not --config.backbone={name}: {', '.join(lost[:3])}{more}",
    )


def export(
    directory: Path,
    shape: Backbone,
    values: Params,
    tokenizer_json: str | None = None,
    like: Pretrained | None = None,
    beside: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Writes a directory that transformers can read, atomically. All processes must call this function.

    Args:
      values: all encoder parameters by name.
      tokenizer_json: content of tokenizer.json.
      like: base model of the parameters. The export keeps its tensor names, other tensors (such as output layers),
        config.json fields and tokenizer files.
      beside: writes further files into the directory; called on the main process.

    Raises:
      UserError: the directory is not empty or not writable, or config.json cannot express the backbone.
      ValueError: the parameters do not match the backbone.
    """
    safetensor_files.require_empty(directory)
    abstract_model = variables.abstract(lambda: backbone(shape, rngs=variables.ParamKeys(0)))
    needed = {(name, v.shape) for name, v in abstract_model.trainable.items()}
    if wrong := needed ^ {(name, x.shape) for name, x in values.items()}:
        raise ValueError(f"parameters do not match the backbone: {sorted(wrong)[:2]}")
    parts: dict[str, list[str]] = {}
    for ours in sorted(values):
        name = their_name(shape.family, ours)
        parts.setdefault(like.found(name) if like else name, []).append(ours)
    tensors = {name: _tensor(shape.family, ours, values) for name, ours in parts.items()}
    config = _settings(shape, like)
    config["torch_dtype"] = max(tensors.values(), key=lambda t: t.size).dtype.name
    if like:
        tensors |= {n: like.files.tensor(n) for n in like.files.names - tensors.keys()}
    with safetensor_files.staged(directory) if is_main() else nullcontext() as folder:
        safetensor_files.write(folder, tensors)
        if folder is not None:
            (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
            for name in BESIDE if like else ():
                if (like.directory / name).is_file():
                    shutil.copyfile(like.directory / name, folder / name)
            if tokenizer_json is not None:
                (folder / TOKENIZER).write_text(tokenizer_json)
            beside(folder)
    barrier(f"export {directory}")


def _settings(shape: Backbone, like: Pretrained | None) -> dict[str, Any]:
    """Returns the fields of config.json: those of the base model, updated where the shape has changed."""
    if like is None:
        return config_json.to_json(shape)
    base = json.loads((like.directory / CONFIG).read_text())
    if shape == like.shape:
        return base
    changed = config_json.to_json(shape)
    return base | {n: value for n, value in changed.items() if n != "architectures"}


def _tensor(family: str, parts: list[str], values: Params) -> Tensor:
    """Returns the stored tensor that concatenates our arrays `parts`."""
    locations = [locate(family, ours, values[ours].shape) for ours in parts]

    def get() -> np.ndarray:
        whole = [gather(values[ours]) for ours in parts]
        return np.concatenate(
            [x.T if p.transposed else x for x, p in zip(whole, locations, strict=True)]
        )

    return Tensor(locations[0].stored, np.dtype(values[parts[0]].dtype), get)
