"""The commands of perception.adapters."""

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
from perception.quantize import costs
from perception.safetensor_files import Tensor, TensorFiles, require_empty, staged, write

CLASSIFIER = "classifier"
"""The folder beside exported weights that has the classifier: weight (N, 2 D), bias (N,), and in config.json the names
of the classes and what it reads."""

MARK = "adapter.json"
"""What `add` leaves beside the tensors: the fingerprint of the weights that the adapters are for."""


def merge(options: Namespace) -> None:
    """Base weights with an adapter in them."""
    require_empty(options.out)
    adapter, source = open_adapter(options.adapter, weights=options.pretrained)
    source = options.pretrained or source
    check(
        source is not None,
        f"--pretrained=DIR is missing: {options.adapter} does not say where its weights are",
    )
    base = open_model(source, "--pretrained")
    _require_same(base, adapter.base, f"--adapter={options.adapter}")
    _export(options.out, base, adapter_arithmetic.merge(_weights(base), adapter))


def _require_same(base: Pretrained, fingerprint: str, what: str) -> None:
    check(
        base.fingerprint == fingerprint,
        f"{what} was trained on other weights than those of {base.directory}"
        f" (fingerprints {fingerprint[:12]} and {base.fingerprint[:12]})",
    )


def unmerge(options: Namespace) -> None:
    """The base weights again, to float rounding."""
    require_empty(options.out)
    merged = open_model(options.merged, "--merged")
    adapter, _ = open_adapter(options.adapter, weights=options.merged)
    check(
        merged.fingerprint != adapter.base,
        f"--merged={options.merged} has the weights that {options.adapter} was trained on: nothing is merged into them",
    )
    _export(options.out, merged, adapter_arithmetic.merge(_weights(merged), adapter, -1))


def add(options: Namespace) -> None:
    """An adapter that does what several do together, each as much as its weight says."""
    require_empty(options.out)
    weights = []
    for given in options.adapters:
        path, colon, weight = given.rpartition(":")
        check(bool(colon and path), f"--adapters {given}: it is ADAPTER:WEIGHT, as in runs/a:0.5")
        weights.append((Path(path), float_arg(f"the weight in --adapters {given}")(weight)))
    found = [
        (open_adapter(path, "--adapters", options.pretrained)[0], weight)
        for path, weight in weights
    ]
    save(options.out, adapter_arithmetic.combine(found))
    print(f"written: {options.out}")


def export(options: Namespace) -> None:
    """The encoder of a run, adapters merged into it, and in CLASSIFIER below it what reads its states."""
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
        given = {n: w for n, w in _wanted(trained.shape).items() if n not in encoder}
        encoder = {**base.load(given), **{n: x for n, x in encoder.items() if "lora_" not in n}}
        if config.finetune == "lora":
            adapter = adapter_arithmetic.of_values(own, make_lora(config), fingerprint)
            encoder = adapter_arithmetic.merge(encoder, adapter)
    text = None if like else trained.tokenizer.to_json()
    head = {"weight": own["head/kernel"].T, "bias": own["head/bias"]}
    reads = {
        "pool": config.pool,
        "max_length": config.data.max_length,
        "pad": trained.tokenizer.pad,
    }

    def classifier(out: Path) -> None:
        folder = out / CLASSIFIER
        folder.mkdir()
        write(folder, {n: _tensor(np.asarray(x)) for n, x in head.items()})
        said = json.dumps(reads | {"classes": trained.classes}, indent=2)
        (folder / CONFIG).write_text(said + "\n")

    hugging_face.export(options.out, trained.shape, encoder, text, like, classifier)
    print(f"written: {options.out}")


def quantize(options: Namespace) -> None:
    """Bytes and relative error of every kernel."""
    if options.out:
        check_folder("--out", options.out)
    base = open_model(options.pretrained, "--pretrained")
    wanted = _wanted(base.shape)
    found = list(costs(base.load, wanted, options.kind))
    rows = [(c.name.removesuffix("/kernel"), c.before, c.after, 100 * c.error) for c in found]
    before, after = (sum(getattr(c, name) for c in found) for name in ("before", "after"))
    rest = 4 * sum(x.size for x in wanted.values()) - before
    rows += [("all of these", before, after, None), ("not quantized", rest, rest, None)]
    columns = ("kernel", "bytes in float32", f"in {options.kind}", "error (% of the norm)")
    if options.out:
        publish(options.out / f"quantize_{options.kind}", columns, rows)
    else:
        print(text(columns, rows))
    print(
        f"{before / after:.2f} times smaller. No weights were written: a run with --config.quantize={options.kind}"
        " quantizes them whenever it reads them"
    )


def open_adapter(
    path: Path, option: str = "--adapter", weights: Path | None = None
) -> tuple[Adapter, Path | None]:
    """An adapter, and the folder of the weights that it is for where that is known. The weights are not read.

    Args:
      option: of the command line, which names `path`.
      weights: a folder of the same shape, if they are no longer where the run had them from.

    Raises:
      UserError: there is none, it is for weights that are nowhere, or a file is damaged.
    """
    if (path / MARK).is_file():
        return _saved(path), None
    config = run.read(path, option)
    check(
        config.finetune == "lora",
        f"{option}={path} has no adapter: it is a run with --config.finetune={config.finetune}",
    )
    base = run.begun_from(config, weights)
    _warn_if_quantized(config, f"{option}={path}")
    drawn = reinitialized(config, base.shape.family)
    check(
        not drawn,
        f"{path} was trained with --config.reinitialize={config.reinitialize}: its adapter is for weights with another"
        f" {' and '.join(drawn)}, drawn from its seed; perception.adapters export writes them together",
    )
    trained, fingerprint = run.load_own(config, path)
    found = adapter_arithmetic.of_values(trained.values.trainable, make_lora(config), fingerprint)
    return found, base.directory


def _warn_if_quantized(config: ConfigDict, what: str) -> None:
    """Written weights are those of the pretrained folder, which is not quantized."""
    if config.quantize != "none":
        print(
            f"warning: {what} was trained on weights quantized to {config.quantize}; with the unquantized weights it is"
            " another model, whose test result is not that of the run",
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
    check(bool(names) and not missing, f"{path} is damaged: it lacks a part of the adapter")
    layers = {n: tuple(files.read(f"{n}/{part}", ()) for part in (A, B)) for n in names}
    return Adapter(base, layers)


def save(path: Path, adapter: Adapter) -> None:
    """Writes what `open_adapter` reads."""
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
    """All values of the encoder, spread over all devices."""
    abstract_model = variables.abstract(lambda: backbone(shape, rngs=variables.ParamKeys(0)))
    return abstract(abstract_model.trainable, make_mesh({"fsdp": -1}))


def _weights(pretrained: Pretrained) -> Params:
    return pretrained.load(_wanted(pretrained.shape))


def _export(out: Path, like: Pretrained, values: Params) -> None:
    hugging_face.export(out, like.shape, values, like=like)
    print(f"written: {out}")
