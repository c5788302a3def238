"""The paper's tables and figures: configurations of their runs, and tables of made-up runs."""

import csv
from functools import partial
from pathlib import Path

import jax
import pytest

from common.config import to_json
from common.errors import UserError
from common.report import printed as report
from common.sharding import make_mesh
from configs import bytelevel, masked, translation
from reservoir import costs, downstream, plots, reproduce, run, tables
from reservoir.backskip import warmup
from reservoir.experiments import ExperimentSuite
from reservoir.model import reservoir_layers
from reservoir.targets import MODELS, NEEDS, SETTINGS, UPDATABLE, Case
from tests.programs import call
from tests.reservoir.known import Known

printed = partial(report.printed, "reservoir")

PAPER = [target for target in NEEDS if target not in ("fig2", "fig6", "fig11", "table4")]


def make_suite(out: Path, kind: type = Known, **fields) -> ExperimentSuite:
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    given = {"scale": "tiny", "seeds": 1, "fields": [], **fields}
    return kind(out=out, mesh=mesh, **given)


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("scale", ["tiny", "laptop", "paper"])
@pytest.mark.parametrize("target", NEEDS)
def test_configurations_of_all_targets_are_valid(tmp_path, target, scale):
    suite = make_suite(tmp_path, scale=scale)
    found = {}
    for cases in suite.needed(target).values():
        for case in cases:
            config = suite.configuration(case, 1)
            run.validate(config)
            # No two different configurations share a folder.
            assert found.setdefault(case.name(1), to_json(config)) == to_json(config)
            assert config.model[SETTINGS[case.setting].depth_field] == case.layers
            assert config.model.reservoir == MODELS[case.model][0]


def test_paper_scale_has_the_rows_of_the_printed_tables(tmp_path):
    suite = make_suite(tmp_path, scale="paper")
    for table in ("table1", "table2", "table5"):
        (cases,) = suite.needed(table).values()
        asked = {(case.model, str(case.layers)) for case in cases if case.model != UPDATABLE}
        assert asked == set(printed(table))
    for table in ("table6", "table7"):
        asked = {
            (setting, case.model, str(case.layers))
            for setting, cases in suite.needed(table).items()
            for case in cases
        }
        assert asked == set(printed(table, keys=3))
    assert {key[0] for key in printed("table3")} <= set(NEEDS["table3"].models)
    assert len(printed("table4")) == 24


PLACES = {
    ("iwslt", 6): (2, 4),
    ("iwslt", 8): (3, 5),
    ("iwslt", 10): (4, 6),
    ("iwslt", 12): (5, 7),
    ("wmt", 12): (3, 5, 7, 9),
    ("wmt", 16): (5, 7, 9, 11),
    ("wmt", 24): (9, 11, 13, 15),
    ("wmt", 32): (13, 15, 17, 19),
}
"""(setting, layers) -> frozen encoder layers, counted from 1."""


@pytest.mark.parametrize("table", ["table1", "table2", "table5"])
def test_frozen_layers_of_tables_1_2_and_5(tmp_path, table):
    (cases,) = make_suite(tmp_path, scale="paper").needed(table).values()
    for case in cases:
        config = make_suite(tmp_path, scale="paper").configuration(case, 1)
        found = tuple(layer + 1 for layer in reservoir_layers(config.model))
        frozen = case.model in ("T Reservoir", "FFN Reservoir")
        assert found == (PLACES[config_name(case), case.layers] if frozen else ())
        assert config.model.decoder_layers == {"table1": 2, "table2": 1, "table5": 6}[table]
        assert not reservoir_layers(config.model, "decoder")


def config_name(case: Case) -> str:
    return case.setting.removesuffix("_deep")


