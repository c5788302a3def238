"""python -m common.report on groups of runs: verdicts, and the examples on which two runs differ."""

import csv
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from common.errors import UserError
from common.metrics.classes import Classes
from common.metrics.losses import Losses
from common.metrics.predictions import PREDICTIONS, TEST_AGAIN
from common.metrics.translations import Translations
from common.report.__main__ import main
from common.report.groups import named_groups
from tests.report.helpers import summary

LINES = [f"there are {number} small birds in the garden" for number in range(60)]


def classes(share: float, seed: int, examples: str = "test") -> Classes:
    """Returns predictions on 400 examples with an accuracy of about `share`."""
    generator = np.random.default_rng(seed)
    chance_E = np.where(generator.random(400) < share, 0.9, 0.2)
    logs_EC = np.log(np.stack([1 - chance_E, chance_E], axis=1))
    return Classes.of_log_probabilities(examples, np.ones(400, np.int32), logs_EC, ("no", "yes"))


def translations(errors: int, seed: int) -> Translations:
    """Returns translations with a wrong word in `errors` sentences."""
    wrong = np.random.default_rng(seed).permutation(60)[:errors]
    lines = [line.replace("birds", "cats") if i in wrong else line for i, line in enumerate(LINES)]
    ones_E = np.ones(60)
    return Translations("test", tuple(lines), tuple(LINES), ones_E, ones_E, False, "13a")


def keep(folder: Path, predictions, *, seed: int, **options) -> None:
    folder.mkdir(parents=True)
    made = predictions.metrics()
    name = "bleu" if "bleu" in made else "accuracy"
    record = summary([made[name] - 1, made[name]], seed=seed, metric=name, **options)
    (folder / "summary.json").write_text(json.dumps(record | {"test": made}))
    predictions.save(folder / PREDICTIONS)


