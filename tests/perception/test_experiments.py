"""The cells of Table 1 and Figure 1, from runs with made-up results."""

import csv
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from ml_collections import ConfigDict

from common.errors import UserError
from common.sharding import make_mesh
from perception import costs, figures, printed, reproduce, run, tables
from perception.datasets import DATASETS
from perception.experiments import TOKENIZER, Case, ExperimentSuite, backbones
from perception.richness import SIZES


class Known(ExperimentSuite):
    """A suite with made-up runs.

    At the best step, F1 is 80 + seed if `config.finetune` is "full", and 85 + seed otherwise. At the last step, F1 is 1
    lower.
    """

    def train(self, asked: Mapping[str, ConfigDict]) -> dict[str, dict]:
        return {name: self.made(name, config) for name, config in asked.items()}

    def made(self, name: str, config: ConfigDict) -> dict:
        run.validate(config)
        best = config.seed + (80.0 if config.finetune == "full" else 85.0)
        points = [{"step": 1, "seconds": 1.0, "flops": 1.0, "value": best}]
        summary = {
            "test": {"weighted_f1": best},
            "test_last": {"weighted_f1": best - 1},
            "curve": {"name": "weighted_f1", "mode": "max", "points": points},
            **{
                "best_valid": best,
                "steps": 1,
                "flops": 1.0,
                "config": {},
                "params": {"trainable": 1, "total": 1},
                "seed": config.seed,
            },
        }
        workdir = self.out / "runs" / name
        workdir.mkdir(parents=True, exist_ok=True)
        (workdir / "summary.json").write_text(json.dumps(summary))
        return summary


@pytest.fixture
def make(tmp_path):
    def make_suite(**fields: object) -> ExperimentSuite:
        mesh = make_mesh({"data": 1}, jax.devices()[:1])
        given = {"scale": "laptop", "seeds": 1, "fields": [], **fields}
        return Known(out=tmp_path, mesh=mesh, **given)

    return make_suite


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def sources(*names: str) -> dict[str, str]:
    return {name: "files:somewhere" for name in names}


@pytest.mark.parametrize("scale", ["tiny", "laptop", "paper"])
@pytest.mark.parametrize("recipe", ["fixed", "paper"])
def test_every_cell_has_valid_config_and_unique_name(make, scale, recipe) -> None:
    weights = {name: Path("weights") for name in backbones()}
    where = {} if scale == "tiny" else sources(*DATASETS)
    suite = make(scale=scale, recipe=recipe, sources=where, weights=weights)
    cases = suite.cases()
    assert len(cases) == {"tiny": 4 * 2, "laptop": 12 * 2, "paper": 11 * 12 * 2}[scale]
    assert len({suite.stem(case) for case in cases}) == len(cases)
    for case in cases:
        config = suite.configuration(case, 3)
        run.validate(config)
        assert (config.finetune, config.seed) == (case.mode, 3) and not suite.missing(case)
        assert config.freeze_head == (recipe == "paper")


def test_full_pretrained_is_an_optional_row(make) -> None:
    """The paper's Table 1 has no row for `full_pretrained`. Like LoRA, the row needs pretrained weights."""
    fields = {"modes": ("full_pretrained",), "sources": sources("sst2"), "datasets": ("sst2",)}
    (case,) = make(**fields).cases()
    assert make(**fields).missing(case) == "--pretrained=arctic_xs=DIR"
    suite = make(**fields, weights={"arctic_xs": Path("weights")})
    config = suite.configuration(case, 2)
    run.validate(config)
    assert (config.finetune, config.pretrained) == ("full_pretrained", "weights")
    tables.table1(suite)
    assert [row["sst2"] for row in read(suite.out / "table1.csv")] == ["86.0", "85.0"]


@pytest.mark.parametrize("recipe", ["fixed", "paper"])
def test_pretrained_tokenizer_is_an_optional_row(make, recipe) -> None:
    """The runs of this row start from random weights, but use the tokenizer of the pretrained folder."""
    case = Case("arctic_xs", "sst2", TOKENIZER)
    assert make(sources=sources("sst2")).missing(case) == "--pretrained=arctic_xs=DIR"
    weights = {"arctic_xs": Path("weights")}
    for scale, backbone in (("laptop", "arctic_xs"), ("tiny", "auto")):
        suite = make(scale=scale, recipe=recipe, sources=sources("sst2"), weights=weights)
        config = suite.configuration(case, 1)
        run.validate(config)
        assert (config.finetune, config.data.tokenizer) == ("full", "pretrained")
        assert (config.backbone, config.pretrained) == (backbone, "weights")


