"""Tests the experiments that the claims in reservoir/claims.csv name, and the table of claims end to end."""

import csv
from pathlib import Path

import jax
import pytest

from common.errors import UserError
from common.report import claims
from common.sharding import make_mesh
from reservoir import finetuning, run
from reservoir.experiments import ExperimentSuite
from tests.programs import call

SIDES = sorted({s for c in claims.read("reservoir") if c.kind == "runs" for s in (c.a, c.b)})


def make_suite(out: Path, **fields) -> ExperimentSuite:
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    return ExperimentSuite(
        out=out, mesh=mesh, **{"scale": "tiny", "seeds": 1, "fields": [], **fields}
    )


@pytest.mark.parametrize("text", SIDES)
def test_claims_need_no_data_at_tiny(tmp_path, text):
    side = make_suite(tmp_path).side(text)
    assert side.missing == ""
    config = side.experiment(2)
    (finetuning if config.task == "classification" else run).validate(config)
    assert config.seed == 2


def test_claimed_fine_tuning_starts_from_claimed_pretraining(tmp_path):
    suite = make_suite(tmp_path)
    experiments = {side.name: side.experiment for side in map(suite.side, SIDES)}
    starts = {
        Path(make(3).pretrained).name
        for make in experiments.values()
        if make(3).task == "classification"
    }
    assert len(starts) == 3
    assert starts <= {f"{name}_seed3" for name in experiments}


def test_claims_and_tables_share_runs(tmp_path):
    suite = make_suite(tmp_path, scale="paper")
    for target in ("table1", "table3", "fig5"):
        for setting, cases in suite.needed(target).items():
            for case in cases:
                if case.model in ("alternate", "Transformer of updatable depth"):
                    continue  # these rows have no runs of their own
                side = suite.side(f"{setting}@{case.layers}: {case.model}")
                assert side.name == case.stem
                assert side.experiment(1) == suite.configuration(case, 1)
    assert suite.side("iwslt: T Reservoir").name == "iwslt_8_t_reservoir"
    assert suite.side("iwslt: Transformer of updatable depth").name == "iwslt_6_transformer"
    tuned = suite.side("mnli@6: FFN Reservoir, reservoirs tuned")
    assert tuned.name == "mnli_tune_roberta_6_ffn_reservoir"
    assert tuned.experiment(1).reservoirs == "tune"


def test_missing_option_of_a_claim_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # has no folder data/, so data are missing

    def missing(text: str, **fields) -> str:
        return make_suite(tmp_path, **fields).side(text).missing

    laptop = {"scale": "laptop"}
    assert missing("iwslt@12: LayerDrop") == "--depths=12"
    assert missing("iwslt@12: LayerDrop", depths={12: None}) == ""
    assert missing("iwslt: T Reservoir", **laptop) == "--data=iwslt=DIR"
    assert missing("iwslt: T Reservoir", **laptop, data_paths={"iwslt": tmp_path}) == ""
    # Data in a bucket are there if their local copy is.
    bucket = Path(".cache/buckets/gs/texts/iwslt")
    bucket.mkdir(parents=True)
    assert missing("iwslt: T Reservoir", **laptop, data_paths={"iwslt": bucket}) == ""
    assert missing("sst2: Transformer", **laptop) == "--data=roberta=DIR"
    data_paths = {"roberta": tmp_path}
    assert missing("sst2: Transformer", **laptop, data_paths=data_paths) == "--data=sst2=DIR"
    assert missing("wmt: Transformer", settings=("iwslt",)) == "--settings excludes the setting"
    assert missing("wmt: LayerDrop", models=("Transformer",)) == "--models excludes the row"
    assert missing("wmt: T Reservoir", depths={4: 0}) == "--depths leaves no reservoirs"
    sweep = {"sweep": {"optimizer.learning_rate": ("1e-3",)}}
    assert "fig2 tunes fine-tuning" in missing("sst2: Transformer", **sweep)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("iwslt15: T Reservoir", "did you mean iwslt?"),
        ("iwslt: T Reservior", "did you mean T Reservoir?"),
        ("iwslt", "in reservoir/claims.csv, 'iwslt', row="),
        (
            "iwslt@x: T Reservoir",
            "the number of layers after @ must be a whole number above 0, got 'x'",
        ),
        (
            "iwslt@0: T Reservoir",
            "the number of layers after @ must be a whole number above 0, got '0'",
        ),
        ("iwslt:T Reservior", "did you mean T Reservoir?"),
        ("sst2: LayerDrop", "the row 'LayerDrop' is unknown: choose one of 'Transformer', 'Transf"),
        (
            "iwslt@1: T Reservoir",
            "in reservoir/claims.csv, 'iwslt@1: T Reservoir': the number of reservoirs, 1",
        ),
        ("sst2: Transformer, reservoirs tuned", "Transformer, frozen in fine-tuning"),
    ],
)
def test_invalid_claims_are_rejected(tmp_path, text, told):
    with pytest.raises(UserError) as caught:
        make_suite(tmp_path).side(text)
    assert told in str(caught.value)


def test_claims_reject_dry_run(tmp_path):
    program = ["reservoir.reproduce", "claims", "--dry-run"]
    told = call(*program, f"--out={tmp_path / 'out'}", code=2)
    assert "--dry-run is for tables and figures, not for claims" in told


@pytest.mark.slow
def test_command_line_writes_the_table_of_claims(tmp_path):
    """The command trains three translators for four steps each. Then --kept writes the same table."""
    out = tmp_path / "out"
    program = ["reservoir.reproduce", "claims", "--scale=tiny"]
    program += [f"--out={out}", "--settings=iwslt", "--models=Transformer,T Reservoir,bottom"]
    small = ["width=16", "hidden=16", "heads=2", "decoder_layers=1"]
    fields = [f"--config.model.{field}" for field in small]
    fields += ["--config.train.steps=4", "--config.eval.steps=2", "--config.eval.sentences=4"]
    call(*program, *fields)
    with (out / "claims.csv").open() as file:
        rows = {row["claim"]: row for row in csv.DictReader(file)}
    assert list(rows) == [claim.id for claim in claims.read("reservoir")]
    assert {path.name for path in (out / "runs").iterdir()} == {
        f"iwslt_3_{model}_seed1" for model in ("transformer", "t_reservoir", "bottom")
    }
    assert rows["trained"]["verdict"] == rows["cost-t"]["verdict"] == "holds"
    assert rows["test-iwslt-t"]["verdict"] == "undecided (at least 2 more seeds)"
    assert rows["test-wmt-t"]["verdict"] == "not run: --settings excludes the setting"
    assert rows["ffn-iwslt"]["verdict"] == "not run: --models excludes the row"
    assert rows["faster-trained"]["verdict"].startswith("refuted by arithmetic")
    assert rows["deep-wmt"]["verdict"].startswith("not run: ")
    before = (out / "claims.csv").read_bytes()
    call(*program, "--kept")
    assert (out / "claims.csv").read_bytes() == before
