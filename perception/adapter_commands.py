"""The commands of perception.adapters."""

import json
from argparse import Namespace
from pathlib import Path

import jax
import numpy as np

from common import variables
from common.config import number, require
from common.data.tensor_files import Tensor, TensorFiles, require_empty, staged, write
from common.errors import UserError
from common.report.table import publish, text
from common.sharding import make_mesh
from common.train.checkpoint import abstract
from common.train.workdir import read_config
from common.variables import Arrays
from perception import arithmetic, run
from perception.arithmetic import A, Adapter, B
from perception.finetuning import make_lora
from perception.hugging_face import TOKENIZER, Pretrained, export, open_model
from perception.model import backbone
from perception.quantize import costs

MARK = "adapter.json"
"""What `add` leaves beside the tensors: the fingerprint of the weights that the adapters are for."""


def merge(options: Namespace) -> None:
    """Base weights with an adapter in them."""
    require_empty(options.out)
    adapter, source = open_adapter(options.adapter)
    source = options.pretrained or source
    require(
        source is not None,
        f"--pretrained=DIR is missing: {options.adapter} does not say where its weights are",
    )
    base = open_model(source, "--pretrained")
    require(
        base.fingerprint == adapter.base,
        f"--adapter={options.adapter} was trained on other weights than those of {source}"
        f" (fingerprints {adapter.base[:12]} and {base.fingerprint[:12]})",
    )
    _export(options.out, base, arithmetic.merge(_weights(base), adapter))


def unmerge(options: Namespace) -> None:
    """The base weights again, to float rounding."""
    require_empty(options.out)
    adapter, _ = open_adapter(options.adapter)
    merged = open_model(options.merged, "--merged")
    _export(options.out, merged, arithmetic.merge(_weights(merged), adapter, -1))


def add(options: Namespace) -> None:
    """An adapter that does what several do together, each as much as its weight says."""
    require_empty(options.out)
    weights = []
    for given in options.adapters:
        path, colon, weight = given.rpartition(":")
        require(bool(colon and path), f"--adapters {given}: it is ADAPTER:WEIGHT, as in runs/a:0.5")
        weights.append((path, number(f"the weight in --adapters {given}")(weight)))
    save(
        options.out,
        arithmetic.combine([(open_adapter(Path(path))[0], weight) for path, weight in weights]),
    )
    print(f"written: {options.out}")


def quantize(options: Namespace) -> None:
    """Bytes and relative error of every kernel."""
    base = open_model(options.pretrained, "--pretrained")
    wanted = _wanted(base)
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
        f"{before / after:.2f} times smaller; --config.quantize={options.kind} trains on top of it"
    )


def open_adapter(path: Path) -> tuple[Adapter, Path | None]:
    """An adapter, and the folder of the weights that it is for where that is known.

    Raises:
      UserError: there is none, or a file is damaged.
    """
    if (path / MARK).is_file():
        return _saved(path), None
    config = read_config(path, "the adapter")
    mode = config.get("finetune", "")
    require(
        mode == "lora",
        f"{path} has no adapter: it is a run of --config.paper={config.get('paper', '')}"
        + (f" --config.finetune={mode}" if mode else ""),
    )
    trained = run.load(path)
    source = Path(trained.config.pretrained)
    found = arithmetic.of_values(
        trained.values.trainable, make_lora(trained.config), open_model(source).fingerprint
    )
    return found, source


def _saved(path: Path) -> Adapter:
    try:
        base = json.loads((path / MARK).read_text())["base"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path / MARK} is damaged: {type(error).__name__}: {error}") from error
    files = TensorFiles(path)
    names = sorted(name.removesuffix(f"/{A}") for name in files.names if name.endswith(f"/{A}"))
    missing = [n for n in names if f"{n}/{B}" not in files.names]
    require(bool(names) and not missing, f"{path} is damaged: it lacks a part of the adapter")
    layers = {n: tuple(files.read(f"{n}/{part}", ()) for part in (A, B)) for n in names}
    return Adapter(base, layers)


def save(path: Path, adapter: Adapter) -> None:
    """Writes what `open_adapter` reads."""
    tensors = {}
    for name, parts in adapter.layers.items():
        for part, value in zip((A, B), map(np.asarray, parts), strict=True):
            tensors[f"{name}/{part}"] = Tensor(value.shape, value.dtype, lambda x=value: x)
    with staged(path) as folder:
        write(folder, tensors)
        (folder / MARK).write_text(json.dumps({"base": adapter.base}) + "\n")


def _wanted(pretrained: Pretrained) -> dict[str, jax.ShapeDtypeStruct]:
    """All values of the encoder, spread over all devices."""
    structure = variables.abstract(lambda: backbone(pretrained.shape, rngs=variables.Keys(0)))
    return abstract(structure.trainable, make_mesh({"fsdp": -1}))


def _weights(pretrained: Pretrained) -> Arrays:
    return pretrained.load(_wanted(pretrained))


def _export(out: Path, like: Pretrained, values: Arrays) -> None:
    tokenizer = like.directory / TOKENIZER
    export(out, like.shape, values, tokenizer.read_text() if tokenizer.is_file() else None)
    print(f"written: {out}")
