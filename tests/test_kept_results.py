"""The code computes the tables of results/ from the runs kept in results/, without training."""

import csv
import importlib
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import claims
from common.experiments import ExperimentSuite
from common.report.runs import load_local
from common.report.significance import Comparison, compare, correct
from tests import programs

F1 = "weighted_f1"
RESULTS = Path(__file__).parents[1] / "results"
KEPT = sorted(path.parent for path in RESULTS.glob("*/*/claims.csv"))

PAGES = sorted(RESULTS.glob("*/README.md"))
"""The pages with all results: one page for each paper, one for the papers together, and one for benchmarks."""

PRINTED = [
    line.strip()
    for page in PAGES
    for line in page.read_text().splitlines()
    if re.match(r" {4}python -m .* --out=results/", line) and "--kept" not in line
]
"""Commands on `PAGES` that print a table from kept runs and train missing runs."""

WORTH = sorted(
    path.parent
    for path in (RESULTS / "perception").glob("*/worth.csv")
    if (path.parent / "runs").exists()
)
"""Folders of comparisons by `perception.worth` whose runs are kept."""


@pytest.mark.medium
@pytest.mark.parametrize("folder", KEPT, ids=lambda path: "-".join(path.parts[-2:]))
def test_claims_table_equals_its_kept_runs(folder, tmp_path, monkeypatch):
    paper, scale = folder.parts[-2:]
    reproduce = importlib.import_module(f"{paper}.reproduce")
    if (folder / "runs").exists():
        (tmp_path / "runs").symlink_to(folder / "runs")
    # The command line of `make claims`: the defaults of its options differ from the defaults of `ExperimentSuite`.
    arguments = ["claims", f"--scale={scale}", "--kept", f"--out={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["reproduce", *arguments])
    reproduce.main()
    for name in ("claims.csv", "claims.md"):
        assert (tmp_path / name).read_text() == (folder / name).read_text(), "run `make claims`"


def test_claims_page_equals_the_tables_of_all_papers():
    assert {path.parts[-2] for path in KEPT} == {
        "explicit_opt",
        "gmlp_lm",
        "perception",
        "reservoir",
    }
    assert (RESULTS / "CLAIMS.md").read_text() == claims.page(RESULTS), "run `make claims`"


@pytest.mark.medium
@pytest.mark.parametrize("command", PRINTED, ids=lambda command: "-".join(command.split()[2:5]))
def test_printed_commands_find_all_their_runs(command, tmp_path, monkeypatch):
    def train(suite, configs):
        pytest.fail(f"{suite.out} lacks {', '.join(configs)}")

    monkeypatch.setattr(ExperimentSuite, "train", train)
    _, _, name, *arguments, out = shlex.split(command)
    folder = RESULTS.parent / out.removeprefix("--out=")
    (tmp_path / "runs").symlink_to(folder / "runs")
    data = tmp_path / "data"
    # The command of Figure 2 reads MNIST, because it also evaluates solutions that need no training.
    if " fig2 " in command:
        if "TRAINLESS_DATA" not in os.environ:
            pytest.skip("TRAINLESS_DATA is not set")
        data.symlink_to(os.environ["TRAINLESS_DATA"])
        shutil.copy(folder / "fig2_baselines.json", tmp_path)
    else:  # The command reads neither data nor weights, but their folders must exist.
        for place in re.findall(r"(?:data/|=runs/|=(?=MINILM))(\w+)", " ".join(arguments)):
            (data / place).mkdir(parents=True, exist_ok=True)
    arguments = [re.sub(r"(?<=[=:])(data/|runs/|(?=MINILM))", f"{data}/", t) for t in arguments]
    text = programs.call(name, *arguments, f"--out={tmp_path}")
    assert f"written: {tmp_path}" in text
    for table in tmp_path.glob("*.md"):
        kept = folder / table.name
        # The kept table `sweep` also has the rows of other commands with the same --out.
        if table.name != "sweep.md" and kept.exists():
            # Two types of CPU may classify one of the 10,000 test images of MNIST differently.
            assert _words(table) == pytest.approx(_words(kept), abs=0.011)


def _words(table: Path) -> list[str | float]:
    """Returns the words of a table, and its numbers with a decimal point as floats."""
    return [
        float(word.replace(",", "")) if re.fullmatch(r"[+-]?[\d,]+\.\d+", word) else word
        for word in table.read_text().split()
    ]


@pytest.mark.parametrize(
    "folder",
    [WORTH[0], *(pytest.param(folder, marks=pytest.mark.medium) for folder in WORTH[1:])],
    ids=lambda path: path.name,
)
def test_kept_tables_of_ways_are_reproduced(folder, tmp_path):
    (tmp_path / "runs").symlink_to(folder / "runs")
    text = programs.call("perception.worth", "--kept", f"--out={tmp_path}")
    assert "LoRA on pretrained weights" in text
    for name in ("worth.md", "verdicts.md"):
        assert (tmp_path / name).read_text() == (folder / name).read_text()


ENCODERS = {
    "plain, 6 layers (5 seeds)": "iwslt_6_transformer_seed?_learning_rate=2e-3",
    "T: 2 of 6 layers frozen, orthogonal (5)": "iwslt_6_t_reservoir_seed?_learning_rate=4e-3",
    "FFN: 2 of 6 frozen, without attention (5)": "iwslt_6_ffn_reservoir_seed?_learning_rate=4e-3",
    "plain, 4 layers: as many trained layers (5)": "iwslt_4_transformer_seed?_learning_rate=4e-3",
    "LayerDrop, p = 1/3, 6 layers (5)": "iwslt_6_layerdrop_seed?_learning_rate=2e-3_layerdrop=0.3333",
    "T, orthogonal but trained": "iwslt_6_orthogonal_t_trained_seed?_learning_rate=4e-3",
    "FFN, orthogonal but trained": "iwslt_6_orthogonal_ffn_trained_seed?_learning_rate=4e-3",
    "T, frozen but Xavier": "iwslt_6_xavier_t_reservoir_seed?_learning_rate=4e-3",
    "FFN, frozen but Xavier": "iwslt_6_xavier_ffn_reservoir_seed?_learning_rate=4e-3",
}
"""Rows of the first table of results/reservoir/README.md, and patterns of their kept runs."""


@pytest.mark.parametrize("row", ENCODERS)
def test_table_of_encoders_has_the_numbers_of_its_kept_runs(row):
    folders = sorted((RESULTS / "reservoir/laptop/runs").glob(ENCODERS[row]))
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    losses = [
        min(json.loads(line)["valid/loss"] for line in (folder / "metrics.jsonl").open())
        for folder in folders
    ]
    expected = [
        _spread([summary["test"]["bleu"] for summary in summaries], 2),
        _spread([summary["best_valid"] for summary in summaries], 2),
        _spread(losses, 3),
        _spread([summary["aucc"]["step"] for summary in summaries], 0),
        f"{summaries[0]['flops'] / 1e12:.1f}",
        f"{summaries[0]['params']['trainable'] / 1e6:.2f}",
    ]
    page = (RESULTS / "reservoir/README.md").read_text()
    assert f"| {' | '.join([row, *expected])} |" in page


LONGER = {
    "plain, 6 layers": ("iwslt_6_transformer_seed{}_learning_rate=2e-3", (1, 2, 3)),
    "FFN: 2 of 6 frozen, without attention": (
        "iwslt_6_ffn_reservoir_seed{}_learning_rate=4e-3",
        (1, 2, 3),
    ),
    "T: 2 of 6 layers frozen": ("iwslt_6_t_reservoir_seed{}_learning_rate=4e-3", (1,)),
    "plain, 4 layers": ("iwslt_4_transformer_seed{}_learning_rate=4e-3", (1, 2, 3)),
}
"""Rows of the table of 800 and 2,400 steps in results/reservoir/README.md: names and seeds of their kept runs."""


def test_table_of_longer_training_has_the_numbers_of_its_kept_runs():
    def summary(length: str, row: str, seed: int) -> dict:
        folder = RESULTS / "reservoir" / length / "runs" / LONGER[row][0].format(seed)
        return json.loads((folder / "summary.json").read_text())

    page = (RESULTS / "reservoir/README.md").read_text()
    first = next(iter(LONGER))
    for row, (name, seeds) in LONGER.items():
        cells = [row, ", ".join(map(str, seeds)), name.rpartition("=")[2]]
        for length in ("laptop", "longer"):
            plain, own = (
                [summary(length, r, seed)["test"]["bleu"] for seed in seeds] for r in (first, row)
            )
            difference = f"{np.mean(own) - np.mean(plain):+.2f}" if row != first else ""
            cells += [_spread(own, 2), difference]
        losses = []
        for seed in seeds:
            folder = RESULTS / "reservoir/longer/runs" / name.format(seed)
            lines = (folder / "metrics.jsonl").open()
            losses.append(min(json.loads(line)["valid/loss"] for line in lines))
        cells += [_spread(losses, 3), f"{summary('longer', row, 1)['flops'] / 1e12:.1f}"]
        assert f"| {' | '.join(cells)} |".replace("|  |", "| |") in page


@pytest.mark.medium
def test_verdicts_of_longer_training_are_those_of_the_kept_runs():
    runs = load_local(RESULTS / "reservoir/longer/runs")
    six, ffn, four = (
        [run for run in runs if run.folder.name.startswith(name)]
        for name in ("iwslt_6_transformer", "iwslt_6_ffn", "iwslt_4_transformer")
    )
    titles = {
        "bleu": "test BLEU",
        "best valid bleu": "best validation BLEU",
        "mean bleu over step": "mean validation BLEU over steps",
        "mean bleu over flops": "mean validation BLEU over FLOPs",
    }
    against_six = correct([*compare(ffn, six), *compare(four, six)])
    half = len(against_six) // 2
    columns = against_six[:half], against_six[half:], correct(compare(ffn, four))
    page = (RESULTS / "reservoir/README.md").read_text()
    for metric, title in titles.items():
        cells = [title]
        for one in (next(one for one in column if one.metric == metric) for column in columns):
            interval = f"({one.low:+.2f} to {one.high:+.2f})"
            cells += [f"{one.difference:+.2f} {interval}", str(one).partition(" (")[0]]
        assert f"| {' | '.join(cells)} |" in page
    together = correct([*compare(ffn, six), *compare(four, six), *compare(ffn, four)])
    assert together[0].metric == "bleu" and together[0].word == "undecided"


def _spread(values: list[float], digits: int) -> str:
    """Returns mean and standard deviation as text, or the only value."""
    spread = f" ± {np.std(values, ddof=1):,.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):,.{digits}f}{spread}"


@pytest.mark.medium
def test_verdicts_on_pretrained_weights_are_corrected_over_all_sets(tmp_path):
    """Two commands of results/perception/README.md print the verdicts of its two tables on four data sets."""
    page = (RESULTS / "perception/README.md").read_text()
    commands = re.findall(r"^ {4}python -m (common.report) (.* --metrics=.*)$", page, re.MULTILINE)
    verdicts = {}  # (data set, group, first group) -> row of the table of verdicts
    for (name, arguments), count in zip(commands, (16, 4), strict=True):
        text = programs.call(f"{name}.__main__", *shlex.split(arguments), f"--out={tmp_path}")
        assert f"The {count} comparisons are corrected together" in text
        with (tmp_path / "verdicts.csv").open(newline="") as file:
            for row in csv.DictReader(file):
                against = next(column for column in row if column.startswith("against "))
                verdicts[row["data"], row["model"], against.removeprefix("against ")] = row
    titles = {"emotion": "emotion", "clickbait": "clickbait", "sst2": "SST-2"}
    titles["snli"] = "SNLI, pairs"
    pairs = (
        [("random weights", "LoRA"), ("TF-IDF", "LoRA")],
        [("all pretrained weights", "all random weights"), ("all pretrained weights", "LoRA")],
    )
    for data, title in titles.items():
        # A data set has a row in each of the two tables, which ends in two differences, each with its verdict.
        rows = re.findall(rf"^\| {title} \| (.*) \|$", page, re.MULTILINE)
        for row, compared in zip(rows, pairs, strict=True):
            cells = [cell.strip() for cell in row.split("|")][-4:]
            for pair, difference, word in zip(compared, cells[::2], cells[1::2], strict=True):
                verdict = verdicts[data, *pair]
                assert word == verdict["verdict"].partition(" (")[0]
                # The page has one digit after the decimal point, the table two.
                expected = _numbers(f"{verdict['difference']} {verdict['95% interval']}")
                assert _numbers(difference) == pytest.approx(expected, abs=0.051)


def _numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"[+-][\d.]+", text)]


