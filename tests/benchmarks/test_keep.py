"""benchmarks.keep copies the files of finished runs, except checkpoints and the metrics of training steps."""

import json
from pathlib import Path

import pytest

from benchmarks import keep
from common.errors import UserError


def made(folder: Path, finished: bool = True) -> None:
    (folder / "checkpoints").mkdir(parents=True)
    lines = [{"step": 10, "train/loss": 2.0}, {"step": 10, "valid/loss": 1.0, "aucc": 3.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = {"data": {"source": "files:/home/me/mnist", "cache_dir": "/tmp"}}
    (folder / "summary.json").write_text(json.dumps({"config": config}))
    (folder / "predictions.npz").write_bytes(b"numbers")
    if finished:
        (folder / "requested_config.json").write_text("{}")


def run(monkeypatch, *arguments: object) -> None:
    monkeypatch.setattr("sys.argv", ["keep", *map(str, arguments)])
    keep.main()


def test_files_of_tables_and_verdicts_are_copied(tmp_path, monkeypatch, capsys):
    made(tmp_path / "runs" / "plain_seed1")
    made(tmp_path / "runs" / "plain_seed2", finished=False)
    made(tmp_path / "runs" / "tf_idf", finished=False)
    (tmp_path / "runs" / "tf_idf" / "metrics.jsonl").unlink()
    stale = tmp_path / "kept" / "plain_seed1" / "old.txt"
    stale.parent.mkdir(parents=True)
    stale.touch()
    run(monkeypatch, tmp_path / "runs", tmp_path / "kept")
    kept = {str(p.relative_to(tmp_path / "kept")) for p in (tmp_path / "kept").rglob("*.*")}
    names = ("summary.json", "requested_config.json", "predictions.npz", "metrics.jsonl")
    fitted = {f"tf_idf/{name}" for name in ("summary.json", "predictions.npz")}
    assert kept == {f"plain_seed1/{name}" for name in names} | fitted
    summary = json.loads((tmp_path / "kept" / "plain_seed1" / "summary.json").read_text())
    assert summary == {"config": {"data": {"source": "files:mnist"}}}, "no path of this machine"
    (line,) = (tmp_path / "kept" / "plain_seed1" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 10, "valid/loss": 1.0, "aucc": 3.0}
    assert "kept 2 runs" in capsys.readouterr().out


def test_folder_without_finished_runs_raises_user_error(tmp_path, monkeypatch):
    made(tmp_path / "runs" / "plain_seed1", finished=False)
    with pytest.raises(UserError, match="has no finished run"):
        run(monkeypatch, tmp_path / "runs", tmp_path / "kept")


def test_copy_of_runs_into_their_own_folder_raises_user_error(tmp_path, monkeypatch):
    made(tmp_path / "plain_seed1")
    with pytest.raises(UserError, match="choose another folder for the copies"):
        run(monkeypatch, tmp_path, tmp_path / "plain_seed1" / "..")
    assert (tmp_path / "plain_seed1" / "predictions.npz").exists()
