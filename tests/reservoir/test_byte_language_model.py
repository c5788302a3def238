"""Training of the byte language model with reservoirs (section 4.2 of the paper)."""

from pathlib import Path

import jax
import pytest
from ml_collections import ConfigDict

from common.sharding import make_mesh
from common.track.tracker import read_metrics
from common.train.command import fit
from configs import bytelevel


def small(estimator: str) -> ConfigDict:
    config = bytelevel.choose(bytelevel.enwik8("transformer"), "tiny")
    config.model.update({"layers": 3, "width": 16, "hidden": 24, "heads": 2, "length": 16})
    config.model.backskip.update({"estimator": estimator, "warmup_steps": 3})
    config.model.backskip.anneal = 0.0
    config.optimizer.schedule, config.wandb.mode = "constant", "disabled"
    config.data.batch = 4
    config.train.update({"steps": 6, "log_steps": 1})
    config.eval.update({"steps": 3, "stride": 8, "batch": 8, "tokens": 200})
    config.checkpoint.steps = 3
    return config


@pytest.mark.slow
def test_backskipping_resume_is_bit_exact(tmp_path: Path) -> None:
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    config = small("identity")
    whole = fit(config.copy_and_resolve_references(), tmp_path / "whole", mesh)
    first = config.copy_and_resolve_references()
    first.train.steps = 5
    fit(first, tmp_path / "parts", mesh)
    parts = fit(config, tmp_path / "parts", mesh)
    losses = [
        [m["train/loss"] for m in read_metrics(tmp_path / name) if "train/loss" in m]
        for name in ("whole", "parts")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 6
    assert parts["test"] == whole["test"]
    assert whole["params"]["frozen"] > 0
    # With backskipping, two of the six steps skip the backward pass of the frozen layer.
    through = fit(small("none"), tmp_path / "through", mesh)
    assert whole["flops"] < through["flops"]