@pytest.mark.parametrize(
    "fair", [{"turns": 5}, {"sweep": {"optimizer.learning_rate": ("1e-4", "1e-3")}}]
)
def test_turns_and_sweep_train_all_cells_together(make, monkeypatch, fair) -> None:
    """Two modes on two data sets are four cells. With turns, one call of `train` trains all four cells.

    With a sweep, all four cells are trained with both learning rates.
    """
    together, train = [], Known.train

    def counted(self: Known, asked: Mapping[str, ConfigDict]) -> dict[str, dict]:
        together.append(set(asked))
        return train(self, asked)

    monkeypatch.setattr(Known, "train", counted)
    weights = {"arctic_xs": Path("weights")}
    chosen = {"datasets": ("sst2", "emotion"), "sources": sources("sst2", "emotion")}
    suite = make(weights=weights, **chosen, **fair)
    tables.table1(suite)
    if suite.turns:
        (names,) = together
        assert len(names) == 4
    else:
        assert len(read(suite.out / "sweep.csv")) == 2 * 4
    best = read(suite.out / "table1.csv")[0]
    assert best["sst2"] == best["emot."] == "86.0"


def test_columns_match_printed_table1() -> None:
    columns = [known.column for known in DATASETS.values()]
    assert columns == list(SIZES)
    assert all(list(row) == columns for row in printed.table1().values())


def test_table1_has_measured_and_printed_rows_and_lists_missing_inputs(
    make, tmp_path, capsys
) -> None:
    """The options name the data of two data sets and the weights of one backbone. There are two seeds."""
    chosen = {"backbones": ("arctic_xs", "phi_2"), "datasets": ("sst2", "emotion", "yelp")}
    weights = {"arctic_xs": Path("weights")}
    tables.table1(make(seeds=2, sources=sources("sst2", "emotion"), weights=weights, **chosen))
    rows = read(tmp_path / "table1.csv")
    assert [row["finetuning"] for row in rows] == [*["lora"] * 3, *["full"] * 3] * 2
    best, last, paper = rows[:3]
    assert best["sst2"] == best["emot."] == "86.5 ± 0.7" and best["yelp"] == best["mean"] == ""
    assert last["sst2"] == "85.5 ± 0.7" and paper["sst2"] == "82.7"
    assert rows[6]["sst2"] == "" and rows[9]["sst2"] == "81.5 ± 0.7"
    said = capsys.readouterr().out
    assert "6 of 12 cells lack a value, because these options are missing:" in said
    assert "--data=yelp=DIR (4)" in said and "--pretrained=phi_2=DIR (2)" in said


OUT_OF_MEMORY = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes."


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (UserError("the loss is nan"), "the loss is nan"),
        (jax.errors.JaxRuntimeError(f"{OUT_OF_MEMORY}\nBufferAssignment: ..."), OUT_OF_MEMORY),
        (MemoryError(), "out of memory"),
        (MemoryError("Unable to allocate 9 GiB"), "Unable to allocate 9 GiB"),
    ],
)
def test_failed_cell_stays_empty_and_others_are_written(
    make, tmp_path, capsys, monkeypatch, fault, told
) -> None:
    """The failure is printed at once, and again in a list at the end.

    The table is written after the cells of each backbone.
    """
    suite = make(datasets=("sst2", "emotion"), sources=sources("sst2", "emotion"))
    suite = replace(suite, backbones=("arctic_xs", "arctic_s"), modes=("full",))
    made, seen = Known.made, []

    def fails(self: Known, name: str, config: ConfigDict) -> dict:
        seen.append((tmp_path / "table1.csv").exists())
        if (config.backbone, config.dataset) == ("arctic_xs", "sst2"):
            raise fault
        return made(self, name, config)

    monkeypatch.setattr(Known, "made", fails)
    with pytest.raises(UserError, match="1 of 4 cells of table1 failed"):
        tables.table1(suite)
    assert seen == [False, False, True, True]
    rows = read(tmp_path / "table1.csv")
    assert [(r["sst2"], r["emot."]) for r in rows[::3]] == [("", "81.0"), ("81.0", "81.0")]
    said = capsys.readouterr()
    assert f"{told}; the cell stays empty" in said.err
    assert said.out.endswith(f"failed:\n  arctic_xs full on sst2: {told}\n")