def test_placements_of_figure_5(tmp_path):
    suite = make_suite(tmp_path, scale="paper", depths={8: None})
    (cases,) = suite.needed("fig5").values()
    found = {c.model: reservoir_layers(suite.configuration(c, 1).model) for c in cases}
    assert found == {
        "Transformer": (),
        "alternate": (2, 4),
        "bottom": (0, 1),
        "middle": (3, 4),
        "top": (6, 7),
    }


def test_layerdrop_probability_and_backskip_warmup(
    tmp_path,
):
    suite = make_suite(tmp_path, scale="paper")
    dropped = suite.configuration(Case("wmt", "LayerDrop", 16, 4), 1)
    assert dropped.model.layerdrop == 0.25 and dropped.model.reservoir == "none"
    skipping = suite.configuration(Case("iwslt", "Backskip Reservoir", 8, 2), 3)
    assert skipping.model.backskip.estimator == "policy" and skipping.seed == 3
    assert warmup(skipping) == skipping.optimizer.warmup_steps == 4000


def test_table_3_has_both_rewards_and_the_controls(tmp_path):
    suite = make_suite(tmp_path)
    (cases,) = suite.needed("table3").values()
    found = {}
    for case in cases:
        settings = suite.configuration(case, 1).model.backskip
        found[case.model] = settings.estimator, settings.reward
    assert found["Backskip Reservoir"] == ("policy", "signed")
    assert found["Backskip by own reward"] == ("policy", "own_rms")
    controls = ("Identity gradient", "Zero gradient", "Noise and true gradients")
    assert [found[name][0] for name in controls] == ["identity", "zero", "noise"]


def test_table_1_from_known_runs(tmp_path):
    """Seeds 1 and 2 reach their best BLEU, 31 and 32, at 100 s (with reservoirs 80 s). An epoch takes 25 s (20 s)."""
    tables.table1(make_suite(tmp_path, seeds=2))
    plain, t, ffn, dropped, short = read(tmp_path / "table1.csv")
    assert plain["best BLEU"] == "31.50 ± 0.71" and plain["frozen"] == "0"
    assert plain["hours to best"] == "0.0278 ± 0.0000" and plain["ratio"] == "1.00"
    assert plain["trained (all)"] == "2.0M (2.5M)" and plain["epoch (s)"] == "25.000 ± 0.000"
    assert t["ratio"] == ffn["ratio"] == "0.80" and t["epoch (s)"] == "20.000 ± 0.000"
    assert dropped["frozen"] == "1 dropped" and dropped["ratio"] == "1.00"
    assert plain["test BLEU"] == "31.50 ± 0.71"
    assert short["model"] == UPDATABLE and short["layers"] == "2" and short["frozen"] == "0"


def test_runs_not_timed_in_turns_have_no_time_ratio(tmp_path):
    tables.table1(make_suite(tmp_path, seeds=2, timing="shared"))
    rows = read(tmp_path / "table1.csv")
    assert {row["ratio"] for row in rows} == {""}
    assert {row[""] for row in rows} == {"measured, timed shared"}


def test_measured_rows_precede_printed_rows(tmp_path):
    suite = make_suite(
        tmp_path, scale="paper", depths={8: None}, models=("Transformer", "FFN Reservoir")
    )
    tables.table1(suite)
    rows = read(tmp_path / "table1.csv")
    assert [row[""] for row in rows] == ["measured, timed turns", "printed"] * 2
    assert rows[3]["best BLEU"] == "34.56 ± 0.16" and rows[3]["ratio"] == "0.86"
    tables.table6(make_suite(tmp_path, scale="paper", settings=("wmt",), depths={24: None}))
    rows = read(tmp_path / "table6.csv")
    assert rows[1]["hours to 95 %"] == "5.262 ± 0.607" and rows[1]["data"] == "wmt"
    assert rows[0]["BLEU there"] == "31.00"


