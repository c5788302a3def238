"""reservoir.translate: its output file."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.errors import UserError
from reservoir import loading, translate


def program(monkeypatch, *arguments: str, result: list[str] | None = None) -> None:
    """Runs the program with a translator that returns `result`, or that fails without `result`."""

    def translate_lines(lines: list[str]) -> list[str]:
        if result is None:
            raise UserError("no translation")
        return result

    monkeypatch.setattr(loading, "load", lambda _: SimpleNamespace(translate=translate_lines))
    monkeypatch.setattr("sys.argv", ["translate", "--workdir=run", *arguments])
    translate.main()


@pytest.fixture
def given(tmp_path):
    path = tmp_path / "given.de"
    path.write_text("eins\n")
    return path


def test_a_failed_translation_changes_no_output(monkeypatch, tmp_path, given):
    new, old = tmp_path / "new.en", tmp_path / "old.en"
    old.write_text("kept\n")
    for path in (new, old):
        with pytest.raises(UserError, match="no translation"):
            program(monkeypatch, f"--input={given}", f"--output={path}")
    assert not new.exists() and old.read_text() == "kept\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["given.de", "old.en"]


def test_output_may_be_the_input(monkeypatch, tmp_path, given):
    program(monkeypatch, f"--input={given}", f"--output={given}", result=["one"])
    assert given.read_text() == "one\n"


def test_output_may_be_a_link_a_pipe_or_a_device(monkeypatch, tmp_path, given):
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(given)
    program(monkeypatch, f"--input={given}", f"--output={link}", result=["one"])
    assert link.is_symlink() and given.read_text() == "one\n"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    program(monkeypatch, f"--input={given}", f"--output={pipe}", result=["two"])
    assert os.read(reader, 10) == b"two\n" and not pipe.is_file()
    os.close(reader)
    if Path("/dev/full").exists():  # only Linux has this device
        with pytest.raises(UserError, match=r"^cannot write to --output=/dev/full: .*; choose"):
            program(monkeypatch, f"--input={given}", "--output=/dev/full", result=["two"])


def test_unusable_output_is_refused_before_translating(monkeypatch, tmp_path, given):
    for path, fault in (
        (tmp_path, "is a folder: name a file"),
        (given / "out.en", "is not a folder"),
    ):
        with pytest.raises(UserError, match=fault):
            program(monkeypatch, f"--input={given}", f"--output={path}")
