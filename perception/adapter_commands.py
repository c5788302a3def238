"""Implements the commands of perception.adapters: merge, unmerge, add, peft, export and quantize."""

import json
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from common.arguments import check_folder, float_arg
from common.errors import check
from common.model.low_rank import Lora
from common.report.table import publish, text
from common.sharding import abstract
from common.storage.addresses import shown
from common.storage.folders import open_folder
from common.variables import Params
from perception import (
    adapter_arithmetic,
    hub,
    hugging_face,
    loading,
    peft_format,
    quantized_files,
)
from perception.adapter_arithmetic import Adapter
from perception.backbones import Backbone
from perception.classifier_folder import write_classifier
from perception.families.fields import Fields, as_json, read_object
from perception.families.table import FAMILIES
from perception.finetuning import ENCODER, encoder_parameters, reinitialized
from perception.head import BIAS, KERNEL
from perception.hugging_face import Pretrained, open_model
from perception.methods import FINETUNE, find, make_lora
from perception.quantized import costs
from perception.safetensor_files import staged
from perception.subword import TOKENIZER

MARK = "adapter.json"
"""Name of a file that this project adds to an adapter in PEFT's format. The file stores `Adapter.base`, `Opened.family`
and `Opened.quantize`."""


class Opened(NamedTuple):
    """An adapter and its base model.

    Attributes:
      family: family of the base model.
      source: directory of the base weights; None if unknown or not found.
      quantize: --config.quantize of the run that trained the adapter. "none" if the value is unknown, or if it differs
        between summed adapters.
    """

    adapter: Adapter
    family: str
    source: Path | None
    quantize: str = "none"


def merge(options: Namespace) -> None:
    """Writes base weights with an adapter merged into them."""
    opened = open_adapter(options.adapter, options.mesh, weights=options.pretrained)
    source = options.pretrained or opened.source
    check(
        source is not None,
        f"the base weights of --adapter={shown(options.adapter)} were not found: name their directory with"
        " --pretrained=DIR",
    )
    base, what = open_model(source, "--pretrained"), f"--adapter={shown(options.adapter)}"
    _check_base(base, opened.adapter.base, what, opened.quantize, options.mesh)
    names = what, f"the weights in {shown(source)}"
    merged = adapter_arithmetic.merge(_weights(base, options.mesh), opened.adapter, names=names)
    hugging_face.export(options.out, base.shape, merged, like=base)


def _check_base(base: Pretrained, fingerprint: str, what: str, kind: str, mesh: Mesh) -> None:
    """Checks that `base` is the model that a run or an adapter was trained on, or this model quantized to `kind`.

    Prints a warning with the quantization errors if `kind` is a quantized format and `base` has another format.

    Args:
      fingerprint: fingerprint of the model that the run or the adapter was trained on; "" accepts every model.
      what: option that names the run or the adapter, for the messages.
      kind: --config.quantize of the run.
    """
    quantized = base.quantization
    same = quantized is not None and (quantized.kind, quantized.base) == (kind, fingerprint)
    check(
        same or fingerprint in ("", base.fingerprint),
        f"{what} was not trained on the weights in {shown(base.directory)} (fingerprint {base.fingerprint[:12]}), but"
        f" on weights with the fingerprint {fingerprint[:12]}: name the directory of the latter with --pretrained=DIR",
    )
    if kind == "none" or (quantized and quantized.kind == kind):
        return
    errors = [
        100 * cost.error for cost in costs(base.load, wanted_parameters(base.shape, mesh), kind)
    ]
    used = f"weights quantized to {quantized.kind}" if quantized else "the unquantized weights"
    remedy = (
        f". To use the quantized weights, write them with perception.adapters quantize"
        f" --pretrained={shown(base.directory)} --kind={kind} --save=DIR, and repeat this command with --pretrained=DIR"
        " and another --out"
    )
    print(
        f"warning: {what} was trained on weights quantized to {kind}, but {used} are used here:"
        f" {len(errors)} kernels differ, by {np.mean(errors):.2g} % of their norm on average and {max(errors):.2g} %"
        f" at most, so the test result of the run does not hold for the written files{'' if quantized else remedy}",
        file=sys.stderr,
    )


def unmerge(options: Namespace) -> None:
    """Writes merged weights minus an adapter, which undoes `merge` up to rounding."""
    merged = open_model(options.merged, "--merged")
    opened = open_adapter(options.adapter, options.mesh, "--adapter", options.merged, "--merged")
    names = f"--adapter={shown(options.adapter)}", f"--merged={shown(options.merged)}"
    check(
        merged.fingerprint != opened.adapter.base,
        f"{names[1]} contains the base weights of {names[0]} without a merged adapter: name the directory of the merged"
        " weights with --merged=DIR",
    )
    values = adapter_arithmetic.merge(_weights(merged, options.mesh), opened.adapter, -1, names)
    hugging_face.export(options.out, merged.shape, values, like=merged)


