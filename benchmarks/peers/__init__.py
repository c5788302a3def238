"""Peers of Train Less: other libraries at the same sizes and on the same work."""

import importlib
from types import ModuleType

from common.errors import UserError


def load(name: str) -> ModuleType:
    """Imports `benchmarks.peers.<name>` on demand, because the project does not depend on PyTorch.

    Raises:
      UserError: the peer's packages are not installed.
    """
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        raise UserError(
            f"the peer {name} needs {error.name}: pip install -r benchmarks/requirements.txt"
        ) from error
