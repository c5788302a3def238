"""The summaries that the training programs of the papers print."""

from importlib import import_module
from pathlib import Path

import pytest

from common.storage.addresses import copy_of
from tests.train import toy

MODULES = ["reservoir.report", "gmlp_lm.train", "explicit_opt.train", "perception.train"]


@pytest.fixture(scope="module")
def untested(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path]:
    """Returns the summary of a run with `eval.test=False`, and a workdir to print."""
    summary = toy.run(tmp_path_factory.mktemp("run"), eval__test=False, train__steps=5)
    config = summary["config"]  # with fields of perception and explicit_opt
    config["eval"]["select"], config["start"] = "valid", "cold"
    return summary, Path("runs/toy")


@pytest.mark.parametrize("module", MODULES)
def test_summary_of_a_run_without_a_test_has_no_test_rows(module, untested, capsys):
    import_module(module).print_summary(*untested)
    output = capsys.readouterr().out
    assert "best" in output and "summary.json" in output
    assert "test" not in output


@pytest.mark.parametrize("module", ["gmlp_lm.train", "perception.train"])
def test_suggested_command_quotes_a_workdir_with_a_space(module, untested, capsys):
    import_module(module).print_summary(untested[0], Path("runs/a b"))
    assert "--workdir='runs/a b'" in capsys.readouterr().out


@pytest.mark.parametrize("module", MODULES)
def test_summary_of_a_run_in_a_bucket_names_the_address(module, untested, capsys):
    summary, _ = untested
    # The commands that reservoir.train suggests after training depend on the task.
    for task in ("language_modelling", "translation", "masked_lm"):
        config = summary["config"] | {"task": task}
        config["data"] = {"source": "files:data", "source_language": "de"}
        import_module(module).print_summary(summary | {"config": config}, copy_of("gs://lab/toy"))
    output = capsys.readouterr().out
    assert "gs://lab/toy/curve.png" in output and "gs://lab/toy/summary.json" in output
    assert ".cache" not in output
