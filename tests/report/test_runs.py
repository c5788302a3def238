"""Loading runs from folders and from a fake wandb."""

import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from common.errors import UserError
from common.metrics.losses import Losses
from common.metrics.predictions import PREDICTIONS
from common.report.runs import load_group, load_local, load_wandb
from tests.report.helpers import summary

RESULTS = Path(__file__).parents[2] / "results"


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_load_local_takes_folders_and_summary_files(tmp_path):
    write(tmp_path / "runs" / "b" / "summary.json", summary([1.0], seed=2))
    write(tmp_path / "runs" / "a" / "summary.json", summary([1.0], seed=1))
    (tmp_path / "runs" / "still training").mkdir()
    alone = write(tmp_path / "gpt_seed3.json", summary([1.0], seed=3))
    runs = load_local(tmp_path / "runs", str(alone), tmp_path / "runs" / "a" / "summary.json")
    assert [(run.name, run.seed) for run in runs] == [
        ("a", 1),
        ("b", 2),
        ("gpt_seed3", 3),
        ("a", 1),
    ]


def test_pattern_without_a_folder_of_the_bucket_raises_an_error():
    with pytest.raises(
        UserError, match=r"^gs://lab/a\* names no folder of a bucket: give a folder, such as gs:"
    ):
        load_group("gs://lab/a*")


def test_load_the_repository_results():
    (run,) = load_local(RESULTS / "multi30k_ffn_res")
    assert run.name == "multi30k_ffn_res" and run.config["model"]["reservoir"] == "ffn"
    assert len(run.curve.points) == 8 and run.test == pytest.approx(38.194, abs=1e-3)
    assert len(load_local(*RESULTS.glob("gmlp_lm/*_seed1.json"))) == 6


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('{"curve": ', "is damaged"),
        ("[1, 2]", "is not the summary of a run"),
        (
            {"benchmark": 1},
            "missing fields: config, curve, test, params, seed; restore the summary",
        ),
        (
            summary([1.0]) | {"seed": "one"},
            "is not the summary of a run: fields whose values have a wrong type: seed; restore the summary, or",
        ),
        (summary([]), "has no validation points"),
        (summary([1.0], timing={"sessions": None}), "timing is {'sessions': None}, not"),
        (
            summary([1.0]) | {"curve": {"name": "b", "mode": "up", "points": []}},
            "is not a validation curve .the mode of the metric 'b' must be",
        ),
        (
            summary([1.0]) | {"curve": {"name": "bleu"}},
            "the validation curve lacks the field 'points'",
        ),
        (
            summary([1.0]) | {"curve": {"name": "b", "mode": "max", "points": [{"step": 1}]}},
            "curve",
        ),
    ],
)
def test_damaged_summary_error_names_the_file(tmp_path, content, complaint):
    path = write(tmp_path / "x" / "summary.json", content)
    with pytest.raises(UserError, match=complaint) as fault:
        load_local(tmp_path / "x")
    assert str(path) in str(fault.value)


@pytest.mark.parametrize("content", ["model,seeds\n", '{"step": 1}\n{"step": 2}\n', "\0"])
def test_file_that_is_no_summary_is_not_reported_as_damaged(tmp_path, content):
    write(tmp_path / "aucc.csv", content)
    with pytest.raises(UserError, match=r"aucc\.csv is not the summary of a run: it is not a JSON"):
        load_group(f"{tmp_path}/*")


def test_missing_and_unfinished_runs(tmp_path):
    with pytest.raises(UserError, match=r"nowhere does not exist: give the folder"):
        load_local(tmp_path / "nowhere")
    write(tmp_path / "begun" / "config.json", {})
    with pytest.raises(
        UserError, match=r"begun has no summary\.json: give the folder of a finished run"
    ):
        load_local(tmp_path / "begun")


def test_unfinished_runs_of_a_folder_are_named(tmp_path, capsys):
    write(tmp_path / "a" / "summary.json", summary([1.0]))
    write(tmp_path / "a" / "metrics.jsonl", "")
    write(tmp_path / "begun" / "metrics.jsonl", "")
    (tmp_path / "figures").mkdir()
    assert [run.name for run in load_local(tmp_path)] == ["a"]
    assert capsys.readouterr().err == "skipped unfinished runs: begun\n"


def test_missing_test_score_raises_user_error(tmp_path):
    path = write(tmp_path / "x.json", summary([1.0]) | {"test": {"loss": 1.0}})
    with pytest.raises(UserError, match="run x has no value of bleu on the test split"):
        _ = load_local(path)[0].test


def test_untested_runs_of_a_sweep_are_skipped(tmp_path, capsys):
    write(tmp_path / "a" / "summary.json", summary([1.0]))
    write(tmp_path / "b" / "summary.json", summary([2.0]) | {"test": {}})
    assert [run.name for run in load_local(tmp_path)] == ["a"]
    assert capsys.readouterr().err == "skipped runs without a test result: b\n"
    with pytest.raises(UserError, match="no run has a test result"):
        load_local(tmp_path / "b")


