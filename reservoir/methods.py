"""The methods of fine-tuning a masked language model (section 4.3): which layers of the encoder are trained.

A new method is an entry of `METHODS`, or a `Method` in a module outside this project, selected by
--config.reservoirs=my_package.ways:mine. Configurations and reports import this module, so it must not import JAX: each
`change` function imports what it needs.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict

from common import user_parts
from common.errors import check
from common.storage.addresses import shown
from common.user_parts import Option
from reservoir.placement import placement

if TYPE_CHECKING:
    from flax import nnx

    from common.report.groups import Layers
    from reservoir.encoder import Classifier
    from reservoir.pretrained import Pretrained

RESERVOIRS = "--config.reservoirs"


@dataclass(frozen=True)
class Method:
    """A method of fine-tuning.

    Attributes:
      label: name in reports, after the kind of reservoir.
      frozen: function (config, layers) -> number of frozen layers. `config` is the configuration as a dictionary, and
        `layers` the `Layers` of the pretraining run.
      change: function (config, model, rngs=) that freezes, unfreezes or adds parameters of `model`, in place. `model`
        is a `Classifier`, frozen where the pretraining run was frozen. None changes nothing.
      row: name in figures and claims, after the name of the model (default: `label`).
      options: name -> additional field of the configuration. `change` reads it as `config.NAME`.
      check: function (config, pretrained) that raises a UserError if the method does not fit the pretraining run, or
        an option has an invalid value.
    """

    label: str
    frozen: "Callable[[Mapping[str, Any], Layers], int]"
    change: "Callable[..., None] | None" = None
    row: str = ""
    options: Mapping[str, Option] = field(default_factory=dict)
    check: "Callable[[ConfigDict, Pretrained], None]" = lambda config, pretrained: None

    def name(self, model: str) -> str:
        """Returns the name of a model and this method in figures and claims."""
        return ", ".join(filter(None, (model, self.row or self.label)))


def _tune(config: ConfigDict, model: "Classifier", *, rngs: "nnx.Rngs") -> None:
    from common.freezing import thaw

    thaw(model.encoder)


def _freeze_now(config: ConfigDict, model: "Classifier", *, rngs: "nnx.Rngs") -> None:
    """Freezes `config.freeze_now` layers at the indices of the placement "alternate"."""
    from common.freezing import freeze_loaded

    for layer in placement(config.model.encoder_layers, config.freeze_now):
        freeze_loaded(model.encoder.stack.blocks[layer])


def _lora(config: ConfigDict, model: "Classifier", *, rngs: "nnx.Rngs") -> None:
    """Freezes the encoder, and adds a trained adapter to each of its linear layers, reservoirs included."""
    from common.model.low_rank import Lora, adapt, linear_layers

    lora = Lora(config.lora.rank, config.lora.alpha or config.lora.rank, rate=0.0)
    adapt(model.encoder, {path[-1] for path in linear_layers(model.encoder)}, lora, rngs=rngs)


def _trains_all(model: ConfigDict) -> bool:
    return model.reservoir == "none" or model.reservoir_trained


def _check_tune(config: ConfigDict, pretrained: "Pretrained") -> None:
    check(
        not _trains_all(pretrained.config.model),
        f"{RESERVOIRS}=tune: {shown(pretrained.workdir)} has no frozen reservoirs to tune; use {RESERVOIRS}=keep",
    )


def _check_freeze_now(config: ConfigDict, pretrained: "Pretrained") -> None:
    option, model = f"{RESERVOIRS}=freeze_now", pretrained.config.model
    check(
        _trains_all(model),
        f"{option} needs a run without frozen reservoirs, but {shown(pretrained.workdir)} has"
        f" --config.model.reservoir={model.reservoir}: choose another --config.pretrained",
    )
    check(
        config.freeze_now >= 1,
        f"{option} freezes nothing: --config.freeze_now={config.freeze_now} must be at least 1",
    )
    most = (model.encoder_layers + 1) // 2
    check(
        config.freeze_now <= most,
        f"--config.freeze_now={config.freeze_now}, the number of layers to freeze, must be at most {most}, because"
        f" {shown(pretrained.workdir)} has {model.encoder_layers} layers, and no two adjacent layers are frozen",
    )


METHODS = {
    "keep": Method("", lambda config, layers: layers.frozen),
    "tune": Method(
        "tuned", lambda config, layers: 0, _tune, row="reservoirs tuned", check=_check_tune
    ),
    "freeze_now": Method(  # the control that the paper calls "frozen finetuned"
        "frozen in fine-tuning",
        lambda config, layers: config["freeze_now"],
        _freeze_now,
        options={"freeze_now": Option(4)},
        check=_check_freeze_now,
    ),
}
"""Value of `config.reservoirs` -> method."""

LORA = Method(
    "LoRA",
    lambda config, layers: layers.total,
    _lora,
    options={
        "lora.rank": Option(0, minimum=0),  # 0 means no adapters
        "lora.alpha": Option(0.0, minimum=0),  # 0 means alpha = rank
    },
)
"""The method of a configuration with `config.lora.rank` above 0. `config.reservoirs` must then be "keep"."""


def find(name: str) -> Method:
    """Returns the method `name`: a key of `METHODS`, or "module:attribute" for a user's method.

    Raises:
      UserError: the method is unknown, cannot be imported, or is not a valid `Method`.
    """
    method = user_parts.find(RESERVOIRS, name, Method, METHODS)
    for part, function in (("frozen", method.frozen), ("change", method.change)):
        optional = part == "change"
        check(
            callable(function) or (optional and function is None),
            f"{RESERVOIRS}={name}: the field {part!r} of the Method must be a function{' or None' * optional}, got"
            f" {function!r}",
        )
    return method


def of(config: ConfigDict) -> Method:
    """Returns the method of a fine-tuning configuration.

    Raises:
      UserError: the method is unknown or invalid (`find`), or `config` has adapters and a method other than "keep".
    """
    method, rank = find(config.reservoirs), config.lora.rank
    check(
        not rank or method is METHODS["keep"],
        f"--config.lora.rank={rank} freezes the encoder, so {RESERVOIRS} must be keep, got {config.reservoirs}: set"
        f" --config.lora.rank=0 or {RESERVOIRS}=keep",
    )
    return LORA if rank else method


def of_run(config: Mapping[str, Any]) -> Method | None:
    """Returns the method of a run's configuration. A pretraining run has the method "keep".

    Returns None for a user's method that `imported_part` does not find.
    """
    if config.get("lora", {}).get("rank"):
        return LORA
    name = config.get("reservoirs", "keep")
    return METHODS.get(name) or imported_part(name, Method)


def imported_part(name: str, kind: type) -> Any:
    """Returns the object `name`, "module:attribute", without importing the module.

    Returns None if the module is not imported yet, or the object is not an instance of the class `kind`. Reports use
    this function, because configurations may come from other people, and importing a module runs the code of the
    module.
    """
    module, _, attribute = name.rpartition(":")
    part = getattr(sys.modules.get(module), attribute, None)
    return part if isinstance(part, kind) else None


def declared(config: ConfigDict) -> dict[str, Option]:
    """Returns the options of all methods of this module, and of the method that `config` names."""
    methods = [*METHODS.values(), LORA, find(config.reservoirs)]
    return {name: option for method in methods for name, option in method.options.items()}
