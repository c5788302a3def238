"""The examples of the READMEs run with the installed wheel, from another directory and in a new environment."""

import os
import re
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAPERS = ("explicit_opt", "gmlp_lm", "perception", "reservoir")

pytestmark = pytest.mark.slow


def run(*command: object, **options) -> str:
    """Runs a command without PYTHONPATH, which may contain the sources. Returns the output."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, env=clean, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """Returns the interpreter of a new environment with the wheel. The other packages come from this environment."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    source, environment = folder / "source", folder / "environment"
    source.mkdir()
    for name in ("pyproject.toml", "requirements.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    skipped = shutil.ignore_patterns("__pycache__")
    for package in ROOT.glob("*/__init__.py"):
        if package.parent.name != "tests":
            shutil.copytree(package.parent, source / package.parent.name, ignore=skipped)
    offline = ("--no-deps", "--no-index", "--quiet", "--disable-pip-version-check")
    pip = (sys.executable, "-m", "pip")
    run(*pip, "wheel", *offline, "--no-build-isolation", "--wheel-dir", folder, source)
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    own = run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=folder).strip()
    Path(own, "shared.pth").write_text("\n".join(site.getsitepackages()))
    run(*pip, "--python", python, "install", *offline, next(folder.glob("*.whl")))
    shutil.rmtree(source)
    return python


@pytest.mark.parametrize("paper", PAPERS)
def test_examples_of_a_readme_run_after_installation(python: Path, paper: str, tmp_path: Path):
    text = (ROOT / paper / "README.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    # Leave out the example that needs a task of this repository.
    code = "\n".join(example for example in examples if "task, values" not in example)
    assert f"from {paper} import" in code
    script = tmp_path / "example.py"
    script.write_text(f"{code}\nimport {paper}\nprint({paper}.__file__)\n")
    place = run(python, script, cwd=tmp_path).splitlines()[-1]
    assert Path(place).is_relative_to(python.parents[1])
