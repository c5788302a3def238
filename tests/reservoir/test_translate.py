"""reservoir.translate: its output file."""

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


def test_unusable_output_is_refused_before_translating(monkeypatch, tmp_path, given):
    for path, fault in (
        (tmp_path, "is a folder or a device: name a file"),
        ("/dev/null", "is a folder or a device: name a file"),
        (given / "out.en", "is not a folder"),
    ):
        with pytest.raises(UserError, match=fault):
            program(monkeypatch, f"--input={given}", f"--output={path}")
