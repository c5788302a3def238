"""Fingerprints of splits and tokenizers, which processes compare before training, and runs when they resume."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from common.config import flatten, load
from common.data.cache import fingerprint_arrays
from common.errors import UserError
from common.sharding import make_mesh
from common.train.command import fit
from common.train.task import Task
from common.train.workdir import FREE
from configs import explicit
from tests.train import toy

CONFIGS = {
    "reservoir": ("wmt_ffn_res", "roberta_ffn_res", "enwik8_ffn_res"),
    "gmlp_lm": ("enwik8_gmlp",),
    "explicit_opt": ("mnist_explicit", "babylm_cat"),
    "perception": ("perception",),
}


NEW_VALUES = {
    "decode.extra": 3,
    "eval.batch": 8,
    "eval.buckets": (64,),
    "eval.test": False,
    "eval.tokens_per_batch": 512,
    "model.remat": "full",
    "train.epochs": 3,
}
"""Another value of each field that may change when a run resumes and that a task reads."""

LINES = [f"{first} {second} the {last}" for first in "abc" for second in "abc" for last in "xyz"]


@pytest.fixture(scope="module")
def make_task(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Task]:
    cache = tmp_path_factory.mktemp("cache")

    def make(paper: str, name: str, changed: bool = False) -> Task:
        """Returns the task of a tiny configuration, if `changed` with another mesh, cache folder and `NEW_VALUES`."""
        config = load(f"configs/{name}.py:tiny")
        if "cache_dir" in config.data:
            config.data.cache_dir = str(cache / "other" if changed else cache)
        if changed:
            own = {field: x for field, x in NEW_VALUES.items() if field in flatten(config)}
            config.update_from_flattened_dict(own)
        count = 2 if changed else 1
        mesh = make_mesh({"data": count}, jax.devices()[:count])
        return importlib.import_module(f"{paper}.run").prepare(config, mesh)[1]

    return make


@pytest.mark.parametrize(
    ("paper", "name"),
    [
        pytest.param(paper, name, marks=[] if name in ("enwik8_gmlp", "mnist_explicit") else slow)
        for slow in [pytest.mark.slow]
        for paper, names in CONFIGS.items()
        for name in names
    ],
)
def test_every_split_and_tokenizer_has_its_own_fingerprint(make_task, paper, name):
    """The fingerprints do not depend on fields that may change when a run resumes."""
    assert all(field.startswith(FREE) for field in NEW_VALUES)
    task = make_task(paper, name)
    found = task.fingerprints()
    for part in ("train", "valid", "test"):
        assert any(f"the {part} " in name for name in found)
    tokenizers = [name for name in vars(task) if name.startswith("tokenizer")]
    assert any("tokenizer" in name for name in found) == bool(tokenizers)
    assert len(set(found.values())) == len(found) or name == "wmt_ffn_res", (
        "only the two sides of wmt_ffn_res share a tokenizer"
    )
    assert all(len(value) == 64 for value in found.values())
    assert make_task(paper, name, changed=True).fingerprints() == found


def test_array_fingerprint_depends_on_values_shape_dtype_and_order():
    x, y = np.arange(6, dtype=np.int32), np.ones((2, 3), np.float32)
    changed = x.copy()
    changed[5] ^= 1 << 30
    arrays = [(x, y), (y, x), (changed, y), (x.reshape(2, 3), y), (x.astype(np.int64), y), (x,)]
    assert len({fingerprint_arrays(*some) for some in arrays}) == len(arrays)
    assert fingerprint_arrays(y.T) == fingerprint_arrays(np.ascontiguousarray(y.T))


def write_texts(folder: Path, **changed: list[str]) -> None:
    """Writes the three splits of a text. `changed` has other lines for some of the splits."""
    folder.mkdir(exist_ok=True)
    splits = {"train": LINES, "valid": LINES[:9], "test": LINES[9:18]} | changed
    for split, lines in splits.items():
        (folder / f"{split}.txt").write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture
def of_texts(tmp_path: Path) -> ConfigDict:
    """Returns the configuration of a language model on the files of `write_texts`, whose evaluations take seconds."""
    write_texts(tmp_path / "texts")
    config = explicit.tiny_text(explicit.babylm("cat"))
    config.data.source, config.data.documents = f"files:{tmp_path}/texts", "line"
    config.data.splits = {split: f"{split}.txt" for split in ("train", "valid", "test")}
    config.data.cache_dir = str(tmp_path / "cache")
    config.data.vocab_size, config.train.batch, config.train.epochs = 20, 64, 2
    config.wandb.mode = "disabled"
    return config


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"valid": LINES[:8]}, "the valid split"),
        ({"test": LINES[9:17]}, "the test split"),
        ({"train": LINES[::-1]}, "the train split"),  # the tokenizer does not change
    ],
)
def test_run_does_not_resume_with_other_text(of_texts, tmp_path, changed, named):
    workdir, mesh = tmp_path / "run", make_mesh({"data": 1}, jax.devices()[:1])
    of_texts.train.epochs = 1
    summary = fit(of_texts, workdir, mesh)
    kept = {name: (workdir / name).read_text() for name in ("summary.json", "metrics.jsonl")}
    write_texts(tmp_path / "texts", **changed)
    of_texts.train.epochs = 2
    message = (
        f"^{named} changed since the run in {workdir} began: restore the data, or choose another"
        " --workdir$"
    )
    with pytest.raises(UserError, match=message):
        fit(of_texts, workdir, mesh)
    assert {name: (workdir / name).read_text() for name in kept} == kept
    write_texts(tmp_path / "texts")
    assert fit(of_texts, workdir, mesh)["steps"] == 2 * summary["steps"]


class Printed(toy.Toy):
    """The toy task with fingerprints."""

    def __init__(self, **fingerprints: str):
        super().__init__()
        self.own = fingerprints

    def fingerprints(self) -> dict[str, str]:
        return self.own

    def save(self, workdir: Path) -> None:
        (workdir / "printed").write_text(str(self.own))


@pytest.mark.medium
def test_fingerprints_without_a_counterpart_are_accepted(tmp_path):
    """A task may add and remove fingerprints. Checkpoints from older code have no fingerprints."""
    tasks = [toy.Toy(), Printed(train="1"), Printed(train="1", valid="2"), toy.Toy()]
    for steps, task in enumerate(tasks, 1):
        toy.run(tmp_path, task, train__steps=steps)
        path = tmp_path / f"checkpoints/latest/{steps}/meta/metadata"
        meta = json.loads(path.read_text())
        assert meta["fingerprints"] == task.fingerprints()
    del meta["fingerprints"]
    path.write_text(json.dumps(meta))
    task = Printed(train="3", valid="3")
    assert toy.run(tmp_path, task, train__steps=6)["steps"] == 6
    assert task.starts == [{"next": 4}]
    with pytest.raises(UserError, match=r"^train and valid changed since the run"):
        toy.run(tmp_path, Printed(train="4", valid="5"), train__steps=7)
    assert (tmp_path / "printed").read_text() == str(
        task.own
    )  # The refused start has saved nothing.
