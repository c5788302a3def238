"""reservoir.evaluate: its output, and averages of checkpoints."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from ml_collections import ConfigDict

from common.errors import UserError
from reservoir import evaluate, loading, saved
from reservoir.parallel_text import load_parallel
from tests.train import toy


def program(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["evaluate", *arguments])
    evaluate.main()


@pytest.fixture
def perfect(monkeypatch, make_config) -> ConfigDict:
    """Makes `reservoir.evaluate` load a fake translator that outputs the validation references.

    Returns the configuration of the fake run.
    """
    config = make_config("ffn")
    target = load_parallel(config.data, "valid").target
    translator = SimpleNamespace(search=SimpleNamespace(beams=5, length_penalty=1.0))
    found = SimpleNamespace(config=config, translator=translator, translate=lambda lines: target)
    monkeypatch.setattr(loading, "load", lambda options: found)
    return config


def test_evaluate_program_names_the_sentences_that_training_scores(perfect, monkeypatch, capsys):
    perfect.eval.sentences = 7
    program(monkeypatch, "--workdir=run", "--split=valid")
    first, second, _ = capsys.readouterr().out.splitlines()
    assert first.startswith("valid: BLEU 100.00 on ")
    assert second == "(training evaluates only the first 7 sentences: --config.eval.sentences)"
    perfect.eval.sentences = 0
    program(monkeypatch, "--workdir=run", "--split=valid")
    assert "training evaluates" not in capsys.readouterr().out


def test_other_splits_and_files(perfect, monkeypatch, capsys, tmp_path):
    """--split may name a split that the configuration lacks. --source and --reference may name any files."""
    text = load_parallel(perfect.data, "valid")
    perfect.data.source = f"files:{tmp_path}"
    paths = {}
    for language, lines in (("en", text.source), ("de", text.target)):
        paths[language] = tmp_path / f"test2016.{language}"
        paths[language].write_text("\n".join(lines) + "\n")
    perfect.data.source_language, perfect.data.target_language = "en", "de"
    program(monkeypatch, "--workdir=run", "--split=test2016")
    assert capsys.readouterr().out.startswith("test2016: BLEU 100.00 on ")
    files = [f"--source={paths['en']}", f"--reference={paths['de']}"]
    program(monkeypatch, "--workdir=run", *files)
    assert capsys.readouterr().out.startswith(f"{paths['en']}: BLEU 100.00 on ")
    (tmp_path / "short.de").write_text("Ein Satz\n")
    for options, fault in (
        (["--split=test2017"], r"no test2017.en or .* its splits in 'en': test2016"),
        (files[:1], "--source and --reference must be given together"),
        ([*files, "--split=test"], "--split cannot be used with --source and --reference"),
        (
            [files[0], f"--reference={tmp_path}/short.de"],
            r"short.de must have .*, got \d+ and 1 lines",
        ),
        ([files[0], "--reference=absent"], "--reference=absent is not a file"),
    ):
        with pytest.raises(UserError, match=fault):
            program(monkeypatch, "--workdir=run", *options)


def test_averages_of_newest_snapshots_and_of_best_checkpoints(
    monkeypatch, make_config, tmp_path: Path
):
    toy.run(tmp_path, train__steps=6, eval__steps=6, checkpoint__snapshots=2)
    asked = []

    def load_run(*arguments: object, snapshots: list[int], best: int) -> None:
        asked.append([*snapshots, *(["best"] * best)])
        raise UserError("the model is not loaded in this test")

    monkeypatch.setattr(saved, "load_run", load_run)
    monkeypatch.setattr(saved, "read_config", lambda *arguments: make_config("ffn"))
    monkeypatch.setattr(saved, "TOKENIZERS", ())
    for given in ("", "--average=1", "--average=2", "--average_best=3"):
        with pytest.raises(UserError, match="the model is not loaded"):
            program(monkeypatch, f"--workdir={tmp_path}", *filter(None, [given]))
    assert asked == [[], [6], [4, 6], ["best"] * 3]
    with pytest.raises(UserError, match="--average cannot be used with --average_best"):
        program(monkeypatch, f"--workdir={tmp_path}", "--average=1", "--average_best=1")
    with pytest.raises(
        UserError, match="--average=4 must be at most 3, the number of snapshots in"
    ):
        program(monkeypatch, f"--workdir={tmp_path}", "--average=4")
    with pytest.raises(UserError, match="has no snapshots; leave out --average, or train with"):
        program(monkeypatch, f"--workdir={tmp_path / 'absent'}", "--average=1")
    with pytest.raises(UserError, match="--average must be a whole number of at least 1"):
        program(monkeypatch, f"--workdir={tmp_path}", "--average=0")
