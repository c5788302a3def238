"""The workdir: the version of the code, errors for runs of another paper, and configurations of old runs."""

import json
import shutil
from argparse import Namespace
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import jax
import pytest
from ml_collections import ConfigDict

from common.train import agreement, restore, workdir
from tests.programs import call

EXTENSION = EXTENSION_SUFFIXES[0]
"""End of the names of compiled modules, such as .cpython-311-x86_64-linux-gnu.so."""


def test_commit_outside_a_checkout_comes_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setattr(workdir, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("TRAINLESS_COMMIT", raising=False)
    assert workdir.commit() == "unknown"
    monkeypatch.setenv("TRAINLESS_COMMIT", "abc")
    assert workdir.commit() == "abc"


def test_code_version_differs_if_a_source_file_differs(tmp_path: Path):
    """Machines with the same commit and different uncommitted changes thus have different versions."""
    for machine, text in (("one", "x = 1\n"), ("two", "x = 1\n"), ("three", "x = 2\n")):
        folder = tmp_path / machine / "package" / "inner"
        folder.mkdir(parents=True)
        (folder / "module.py").write_text(text)
    versions = [
        agreement.code_version("package", root=tmp_path / m) for m in ("one", "two", "three")
    ]
    assert versions[0] == versions[1] != versions[2]
    shutil.move(tmp_path / "two/package/inner/module.py", tmp_path / "two/package/moved.py")
    assert agreement.code_version("package", root=tmp_path / "two") != versions[1]


@pytest.mark.parametrize("file", ["my_data.py", "my_data.so", f"my_data/__init__{EXTENSION}"])
def test_files_of_user_modules_are_compared(file, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    config = ConfigDict({"data": {"source": "import:my_data:texts"}, "task": "gone:Task"})
    options = Namespace(workdir="runs/a", dry_run=False, profile="")
    versions = []
    for text in ("x = 1\n", "x = 2\n"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
        versions.append(agreement.settings("gmlp_lm.train", config, options))
    first, second = versions
    assert {name for name in first if first[name] != second[name]} == {"the module my_data"}
    assert first["the version of jax"] == jax.__version__


@pytest.mark.parametrize(
    ("program", "paper", "task", "message"),
    [
        (
            ("gmlp_lm.sample", "--workdir={}"),
            *("reservoir", "translation"),
            "--workdir={0} is a run of reservoir with the task translation, not of gmlp_lm;"
            " reservoir/README.md lists the programs of reservoir",
        ),
        (
            ("gmlp_lm.evaluate", "--workdir={}", "--text=README.md"),
            *("perception", ""),
            "--workdir={0} is a run of perception, not of gmlp_lm;"
            " perception/README.md lists the programs of perception",
        ),
        (
            ("reservoir.translate", "--workdir={}", "--input=README.md"),
            *("gmlp_lm", ""),
            "--workdir={0} is a run of gmlp_lm, not of reservoir with the task translation;"
            " gmlp_lm/README.md lists the programs of gmlp_lm",
        ),
        (
            ("reservoir.evaluate", "--workdir={}"),
            *("reservoir", "masked_lm"),
            "--workdir={0} is a run of reservoir with the task masked_lm, not of reservoir with the task translation;"
            " reservoir/README.md lists the programs of reservoir",
        ),
        (
            ("reservoir.finetune", "--config=configs/sst2.py:tiny", "--config.pretrained={}"),
            *("explicit_opt", ""),
            "--config.pretrained={0} is a run of explicit_opt, not of reservoir with the task masked_lm;"
            " explicit_opt/README.md lists the programs of explicit_opt",
        ),
        (
            ("perception.classify", "--workdir={}"),
            *("reservoir", "translation"),
            "--workdir={0} is a run of reservoir with the task translation, not of perception;"
            " reservoir/README.md lists the programs of reservoir",
        ),
    ],
)
def test_run_of_another_paper_names_the_page_of_its_programs(
    tmp_path: Path, program, paper, task, message
):
    groups = {name: {} for name in workdir.GROUPS} | {"paper": paper, "task": task}
    (tmp_path / workdir.CONFIG).write_text(json.dumps(groups))
    output = call(*(text.format(tmp_path) for text in program), code=2)
    assert output.splitlines()[-1] == f"error: {message.format(tmp_path)}"


def test_configurations_of_old_runs_are_read(tmp_path: Path):
    """In the configurations of old runs, `model.remat` is a boolean."""
    groups = {name: {} for name in workdir.GROUPS}
    for old, new in ((True, "full"), (False, "none")):
        text = json.dumps(groups | {"seed": 1, "model": {"remat": old}})
        (tmp_path / workdir.CONFIG).write_text(text)
        assert restore.read_config(tmp_path).model.remat == new
