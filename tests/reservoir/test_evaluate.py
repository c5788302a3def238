"""The output of reservoir.evaluate, and the checkpoints that it averages."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from ml_collections import ConfigDict

from common.data.sources import load_parallel
from common.errors import UserError
from reservoir import evaluate, run
from tests.train import toy


def program(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["evaluate", *arguments])
    evaluate.main()


@pytest.fixture
def perfect(monkeypatch, make_config) -> ConfigDict:
    """Returns a translator that outputs the validation references, and its configuration."""
    config = make_config("ffn")
    target = load_parallel(config.data, "valid").target
    translator = SimpleNamespace(search=SimpleNamespace(beams=5, length_penalty=1.0))
    found = SimpleNamespace(config=config, translator=translator, translate=lambda lines: target)
    monkeypatch.setattr(run, "load", lambda options: found)
    return config


def test_evaluate_program_names_the_sentences_that_training_scores(perfect, monkeypatch, capsys):
    perfect.eval.sentences = 7
    program(monkeypatch, "--workdir=run", "--split=valid")
    first, second, _ = capsys.readouterr().out.splitlines()
    assert first.startswith("valid: BLEU 100.00 on ")
    assert second == "(training evaluates the first 7 only: --config.eval.sentences)"
    perfect.eval.sentences = 0
    program(monkeypatch, "--workdir=run", "--split=valid")
    assert "training evaluates" not in capsys.readouterr().out


def test_averages_of_newest_snapshots_and_of_best_checkpoints(
    monkeypatch, make_config, tmp_path: Path
):
    toy.run(tmp_path, train__steps=6, eval__steps=6, checkpoint__snapshots=2)
    asked = []

    def load_run(*arguments: object, snapshots: list[int], best: int) -> None:
        asked.append([*snapshots, *(["best"] * best)])
        raise UserError("as far as this test goes")

    monkeypatch.setattr(run, "load_run", load_run)
    monkeypatch.setattr(run, "read_run", lambda *options: make_config("ffn"))
    monkeypatch.setattr(run, "load_tokenizers", lambda workdir: ())
    for given in ("", "--average=1", "--average=2", "--average_best=3"):
        with pytest.raises(UserError, match="as far as"):
            program(monkeypatch, f"--workdir={tmp_path}", *filter(None, [given]))
    assert asked == [[], [6], [4, 6], ["best"] * 3]
    with pytest.raises(UserError, match="leave one of them out"):
        program(monkeypatch, f"--workdir={tmp_path}", "--average=1", "--average_best=1")
    with pytest.raises(UserError, match=r"--average=4: .* has 3 snapshots; --config.checkpoint"):
        program(monkeypatch, f"--workdir={tmp_path}", "--average=4")
    with pytest.raises(UserError, match="--average must be a whole number of at least 1"):
        program(monkeypatch, f"--workdir={tmp_path}", "--average=0")