def add(options: Namespace) -> None:
    """Writes the weighted sum of adapters in PEFT's format."""
    weights = []
    for term in options.adapters:
        path, colon, weight = term.rpartition(":")
        check(bool(colon and path), f"--adapters {term} must be ADAPTER:WEIGHT, such as runs/a:0.5")
        weights.append((open_folder(path), float_arg(f"the weight in --adapters {term}")(weight)))
    found = [
        (open_adapter(path, options.mesh, "--adapters", options.pretrained), weight)
        for path, weight in weights
    ]
    families = dict.fromkeys(opened.family for opened, _ in found)
    check(
        len(families) == 1,
        f"--adapters names adapters of several model families ({', '.join(families)}): name adapters of one family",
    )
    terms = [(opened.adapter, weight) for opened, weight in found]
    total = adapter_arithmetic.combine(terms, "--adapters")
    source = options.pretrained or next((x.source for x, _ in found if x.source), None)
    kinds = {opened.quantize for opened, _ in found}
    kind = kinds.pop() if len(kinds) == 1 else "none"
    with staged(options.out) as folder:
        _save(folder, Opened(total, found[0][0].family, source, kind), None)


def peft(options: Namespace) -> None:
    """Writes the adapter of a run in PEFT's format, with the tokenizer, the classification head and a README.md."""
    config = loading.read(options.run, "--run")
    base = _base_of_adapter(config, options.run, "--run", options.pretrained)
    what = f"--run={shown(options.run)}"
    trained, fingerprint = loading.load_own(config, options.run, options.mesh)
    _check_base(base, fingerprint, what, config.quantize, options.mesh)
    lora = make_lora(config)
    # PEFT applies the LoRA scale itself, so the file must store B without the scale. With alpha = rank, `of_values`
    # multiplies B by 1.
    unscaled = replace(lora, alpha=lora.rank, stabilized=False)
    adapter = adapter_arithmetic.of_values(trained.values.trainable, unscaled, fingerprint)
    with staged(options.out) as folder:
        _save(folder, Opened(adapter, base.shape.family, base.directory, config.quantize), lora)
        trained.tokenizer.save(folder / TOKENIZER)
        thresholds = loading.read_thresholds(options.run, config)
        write_classifier(folder, trained, base.directory.absolute(), thresholds)


def export(options: Namespace) -> None:
    """Writes a run's encoder (with merged adapters), tokenizer and head, and a README.md with code that uses them."""
    config = loading.read(options.run, "--run")
    base = loading.begun_from(config, options.pretrained)
    trained, fingerprint = loading.load_own(config, options.run, options.mesh)
    own = {**trained.values.frozen, **trained.values.trainable}
    method, like = find(config.finetune), None
    encoder = {n.removeprefix(ENCODER): x for n, x in own.items() if n not in (KERNEL, BIAS)}
    if method.adapters:
        encoder = {n: x for n, x in encoder.items() if "lora_" not in n}
    wanted = wanted_parameters(trained.shape, options.mesh)
    added = sorted(encoder.keys() - wanted.keys())
    check(
        not added,
        f"--run={shown(options.run)} cannot be exported: {FINETUNE}={config.finetune} adds parameters that"
        f" models in Hugging Face format lack, such as {', '.join(added[:1])}; use perception.classify with this run"
        " instead",
    )
    if method.pretrained and not method.trains_all:
        like, what = base, f"--run={shown(options.run)}"
        _check_base(base, fingerprint, what, config.quantize, options.mesh)
        encoder |= base.load({n: w for n, w in wanted.items() if n not in encoder})
    if method.adapters:
        adapter = adapter_arithmetic.of_values(own, make_lora(config), fingerprint)
        encoder = adapter_arithmetic.merge(encoder, adapter)
    text = None if like else trained.tokenizer.to_json()
    thresholds = loading.read_thresholds(options.run, config)
    hugging_face.export(
        options.out,
        trained.shape,
        encoder,
        text,
        like,
        lambda out: write_classifier(out, trained, thresholds=thresholds),
    )


def quantize(options: Namespace) -> None:
    """Prints a table of each kernel's bytes before and after quantization, and its relative error.

    --out also writes the table as CSV and Markdown. --save writes the quantized weights.
    """
    if options.out:
        check_folder("--out", options.out)
    base = open_model(options.pretrained, "--pretrained")
    wanted = wanted_parameters(base.shape, options.mesh)
    if options.save:
        quantized_files.write(options.save, base, wanted, options.kind, "--save")
    found = list(costs(base.load, wanted, options.kind))
    rows = [(c.name.removesuffix("/kernel"), c.before, c.after, 100 * c.error) for c in found]
    before, after = (sum(getattr(c, name) for c in found) for name in ("before", "after"))
    rest = 4 * sum(x.size for x in wanted.values()) - before
    rows += [("all kernels", before, after, None), ("not quantized", rest, rest, None)]
    columns = ("kernel", "bytes in float32", f"in {options.kind}", "error (% of the norm)")
    if options.out:
        publish(options.out / f"quantize_{options.kind}", columns, rows)
    else:
        print(text(columns, rows))
    print(f"kernels are {before / after:.2f} times smaller than in float32")
    if options.save:
        print(f"written: {shown(options.save)}")
    else:
        print(
            f"No weights were written: a run with --config.quantize={options.kind} quantizes the kernels at every"
            " start; --save=DIR writes the quantized weights"
        )