def test_verdicts_after_10000_steps_match_the_kept_runs():
    """On emotion, results/perception/README.md compares LoRA, random weights and TF-IDF, corrected together."""
    runs = load_local(RESULTS / "perception/laptop/runs")
    lora, random = (
        [run for run in runs if run.folder.name.startswith(f"emotion_arctic_xs_{way}")]
        for way in ("lora", "full")
    )
    tf_idf = load_local(RESULTS / "perception/gain/runs/emotion_tf_idf")
    found = [
        next(c for c in compare(*pair) if c.metric == F1)
        for pair in ((random, lora), (lora, tf_idf), (random, tf_idf))
    ]
    to_lora, *to_tf_idf = map(_cells, correct(found))
    rows = {
        "LoRA on MiniLM": (lora, ["", "", *to_tf_idf[0]]),
        "all weights, random at the start": (random, [*to_lora, *to_tf_idf[1]]),
    }
    page = (RESULTS / "perception/README.md").read_text()
    for name, (group, cells) in rows.items():
        values = [run.summary["test"][F1] for run in group]
        mean = f"{np.mean(values):.1f} ± {np.std(values, ddof=1):.1f}"
        assert re.sub(" +", " ", f"| {' | '.join([name, mean, *cells])} |") in page


def _cells(one: Comparison) -> list[str]:
    """Returns two cells of a table in Markdown: the difference with its interval, and the verdict in one word."""
    interval = f"({one.low:+.1f} to {one.high:+.1f})"
    return [f"{one.difference:+.1f} {interval}", str(one).partition(" (")[0]]


