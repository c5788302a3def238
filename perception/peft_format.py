"""Reads and writes LoRA adapters in the format of PEFT: adapter_config.json and adapter_model.safetensors.

PEFT stores the transposed matrices, lora_A.weight (R, M) and lora_B.weight (N, R), under the module names of
transformers, and multiplies their product by a scale.
"""

import json
import re
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from common.errors import UserError, check
from common.model.low_rank import Lora
from common.storage.addresses import shown
from perception.adapter_arithmetic import Adapter
from perception.families.fields import Fields, as_json, is_number, read_object
from perception.families.table import FAMILIES
from perception.parameter_names import our_layer, their_name
from perception.safetensor_files import ADAPTER, Tensor, TensorFiles
from perception.safetensor_files import write as write_tensors

CONFIG = "adapter_config.json"
_PREFIX = "base_model.model."

_KEEPS_BASE = (True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base weights unchanged."""

_VARIANTS = (
    *("alora_invocation_tokens", "arrow_config", "fan_in_fan_out", "kasa_config", "layer_replication", "lora_bias"),
    *("monteclora_config", "target_parameters", "trainable_token_indices", "use_bdlora", "use_dora", "use_qalora"),
)  # fmt: skip
"""Fields of adapter_config.json that must be missing, null, false or empty. If such a field has another value, the
adapter may compute something else than x A B times a scale, or expects a transposed base kernel (`fan_in_fan_out`)."""


def write(
    directory: Path, adapter: Adapter, family: str, lora: Lora | None, base: Path | None
) -> None:
    """Writes adapter_config.json and adapter_model.safetensors to `directory`.

    Args:
      adapter: the matrices A and B of each layer.
      lora: LoRA settings, which give the scale of the product A B. None if the matrices B have been multiplied by the
        scale; in this case, the ranks of the layers may differ.
      base: directory of the base weights, or None if unknown.

    Raises:
      UserError: the family fuses an adapted layer with another layer.
      OSError: the directory is not writable.
    """
    tensors, ranks = {}, {}
    for layer, (a_MR, b_RN) in adapter.layers.items():
        module = their_name(family, f"{layer}/kernel").removesuffix(".weight")
        check(
            our_layer(family, module) == layer,
            f"PEFT cannot express the adapter of {layer}, because {module} of the family {family} holds the weights of"
            " several layers: use perception.adapters merge or export",
        )
        for side, value in (("A", a_MR), ("B", b_RN)):
            whole = np.ascontiguousarray(np.asarray(value).T)
            name = f"{_PREFIX}{module}.lora_{side}.weight"
            tensors[name] = Tensor(whole.shape, whole.dtype, lambda whole=whole: whole)
        ranks[module] = a_MR.shape[1]
    lora = lora or Lora(adapter.rank, adapter.rank, 0.0)
    others = {module: rank for module, rank in ranks.items() if rank != lora.rank}
    config = {
        "peft_type": "LORA",
        "task_type": "FEATURE_EXTRACTION",
        "base_model_name_or_path": str(base.absolute()) if base else None,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.rate,
        "use_rslora": lora.stabilized,
        "target_modules": list(ranks),
        "rank_pattern": others,
        "alpha_pattern": others,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    write_tensors(directory, tensors, whole=ADAPTER)
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def read_config(directory: Path) -> Fields:
    """Reads adapter_config.json.

    Raises:
      UserError: the file is missing or damaged, or its fields have unsupported values.
    """
    path = directory / CONFIG
    check(
        path.is_file(),
        f"{shown(directory)} has no {CONFIG}: restore the file, or give another adapter",
    )
    values = read_object(path)
    fields = Fields(path, values)
    fields.only(peft_type="LORA", bias="none")
    for name in _VARIANTS:
        check(
            not values.get(name),
            f"{shown(path)}: {name}={as_json(values.get(name))} is not supported: use an adapter that was trained"
            f" without {name}",
        )
    start = fields.get("init_lora_weights", True)
    check(
        start in _KEEPS_BASE,
        f"{shown(path)}: init_lora_weights={as_json(start)} may change the base weights, which is not supported: use an"
        f" adapter whose init_lora_weights is one of {', '.join(map(as_json, _KEEPS_BASE))}",
    )
    return fields


def read(directory: Path, family: str, base: str = "") -> Adapter:
    """Reads an adapter, and multiplies its matrices B by the scale.

    Ignores tensors outside the encoder, such as a head, and prints a note about them.

    Args:
      family: family of the base model.
      base: fingerprint of the base weights, or "" if unknown.

    Raises:
      UserError: a file is missing or damaged, `read_config` rejects the adapter, a dtype is not supported, or the
        adapter does not fit the family.
    """
    fields, files = read_config(directory), TensorFiles(directory, ADAPTER)
    place = shown(directory)
    names = FAMILIES[family].names
    found: dict[str, dict[str, np.ndarray]] = {}
    left = []
    for name in sorted(files.names):
        whole = name.removeprefix(_PREFIX)
        match = re.fullmatch(r"(.+)\.lora_([AB])\.weight", whole)
        inside = (f"{names.layers}.", *names.outside.values())
        if not whole.removeprefix(names.prefix).startswith(inside):
            left.append(whole)
        else:
            check(
                match is not None,
                f"{place}: tensor {name} is not supported, because it is not lora_A.weight or lora_B.weight of a"
                " layer: use an adapter of linear layers only",
            )
            found.setdefault(match[1], {})[match[2]] = files.read(name, ())
    check(
        bool(found),
        f"{place}: {ADAPTER} has no LoRA matrices for an encoder of the family {family}, the family of the base model:"
        " use an adapter of this family, or the base model of this adapter",
    )
    if left:
        print(
            f"note: {place}: ignored tensors outside the encoder: {', '.join(left)}",
            file=sys.stderr,
        )
    layers = {}
    for module, sides in found.items():
        layer = our_layer(family, module)
        check(
            layer is not None,
            f"{place} has LoRA matrices for {module}, which is unknown in the family {family}, is outside the"
            " transformer layers, or fuses several linear layers: use an adapter of this family without matrices for"
            f" {module}",
        )
        check(
            len(sides) == 2 and all(x.ndim == 2 for x in sides.values()),
            f"{place} is damaged: lora_A or lora_B of {module} is missing or no matrix; use an undamaged copy",
        )
        check(
            len(sides["A"]) == sides["B"].shape[1],
            f"{place} is damaged: lora_A and lora_B of {module} have different ranks; use an undamaged copy",
        )
        scale = _scale(fields, module, len(sides["A"]))
        a_MR, b_RN = (sides[side].T.astype(np.float32) for side in "AB")
        layers[layer] = (jnp.asarray(a_MR), jnp.asarray(scale * b_RN))
    return Adapter(base, layers)


def _scale(fields: Fields, module: str, rank: int) -> float:
    """Returns the scale of a module's adapter. A key of `alpha_pattern` is a regex for the end of module names."""
    patterns = fields.object("alpha_pattern")
    try:
        key = next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), None)
    except re.error as error:  # error.pattern is (.*\.)?(KEY)$
        raise UserError(
            f"{fields.place}: the key {error.pattern[8:-2]} of alpha_pattern is not a regular expression ({error.msg});"
            " correct the file"
        ) from error
    alpha = fields.number("lora_alpha", 8) if key is None else patterns[key]
    check(
        is_number(alpha),
        f"{fields.place}: the value of {key} in alpha_pattern must be a finite number, got {as_json(alpha)}",
    )
    return alpha / (rank**0.5 if fields.flag("use_rslora", False) else rank)
