"""Programs whose arguments are addresses in buckets."""

import json
import shutil
from pathlib import Path

import pytest

import gmlp_lm
import perception
import reservoir
from common.data.files import source_folder
from common.errors import UserError
from common.report.runs import load_group
from common.reproduce import named_paths
from common.storage.addresses import copy_of, shown
from common.storage.folders import open_file, open_folder, open_path, output
from tests.programs import call
from tests.report.helpers import summary
from tests.storage.test_mirror import training, write


def put_runs(address: str, names: str) -> Path:
    """Writes made-up runs into a bucket; returns the local copy of their folder."""
    folder = open_folder(address)
    for seed, name in enumerate(names.split(), 1):
        run = folder / name
        write(
            run, **{"summary.json": json.dumps(summary([1.0, 2.0], seed=seed)), "metrics.jsonl": ""}
        )
        write(run, checkpoints__best__1___CHECKPOINT_METADATA="large")
    with training(folder):
        pass
    return folder


@pytest.mark.parametrize("given", ["{}", "{}/gpt_*", "{}/gpt_2", "{}/gpt_2/summary.json"])
def test_groups_of_runs_are_read_from_a_bucket(bucket, one_store, given):
    put_runs(bucket.address, "gpt_1 gpt_2 gmlp_1")
    bucket.machine("second")
    found = [run.folder.name for run in load_group(given.format(bucket.address))]
    expected = {"{}": ["gmlp_1", "gpt_1", "gpt_2"], "{}/gpt_*": ["gpt_1", "gpt_2"]}
    assert found == expected.get(given, ["gpt_2"])
    copy = open_folder(bucket.address, lambda path: False)
    assert not list(copy.rglob("checkpoints")), "a report does not read checkpoints"


def test_missing_runs_in_a_bucket_raise_one_line_error(bucket, one_store):
    for given, told in (
        ("/none", "{} does not exist"),
        ("/none/*", "no file or folder matches {}"),
    ):
        with pytest.raises(UserError) as caught:
            load_group(bucket.address + given)
        assert told.format(bucket.address + given) in str(caught.value)


def test_data_in_a_bucket_are_read_and_cached(bucket, tmp_path):
    folder = open_folder(bucket.address)
    write(folder, **{"train.txt": "one\n", "books__a.txt": "two\n"})
    with training(folder):
        pass
    bucket.machine("second")
    copy = source_folder(bucket.address)
    assert (copy / "books" / "a.txt").read_text() == "two\n"
    before = (copy / "train.txt").stat()
    assert source_folder(bucket.address) == copy
    assert (copy / "train.txt").stat() == before
    with pytest.raises(UserError, match="no directory"):
        source_folder(bucket.address + "/absent")


@pytest.mark.parametrize(
    ("program", "option", "line"),
    [
        ("reservoir.evaluate", "--workdir=hdfs://a/b", "must begin with gs:// or s3://"),
        ("gmlp_lm.sample", "--workdir=gs://bucket", "must be gs://BUCKET/FOLDER"),
        ("gmlp_lm.train", "--workdir=s3://bucket", "must be s3://BUCKET/FOLDER"),
        ("reservoir.translate", "--output=gs://bucket", "must be gs://BUCKET/FOLDER"),
        ("perception.classify", "--input=gcs://a/b.csv", "must begin with gs:// or s3://"),
        ("common.report.__main__", "az://a/b", "must begin with gs:// or s3://"),
    ],
)
def test_invalid_address_exits_with_code_2(program, option, line):
    config = ["--config=configs/enwik8_gmlp.py:tiny"] if program == "gmlp_lm.train" else []
    said = call(program, *config, option, code=2)
    assert line in said and said.count("\n") == 1


@pytest.mark.parametrize("load_run", [gmlp_lm.load_run, perception.load_run, reservoir.load_run])
def test_load_run_reads_a_str_as_an_address(load_run):
    with pytest.raises(UserError, match="must be gs://BUCKET/FOLDER"):
        load_run("gs://bucket")


def test_files_in_a_bucket_are_read_and_written(bucket):
    place = f"{bucket.address}/texts/in.txt"
    with output(open_file(place)):
        copy_of(place).write_text("a prompt")
    assert bucket.paths() == {"texts/in.txt"}
    write(copy_of(bucket.address), unfinished="stays here")
    with output(open_file(f"{bucket.address}/out.txt")):
        copy_of(f"{bucket.address}/out.txt").write_text("a text")
    assert bucket.paths() == {"texts/in.txt", "out.txt"}
    bucket.machine("second")
    assert open_file(place).read_text() == "a prompt"
    assert not open_file(f"{bucket.address}/absent.txt").exists()
    assert open_path(place).is_file() and open_path(f"{bucket.address}/texts").is_dir()
    (given,) = named_paths("--data", [f"corpus={place}"], ["corpus"]).values()
    assert shown(given) == place
    with pytest.raises(UserError, match=f"--data=corpus={place}2: .* does not exist"):
        named_paths("--data", [f"corpus={place}2"], ["corpus"])


def test_unreachable_store_exits_with_code_2(bucket, one_store, monkeypatch):
    monkeypatch.setenv("TRAINLESS_BUCKET_SECONDS", "2")
    bucket.proxy.status = 503
    said = call("gmlp_lm.sample", f"--workdir={bucket.address}", code=2)
    *warnings, error = said.splitlines()
    assert all("retrying for" in warning for warning in warnings)
    assert error.startswith("error: ") and "have failed for" in error


@pytest.mark.slow
def test_run_in_a_bucket_is_trained_evaluated_and_compared(bucket, tmp_path):
    data, out = f"{bucket.address}/data", f"{bucket.address}/report"
    folder = open_folder(data)
    write(folder, text="In the beginning there was a text. " * 400)
    with training(folder):
        pass
    config = ["--config=configs/enwik8_gmlp.py:tiny", f"--config.data.source=files:{data}"]
    config += ["--config.data.file=text", "--config.train.steps=4", "--config.eval.steps=2"]
    config += ["--config.wandb.mode=disabled", f"--config.data.cache_dir={tmp_path}"]
    runs = [f"{bucket.address}/runs/seed{seed}" for seed in (1, 2)]
    for seed, run in enumerate(runs, 1):
        call("gmlp_lm.train", *config, f"--config.seed={seed}", f"--workdir={run}")
    bucket.machine("second")
    assert "bits per byte" in call(
        "gmlp_lm.evaluate", f"--workdir={runs[0]}", f"--text={data}/text"
    )
    assert call("gmlp_lm.sample", f"--workdir={runs[0]}", "--length=3")
    assert "seed2" in call("common.report.__main__", f"{bucket.address}/runs/seed*", f"--out={out}")
    shutil.rmtree(tmp_path / "second")
    assert (open_folder(out) / "runs.md").is_file()
