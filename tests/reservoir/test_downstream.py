"""Table 4 and Figures 2, 6 and 11 from made-up runs."""

import csv
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from common.errors import UserError
from common.sharding import make_mesh
from reservoir import costs, downstream
from reservoir.probing import table
from reservoir.probing.classifier import Probe
from reservoir.targets import snapshot_steps
from tests.reservoir.known import Known


def make_suite(out: Path, **fields) -> Known:
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    return Known(out=out, mesh=mesh, **{"scale": "tiny", "seeds": 2, "fields": [], **fields})


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def made(out: Path) -> set[str]:
    return {path.name for path in out.iterdir()}


@pytest.mark.parametrize("target", ["fig2", "fig11"])
def test_figures_2_and_11_from_known_runs(tmp_path: Path, target: str):
    """The made-up accuracy (%) of seeds 1 and 2 is 50 + seed without reservoirs and 55 + seed with reservoirs."""
    getattr(downstream, target)(make_suite(tmp_path))
    assert made(tmp_path) == {
        f"{target}_{task}.{end}" for task in downstream.TASKS for end in ("csv", "md", "png")
    }
    for task in downstream.TASKS:
        rows = read(tmp_path / f"{target}_{task}.csv")
        assert [(r["model"], r["frozen in pretraining"], r["in fine-tuning"]) for r in rows] == [
            ("Transformer", "0", "0"),
            ("Transformer, frozen in fine-tuning", "0", "1"),
            ("T Reservoir", "1", "1"),
            ("T Reservoir, reservoirs tuned", "1", "0"),
            ("FFN Reservoir", "1", "1"),
            ("FFN Reservoir, reservoirs tuned", "1", "0"),
        ]
        tests = [row["test accuracy"] for row in rows]
        assert tests == ["51.50 ± 0.71"] * 2 + ["56.50 ± 0.71"] * 4
        assert {row["step"] for row in rows} == {"best"}
        hours = (150 / 3600, 120 / 3600)  # training hours of whole runs
        assert [row["pretraining (h)"] for row in rows] == [
            f"{hours[n > 1]:.3f} ± 0.000" for n in range(6)
        ]


def test_figure_6_from_known_runs(tmp_path: Path):
    """A run has snapshots of steps 50, 100, ..., 250, and made-up evaluations at steps 100, 200 and 300."""
    suite = make_suite(tmp_path, fields=["--config.train.steps=250"])
    downstream.fig6(suite)
    for task in downstream.TASKS:
        rows = read(tmp_path / f"fig6_{task}.csv")
        assert [row["model"] for row in rows[::5]] == [
            "Transformer",
            "T Reservoir",
            "FFN Reservoir",
        ]
        assert [row["step"] for row in rows] == ["50", "100", "150", "200", "250"] * 3
        for number, row in enumerate(rows):
            seconds = (50.0, 40.0)[number >= 5] * int(row["step"]) / 100
            assert row["pretraining (h)"] == f"{seconds / 3600:.3f} ± 0.000"
    assert "fig6.png" in made(tmp_path)
    starts = {(c.pretrained, c.pretrained_step) for c in suite.asked if c.task == "classification"}
    pretrained = {place for place, _ in starts}
    assert len(pretrained) == 6 and {step for _, step in starts} == {50, 100, 150, 200, 250}
    # Pretraining keeps the snapshots from which Figure 6 fine-tunes.
    for config in suite.asked:
        if config.task == "masked_lm":
            assert config.checkpoint.snapshots == 50 and list(snapshot_steps(config))[-1] == 250