def test_table_3_aucc_uses_one_horizon(tmp_path):
    """The longest run ends at 150 s. The curves of other runs hold their best score until 150 s."""
    tables.table3(make_suite(tmp_path, models=("Transformer", "T Reservoir")))
    plain, t = read(tmp_path / "table3.csv")
    hours = 1 / 3600
    area = 50 * 15.5 / 2 + 50 * (15.5 + 31) / 2 + 50 * 31
    assert plain["AUCC (BLEU hours)"] == f"{area * hours:.4f}"
    area = 40 * 15.5 / 2 + 40 * (15.5 + 31) / 2 + 70 * 31
    assert t["AUCC (BLEU hours)"] == f"{area * hours:.4f}"


def test_horizons_are_the_papers_at_paper_scale(tmp_path):
    """At smaller scales, the horizon is the end of the longest run."""
    paper = {"iwslt": 4, "iwslt_deep": 4, "wmt": 20, "enwik8": 30, "roberta": 60}
    suite = make_suite(tmp_path, scale="paper")
    assert {setting: suite.horizon(setting) for setting in SETTINGS} == paper
    assert make_suite(tmp_path, scale="laptop").horizon("wmt") == "longest"


def test_horizon_limits_aucc_only(tmp_path, monkeypatch):
    """The best score is reached at 100 s, after the horizon of 60 s. The horizon changes the AUCC only."""
    monkeypatch.setattr(Known, "horizon", lambda self, setting: 60 / 3600)
    suite = make_suite(tmp_path, models=("Transformer",))
    tables.table3(suite)
    (row,) = read(tmp_path / "table3.csv")
    at_60 = 15.5 + 15.5 / 5
    area = 50 * 15.5 / 2 + 10 * (15.5 + at_60) / 2
    assert row["best BLEU"] == "31.00" and row["AUCC (BLEU hours)"] == f"{area / 3600:.4f}"
    tables.table7(make_suite(tmp_path, models=("Transformer",), settings=("iwslt",)))
    (row,) = read(tmp_path / "table7.csv")
    assert row["hours to 99 %"] == f"{100 / 3600:.4f}" and row["BLEU there"] == "31.00"


@pytest.mark.parametrize("target", PAPER)
def test_targets_write_their_files(tmp_path, target):
    module = tables if reproduce.TARGETS[target] == "tables" else plots
    getattr(module, target)(make_suite(tmp_path))
    made = sorted(path.name for path in tmp_path.iterdir())
    assert any(name.endswith(".csv") for name in made) and any(n.endswith(".md") for n in made)
    assert (module is tables) == (not any(name.endswith(".png") for name in made))


def test_options_that_exclude_every_run_are_rejected(tmp_path):
    every = "excludes every run of table1"
    for fields, message in (
        (
            {"depths": {4: 0}, "models": ("T Reservoir",)},
            f"--depths sets 0 reservoirs, so --models=T Reservoir {every}: set at least 1",
        ),
        ({"settings": ("wmt",)}, f"--settings=wmt {every}: choose from iwslt$"),
        (
            {"models": ("BiGRU Reservoir",)},
            f"--models=BiGRU Reservoir {every}: choose from Transformer,T Res",
        ),
    ):
        with pytest.raises(UserError, match=message):
            tables.table1(make_suite(tmp_path, **fields))
    with pytest.raises(
        UserError,
        match="table4 needs SentEval's probing tasks: set the folder of their files by --data=probing=DIR",
    ):
        downstream.table4(make_suite(tmp_path))
    with pytest.raises(UserError, match="has none of the tasks of Table 4"):
        downstream.table4(make_suite(tmp_path, data_paths={"probing": tmp_path}))


def depths_of(suite: ExperimentSuite, target: str, model: str) -> list[tuple[int, int]]:
    """Returns (encoder layers, number of reservoirs) of each configuration of `target` for a model."""
    return [
        (config.model.encoder_layers, len(reservoir_layers(config.model)))
        for cases in suite.needed(target).values()
        for case in cases
        if case.model == model
        for config in [suite.configuration(case, 1)]
    ]