def recorded(values, **options):
    """Returns a summary as wandb stores it: 8.0 is stored as 8, and wandb adds fields."""
    text = json.dumps(summary(values, **options)).replace(".0,", ",").replace(".0}", "}")
    return json.loads(text) | {"_step": 1, "_runtime": 3, "_wandb": {"runtime": 3}, "valid/bleu": 1}


@pytest.fixture
def wandb(monkeypatch, tmp_path):
    """Returns a fake wandb package. `projects` has the runs. If `fault` is set, requests raise it."""
    monkeypatch.chdir(tmp_path)  # wandb files are downloaded to the current folder.

    class Api:
        def __init__(self, timeout):
            assert timeout <= 60

        def runs(self, path, filters, lazy):
            assert lazy is False
            module.asked.append((path, filters))
            if module.fault:
                raise module.fault
            return iterate(path)

    def iterate(path):  # As in wandb, an unknown project raises only when the iteration starts.
        if path not in module.projects:
            raise ValueError(f"Could not find project {path.split('/')[1]}")
        for name, summary_ in module.projects[path].items():
            files = module.files.get(name, {})
            yield types.SimpleNamespace(
                name=name, summary_metrics=summary_, id=f"id_{name}", file=files.__getitem__
            )

    def login(prompt, verify):
        assert prompt is False
        return module.key

    module = types.ModuleType("wandb")
    module.Api, module.login = Api, login
    module.files = {}
    module.projects, module.asked, module.fault, module.key = {}, [], None, True
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_runs_equal_local_runs(wandb, tmp_path, capsys):
    values = [8.0, 12.5]
    wandb.projects["me/p"] = {
        "a": recorded(values),
        "b": recorded(values, seed=2),
        "new": {"_step": 3},
    }
    runs = load_wandb("me/p", {"state": "finished"})
    assert wandb.asked == [("me/p", {"state": "finished"})]
    assert [(run.name, run.seed) for run in runs] == [("a", 1), ("b", 2)]
    (local,) = load_local(write(tmp_path / "a.json", summary(values)))
    assert runs[0].curve == local.curve and runs[0].config == local.config
    assert capsys.readouterr().err == "wandb: skipped runs without a summary: new\n"


def test_wandb_predictions_are_downloaded_once(wandb):
    kept = Losses("w", np.ones(3), np.ones(3), np.zeros(0), np.zeros(0), "token")
    downloads = []

    def download(root, exist_ok):
        downloads.append(root)
        Path(root).mkdir(parents=True)
        kept.save(Path(root) / PREDICTIONS)

    wandb.projects["me/p"] = {"a": recorded([8.0]), "b": recorded([8.0], seed=2)}
    wandb.files["a"] = {PREDICTIONS: types.SimpleNamespace(download=download)}
    for _ in range(2):
        a, b = load_wandb("me/p")
        assert a.predictions.metrics() == kept.metrics() and b.predictions is None
    assert len(downloads) == 1


def test_wandb_group_is_a_filter(wandb):
    wandb.projects["me/p"] = {"a": recorded([8.0])}
    (run,) = load_group("wandb:me/p:plain")
    assert run.name == "a" and wandb.asked == [("me/p", {"group": "plain"})]


def test_wandb_errors_are_one_line(wandb):
    wandb.projects |= {
        "me/none": {},
        "me/begun": {"x": {"_step": 1}},
        "me/bad": {"x": {"curve": 1}},
    }
    for name in ("p", "me/p/x", "/p", "me/"):
        with pytest.raises(UserError, match="must be ENTITY/PROJECT, not"):
            load_wandb(name)
    with pytest.raises(
        UserError,
        match=r"^cannot read the wandb project me/typo: Could not find project typo; check",
    ):
        load_wandb("me/typo")
    with pytest.raises(UserError, match=r"me/none has no matching run .* \(unfinished runs: 0\)"):
        load_wandb("me/none")
    with pytest.raises(UserError, match=r"me/begun has no matching run .* \(unfinished runs: 1\)"):
        load_wandb("me/begun")
    with pytest.raises(UserError, match="wandb run me/bad/x is not the summary of a run"):
        load_wandb("me/bad")
    wandb.fault = RuntimeError("no\nnetwork")
    with pytest.raises(
        UserError,
        match=r"^cannot read the wandb project me/p: no network; check its name, your login and the network$",
    ):
        load_wandb("me/p")
    wandb.fault = TimeoutError()
    with pytest.raises(UserError, match=r"the wandb project me/p: TimeoutError; check its name"):
        load_wandb("me/p")
    wandb.fault, wandb.key = None, False
    with pytest.raises(UserError, match="no API key"):
        load_wandb("me/p")
