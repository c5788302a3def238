"""Entries of mutants.toml quote lines of the code, and each module that mutmut changes has a test file (mutants.py)."""

import inspect
import tomllib
from functools import cached_property, reduce
from importlib import import_module
from pathlib import Path

import pytest

LISTED = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text())
MUTANTS, TESTED_BY = LISTED["mutant"], LISTED["tested_by"]


@pytest.mark.parametrize("function", sorted({mutant["function"] for mutant in MUTANTS}))
def test_listed_mutants_quote_lines_of_their_functions(function: str) -> None:
    parts = function.split(".")
    modules = [n for n in range(1, len(parts)) if _is_module(parts[:n])]
    value = import_module(".".join(parts[: modules[-1]]))
    value = reduce(getattr, parts[modules[-1] :], value)
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, cached_property):
        value = value.func
    source = inspect.getsource(value)
    lines = {line.strip() for line in source.splitlines()}
    for mutant in MUTANTS:
        if mutant["function"] == function:
            assert set(mutant["old"].splitlines()) <= lines


def test_each_changed_module_has_a_test_file() -> None:
    settings = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["mutmut"]
    changed = {path.stem for pattern in settings["only_mutate"] for path in Path().glob(pattern)}
    places = map(Path, settings["pytest_add_cli_args_test_selection"])
    files = [file for place in places for file in (place, *place.glob("*.py"))]
    tested = {file.stem.removeprefix("test_") for file in files}
    assert {TESTED_BY.get(name, name) for name in changed - {"__init__"}} <= tested
    assert TESTED_BY.keys() <= changed - tested


def _is_module(parts: list[str]) -> bool:
    path = Path(*parts)
    return path.is_dir() or path.with_suffix(".py").is_file()