def test_depths_option(tmp_path):
    """--depths=LAYERS:RESERVOIRS sets the number of reservoirs.

    With --depths=LAYERS, a model has as many reservoirs as the nearest of the default depths has.
    """
    suite = make_suite(tmp_path, scale="laptop", depths={4: None, 8: 3, 6: None})
    assert depths_of(suite, "table1", "FFN Reservoir") == [(4, 2), (8, 3), (6, 2)]
    assert depths_of(suite, "table1", "Transformer") == [(4, 0), (8, 0), (6, 0)]
    assert depths_of(suite, "table1", UPDATABLE) == [(2, 0), (5, 0), (4, 0)]
    (cases,) = suite.needed("table1").values()
    rates = [suite.configuration(c, 1).model.layerdrop for c in cases if c.model == "LayerDrop"]
    assert rates == [2 / 4, 3 / 8, 2 / 6]
    # A number of reservoirs other than the default is part of the run's name. Rows with equal models share a run.
    names = {(case.model, case.layers): case.name(1) for case in cases}
    assert names["FFN Reservoir", 8] == "iwslt_8r3_ffn_reservoir_seed1"
    assert names["FFN Reservoir", 4] == "iwslt_4_ffn_reservoir_seed1"
    assert names["Transformer", 4] == names[UPDATABLE, 4] == "iwslt_4_transformer_seed1"
    # With 0 reservoirs in --depths, only the plain model runs.
    (cases,) = make_suite(tmp_path, scale="laptop", depths={4: 0}).needed("table1").values()
    assert [(case.model, case.name(1)) for case in cases] == [
        ("Transformer", "iwslt_4_transformer_seed1")
    ]


def test_depths_too_small_for_the_reservoirs_are_rejected(tmp_path):
    message = "2 alternating reservoirs need 3 layers, but the number of layers is 2; set a smaller number .*=2:R"
    for number, option in ((None, "^--depths=2: "), (2, "^--depths=2:2: ")):
        with pytest.raises(UserError, match=option + message):
            make_suite(tmp_path, scale="laptop", depths={2: number}).needed("table1")
    fields = {"scale": "laptop", "models": ("Transformer",)}
    assert depths_of(make_suite(tmp_path, depths={2: None}, **fields), "table1", "Transformer") == [
        (2, 0)
    ]
    for model in ("LayerDrop", UPDATABLE):
        with pytest.raises(
            UserError, match="number of reservoirs, 2, must be below the number of layers, 2"
        ):
            fields = {"scale": "laptop", "models": (model,)}
            make_suite(tmp_path, depths={2: None}, **fields).needed("table1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("6,x", "'x' must be LAYERS or LAYERS:RESERVOIRS"),
        ("8:", "'8:' must be LAYERS"),
        ("0", "'0' must be LAYERS"),
        ("6,6:2", "the depth 6 occurs twice"),
    ],
)
def test_malformed_depths_are_rejected(text: str, message: str):
    assert reproduce._depths("6,8:3") == {6: None, 8: 3}
    with pytest.raises(UserError, match=message):
        reproduce._depths(text)


def test_controls_separate_freezing_initialization_and_depth(tmp_path):
    suite = make_suite(tmp_path, scale="laptop")
    (cases,) = suite.needed("controls").values()
    found = {case.model: suite.configuration(case, 1).model for case in cases}
    trained, xavier = found["Orthogonal T trained"], found["Xavier T Reservoir"]
    assert trained.reservoir_trained and trained.reservoir_init == "orthogonal"
    assert not xavier.reservoir_trained and xavier.reservoir_init == "xavier"
    assert {model.reservoir for model in (trained, xavier)} == {"transformer"}
    assert found[UPDATABLE].encoder_layers == found["T Reservoir"].encoder_layers - 2
    tables.controls(suite)
    rows = {row["model"]: row["frozen"] for row in read(tmp_path / "controls.csv")}
    assert rows["Orthogonal FFN trained"] == "0" and rows["Xavier FFN Reservoir"] == "2"


