"""reservoir.translate: its output file. `load_run`: the same translations in Python."""

import os
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from common.errors import UserError
from common.sharding import make_mesh
from reservoir import load_run, loading, translate
from reservoir.loading import TrainedRun
from tests.programs import call
from tests.tiny_runs import write_tiny_run


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


@pytest.mark.medium
def test_translations_in_python_equal_the_output_of_the_program(tmp_path):
    """The folder is a str. An empty line and a line without tokens have an empty translation."""
    workdir = write_tiny_run("reservoir", tmp_path)
    lines = ["Mein Bruder kam am 7. März 2011.", "", " ", "Das Haus ist alt."]
    (tmp_path / "lines").write_text("\n".join(lines) + "\n")
    options = {"beams": 2, "length_penalty": 0.5, "max_tokens": 40}
    given = [f"--{name}={value}" for name, value in options.items()]
    said = call(
        "reservoir.translate", f"--workdir={workdir}", f"--input={tmp_path / 'lines'}", *given
    )
    mesh = make_mesh({}, jax.devices()[:1])
    run = load_run(str(workdir), **options, mesh=mesh)
    assert run.translate(lines) == said.split("\n")[:-1]
    assert said.split("\n")[0] and run.translate(lines)[1:3] == ["", ""]
    search = run.translator.search
    assert (search.beams, search.length_penalty, run.translator.mesh) == (2, 0.5, mesh)
    short = load_run(workdir, max_tokens=2)
    assert short.mesh.size == 8
    with pytest.raises(
        UserError, match="more than max_tokens=2; split the line or set max_tokens="
    ):
        short.translate(lines)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "^folder=nowhere holds no run"),
        ({"beams": 0}, "^beams must be a whole number of at least 1, got 0"),
        ({"max_tokens": 2.5}, "^max_tokens must be a whole number of at least 1, got 2.5"),
        ({"length_penalty": -1.0}, "^length_penalty must be a finite number of at least 0"),
        ({"average": 1, "average_best": 1}, "^average cannot be used with average_best"),
    ],
)
def test_errors_in_python_name_arguments(options, message):
    with pytest.raises(UserError, match=message):
        load_run("nowhere", **options)


@pytest.mark.parametrize("lines", ["eins", ["eins", None], None])
def test_lines_must_be_a_list_of_texts(lines):
    with pytest.raises(UserError, match=r"^lines must be a list of texts, got "):
        TrainedRun(None, None, None, None, 5).translate(lines)
