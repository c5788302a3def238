"""Options: configuration fields that methods of fine-tuning declare.

`common.config` imports this module to parse a command line, so it must not import JAX.
"""

from ml_collections import ConfigDict

from common import user_parts
from common.user_parts import Option
from perception.methods import FINETUNE, METHODS, Method, find


def add_to(config: ConfigDict) -> None:
    """Adds missing options with their defaults to `config`.

    Raises:
      UserError: the method is unknown, cannot be imported, or is not a valid `Method`.
    """
    user_parts.add_options(config, _declared(config))


def validate(config: ConfigDict) -> None:
    """Checks the options of all methods in `METHODS`, and of a user's method.

    Raises:
      UserError: the method is invalid (see `add_to`), an option has an invalid value, or the check of a user's method
        raises an exception.
    """
    user_parts.check_minimum("--config.", config, _declared(config))
    for method in METHODS.values():
        method.check(config)
    if config.finetune not in METHODS:
        with user_parts.user_code(f"{FINETUNE}={config.finetune}", Method, "config"):
            find(config.finetune).check(config)


def _declared(config: ConfigDict) -> dict[str, Option]:
    methods = [*METHODS.values(), find(config.finetune)]
    return {name: option for method in methods for name, option in method.options.items()}
