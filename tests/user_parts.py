"""Helpers for tests of a user's parts: a temporary importable package, and the Python examples of READMEs."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.programs import ROOT


def python_of_readme(paper: str) -> list[str]:
    """Returns the Python examples of a paper's README and of the other pages in the paper's folder."""
    text = "".join(page.read_text() for page in sorted((ROOT / paper).glob("*.md")))
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@contextmanager
def importable(folder: Path, **modules: str) -> Iterator[Path]:
    """Writes the package `my_package` of the modules {name: code} to `folder` and makes it importable. Yields `folder`.

    The package has a module `broken`, whose import fails.
    """
    package = folder / "my_package"
    package.mkdir()
    for name, code in {"__init__": "", "broken": "1 / 0\n", **modules}.items():
        (package / f"{name}.py").write_text(code)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "my_package"]:
        del sys.modules[name]
