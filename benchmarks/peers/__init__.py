"""Implementations of Train Less's models in other libraries, the baselines of the benchmarks."""

import importlib
from types import ModuleType

from common.errors import UserError


def load(name: str) -> ModuleType:
    """Imports `benchmarks.peers.<name>`. Programs call this function only if needed, since PyTorch is optional.

    Raises:
      UserError: a package that the module imports is not installed.
    """
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        raise UserError(
            f"benchmarks/peers/{name}.py needs the package {error.name}: pip install -r benchmarks/requirements.txt"
        ) from error