def test_up_projected_bigru_has_the_feed_forwards_width(tmp_path):
    suite = make_suite(tmp_path)
    (cases,) = suite.needed("fig3").values()
    found = {case.model: suite.configuration(case, 1).model for case in cases}
    assert found["BiGRU Reservoir"].reservoir_hidden == 0
    assert found["BiGRU Reservoir up-projected"].reservoir_hidden == 256


def test_dry_run_lists_runs_and_marks_finished_ones(tmp_path, capsys):
    done = tmp_path / "runs" / "iwslt_3_ffn_reservoir_seed1"
    done.mkdir(parents=True)
    (done / "summary.json").write_text("{}")
    costs.show(make_suite(tmp_path, seeds=2), "table1")
    shown = capsys.readouterr().out.splitlines()
    assert sum("_seed" in line for line in shown) == 10
    assert [line.split()[0] for line in shown if line.endswith("yes")] == [done.name]
    assert "the matrices over positions of gMLP layers" in shown[-1]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.medium
def test_dry_run_from_the_command_line(tmp_path):
    program = ["reservoir.reproduce", "fig4", f"--out={tmp_path / 'out'}"]
    shown = call(*program, "--models=FFN Reservoir", "--dry-run")
    assert "iwslt_deep_3_ffn_reservoir_seed1" in shown and "hours" in shown
    assert not (tmp_path / "out" / "runs").exists()


def test_dry_run_flops_per_weight_and_token():
    config = translation.tiny(translation.iwslt("ffn"))
    abstract_model = costs.abstract(config)
    product = lambda shape: shape[0] * shape[1]  # noqa: E731
    trained = sum(
        product(v.shape) for n, v in abstract_model.trainable.items() if n.endswith("kernel")
    )
    frozen = sum(product(v.shape) for n, v in abstract_model.frozen.items() if n.endswith("kernel"))
    table = config.data.vocab_size * config.model.width
    expected = (6 * (trained + table) + 4 * frozen) * config.data.tokens_per_batch
    assert costs.flops(config, abstract_model) == expected


def test_dry_run_flops_exclude_learned_positions():
    """With twice the `max_length` and half the rows, a batch has the same number of tokens and costs the same FLOPs."""
    config = masked.tiny(masked.roberta("none"))
    before = costs.flops(config, costs.abstract(config))
    config.model.max_length *= 2
    config.data.batch //= 2
    assert costs.flops(config, costs.abstract(config)) == before


def test_dry_run_flops_count_one_output_layer_of_256_bytes():
    config = bytelevel.tiny(bytelevel.enwik8("none"))
    assert costs.abstract(config).trainable["embed/table"].shape == (256, config.model.width)
    tied = costs.flops(config, costs.abstract(config))
    config.model.tied = False
    assert costs.flops(config, costs.abstract(config)) == tied


@pytest.mark.medium
def test_reproduce_program_does_not_retrain_finished_runs(tmp_path):
    """The repeated command leaves metrics.jsonl unchanged."""
    out = tmp_path / "out"
    program = ["reservoir.reproduce", "table1", f"--out={out}"]
    program.append("--models=FFN Reservoir")
    small = ["width=16", "hidden=16", "heads=2", "decoder_layers=1"]
    fields = [f"--config.model.{field}" for field in small]
    fields += ["--config.train.steps=4", "--config.eval.steps=2", "--config.eval.sentences=4"]
    call(*program, *fields)
    (row,) = read(out / "table1.csv")
    assert row["model"] == "FFN Reservoir" and row["ratio"] == ""
    log = out / "runs" / "iwslt_3_ffn_reservoir_seed1" / "metrics.jsonl"
    before = log.read_bytes()
    call(*program, *fields)
    assert log.read_bytes() == before
    told = call(*program, "--data=iwslt=nowhere", code=2)
    assert "nowhere does not exist" in told
