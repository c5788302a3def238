"""The workdir: the version of the code, and configurations of old runs."""

import json
import shutil
from pathlib import Path

from common.train import restore, workdir


def test_commit_outside_a_checkout_comes_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setattr(workdir, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("TRAINLESS_COMMIT", raising=False)
    assert workdir.commit() == "unknown"
    monkeypatch.setenv("TRAINLESS_COMMIT", "abc")
    assert workdir.commit() == "abc"


def test_code_version_differs_if_a_source_file_differs(tmp_path: Path):
    """Two machines with the same commit and different uncommitted changes have different versions."""
    for machine, text in (("one", "x = 1\n"), ("two", "x = 1\n"), ("three", "x = 2\n")):
        folder = tmp_path / machine / "package" / "inner"
        folder.mkdir(parents=True)
        (folder / "module.py").write_text(text)
    versions = [workdir.code_version("package", root=tmp_path / m) for m in ("one", "two", "three")]
    assert versions[0] == versions[1] != versions[2]
    shutil.move(tmp_path / "two/package/inner/module.py", tmp_path / "two/package/moved.py")
    assert workdir.code_version("package", root=tmp_path / "two") != versions[1]


def test_configurations_of_old_runs_are_read(tmp_path: Path):
    """In the configurations of old runs, `model.remat` is a boolean."""
    groups = {name: {} for name in workdir.GROUPS}
    for old, new in ((True, "full"), (False, "none")):
        text = json.dumps(groups | {"seed": 1, "model": {"remat": old}})
        (tmp_path / workdir.CONFIG).write_text(text)
        assert restore.read_config(tmp_path).model.remat == new