def open_adapter(
    path: Path,
    mesh: Mesh,
    option: str = "--adapter",
    weights: Path | None = None,
    weights_option: str = "--pretrained",
) -> Opened:
    """Opens an adapter: a run that trained LoRA adapters, or a directory in PEFT's format.

    Args:
      option: the command-line option that `path` comes from, for error messages.
      weights: directory of the base weights or of merged weights; None for the directory that the run or the adapter
        names.
      weights_option: the command-line option that `weights` comes from, for error messages.

    Raises:
      UserError: `path` holds no adapter; the run reinitialised embedding tables; or the base model or another file is
        missing, damaged or not supported, or does not fit the adapter.
    """
    if (path / MARK).is_file() or (path / peft_format.CONFIG).is_file():
        return _saved(path, weights)
    config = loading.read(path, option)
    base = _base_of_adapter(config, path, option, weights, weights_option)
    trained, fingerprint = loading.load_own(config, path, mesh)
    found = adapter_arithmetic.of_values(trained.values.trainable, make_lora(config), fingerprint)
    return Opened(found, base.shape.family, base.directory, config.quantize)


def _base_of_adapter(
    config: ConfigDict,
    path: Path,
    option: str,
    weights: Path | None,
    weights_option: str = "--pretrained",
) -> Pretrained:
    """Returns the base model of a run. Raises a UserError unless base model and adapter are the whole encoder."""
    check(
        find(config.finetune).adapters,
        f"{option}={shown(path)} has no adapter: the run used --config.finetune={config.finetune}; name a run that"
        " trained LoRA adapters",
    )
    base = loading.begun_from(config, weights, weights_option)
    check(
        base is not None,
        f"{option}={shown(path)} did not begin from pretrained weights, so its adapter has no base model: use"
        " perception.adapters export, which writes the whole encoder",
    )
    drawn = reinitialized(config, base.shape.family)
    check(
        not drawn,
        f"{option}={shown(path)} was trained with --config.reinitialize={config.reinitialize}: its adapter needs the"
        f" run's own embedding tables ({' and '.join(drawn)}), which an adapter does not contain; use"
        " perception.adapters export, which writes the whole encoder",
    )
    return base


def _saved(path: Path, weights: Path | None) -> Opened:
    """Opens an adapter in PEFT's format. Without the file MARK, the family is the family of the base model."""
    mark = _read_mark(path / MARK)
    fields = peft_format.read_config(path)
    name = fields.get("base_model_name_or_path", "")
    check(
        isinstance(name, str),
        f"{fields.place}: base_model_name_or_path must be a string or null, got {as_json(name)}; correct the file",
    )
    source = _folder(name)
    if mark is None:
        check(
            weights is not None or source is not None,
            f"{shown(path / peft_format.CONFIG)}: base_model_name_or_path={as_json(name)} is neither a directory nor in"
            " the Hugging Face cache: name the directory of the base weights with --pretrained=DIR",
        )
        named = f"{shown(path / peft_format.CONFIG)}: base_model_name_or_path"
        family = open_model(weights or source, "--pretrained" if weights else named).shape.family
        mark = {"base": "", "family": family, "quantize": "none"}
    found = peft_format.read(path, mark["family"], mark["base"])
    return Opened(found, mark["family"], source, mark["quantize"])


def _read_mark(path: Path) -> dict[str, str] | None:
    if not path.is_file():
        return None
    fields = Fields(path, read_object(path))
    fields.one_of("family", FAMILIES)
    # Adapters from before 24 November 2026 lack the field `quantize`.
    quantize = fields.get("quantize", "none")
    return {"base": fields.get("base"), "family": fields.get("family"), "quantize": quantize}


def _folder(name: str) -> Path | None:
    """Returns the directory `name`, or else the directory of the hub model `name` in the local cache, or else None."""
    return Path(name) if name and Path(name).is_dir() else hub.cached(name)


def _save(folder: Path, opened: Opened, lora: Lora | None) -> None:
    """Writes an adapter that `open_adapter` and PEFT can read. `peft_format.write` documents `lora`."""
    peft_format.write(folder, opened.adapter, opened.family, lora, opened.source)
    mark = {"base": opened.adapter.base, "family": opened.family, "quantize": opened.quantize}
    (folder / MARK).write_text(json.dumps(mark) + "\n")


def wanted_parameters(shape: Backbone, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shape, dtype and sharding of every encoder parameter by name."""
    return abstract(encoder_parameters(shape), mesh)


def _weights(pretrained: Pretrained, mesh: Mesh) -> Params:
    return pretrained.load(wanted_parameters(pretrained.shape, mesh))
