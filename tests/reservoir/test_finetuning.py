"""Fine-tuning of a pretraining run: frozen and trained parameters, resume, and rejected options."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from ml_collections import ConfigDict

from common.data.tokenizer import Tokenizer
from common.errors import UserError
from common.sharding import make_mesh
from common.track.tracker import read_metrics
from common.train.command import fit
from common.train.restore import load_run
from configs import finetuning as recipes
from configs import masked
from reservoir import evaluate, finetuning
from reservoir.pretrained import open_run

pytestmark = pytest.mark.medium

SIZES = {"width": 16, "hidden": 24, "heads": 2, "max_length": 32}
SEED = 11
"""Seed of fine-tuning, which differs from the seed of pretraining."""


def pretraining(reservoir: str, cache: Path) -> ConfigDict:
    config = masked.tiny(masked.roberta(reservoir))
    config.wandb.mode = "disabled"
    config.data.update({"vocab_size": 300, "batch": 8, "cache_dir": str(cache)})
    config.model.update(SIZES)
    config.train.steps = 4
    config.eval.update({"steps": 4, "sequences": 8})
    config.checkpoint.snapshots = 2
    return config


def classifying(pretrained: Path, recipe: str = "sst2", **fields: object) -> ConfigDict:
    config = recipes.tiny(getattr(recipes, recipe)())
    config.wandb.mode = "disabled"
    config.pretrained, config.seed = str(pretrained), SEED
    config.optimizer.schedule, config.optimizer.warmup_steps = "constant", 0
    config.data.update({"batch": 16, "buckets": (32,)})
    config.train.steps, config.train.log_steps = 6, 1
    config.eval.steps = config.checkpoint.steps = 3
    config.update_from_flattened_dict(fields)
    return config


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"data": 1}, jax.devices()[:1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


def pretrain(folder: Path, mesh, reservoir: str) -> Path:
    workdir = folder / reservoir
    fit(pretraining(reservoir, folder / "cache"), workdir, mesh)
    return workdir


@pytest.fixture(scope="module")
def reservoirs(folder, mesh) -> Path:
    """Returns the workdir of a pretraining run with an FFN reservoir."""
    return pretrain(folder, mesh, "ffn")


@pytest.fixture(scope="module")
def plain(folder, mesh) -> Path:
    return pretrain(folder, mesh, "none")


def arrays(workdir: Path) -> tuple[dict, dict]:
    """Returns the trainable values in the latest checkpoint of a fine-tuning run, and the frozen values of the run."""
    folder = workdir.absolute() / "checkpoints"
    step = max(int(path.name) for path in (folder / "latest").iterdir())
    with ocp.StandardCheckpointer() as checkpointer:
        trainable = checkpointer.restore(folder / "latest" / str(step) / "state")["trainable"]
        if not (folder / "frozen" / "0").exists():
            return trainable, {}
        return trainable, checkpointer.restore(folder / "frozen" / "0" / "state")["frozen"]


def pretrained_values(workdir: Path, mesh) -> dict[str, np.ndarray]:
    values = open_run(workdir).load(mesh)
    return {n: np.asarray(x) for n, x in {**values.trainable, **values.frozen}.items()}


@pytest.fixture(scope="module")
def kept(folder, mesh, reservoirs) -> tuple[Path, dict]:
    workdir = folder / "kept"
    return workdir, fit(classifying(reservoirs), workdir, mesh)


def test_frozen_layers_keep_pretraining_values_to_the_bit(kept, reservoirs, mesh):
    """Frozen values come from the pretraining run, not from the fine-tuning seed. All other values are trained."""
    trainable, frozen = arrays(kept[0])
    before = pretrained_values(reservoirs, mesh)
    assert frozen and all("/blocks/1/" in name for name in frozen)
    for name, value in frozen.items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)
    for name in before.keys() & trainable.keys():
        assert (np.asarray(trainable[name]) != before[name]).any(), name
    assert {n for n in before if n.startswith("encoder/")} == {
        n for n in (*trainable, *frozen) if n.startswith("encoder/")
    }


def test_summary_counts_frozen_parameters(kept):
    _, summary = kept
    assert summary["objective"] == "accuracy"
    ffn = 2 * 16 * 24 + 24 + 16 + 2 * 16
    assert summary["params"]["frozen"] == ffn
    assert set(summary["test"]) == {"accuracy", "weighted_f1", "loss"}


def test_frozen_layers_can_be_tuned(folder, mesh, reservoirs):
    workdir = folder / "tuned"
    summary = fit(classifying(reservoirs, reservoirs="tune"), workdir, mesh)
    trainable, frozen = arrays(workdir)
    assert not frozen and summary["params"]["frozen"] == 0
    before = pretrained_values(reservoirs, mesh)
    for name in (n for n in before if "/blocks/1/" in n):
        assert (np.asarray(trainable[name]) != before[name]).any(), name


def test_lora_trains_adapters_on_a_frozen_base_with_reservoirs(folder, mesh, reservoirs):
    workdir = folder / "lora"
    fields = {"lora.rank": 2, "optimizer.weight_decay": 0.0}
    summary = fit(classifying(reservoirs, **fields), workdir, mesh)
    trainable, frozen = arrays(workdir)
    before = {n: x for n, x in pretrained_values(reservoirs, mesh).items() if "encoder/" in n}
    assert before.keys() == frozen.keys()
    for name, value in frozen.items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)
    kernels = {n.removesuffix("/kernel") for n in before if n.endswith("/kernel")}
    assert any("/blocks/1/" in n for n in kernels), "the reservoir must have adapters"
    for name in kernels:
        assert np.any(trainable[f"{name}/lora_b"]), f"{name}/lora_b is 0, as before training"
    adapters = {f"{n}/{part}" for n in kernels for part in ("lora_a", "lora_b")}
    assert {n for n in trainable if not n.startswith("head/")} == adapters
    assert summary["params"]["frozen"] == sum(x.size for x in before.values())


@pytest.mark.slow
def test_freeze_now_freezes_layers_of_a_plain_run(folder, mesh, plain):
    """In fine-tuning, the paper's control freezes layers of a pretraining run without reservoirs.

    The frozen layers are the layers that would be reservoirs in a model with `freeze_now` reservoirs.
    """
    workdir = folder / "now"
    config = classifying(plain, "mnli", reservoirs="freeze_now", freeze_now=2)
    fit(config, workdir, mesh)
    trainable, frozen = arrays(workdir)
    before = pretrained_values(plain, mesh)
    assert {name.split("/")[3] for name in frozen} == {"0", "2"}
    for name, value in frozen.items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)
    changed = [n for n in before if "/blocks/1/" in n]
    assert all((np.asarray(trainable[n]) != before[n]).any() for n in changed)


def test_model_fields_come_from_pretraining_and_dropout_from_fine_tuning(tmp_path):
    before = pretraining("ffn", tmp_path).model
    before.dropout = before.attention_dropout = 0.5
    own = {"model.dropout": 0.25, "model.attention_dropout": 0.125, "model.head_dropout": 0.0}
    found = finetuning.inherit(classifying(tmp_path, **own), before).model
    assert (found.width, found.reservoir, found.reservoirs) == (16, "ffn", before.reservoirs)
    assert (found.dropout, found.attention_dropout, found.head_dropout) == (0.25, 0.125, 0.0)


def test_fine_tuning_from_a_snapshot(folder, mesh, reservoirs, kept):
    """By default, fine-tuning starts from the best checkpoint, which equals the snapshot of step 4 in this run."""
    first = {}
    for step in (2, 4):
        config = classifying(reservoirs, pretrained_step=step, **{"train.steps": 1})
        fit(config, folder / f"from_{step}", mesh)
        first[step] = losses(folder / f"from_{step}")[0]
    assert first[4] == losses(kept[0])[0] != first[2]


def losses(workdir: Path) -> list[float]:
    return [m["train/loss"] for m in read_metrics(workdir) if "train/loss" in m]


def final_checksum(workdir: Path, step: int) -> int:
    meta = workdir / "checkpoints" / "latest" / str(step) / "meta" / "metadata"
    return json.loads(meta.read_text())["checksum"]


def test_fine_tuning_resume_is_bit_exact(kept, folder, mesh, reservoirs):
    """The checkpoints have all values, so resuming loads no values from the pretraining run."""
    workdir = folder / "parts"
    fit(classifying(reservoirs, **{"train.steps": 4}), workdir, mesh)
    fit(classifying(reservoirs), workdir, mesh)
    assert losses(workdir) == losses(kept[0])
    assert final_checksum(workdir, 6) == final_checksum(kept[0], 6)


def test_best_checkpoint_reproduces_the_summarys_test_score(kept, mesh, reservoirs):
    workdir, summary = kept
    pretrained = open_run(reservoirs)
    config = finetuning.complete_model(classifying(reservoirs), pretrained)
    task = finetuning.FineTuning(config, pretrained, mesh)
    values = load_run(workdir, config, task.build, mesh)
    assert task.evaluate(values, "test") == pytest.approx(summary["test"])


def test_tokenizer_comes_from_pretraining(kept, reservoirs):
    found = [Tokenizer.load(w / "tokenizer.npz").fingerprint for w in (kept[0], reservoirs)]
    assert found[0] == found[1]


def test_processes_compare_the_pretraining_run(mesh, reservoirs, plain, monkeypatch):
    """Different pretraining runs have different fingerprints, which processes compare before training.

    Two hosts may have different runs in folders of the same name. A run that resumes does not need the parameters of
    its pretraining run, so the fingerprints of its data do not change with that run.
    """
    compared, of_data = [], []
    monkeypatch.setattr(finetuning, "check_agreement", lambda known: compared.append(known()))
    for workdir in (reservoirs, reservoirs, plain):
        pretrained = open_run(workdir)
        config = finetuning.complete_model(classifying(workdir), pretrained)
        task = finetuning.FineTuning(config, pretrained, mesh)
        task.start({}, {})
        of_data.append(task.fingerprints())
    assert compared[0] == compared[1] != compared[2]
    assert of_data[0] == of_data[1] == of_data[2]


def refused(config: ConfigDict, folder: Path, mesh) -> str:
    workdir = folder / "refused"
    with pytest.raises(UserError) as caught:
        fit(config, workdir, mesh)
    assert not workdir.exists() and "\n" not in str(caught.value)
    return str(caught.value)


def test_invalid_fine_tuning_is_rejected(folder, mesh, reservoirs, plain, kept):
    def told(pretrained: object, **fields: object) -> str:
        return refused(classifying(pretrained, **fields), folder, mesh)

    with pytest.raises(
        UserError, match=r"^--config.task=masked_lm cannot .*, such as configs/sst2.py"
    ):
        finetuning.validate(classifying(reservoirs, task="masked_lm"))
    assert "--config.pretrained is empty" in told("")
    assert f"--config.pretrained={folder}/nowhere holds no run" in told(folder / "nowhere")
    assert (
        "is a run of reservoir with the task classification, not of reservoir with the task masked_lm"
        in told(kept[0])
    )
    assert "has no frozen reservoirs to tune" in told(plain, reservoirs="tune")
    assert "--config.lora.rank must be a number of at least 0" in told(
        reservoirs, **{"lora.rank": -1}
    )
    tuned = {"lora.rank": 2, "reservoirs": "tune"}
    assert "--config.reservoirs must be keep, got tune" in told(reservoirs, **tuned)
    assert "no snapshot of step 3 in" in told(reservoirs, pretrained_step=3)
    assert "pretrained_step must be at least 0" in told(reservoirs, pretrained_step=-1)
    assert "needs a run without frozen reservoirs" in told(reservoirs, reservoirs="freeze_now")
    fields = {"reservoirs": "freeze_now", "freeze_now": 3}
    too_many = "--config.freeze_now=3, the number of layers to freeze, must be at most 2, because"
    assert too_many in told(plain, **fields)
    assert "freezes nothing" in told(plain, **(fields | {"freeze_now": 0}))
    assert "did you mean tune?" in told(reservoirs, reservoirs="tuned")
    assert "has 1 text field" in told(reservoirs, **{"data.fields": "premise hypothesis"})


def test_checkpoint_of_another_configuration_is_not_reported_as_damaged(folder, mesh, reservoirs):
    other = folder / "other"
    shutil.copytree(reservoirs, other)
    config = json.loads((other / "config.json").read_text())
    config["model"]["hidden"] = 32
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as caught:
        fit(classifying(other), folder / "of_another", mesh)
    message = str(caught.value)
    assert f"{other}/checkpoints/best/4, does not match the model" in message
    kernel = "encoder/stack/blocks/0/residuals/1/function/down/kernel"
    assert f"{kernel} is (24, 16) in the checkpoint" in message


def test_programs_reject_runs_of_other_tasks(kept, reservoirs, monkeypatch):
    for workdir, task in ((kept[0], "classification"), (reservoirs, "masked_lm")):
        monkeypatch.setattr("sys.argv", ["evaluate", f"--workdir={workdir}"])
        with pytest.raises(
            UserError, match=f"is a run of reservoir with the task {task}, not of reservoir"
        ):
            evaluate.main()
