"""Imports follow the order that ARCHITECTURE.md prints, without cycles, and common/ names papers in two places only.

Imports inside functions count. Imports for type checking do not, because they are never executed; ARCHITECTURE.md names
the modules that close an import cycle by such an import.
"""

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAPERS = ("reservoir", "gmlp_lm", "explicit_opt", "perception")
FOLDERS = (*PAPERS, "configs", "launch", "common")


def names() -> dict[str, Path]:
    """Returns {name of a module: its file}."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    dotted = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    return {name.removesuffix(".__init__"): path for name, path in dotted.items()}


MODULES = names()


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """Yields all nodes below `node`, except those below `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield child
            yield from executed(child)


def imports(path: Path, nodes: Callable[[ast.AST], Iterable[ast.AST]] = executed) -> set[str]:
    """Returns the names of the modules of this project that the module in `path` imports.

    Args:
      nodes: function that returns the nodes of a module that count; `ast.walk` also counts imports for type checking.
    """
    found = set()
    for statement in nodes(ast.parse(path.read_text())):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            assert not statement.level, f"{path}: relative import"
            inner = {f"{statement.module}.{alias.name}" for alias in statement.names}
            found |= (inner & MODULES.keys()) or {statement.module}
    return found & MODULES.keys()


GRAPH = {name: imports(path) - {name} for name, path in MODULES.items()}


def entry(module: str) -> str:
    """Returns a module's entry in `levels`: the first part of its name, or the second part for a module of common/."""
    first, *rest = module.split(".")
    return rest[0] if first == "common" and rest else first


def levels() -> list[list[str]]:
    """Returns the levels that ARCHITECTURE.md prints, from top to bottom. A level is a list of packages and modules."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    (block,) = re.findall(r"(?:^    launch,.*\n)(?:^    common: .*\n)+", text, re.MULTILINE)
    return [line.strip().removeprefix("common: ").split(", ") for line in block.splitlines()]


def test_imports_have_no_cycles():
    TopologicalSorter(GRAPH).prepare()  # raises a CycleError that names the cycle


def test_architecture_lists_the_cycles_of_type_checking_imports():
    graph = {name: imports(path, ast.walk) - {name} for name, path in MODULES.items()}

    def reachable(start: str) -> set[str]:
        found, rest = set(), [start]
        while rest:
            new = graph[rest.pop()] - found
            found |= new
            rest += new
        return found

    closing = {
        str(MODULES[name].relative_to(ROOT))
        for name in MODULES
        for imported in graph[name] - GRAPH[name]
        if name in reachable(imported)
    }
    text = (ROOT / "ARCHITECTURE.md").read_text().replace("\n", " ")
    (listed,) = re.findall(r"which is never executed: (.*?)\.  ", text)
    assert closing == set(re.findall(r"`(.*?)`", listed))


def test_modules_import_only_from_lower_levels():
    level = {name: number for number, line in enumerate(levels()) for name in line}
    assert level.keys() - {"common"} == {entry(name) for name in MODULES} - {"common"}
    wrong = [
        f"{importer} imports {imported}"
        for importer, all_imported in GRAPH.items()
        for imported in all_imported
        if (a := entry(importer)) != (b := entry(imported))
        # configs/ and papers may import each other: a configuration reads the options of a paper's parts, and a paper
        # reads its configurations.
        and not (level[a] < level[b] or ("configs" in (a, b) and {a, b} & {*PAPERS}))
    ]
    assert not wrong


def test_common_names_no_paper():
    known = {
        ("report/groups.py", "reservoir"): "runs from before the field `paper`",
        ("train/frozen.py", "reservoir"): "a field of old checkpoints",
    }
    words = (*PAPERS, "gmlp", "layerdrop", "backskip")
    found = {
        (str(path.relative_to(ROOT / "common")), word)
        for path in (ROOT / "common").rglob("*.py")
        for word in words
        if word in path.read_text().lower()
    }
    assert found == known.keys()