def test_finetune_overrides_apply_to_fine_tuning_only(tmp_path: Path, capsys):
    suite = make_suite(
        tmp_path, fields=["--config.train.steps=250"], finetune=("train.steps=7",), seeds=1
    )
    downstream.fig2(suite)
    assert {(c.task, c.train.steps) for c in suite.asked} == {
        ("masked_lm", 250),
        ("classification", 7),
    }
    assert (
        "--config.train.steps=250 sets pretraining only; for fine-tuning, give --finetune"
        in capsys.readouterr().out
    )
    # The errors are raised before pretraining.
    for field, message in (
        ("train.stepz=7", "unknown option --finetune=train.stepz; did you mean"),
        ("data.batch=0", "data.batch must be at least 1"),
        ("task=masked_lm", "^remove --finetune=task=masked_lm: reservoir.reproduce sets task$"),
        ("lora.rank=8", "^--finetune=lora.rank=8 needs .* leave out --finetune=lora.rank$"),
    ):
        suite = make_suite(tmp_path / "wrong", finetune=(field,))
        with pytest.raises(UserError, match=message):
            downstream.fig2(suite)
        assert not suite.asked


def test_sweep_applies_to_fine_tuning_only(tmp_path: Path, capsys):
    """A fine-tuning case trains both learning rates with seed 1, and the best learning rate with both seeds."""
    sweep = {"optimizer.learning_rate": ("1e-4", "1e-3")}
    suite = make_suite(tmp_path, models=("T Reservoir",), sweep=sweep)
    downstream.fig2(suite)
    before, after = (
        [config for config in suite.asked if config.task == task]
        for task in ("masked_lm", "classification")
    )
    assert len(before) == 2 and len({config.optimizer.learning_rate for config in before}) == 1
    ways = 2 * 2  # number of modes times number of tasks
    tried = [config for config in after if not config.eval.test]
    assert len(tried) == 2 * ways and {config.seed for config in tried} == {1}
    chosen = [config for config in after if config.eval.test]
    assert len(chosen) == 2 * ways and {c.optimizer.learning_rate for c in chosen} == {1e-4}
    assert len(read(tmp_path / "sweep.csv")) == 2 * ways
    assert "--sweep varies fine-tuning only" in capsys.readouterr().out


def test_fine_tuning_runs_of_a_seed_train_in_turns(tmp_path: Path, monkeypatch):
    together, train = [], Known.train

    def counted(self: Known, asked: Mapping[str, ConfigDict]) -> dict[str, dict]:
        together.append([config.task for config in asked.values()])
        return train(self, asked)

    monkeypatch.setattr(Known, "train", counted)
    downstream.fig2(make_suite(tmp_path, models=("Transformer", "FFN Reservoir"), turns=10))
    assert together == [["masked_lm"] * 2] * 2 + [["classification"] * 8] * 2


def test_tasks_without_data_are_left_out(tmp_path: Path, capsys):
    suite = make_suite(tmp_path, scale="laptop", data_paths={"sst2": tmp_path}, seeds=1)
    assert {tuning.task for tuning in downstream.tunings(suite, "fig2")} == {"sst2"}
    assert "mnli is left out: set its data folder by --data=mnli=DIR" in capsys.readouterr().out
    with pytest.raises(
        UserError, match="no data to fine-tune on: add --data=sst2=DIR or --data=mnli"
    ):
        downstream.tunings(make_suite(tmp_path, scale="laptop"), "fig2")
    with pytest.raises(UserError, match=r"^--finetune=model.dropout must be a number from 0"):
        downstream.tunings(make_suite(tmp_path, finetune=("model.dropout=2",)), "fig2")


def test_unreadable_fine_tuning_data_fail_before_pretraining(tmp_path: Path):
    suite = make_suite(tmp_path, data_paths={"sst2": tmp_path / "absent"}, models=("T Reservoir",))
    with pytest.raises(UserError) as error:
        downstream.fig2(suite)
    start = f"cannot read the data of fine-tuning on sst2 (checked before pretraining): --data=sst2={tmp_path}/absent"
    assert str(error.value).startswith(start) and not suite.asked
    suite = make_suite(tmp_path, models=("T Reservoir",), finetune=("data.source=files:absent",))
    with pytest.raises(
        UserError, match=r"before pretraining\): --finetune=data.source=files:absent"
    ):
        downstream.fig2(suite)


