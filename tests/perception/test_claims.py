"""Tests the experiments that the claims in perception/claims.csv name, and the table of claims end to end."""

import csv
from pathlib import Path

import jax
import pytest

from common.errors import UserError
from common.report import claims
from common.sharding import make_mesh
from perception import run
from perception.datasets import DATASETS
from perception.experiments import TOKENIZER, ExperimentSuite, stand_ins
from tests.programs import call

SIDES = sorted({s for c in claims.read("perception") if c.kind == "runs" for s in (c.a, c.b)})
WEIGHTS = {name: Path("weights") for name in (*stand_ins().values(), "arctic_xs", "arctic_s")}
SOURCES = {name: "files:somewhere" for name in DATASETS}


def make_suite(out: Path, **fields) -> ExperimentSuite:
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    return ExperimentSuite(
        out=out, mesh=mesh, **{"scale": "tiny", "seeds": 1, "fields": [], **fields}
    )


@pytest.mark.parametrize("text", SIDES)
def test_every_side_is_valid_at_tiny_and_laptop_scale(tmp_path, text) -> None:
    for scale, sources in (("tiny", {}), ("laptop", SOURCES)):
        side = make_suite(tmp_path, scale=scale, weights=WEIGHTS, sources=sources).side(text)
        if scale == "tiny" and "@arctic_s" in text:
            assert side.missing == "--scale=tiny has no arctic_s"
            continue
        assert side.missing == ""
        config = side.experiment(2)
        run.validate(config)
        assert config.seed == 2


def test_sides_share_runs_with_table1(tmp_path) -> None:
    """Each side of a claim uses the same runs as the matching cell of Table 1.

    A side that names no backbone uses arctic_xs, or at the scale "tiny" the only Arctic backbone of that scale.
    """
    suite = make_suite(tmp_path, scale="laptop", sources=SOURCES, weights=WEIGHTS)
    for case in suite.cases():
        side = suite.side(f"{case.dataset}: {case.mode}")
        assert side.name == suite.stem(case) and side.experiment(1) == suite.configuration(case, 1)
    suite = make_suite(tmp_path, weights=WEIGHTS)
    tables = {suite.stem(case) for case in suite.cases()}
    assert {suite.side(f"sst2{at}: full").name for at in ("", "@phi_2", "@qwen2_0.5b")} <= tables
    paper = make_suite(tmp_path, recipe="paper")
    assert paper.side("sst2: full").name == "embedded_arctic_l_full_paper"


def test_side_reports_the_missing_option(tmp_path) -> None:
    def missing(text: str, **fields) -> str:
        return make_suite(tmp_path, **fields).side(text).missing

    assert missing("sst2: full") == ""
    assert missing("sst2: lora") == "--pretrained=arctic_l=DIR"
    laptop = {"scale": "laptop", "sources": {"sst2": "files:somewhere"}}
    assert missing("yelp: full", **laptop) == "--data=yelp=DIR"
    assert missing(f"sst2: {TOKENIZER}", **laptop) == "--pretrained=arctic_xs=DIR"
    assert missing("sst2: full", **laptop, datasets=("yelp",)) == "--datasets excludes sst2"
    assert missing("sst2: full", **laptop, modes=("lora",)) == "--modes excludes full"
    assert missing("sst2: full", **laptop, backbones=("phi_2",)) == "--backbones excludes arctic_xs"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("sst3: full", "did you mean sst2?"),
        ("sst2: fulll", "did you mean full?"),
        ("sst2", "sst2: mode"),
        ("sst2@phi: full", "did you mean phi_2?"),
        ("sst2@: full", "sst2@: full: backbone"),
    ],
)
def test_unknown_side_raises_error(tmp_path, text, told) -> None:
    with pytest.raises(UserError) as caught:
        make_suite(tmp_path).side(text)
    assert told in str(caught.value)


@pytest.mark.slow
def test_claims_command_and_kept_runs(tmp_path, pretrained) -> None:
    """`--kept` writes the same table from the finished runs. There is one run of four steps for each of three modes."""
    out = tmp_path / "out"
    program = ["perception.reproduce", "claims", "--scale=tiny"]
    program.append(f"--out={out}")
    fields = ["data.max_length=16", "data.buckets=(16,)", "data.vocab_size=290"]
    fields += ["train.steps=4", "eval.steps=2", "optimizer.warmup_steps=1"]
    weights = f"--pretrained=arctic_l={pretrained}"
    call(*program, weights, *(f"--config.{field}" for field in fields))
    with (out / "claims.csv").open() as file:
        rows = {row["claim"]: row for row in csv.DictReader(file)}
    assert list(rows) == [claim.id for claim in claims.read("perception")]
    assert {path.name for path in (out / "runs").iterdir()} == {
        f"embedded_arctic_l_{mode}_seed1" for mode in ("full", "lora", TOKENIZER)
    }
    assert rows["trained"]["verdict"] == "holds"
    assert rows["close-rotten"]["verdict"] == "undecided (at least 2 more seeds)"
    assert rows["size"]["verdict"] == "not run: --scale=tiny has no arctic_s"
    assert rows["minimal"]["verdict"].startswith("refuted by arithmetic")
    before = (out / "claims.csv").read_bytes()
    call(*program, weights, "--kept")
    assert (out / "claims.csv").read_bytes() == before
