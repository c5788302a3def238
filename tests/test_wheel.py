"""The examples of the Markdown pages run with the installed wheel and the packages that it declares, and no others.

They run in a new environment, because pytest's environment may have the sources on its path, and further packages.
"""

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.perception.helpers import write_small_bert
from tests.programs import ROOT
from tests.tiny_runs import NAMES, write_tiny_run

PAPERS = ("explicit_opt", "gmlp_lm", "perception", "reservoir")
PAGES = (
    "ARCHITECTURE.md",
    *(
        str(page.relative_to(ROOT))
        for folder in ("common", *PAPERS)
        for page in sorted((ROOT / folder).glob("*.md"))
        if "```python\n" in page.read_text()
    ),
)
"""The pages with Python examples."""

PACKAGES = tuple(path.parent.name for path in ROOT.glob("*/__init__.py"))
"""The packages of this repository, including `tests`, which the wheel does not have."""

CHECK = f"""
import sys
for name, module in sorted(sys.modules.items()):
    if name.split(".")[0] in {PACKAGES}:
        print("loaded", name, module.__file__)
print(*("path " + folder for folder in sys.path), sep="\\n")
"""
"""Prints the file of every loaded module of this repository, and the folders that Python searches."""

pytestmark = pytest.mark.slow


def run(*command: object, **options) -> str:
    """Runs a command without the environment variables PYTHON*. Returns the output."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, env=clean, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def declared() -> dict[str, metadata.Distribution]:
    """Returns {name: package} for all direct and indirect dependencies of the wheel."""
    found, wanted = {}, []
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        wanted += [Requirement(text) for text in [line.partition("#")[0].strip()] if text]
    while wanted:
        one = wanted.pop()
        distribution = metadata.distribution(one.name)
        if (distribution.name, *one.extras) in found:
            continue
        found[distribution.name, *one.extras] = distribution
        for more in map(Requirement, distribution.requires or ()):
            extras = one.extras | {""}
            if not more.marker or any(more.marker.evaluate({"extra": extra}) for extra in extras):
                wanted.append(more)
    return {name: distribution for (name, *_), distribution in found.items()}


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """Returns the interpreter of a new environment with the wheel, and with links to the packages that it declares."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    source, environment = folder / "source", folder / "environment"
    source.mkdir()
    for name in ("pyproject.toml", "requirements.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    skipped = shutil.ignore_patterns("__pycache__")
    for package in PACKAGES:
        if package != "tests":
            shutil.copytree(ROOT / package, source / package, ignore=skipped)
    offline = ("--no-deps", "--no-index", "--quiet", "--disable-pip-version-check")
    pip = (sys.executable, "-m", "pip")
    run(*pip, "wheel", *offline, "--no-build-isolation", "--wheel-dir", folder, source)
    shutil.rmtree(source)
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    (own,) = environment.glob("lib/python*/site-packages")
    for distribution in declared().values():
        for name in {file.parts[0] for file in distribution.files if file.parts[0] != ".."}:
            if not (own / name).exists():
                (own / name).symlink_to(distribution.locate_file(name))
    code = f"import importlib.util as u; print(*filter(u.find_spec, {PACKAGES}))"
    assert run(python, "-I", "-c", code).split() == []
    run(*pip, "--python", python, "install", *offline, next(folder.glob("*.whl")))
    return python


def as_statements(examples: list[str], folder: Path) -> list[str]:
    """Returns statements that run all examples. Writes an example that names a path in its first line to this path."""
    statements = [f"import runpy, sys; sys.path.append({str(folder)!r})"]
    for code in examples:
        if path := re.match(r"# (\S+\.py)\n", code):
            (folder / path[1]).parent.mkdir(exist_ok=True)
            (folder / path[1]).write_text(code)
            code = f"runpy.run_path({str(folder / path[1])!r})"
        statements.append(code)
    return statements


def test_every_paper_has_a_page_with_examples():
    assert {page.split("/")[0] for page in PAGES} == {"ARCHITECTURE.md", "common", *PAPERS}


@pytest.mark.parametrize("page", PAGES)
def test_examples_of_a_page_run_after_installation(python: Path, page: str, tmp_path: Path):
    examples = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    if page == "explicit_opt/PYTHON.md":  # An example reads the folder all-MiniLM-L6-v2.
        write_small_bert(tmp_path / "all-MiniLM-L6-v2")
    if page in [f"{paper}/PYTHON.md" for paper in NAMES]:  # An example loads a run.
        write_tiny_run(page.split("/")[0], tmp_path)
    script = tmp_path / "example.py"
    script.write_text("\n".join([*as_statements(examples, tmp_path), CHECK]))
    said = run(python, "-I", script, cwd=tmp_path).splitlines()
    loaded = [line.split()[1:] for line in said if line.startswith("loaded ")]
    own = python.parents[1]
    assert loaded and all(Path(file).is_relative_to(own) for _, file in loaded)
    folders = [Path(line.removeprefix("path ")) for line in said if line.startswith("path ")]
    assert folders and not [path for path in folders if path.is_relative_to(ROOT)]
