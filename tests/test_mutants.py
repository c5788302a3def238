"""The list of surviving mutants fits the code: see mutants.py."""

import inspect
import tomllib
from functools import reduce
from importlib import import_module
from pathlib import Path

import pytest

MUTANTS = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text())["mutant"]


@pytest.mark.parametrize("function", sorted({mutant["function"] for mutant in MUTANTS}))
def test_a_listed_mutant_changes_lines_that_its_function_has(function: str) -> None:
    parts = function.split(".")
    modules = [n for n in range(1, len(parts)) if _is_module(parts[:n])]
    value = import_module(".".join(parts[: modules[-1]]))
    value = reduce(getattr, parts[modules[-1] :], value)
    source = inspect.getsource(value.fget if isinstance(value, property) else value)
    lines = {line.strip() for line in source.splitlines()}
    for mutant in MUTANTS:
        if mutant["function"] == function:
            assert set(mutant["old"].splitlines()) <= lines


def _is_module(parts: list[str]) -> bool:
    path = Path(*parts)
    return path.is_dir() or path.with_suffix(".py").is_file()
