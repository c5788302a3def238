"""Options: fields of `config.model` that only one kind of reservoir or one placement reads.

`common.config` imports this module to parse a command line, so it must not import JAX.
"""

from ml_collections import ConfigDict

from common.errors import check
from reservoir import placement
from reservoir.kinds import RESERVOIRS, Option, find


def add(model: ConfigDict) -> None:
    """Adds missing options with their defaults to `config.model`, if `config.model` has the field `reservoir`.

    Raises:
      UserError: the kind or a placement is unknown, incomplete or cannot be imported.
    """
    if "reservoir" in model:
        for name, option in _declared(model).items():
            if name not in model:
                model[name] = option.default


def check_minimum(model: ConfigDict) -> None:
    """Raises a UserError if an option in `config.model` is below its minimum."""
    for name, option in _declared(model).items():
        check(
            option.minimum is None or model[name] >= option.minimum,
            f"--config.model.{name} must be at least {option.minimum}, got {model[name]}",
        )


def _declared(model: ConfigDict) -> dict[str, Option]:
    """Returns the options of all kinds in `RESERVOIRS`, and of the kind and the placements that `model` names."""
    kinds = [*RESERVOIRS.values(), find(model.reservoir)]
    options = {name: option for kind in kinds if kind for name, option in kind.options.items()}
    for field in ("placement", "decoder_placement"):
        defaults = placement.defaults(model.get(field, ""), f"--config.model.{field}")
        options |= {name: Option(default) for name, default in defaults.items()}
    return options
