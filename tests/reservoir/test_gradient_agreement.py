"""`reservoir.gradients`: the gradients of skipping steps compared with true gradients, on a short run."""

import csv
import json
import shutil
import sys
from itertools import islice
from pathlib import Path

import jax
import numpy as np
import pytest

from common.errors import UserError
from common.sharding import make_mesh
from common.train.command import fit
from common.train.restore import load_run, read_config
from reservoir import gradients, run
from reservoir.gradient_agreement import Agreement, agreement, measure


def test_agreement_by_hand():
    true_BRP = np.array([[[3.0, 4.0], [4.0, 3.0]]])
    assert agreement(true_BRP, 2 * true_BRP) == pytest.approx((1, 1, 2))
    assert agreement(true_BRP, -true_BRP) == pytest.approx((-1, -1, 1))
    assert agreement(true_BRP, 0 * true_BRP) == (None, None, 0)
    # The two draws have the noise (-4, 4) and (4, -4), whose sum is 0, and so the estimates (-1, 8) and (8, -1).
    noise_BRP = np.array([[[-4.0, 4.0], [4.0, -4.0]]])
    found = agreement(true_BRP, true_BRP + noise_BRP)
    assert found.cosine == pytest.approx(29 / np.sqrt(65) / 5)
    assert found.cosine_of_means == pytest.approx(1)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"data": 1}, jax.devices()[:1])


@pytest.fixture(scope="module")
def identity(tmp_path_factory, mesh, make_config) -> Path:
    """Returns the workdir of a run with the estimator "identity" and snapshots of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("identity")
    config = make_config("transformer")
    config.model.backskip.update({"estimator": "identity", "warmup_steps": 1})
    config.data.update({"vocab_size": 300, "cache_dir": str(folder / "cache")})
    config.train.steps = config.eval.steps = 4
    config.checkpoint.snapshots = 2
    config.eval.sentences = 8
    config.decode.update({"beams": 1, "ratio": 0.0, "extra": 1})
    config.wandb.mode = "disabled"
    fit(config, folder / "run", mesh)
    return folder / "run"


def changed(workdir: Path, copy: Path, estimator: str, **fields: object) -> Path:
    """Copies the run in `workdir` to `copy`, changes the copied configuration, and returns `copy`.

    Args:
      fields: values of fields of `config.model`.
    """
    shutil.copytree(workdir, copy)
    for name in ("config.json", "summary.json"):
        content = json.loads((copy / name).read_text())
        model = content.get("config", content)["model"]
        model["backskip"]["estimator"] = estimator
        model |= fields
        (copy / name).write_text(json.dumps(content))
    return copy


@pytest.mark.medium
def test_program_writes_a_row_for_each_snapshot(identity, tmp_path, monkeypatch):
    zero = changed(identity, tmp_path / "zero", "zero")
    named = [f"copied={identity}", f"nothing={zero}"]
    monkeypatch.setattr(
        sys, "argv", ["gradients", *named, "--batches=1", "--draws=2", f"--out={tmp_path}/out"]
    )
    gradients.main()
    rows = list(csv.DictReader((tmp_path / "out" / "gradients.csv").open()))
    assert [(row["group"], row["step"]) for row in rows] == [
        ("copied", "2"),
        ("copied", "4"),
        ("nothing", "2"),
        ("nothing", "4"),
    ]
    for row in rows[:2]:
        assert 0.2 < float(row["cosine"]) < 0.9999
        assert float(row["relative size"]) > 0.1
    for row in rows[2:]:
        assert (row["cosine"], row["cosine of means"], float(row["relative size"])) == ("", "", 0)
    assert (tmp_path / "out" / "gradients.png").stat().st_size > 10_000


@pytest.mark.medium
def test_measured_gradients_are_of_layers_below_the_reservoir(identity, mesh):
    """`measure` of one batch and one draw agrees with jax.grad of `task.loss` and of `task.skipping_loss`."""
    config = read_config(identity)
    _, task = run.prepare(config, mesh)
    values = load_run(identity, config, task.build, mesh, task.pretrained_weights, snapshots=(4,))
    ((batch, _),) = islice(task.batches(None), 1)
    (key,) = jax.random.split(jax.random.key(config.seed), 1)

    def gradient(loss):
        def of(trainable):
            return loss(values.abstract_model.build(trainable, values.frozen), batch, key)[0]

        found = jax.jit(jax.grad(of))(values.trainable)
        # The reservoir is layer 1 of the encoder, so only layer 0 is below it.
        below = [found[name] for name in sorted(found) if name.startswith("encoder/blocks/0/")]
        assert len(below) == 16
        return np.concatenate([np.ravel(x) for x in below])

    true_P, estimate_P = gradient(task.loss), gradient(task.skipping_loss)
    norms = np.linalg.norm(true_P), np.linalg.norm(estimate_P)
    cosine = true_P @ estimate_P / np.prod(norms)
    (_, (step, found)) = measure(identity, mesh, batches=1, draws=1)
    assert step == 4
    assert found == pytest.approx(Agreement(cosine, cosine, norms[1] / norms[0]), rel=1e-4)


@pytest.mark.medium
def test_runs_that_cannot_be_measured_are_rejected(identity, tmp_path, mesh):
    noise = changed(identity, tmp_path / "noise", "noise")
    with pytest.raises(
        UserError,
        match=r"noise skips no reservoirs, because its --config.model.backskip.estimator is noise",
    ):
        next(measure(noise, mesh, 1, 1))
    low = changed(identity, tmp_path / "low", "identity", placement="bottom")
    with pytest.raises(UserError, match="low has no trained layer below a reservoir: give a run"):
        next(measure(low, mesh, 1, 1))
    bare = changed(identity, tmp_path / "bare", "identity")
    shutil.rmtree(bare / "checkpoints" / "snapshots")
    with pytest.raises(UserError, match="bare has no snapshots; train a run with"):
        next(measure(bare, mesh, 1, 1))
