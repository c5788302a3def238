"""The commit that a run records."""

from pathlib import Path

from common.train import workdir


def test_commit_outside_a_checkout_comes_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setattr(workdir, "__file__", str(tmp_path / "common" / "train" / "workdir.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(Path(tmp_path).parent))
    monkeypatch.delenv("TRAINLESS_COMMIT", raising=False)
    assert workdir.commit() == "unknown"
    monkeypatch.setenv("TRAINLESS_COMMIT", "abc")
    assert workdir.commit() == "abc"