@pytest.fixture
def report(tmp_path, monkeypatch, capsys):
    """Returns a function that runs common.report in `tmp_path`, without saving figures, and returns its output."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *_: None)

    def call(*arguments: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["report", *arguments])
        main()
        return capsys.readouterr().out

    return call


def verdicts(path: Path) -> dict[str, str]:
    """Returns {metric: verdict} from `runs/report/verdicts.md` below `path`."""
    lines = (path / "runs" / "report" / "verdicts.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[6] for row in cells[2:]}


def test_groups_are_compared_with_the_first(tmp_path, report):
    for seed in (1, 2, 3):
        keep(tmp_path / "plain" / f"s{seed}", classes(0.6, seed), seed=seed)
        keep(tmp_path / "ours" / f"s{seed}", classes(0.9, 9 + seed), seed=seed, reservoir="ffn")
    output = report("plain", "ours")
    found = verdicts(tmp_path)
    assert found["accuracy"] == found["weighted_f1"] == found["loss"] == "better"
    assert "corrected together by Holm" in output and "against plain" in output
    report("ours", "plain")
    assert verdicts(tmp_path)["accuracy"] == "worse"


def test_equal_configurations_are_neither_better_nor_worse(tmp_path, report):
    for seed in range(1, 7):
        keep(tmp_path / "a" / f"s{seed}", classes(0.8, seed), seed=seed)
    for name in ("s1", "s2", "s3"):
        (tmp_path / "b").mkdir(exist_ok=True)
        (tmp_path / "a" / name).rename(tmp_path / "b" / name)
    report("a", "b")
    assert not {"better", "worse"} & set(verdicts(tmp_path).values())


@pytest.mark.medium
def test_groups_of_different_length_are_named_with_their_steps(tmp_path, report):
    def lengthen(path: Path, extra: int) -> None:
        """Appends `extra` validations, each 500 steps after the one before."""
        record = json.loads(path.read_text())
        points = record["curve"]["points"]
        points += [points[-1] | {"step": 20 + 500 * n} for n in range(1, 1 + extra)]
        path.write_text(json.dumps(record))

    for seed in (1, 2, 3):
        keep(tmp_path / "plain" / f"s{seed}", classes(0.8, seed), seed=seed)
        keep(tmp_path / "ours" / f"s{seed}", classes(0.9, 9 + seed), seed=seed, reservoir="ffn")
    assert "differ in training steps" not in report("plain", "ours")
    for seed in (1, 2, 3):
        lengthen(tmp_path / "plain" / f"s{seed}" / "summary.json", 3)
    note = "The groups differ in training steps: plain 1,520; ours 20. Test and best"
    assert note in report("plain", "ours")
    lengthen(tmp_path / "ours" / "s2" / "summary.json", 1)
    assert "\nThe groups differ in training steps: plain 1,520; ours 20 to 520. " in report(
        "plain", "ours"
    )
    for name in ("plain", "ours"):
        (tmp_path / name).rename(tmp_path / f"films_{name}")
    note = "\nfilms: The groups differ in training steps: plain 1,520; ours 20 to 520. "
    assert note in report("plain={}_plain", "ours={}_ours", "--sets=films")


def test_glob_is_a_group_and_single_runs_are_undecided(tmp_path, report):
    for seed in (1, 2, 3):
        keep(tmp_path / f"plain_seed{seed}", classes(0.6, seed), seed=seed)
        keep(tmp_path / f"ours_seed{seed}", classes(0.9, 9 + seed), seed=seed, reservoir="ffn")
    report("plain_seed*", "ours_seed*")
    assert verdicts(tmp_path)["accuracy"] == "better"
    report("plain_seed1", "ours_seed1")
    assert set(verdicts(tmp_path).values()) == {"undecided (at least 2 more seeds)"}


def test_arguments_may_name_the_groups(tmp_path, report, monkeypatch):
    for seed in (1, 2, 3):
        keep(tmp_path / "a" / f"s{seed}", classes(0.8, seed), seed=seed)
        keep(tmp_path / "b" / f"rate=1_s{seed}", classes(0.9, 9 + seed), seed=seed, reservoir="ffn")
    report("a", "wide model=b")
    assert "wide model" in (tmp_path / "runs" / "report" / "verdicts.md").read_text()
    # In folders and globs, "=" does not separate a name.
    monkeypatch.chdir(tmp_path / "b")
    assert [group.name for group in named_groups(["../a", "rate=1_s*"])] == ["a", "rate=1_s*"]
    assert [group.name for group in named_groups(["../a", "wide=rate=1_s*"])] == ["a", "wide"]
    assert [group.name for group in named_groups(["wide=rate=1_s1"])] == ["wide"]


def test_named_groups_have_the_same_metric(tmp_path):
    for name, measured in {"words": classes(0.8, 1), "lines": translations(5, 1)}.items():
        keep(tmp_path / name, measured, seed=1)
    lines, words = (f"{tmp_path}/{name} measures" for name in ("lines", "words"))
    message = f"{words} accuracy (max), but {lines} bleu (max): "
    with pytest.raises(UserError, match="^" + re.escape(message)):
        named_groups([f"a={tmp_path}/lines", f"b={tmp_path}/words"])


def test_margin_option_makes_groups_equivalent(tmp_path, report):
    for seed in (1, 2, 3):
        keep(tmp_path / "a" / f"s{seed}", classes(0.8, seed), seed=seed)
        keep(tmp_path / "b" / f"s{seed}", classes(0.8, 9 + seed), seed=seed, reservoir="ffn")
    report("a", "b")
    assert verdicts(tmp_path)["accuracy"].startswith("undecided")
    report("a", "b", "--margin=accuracy=20")
    assert verdicts(tmp_path)["accuracy"] == "equivalent within 20"


def test_verdicts_of_several_data_sets_are_corrected_together(tmp_path, report):
    for data in ("films", "news"):
        for seed in (1, 2, 3):
            keep(tmp_path / f"{data}_a" / f"s{seed}", classes(0.6, seed, data), seed=seed)
            other = classes(0.9, 9 + seed, data)
            keep(tmp_path / f"{data}_b" / f"s{seed}", other, seed=seed, reservoir="ffn")
    groups = ("plain={}_a", "ours={}_b")
    output = report(*groups, "--sets=films,news", "--metrics=accuracy")
    assert "The 2 comparisons are corrected together" in output
    with (tmp_path / "runs/report/verdicts.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["data"], row["metric"], row["verdict"]) for row in rows] == [
        ("films", "accuracy", "better"),
        ("news", "accuracy", "better"),
    ]
    report("films_a", "films_b", "--metrics=accuracy")
    assert list(verdicts(tmp_path)) == ["accuracy"]
    # Holm's correction doubles the smaller of two p-values, and both are equal here.
    with (tmp_path / "runs/report/verdicts.csv").open(newline="") as file:
        alone = float(next(csv.DictReader(file))["p (Holm)"])
    assert min(float(row["p (Holm)"]) for row in rows) == pytest.approx(2 * alone, rel=0.1)


def test_margin_of_an_uncompared_metric_is_refused(tmp_path, report):
    for name, share in (("a", 0.8), ("b", 0.9)):
        keep(tmp_path / name, classes(share, 1), seed=1, reservoir=name)
    with pytest.raises(
        UserError,
        match=r"^--margin=bleu=\S+ has no effect: the compared metrics that take a margin are (\w+, )*\w+;"
        " leave out the margin$",
    ):
        report("a", "b", "--margin=bleu=0.5")
    report("a", "b", "--margin=weighted_f1=0.5")
    with pytest.raises(UserError, match="--margin=accuracy=2: accuracy is given twice"):
        report("a", "b", "--margin=accuracy=1", "--margin=accuracy=2")
    with pytest.raises(UserError, match="leave out --margin"):
        report("--examples", "a", "b", "--margin=accuracy=1")


def test_groups_of_different_data_without_predictions_are_refused(tmp_path, report):
    for name, source in {"a": "files:/a/imdb", "b": "files:imdb"}.items():
        for seed in (1, 2, 3):
            keep(tmp_path / name / f"s{seed}", classes(0.8, seed), seed=seed, reservoir=name)
            read(tmp_path / name / f"s{seed}", source)
    (tmp_path / "b" / "s2" / PREDICTIONS).unlink()
    # no error: /a/imdb and imdb may be the same data on two machines
    assert f"test metrics. If a file is lost, {TEST_AGAIN}." in " ".join(report("a", "b").split())
    for seed in (1, 2, 3):
        read(tmp_path / "b" / f"s{seed}", "files:/b/sst2")
    with pytest.raises(UserError, match=r"differ in data.source .* without predictions\.npz"):
        report("a", "b")


def read(folder: Path, source: str) -> None:
    """Changes the data source in the summary of a run."""
    path = folder / "summary.json"
    record = json.loads(path.read_text())
    record["config"]["data"]["source"] = source
    path.write_text(json.dumps(record))


def test_translations_have_sacrebleus_paired_test(tmp_path, report):
    for seed in (1, 2, 3):
        keep(tmp_path / "a" / f"s{seed}", translations(40, seed), seed=seed)
        keep(tmp_path / "b" / f"s{seed}", translations(4, 9 + seed), seed=seed, reservoir="ffn")
    report("a", "b")
    assert verdicts(tmp_path)["bleu"] == "better"
    table = (tmp_path / "runs" / "report" / "sentences.md").read_text()
    assert table.count("0.001") == 3, "the smallest p of 1,000 resamples"


def test_paired_test_compares_equal_seeds(tmp_path, report):
    for seed in (1, 2, 3):
        keep(tmp_path / "a" / f"s{seed}", translations(40 + seed, seed), seed=seed)
    for seed in (2, 3, 4):
        keep(tmp_path / "b" / f"s{seed}", translations(4, seed), seed=seed, reservoir="ffn")
    report("a", "b")
    rows = (tmp_path / "runs" / "report" / "sentences.csv").read_text().splitlines()[1:]
    base = {seed: translations(40 + seed, seed).metrics()["bleu"] for seed in (2, 3)}
    assert {int(row.split(",")[1]): float(row.split(",")[3]) for row in rows} == pytest.approx(base)


def test_losses_per_token_need_equal_vocabularies(tmp_path, report):
    for seed in (1, 2, 3):
        made = translations(40, seed)
        keep(tmp_path / "a" / f"s{seed}", made, seed=seed)
        other = replace(made, tokens_E=2 * made.tokens_E)
        keep(tmp_path / "b" / f"s{seed}", other, seed=seed, reservoir="ffn")
    report("a", "b")
    found = verdicts(tmp_path)
    assert "bleu" in found and not {"loss", "perplexity"} & set(found)


def test_single_test_example_is_undecided(tmp_path, report):
    for name, right in (("a", 0.2), ("b", 0.8)):
        logs_EC = np.log([[1 - right, right]])
        made = Classes.of_log_probabilities("one", np.ones(1, np.int32), logs_EC, ("no", "yes"))
        for seed in (1, 2, 3):
            keep(tmp_path / name / f"s{seed}", made, seed=seed, reservoir=name)
    report("a", "b")
    assert verdicts(tmp_path)["accuracy"] == "undecided (not with 100 seeds either)"


def test_seedless_runs_make_a_group(tmp_path, report):
    for number in (1, 2, 3):
        keep(tmp_path / "a" / f"s{number}", classes(0.6, 1), seed=None)
        keep(tmp_path / "b" / f"s{number}", classes(0.9, number), seed=number, reservoir="ffn")
    report("a", "b")
    assert verdicts(tmp_path)["accuracy"] == "better"


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"params": {}}, "its field params is {}, without the numbers trainable and total"),
        ({"timing": "alone"}, "timing is 'alone', not"),
        ({"test": {"accuracy": "60"}}, "the run a has no value of accuracy on the test split"),
    ],
)
def test_damaged_summary_field_raises_one_line_error(fields, complaint, tmp_path, report):
    keep(tmp_path / "a", classes(0.6, 1), seed=1)
    path = tmp_path / "a" / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(UserError, match=complaint):
        report("a")


@pytest.mark.parametrize("settings", [{"lowercase": True}, {"tokenize": "char"}])
def test_different_bleu_settings_raise_user_error(settings, tmp_path, report):
    for seed in (1, 2, 3):
        keep(tmp_path / "a" / f"s{seed}", translations(40, seed), seed=seed)
        other = replace(translations(40, seed), **settings)
        keep(tmp_path / "b" / f"s{seed}", other, seed=seed, reservoir="ffn")
    with pytest.raises(UserError, match="different test examples or metrics"):
        report("a", "b")


def test_different_text_windows_raise_user_error(tmp_path, report):
    for name, count in (("a", 10), ("b", 20)):
        ones_E, none = np.ones(count), np.zeros(0)
        for seed in (1, 2, 3):
            folder = tmp_path / name / f"s{seed}"
            keep(folder, classes(0.6, seed), seed=seed, reservoir=name)
            Losses("text", ones_E, ones_E, none, none, "byte").save(folder / PREDICTIONS)
    with pytest.raises(UserError, match="different test examples or metrics"):
        report("a", "b")


def test_example_table(tmp_path, report):
    keep(tmp_path / "a", translations(0, 1), seed=1)
    keep(tmp_path / "b", translations(3, 1), seed=1)
    output = report("--examples", "a", "b", "--most=3")
    rows = output.strip().splitlines()[2:]
    wrong = np.random.default_rng(1).permutation(60)[:3]
    assert {int(row.split()[0]) for row in rows} == set(wrong.tolist())
    assert all("cats" in row and "birds" in row for row in rows)


def test_example_table_of_classes(tmp_path, report):
    keep(tmp_path / "a", classes(1.0, 1), seed=1)
    keep(tmp_path / "b", classes(0.0, 1), seed=1)
    output = report("--examples", "a", "b", "--most=1")
    assert "yes (0.90)" in output and "no (0.80)" in output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["a", "b", "--margin=bleu=-1"],
            "--margin=bleu: the margin must be a finite number of at least 0, got -1.0",
        ),
        (["a", "b", "--margin=bleu"], "--margin=bleu must be METRIC=NUMBER, such as bleu=0.5"),
        (
            ["a", "b", "--margin=blue=1"],
            "--margin: metric='blue': choose one of accuracy",
        ),
        (
            ["a", "b", "--margin=bleu=much"],
            "--margin=bleu: the margin must be a finite number",
        ),
        (
            ["a", "other"],
            "a/s1 and other/s1 have different test examples or metrics",
        ),
        (["a", "b", "--metrics=,"], "--metrics=, has no name: give names separated by commas"),
        (
            ["a", "b", "--metrics=blue"],
            "--metrics: the runs are not compared by 'blue': choose from",
        ),
        (["a", "--metrics=accuracy"], "--metrics has no effect on a single group: give at least"),
        (["a", "--margin=accuracy=1"], "--margin has no effect on a single group: give at least"),
        (
            ["--examples", "a", "b", "--axis=step", "--out=tables"],
            "--examples prints a table of examples and no verdict: leave out --axis and --out",
        ),
        (
            ["a", "b", "--metrics=accuracy", "--margin=weighted_f1=2"],
            "--margin=weighted_f1=2 has no effect: the compared metrics that take a margin are accuracy; ",
        ),
        (
            ["a", "{}", "--sets=b"],
            "--sets=b: a must contain {}, which stands for a data set's name",
        ),
        (
            ["{}", "--sets=a"],
            "--sets compares groups, but the data set a has a single group: give at least",
        ),
        (["{}", "--sets=a,a"], "--sets=a,a names a twice"),
        (["{}", "--sets=,"], "--sets=, has no name: give names separated by commas"),
        (
            ["{}", "--sets=a", "--axis=step"],
            "with --sets, only verdicts are written: leave out --axis",
        ),
        (["a", "nobody*"], "no file or folder matches nobody*"),
        (["x" * 5000], "cannot read xxx"),
        (["a", "a"], "the run a/s1 is given twice"),
        (["a", "a/s[12]"], "the run a/s1 is given twice"),
        (["--examples", "a", "b"], "--examples: a names 3 runs, but each argument must name one"),
        (["a", "--examples", "a/s1", "b/s1"], "--examples takes two runs"),
        (
            ["--examples", "a/s1", "without"],
            "the run without has no predictions.npz, which --examples needs: choose another run, or"
            f" {TEST_AGAIN}",
        ),
        (["--examples", "a/s1", "other/s1"], "other/s1 and a/s1 have different test examples or"),
    ],
)
def test_errors_are_one_line(arguments, complaint, tmp_path, report):
    for seed in (1, 2, 3):
        keep(tmp_path / "a" / f"s{seed}", classes(0.6, seed), seed=seed)
        keep(tmp_path / "b" / f"s{seed}", classes(0.6, seed), seed=seed, reservoir="ffn")
        keep(tmp_path / "other" / f"s{seed}", classes(0.6, seed, "others"), seed=seed)
    keep(tmp_path / "without", classes(0.6, 1), seed=1)
    (tmp_path / "without" / PREDICTIONS).unlink()
    with pytest.raises(UserError) as fault:
        report(*arguments)
    assert str(fault.value).startswith(complaint)
    assert not (tmp_path / "runs").exists()
