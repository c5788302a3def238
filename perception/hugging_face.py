"""Pretrained weights from, and export to, a local folder of Hugging Face's format: config.json and safetensors."""

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
from perception.parameter_names import NAMES, OLD, Place, place, their_name
from perception.safetensor_files import Tensor, TensorFiles

TOKENIZER = "tokenizer.json"
BESIDE = (
    *(TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.txt", "vocab.json", "merges.txt", "tokenizer.model", "generation_config.json"),
)
"""Files of a folder that belong to a model beside its weights and its configuration."""


@dataclass(frozen=True)
class Pretrained:
    """A model in a folder, whose weights stay there until `load`."""

    directory: Path
    shape: Backbone
    files: TensorFiles

    @property
    def fingerprint(self) -> str:
        """SHA-256 (64 hex digits) of the files of weights and of config.json, which says how they are used."""
        said = (self.directory / CONFIG).read_text()
        return cache.fingerprint([self.files.fingerprint, said])

    def found(self, name: str) -> str:
        """The name in these files: with or without the prefix, and BERT's older ones."""
        *module, leaf = name.split(".")
        old = ".".join([*module, OLD[leaf]]) if module[-1] == "LayerNorm" else name
        prefix = NAMES[self.shape.family].prefix
        known = (p + n for p in ("", prefix) for n in (name, old) if p + n in self.files.names)
        found = next(known, None)
        check(found is not None, f"{self.directory} has no tensor {name}, nor {prefix}{name}")
        return found

    def load(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> Params:
        """Arrays of the wanted types at the wanted places; every device's part is read from the files on its own.

        Args:
          wanted: by the encoder's names, such as "embed/table"; each with a sharding.

        Raises:
          UserError: a tensor is missing or of another shape, or has numbers that are not finite.
        """
        # All are checked before the first is read.
        places = {ours: self._place(ours, want.shape) for ours, want in wanted.items()}

        def load(ours: str, want: jax.ShapeDtypeStruct) -> jax.Array:
            def part(index: tuple[slice, ...]) -> np.ndarray:
                found = places[ours].read(self.files, index, want.shape)
                check(
                    bool(np.isfinite(found).all()),
                    f"the tensor {places[ours].name} of {self.directory} has numbers that are not finite",
                )
                return found.astype(want.dtype)

            return jax.make_array_from_callback(want.shape, want.sharding, part)

        return {ours: load(ours, want) for ours, want in wanted.items()}

    def _place(self, ours: str, shape: tuple[int, ...]) -> Place:
        there = place(self.shape.family, ours, shape)
        name = self.found(there.name)
        found = self.files.shape(name)
        check(
            found == there.whole,
            f"the tensor {name} of {self.directory} has the shape {found}, the model needs {there.whole}",
        )
        return Place(name, found, there.start, there.turned)


def open_model(
    directory: Path, option: str = "--config.pretrained", advice: str = ""
) -> Pretrained:
    """The model in a folder, which `option` of a command line names; `advice` is for where there is no folder.

    Raises:
      UserError: there is none, its family or a field of its configuration is unknown here, or a file is damaged.
    """
    directory = directory.expanduser()
    check(directory.is_dir(), f"{option}={directory} is no folder{advice}")
    return Pretrained(directory, config_json.read(directory / CONFIG), TensorFiles(directory))


def check_shape(name: str, given: Backbone, found: Backbone) -> None:
    """The backbone that was asked for by `name` has to be that of the files.

    Raises:
      UserError: it is another; the line names the first differences.
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
    """Writes a folder that transformers reads; all processes call it. It appears when it is complete.

    Args:
      values: all of the encoder's, by its names.
      tokenizer_json: the content of tokenizer.json.
      like: the model that the values are of. Its names of tensors, and what it has beside them, are taken over: output
        layers, fields of its configuration, files of its tokenizer.
      beside: writes into the folder what else belongs there, before it appears; called on the main process.

    Raises:
      UserError: the folder is not empty or cannot be written, or the family's files cannot express the backbone.
      ValueError: the values are not those of the backbone.
    """
    safetensor_files.require_empty(directory)
    abstract_model = variables.abstract(lambda: backbone(shape, rngs=variables.ParamKeys(0)))
    needed = {(name, v.shape) for name, v in abstract_model.trainable.items()}
    if wrong := needed ^ {(name, x.shape) for name, x in values.items()}:
        raise ValueError(f"not the values of this backbone: {sorted(wrong)[:2]}")
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
    """The fields of config.json: where there is a model that they come from, its own, but for what has changed."""
    if like is None:
        return config_json.to_json(shape)
    theirs = json.loads((like.directory / CONFIG).read_text())
    if shape == like.shape:
        return theirs
    ours = config_json.to_json(shape)
    return theirs | {n: value for n, value in ours.items() if n != "architectures"}


def _tensor(family: str, parts: list[str], values: Params) -> Tensor:
    """Our arrays that together, in their order, are one of their tensors."""
    places = [place(family, ours, values[ours].shape) for ours in parts]

    def get() -> np.ndarray:
        whole = [gather(values[ours]) for ours in parts]
        return np.concatenate([x.T if p.turned else x for x, p in zip(whole, places, strict=True)])

    return Tensor(places[0].whole, np.dtype(values[parts[0]].dtype), get)