def test_numbers_of_the_overview_match_the_pages_of_the_papers():
    """Numbers and verdicts on results/README.md are also on the pages with all results (`PAGES`).

    Compares "mean ± standard deviation", differences with intervals, and the verdict after an interval. Two pages may
    compare the same two cases in opposite order, so a difference and its verdict may be reversed.
    """

    def measured(text: str) -> tuple[set, set]:
        number = r"([+-][\d.]+)"
        found = re.findall(rf"{number}[,| (]+{number} to {number}\)?[:| ]*([a-z]*)", text)
        intervals, verdicts = set(re.findall(r"[\d.]+ ± [\d.]+", text)), set()
        for *numbers, word in found:
            difference, low, high = map(float, numbers)
            if difference < 0:
                difference, low, high = -difference, -high, -low
                word = {"better": "worse", "worse": "better"}.get(word, word)
            intervals.add((difference, low, high))
            if word in ("better", "worse", "undecided", "equivalent"):
                verdicts.add((difference, low, high, word))
        return intervals, verdicts

    first = measured((RESULTS / "README.md").read_text())
    assert len(first[0]) > 40 and len(first[1]) > 30
    for mine, all_of_them in zip(
        first, zip(*(measured(p.read_text()) for p in PAGES), strict=True), strict=True
    ):
        assert mine <= set().union(*all_of_them)