def test_invalid_config_fails_before_training(make, monkeypatch) -> None:
    monkeypatch.setattr(Known, "made", None)
    suite = make(datasets=("sst2",), sources=sources("sst2"), fields=["--config.data.max_length=0"])
    with pytest.raises(UserError, match="max_length must be a whole number"):
        tables.table1(suite)


def test_run_names_depend_on_recipe(make) -> None:
    case = Case("arctic_xs", "sst2", "full")
    assert make().stem(case) == "sst2_arctic_xs_full"
    assert make(recipe="paper").stem(case) == "sst2_arctic_xs_full_paper"


def test_mean_covers_the_selected_columns(make, tmp_path) -> None:
    tables.table1(
        make(datasets=("sst2", "emotion"), sources=sources("sst2", "emotion"), modes=("full",))
    )
    best, _, paper = read(tmp_path / "table1.csv")
    assert best["mean"] == "81.0" and paper["mean"] == "85.7"  # (81.5 + 89.8) / 2


def test_fig1_uses_finished_runs(make, tmp_path) -> None:
    names = ("sst2", "emotion", "imdb")
    suite = make(datasets=names, sources=sources(*names), weights={"arctic_xs": Path("weights")})
    figures.fig1(suite)
    assert {row["from"] for row in read(tmp_path / "fig1.csv")} == {
        *("printed", "printed, without artefacts")
    }
    tables.table1(suite)
    figures.fig1(suite)
    measured = [row for row in read(tmp_path / "fig1.csv") if row["from"] == "measured"]
    assert {row["data set"]: row["LoRA - full (F1)"] for row in measured} == {
        "sst2": "5.0",
        "emot.": "5.0",
        "imdb": "5.0",
    }
    fits = {row["from"]: row for row in read(tmp_path / "fig1_fit.csv")}
    assert fits["printed"]["R²"] == "0.370" and fits["the paper's caption"]["R²"] == "0.342"
    assert fits["measured"]["per factor of 10"] in ("0.00", "-0.00")
    assert (tmp_path / "fig1.png").stat().st_size > 10_000


def test_dry_run_lists_missing_inputs_and_finished_runs(make, tmp_path, capsys) -> None:
    suite = make(datasets=("sst2", "yelp"), sources=sources("sst2"))
    case = Case("arctic_xs", "sst2", "full")
    suite.fit_all({f"{suite.stem(case)}_seed1": suite.configuration(case, 1)})
    capsys.readouterr()
    costs.show(suite, "table1")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[-1].strip() for line in lines[2:6]] == [
        *("needs --pretrained=arctic_xs=DIR", "needs --data=yelp=DIR"),
        *("1 of 1 done", "needs --data=yelp=DIR"),
    ]


def test_invalid_options_raise_errors(monkeypatch, tmp_path) -> None:
    def told(*options: str) -> str:
        monkeypatch.setattr(sys, "argv", ["reproduce", *options, f"--out={tmp_path / 'out'}"])
        with pytest.raises(UserError) as caught:
            reproduce.main()
        return str(caught.value)

    assert "did you mean arctic_xs?" in told("table1", "--backbones=artic_xs")
    assert "did you mean emotion?" in told("table1", "--datasets=emotions")
    assert "--data=sst2 must be NAME=PATH" in told("table1", "--data=sst2")
    for place in ("nowhere", "~nobody_here/model"):
        assert f"{place} is neither a directory nor a model" in told(
            "table1", f"--pretrained=arctic_xs={place}"
        )
    assert "did you mean fixed?" in told("table1", "--recipe=fix")
    assert "--dry-run is only for the target table1" in told("table2", "--dry-run")
    assert "--dry-run is only for the target table1" in told("claims", "--dry-run")
    assert "fig1 trains no model: leave out --turns" in told("fig1", "--turns=5")
    assert told("table1", "--datasets=sst2").endswith(
        "remove --datasets, or set --scale=laptop or paper"
    )
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").write_text("a file")
    assert "out is not a folder" in told("table1", "--config.train.steps=1")


def test_overrides_of_cell_fields_are_rejected(make) -> None:
    """Overrides of `finetune` or `dataset` could fill cells with runs of another mode or another data set."""
    suite = make(fields=["--config.finetune=full"], sources=sources("sst2"))
    with pytest.raises(
        UserError, match=r"^leave out --config.finetune=full, because each cell of the table sets"
    ):
        suite.configuration(Case("arctic_xs", "sst2", "full"), 1)
