"""Implements the commands of perception.adapters."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from common import variables
from common.config import check, check_folder, float_arg
from common.errors import UserError
from common.report.table import publish, text
from common.sharding import make_mesh
from common.train.checkpoint import abstract
from common.variables import Params
from perception import adapter_arithmetic, hugging_face, run
from perception.adapter_arithmetic import A, Adapter, B
from perception.backbones import Backbone
from perception.config_json import CONFIG
from perception.finetuning import ENCODER, TRAINS_ALL, make_lora, reinitialized
from perception.hugging_face import Pretrained, open_model
from perception.model import backbone
from perception.quantized import costs
from perception.safetensor_files import Tensor, TensorFiles, require_empty, staged, write

CLASSIFIER = "classifier"
"""Subdirectory of exported weights with the classification head: weight (C, 2 D), bias (C,), and a config.json with the
class names, pooling, maximum length and padding id."""

MARK = "adapter.json"
"""File in the output of `add` that holds the fingerprint of the base weights."""


def merge(options: Namespace) -> None:
    """Writes base weights with an adapter merged into them."""
    require_empty(options.out)
    adapter, source = open_adapter(options.adapter, weights=options.pretrained)
    source = options.pretrained or source
    check(
        source is not None,
        f"{options.adapter} does not record its base weights: add --pretrained=DIR",
    )
    base = open_model(source, "--pretrained")
    _require_same(base, adapter.base, f"--adapter={options.adapter}")
    _export(options.out, base, adapter_arithmetic.merge(_weights(base), adapter))


def _require_same(base: Pretrained, fingerprint: str, what: str) -> None:
    check(
        base.fingerprint == fingerprint,
        f"{what} was not trained on the weights in {base.directory}"
        f" (fingerprints {fingerprint[:12]} and {base.fingerprint[:12]})",
    )


def unmerge(options: Namespace) -> None:
    """Writes the base weights recovered from merged weights, up to rounding."""
    require_empty(options.out)
    merged = open_model(options.merged, "--merged")
    adapter, _ = open_adapter(options.adapter, weights=options.merged)
    check(
        merged.fingerprint != adapter.base,
        f"--merged={options.merged} holds the base weights of {options.adapter}: no adapter is merged into them",
    )
    _export(options.out, merged, adapter_arithmetic.merge(_weights(merged), adapter, -1))


def add(options: Namespace) -> None:
    """Writes the weighted sum of adapters."""
    require_empty(options.out)
    weights = []
    for term in options.adapters:
        path, colon, weight = term.rpartition(":")
        check(bool(colon and path), f"--adapters {term}: write ADAPTER:WEIGHT, such as runs/a:0.5")
        weights.append((Path(path), float_arg(f"the weight in --adapters {term}")(weight)))
    found = [
        (open_adapter(path, "--adapters", options.pretrained)[0], weight)
        for path, weight in weights
    ]
    save(options.out, adapter_arithmetic.combine(found))
    print(f"written: {options.out}")


def export(options: Namespace) -> None:
    """Writes the encoder of a run, with merged adapters, and its classification head in the subdirectory CLASSIFIER."""
    require_empty(options.out)
    config = run.read(options.run, "--run")
    base = run.begun_from(config, options.pretrained)
    _warn_if_quantized(config, f"--run={options.run}")
    trained, fingerprint = run.load_own(config, options.run)
    own = {**trained.values.frozen, **trained.values.trainable}
    encoder = {n.removeprefix(ENCODER): x for n, x in own.items() if n.startswith(ENCODER)}
    like = None
    if config.finetune not in TRAINS_ALL:
        like = base
        _require_same(base, fingerprint, f"--run={options.run}")
        frozen = {n: w for n, w in _wanted(trained.shape).items() if n not in encoder}
        encoder = {**base.load(frozen), **{n: x for n, x in encoder.items() if "lora_" not in n}}
        if config.finetune == "lora":
            adapter = adapter_arithmetic.of_values(own, make_lora(config), fingerprint)
            encoder = adapter_arithmetic.merge(encoder, adapter)
    text = None if like else trained.tokenizer.to_json()
    head = {"weight": own["head/kernel"].T, "bias": own["head/bias"]}
    settings = {
        "pool": config.pool,
        "max_length": config.data.max_length,
        "pad": trained.tokenizer.pad,
    }

    def classifier(out: Path) -> None:
        folder = out / CLASSIFIER
        folder.mkdir()
        write(folder, {n: _tensor(np.asarray(x)) for n, x in head.items()})
        content = json.dumps(settings | {"classes": trained.classes}, indent=2)
        (folder / CONFIG).write_text(content + "\n")

    hugging_face.export(options.out, trained.shape, encoder, text, like, classifier)
    print(f"written: {options.out}")


def quantize(options: Namespace) -> None:
    """Prints or writes size and relative quantization error of every kernel."""
    if options.out:
        check_folder("--out", options.out)
    base = open_model(options.pretrained, "--pretrained")
    wanted = _wanted(base.shape)
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
    print(
        f"kernels are {before / after:.2f} times smaller. No weights were written: a run with"
        f" --config.quantize={options.kind} quantizes them at every start"
    )


def open_adapter(
    path: Path, option: str = "--adapter", weights: Path | None = None
) -> tuple[Adapter, Path | None]:
    """Returns an adapter and the directory of its base weights (None if unknown). Does not read the weights.

    Args:
      option: the command-line option that `path` comes from, for error messages.
      weights: directory of the base weights, if it has moved since the run.

    Raises:
      UserError: `path` holds no adapter, the base weights are missing, or a file is damaged.
    """
    if (path / MARK).is_file():
        return _saved(path), None
    config = run.read(path, option)
    check(
        config.finetune == "lora",
        f"{option}={path} has no adapter: the run used --config.finetune={config.finetune}",
    )
    base = run.begun_from(config, weights)
    _warn_if_quantized(config, f"{option}={path}")
    drawn = reinitialized(config, base.shape.family)
    check(
        not drawn,
        f"{path} was trained with --config.reinitialize={config.reinitialize}, so its adapter does not fit the"
        f" pretrained {' and '.join(drawn)}: use perception.adapters export, which writes both together",
    )
    trained, fingerprint = run.load_own(config, path)
    found = adapter_arithmetic.of_values(trained.values.trainable, make_lora(config), fingerprint)
    return found, base.directory


def _warn_if_quantized(config: ConfigDict, what: str) -> None:
    if config.quantize != "none":
        print(
            f"warning: {what} was trained on weights quantized to {config.quantize}, but the unquantized weights are"
            " written: the test result of the run does not hold for them",
            file=sys.stderr,
        )


def _saved(path: Path) -> Adapter:
    try:
        base = json.loads((path / MARK).read_text())["base"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path / MARK} is damaged: {type(error).__name__}: {error}") from error
    files = TensorFiles(path)
    names = sorted(name.removesuffix(f"/{A}") for name in files.names if name.endswith(f"/{A}"))
    missing = [n for n in names if f"{n}/{B}" not in files.names]
    check(bool(names) and not missing, f"{path} is damaged: adapter tensors are missing: {missing}")
    layers = {n: tuple(files.read(f"{n}/{part}", ()) for part in (A, B)) for n in names}
    return Adapter(base, layers)


def save(path: Path, adapter: Adapter) -> None:
    """Writes an adapter that `open_adapter` can read."""
    tensors = {}
    for name, parts in adapter.layers.items():
        for part, value in zip((A, B), map(np.asarray, parts), strict=True):
            tensors[f"{name}/{part}"] = _tensor(value)
    with staged(path) as folder:
        write(folder, tensors)
        (folder / MARK).write_text(json.dumps({"base": adapter.base}) + "\n")


def _tensor(value: np.ndarray) -> Tensor:
    return Tensor(value.shape, value.dtype, lambda: value)


def _wanted(shape: Backbone) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shape, dtype and sharding of all encoder parameters, sharded over all devices."""
    abstract_model = variables.abstract(lambda: backbone(shape, rngs=variables.ParamKeys(0)))
    return abstract(abstract_model.trainable, make_mesh({"fsdp": -1}))


def _weights(pretrained: Pretrained) -> Params:
    return pretrained.load(_wanted(pretrained.shape))


def _export(out: Path, like: Pretrained, values: Params) -> None:
    hugging_face.export(out, like.shape, values, like=like)
    print(f"written: {out}")