def test_errors_of_fine_tuning_runs_name_the_finetune_option(tmp_path: Path, monkeypatch):
    train = Known.train

    def fails(self: Known, asked: Mapping[str, ConfigDict]) -> dict[str, dict]:
        if any(config.task == "classification" for config in asked.values()):
            raise UserError("--config.data.batch is too small")
        return train(self, asked)

    monkeypatch.setattr(Known, "train", fails)
    with pytest.raises(UserError, match=r"^--finetune=data.batch is too small$"):
        downstream.fig2(make_suite(tmp_path, models=("T Reservoir",)))


def test_dry_run_lists_fine_tuning(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(costs, "flops_per_second", lambda dtype: 1e9)
    models = ("FFN Reservoir",)
    suite = make_suite(tmp_path, models=models, seeds=1, finetune=("train.steps=7",))
    costs.show(suite, "fig2")
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = {line[0]: line for line in shown if line and "_seed" in line[0]}
    assert len(rows) == 1 + 2 * 2 and not suite.asked
    kept, tuned = (rows[f"sst2_{mode}_roberta_3_ffn_reservoir_seed1"] for mode in ("keep", "tune"))
    frozen = 2 * 128 * 256 + 256 + 128 + 2 * 128
    count = lambda cell: int(cell.replace(",", ""))  # noqa: E731
    assert count(tuned[1]) == count(tuned[2]) == count(kept[2]) == count(kept[1]) + frozen
    assert kept[3] == "7" and 0 < float(kept[4]) < float(tuned[4])
    costs.show(suite, "fig6")
    assert capsys.readouterr().out.count("sst2_keep_step") == 5


# Probing.


class Features:
    """A fake reader of embeddings (layer 0) and of layers 1 to 12. All features of layer n are n + seed / 10."""

    def __init__(self, seed: int):
        self.seed, self.layers = seed, ["embeddings", *("trained", "reservoir") * 6]

    def __call__(self, sentences: list[str]) -> np.ndarray:
        layers = np.arange(13.0)[:, None, None] + self.seed / 10
        return np.broadcast_to(layers, (13, len(sentences), 1)).astype(np.float32)


def probe(features: Mapping[str, np.ndarray], *rest: object, **options: object) -> list[Probe]:
    return [Probe(50, 0.0, 1e-5, 0.5, float(x) / 100) for x in features["test"][:, 0, 0]]


def test_table_4_averages_seeds_beside_printed_values(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(table, "probe", probe)
    monkeypatch.setattr(
        downstream, "open_reader", lambda workdir, mesh, pool: Features(int(workdir.name[-1]))
    )
    lines = [f"{part}\t{label}\tOne two ." for part in ("tr", "va", "te") for label in "aab"]
    for task in ("sentence_length", "bigram_shift"):
        (tmp_path / f"{task}.txt").write_text("\n".join(lines))
    out = tmp_path / "out"
    downstream.table4(make_suite(out, scale="paper", seeds=3, data_paths={"probing": tmp_path}))
    majority, *rows = read(out / "table4.csv")
    assert majority["kind"] == "majority class" and majority["SentLen"] == "66.67"
    assert len(rows) == 2 * (13 + 12)
    plain = rows[:25]
    assert [row[""] for row in plain] == ["measured", *("measured", "printed") * 12]
    assert [row["layer"] for row in plain] == ["0", *(str(n) for n in range(1, 13) for _ in "mp")]
    # In layer 1, seeds 1 to 3 have the accuracies 1.1 %, 1.2 % and 1.3 %.
    assert plain[1]["SentLen"] == plain[1]["BShift"] == "1.20 ± 0.10"
    assert plain[2]["SentLen"] == "84.56 ± 0.54" and plain[2]["BShift"] == "49.99 ± 0.01"
    assert rows[-1]["model"] == "T Reservoir" and rows[-1]["SentLen"] == "70.61 ± 0.18"
