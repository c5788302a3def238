"""Fingerprints of splits and tokenizers, which several processes compare before training."""

import importlib
from collections.abc import Callable

import jax
import numpy as np
import pytest

from common.config import load
from common.data.cache import fingerprint_arrays
from common.sharding import make_mesh
from common.train.task import Task

CONFIGS = {
    "reservoir": ("wmt_ffn_res", "roberta_ffn_res", "enwik8_ffn_res"),
    "gmlp_lm": ("enwik8_gmlp",),
    "explicit_opt": ("mnist_explicit", "babylm_cat"),
    "perception": ("perception",),
}


@pytest.fixture(scope="module")
def make_task(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Task]:
    cache = str(tmp_path_factory.mktemp("cache"))

    def make(paper: str, name: str) -> Task:
        config = load(f"configs/{name}.py:tiny")
        if "cache_dir" in config.data:
            config.data.cache_dir = cache
        mesh = make_mesh({"data": 1}, jax.devices()[:1])
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
    assert make_task(paper, name).fingerprints() == found


def test_array_fingerprint_depends_on_values_shape_dtype_and_order():
    x, y = np.arange(6, dtype=np.int32), np.ones((2, 3), np.float32)
    changed = x.copy()
    changed[5] ^= 1 << 30
    arrays = [(x, y), (y, x), (changed, y), (x.reshape(2, 3), y), (x.astype(np.int64), y), (x,)]
    assert len({fingerprint_arrays(*some) for some in arrays}) == len(arrays)
    assert fingerprint_arrays(y.T) == fingerprint_arrays(np.ascontiguousarray(y.T))
