"""Options: configuration fields that only one kind of reservoir, one placement or one method of fine-tuning reads.

Parsing a command line may import this module (`common.config.override`), so this module must not import JAX.
"""

from ml_collections import ConfigDict

from common import user_parts
from common.user_parts import Option
from reservoir.kinds import RESERVOIRS, find


def add_to(config: ConfigDict) -> None:
    """Adds missing options of kinds and placements (`add`) and, for fine-tuning, of methods to a configuration.

    Raises:
      UserError: the method of fine-tuning or the kind of reservoir is unknown, or a user's method, kind or placement
        is invalid or cannot be imported.
    """
    add(config.model)
    if "reservoirs" in config:
        from reservoir import methods

        user_parts.add_options(config, methods.declared(config))


def add(model: ConfigDict) -> None:
    """Adds missing options with their defaults to `config.model`. Without the field `reservoir`, adds nothing.

    Raises:
      UserError: the kind of reservoir is unknown, or a user's kind or placement is invalid or cannot be imported.
    """
    if "reservoir" in model:
        user_parts.add_options(model, declared(model))


def declared(model: ConfigDict) -> dict[str, Option]:
    """Returns the options of all kinds in `RESERVOIRS`, and of the kind and the placements that `model` names.

    Raises the errors of `add`.
    """
    kinds = [*RESERVOIRS.values(), find(model.reservoir)]
    options = {name: option for kind in kinds if kind for name, option in kind.options.items()}
    for field in ("placement", "decoder_placement"):
        if ":" in (strategy := model.get(field, "")):
            from reservoir import user_placement

            options |= user_placement.options(f"--config.model.{field}", strategy)
    return options
