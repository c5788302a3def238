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
            program(monkeypatch, f"--input={given}", f"--output={path}", "--overwrite")
    assert not new.exists() and old.read_text() == "kept\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["given.de", "old.en"]


def test_output_may_not_be_the_input(monkeypatch, tmp_path, given):
    link = tmp_path / "link"
    link.symlink_to(given)
    for path in given, link:
        with pytest.raises(UserError, match=f"^--output={path} is the file of --input"):
            program(monkeypatch, f"--input={given}", f"--output={path}", "--overwrite", result=[])
    assert given.read_text() == "eins\n"


def test_existing_output_needs_overwrite(monkeypatch, tmp_path, given):
    old, link = tmp_path / "old.en", tmp_path / "link"
    old.write_text("kept\n")
    link.symlink_to(old)
    arguments = f"--input={given}", f"--output={link}"
    with pytest.raises(UserError, match=r"link exists: add --overwrite to replace it$"):
        program(monkeypatch, *arguments, result=["one"])
    assert old.read_text() == "kept\n"
    program(monkeypatch, *arguments, "--overwrite", result=["one"])
    assert link.is_symlink() and old.read_text() == "one\n"


def test_output_may_be_a_pipe_or_a_device(monkeypatch, tmp_path, given):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    program(monkeypatch, f"--input={given}", f"--output={pipe}", result=["two"])
    assert os.read(reader, 10) == b"two\n" and not pipe.is_file()
    os.close(reader)
    if Path("/dev/full").exists():  # only Linux has this device
        with pytest.raises(
            UserError, match=r"^cannot write to --output=/dev/full: No .*; free space, then"
        ):
            program(monkeypatch, f"--input={given}", "--output=/dev/full", result=["two"])


def test_unusable_output_is_refused_before_translating(monkeypatch, tmp_path, given):
    for path, fault in (
        (tmp_path, "is a folder: name a file"),
        (given / "out.en", "is not a folder"),
    ):
        with pytest.raises(UserError, match=fault):
            program(monkeypatch, f"--input={given}", f"--output={path}")
