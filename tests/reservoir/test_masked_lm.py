"""Masked-language-model pretraining on a small text: evaluation, batches and masks of each step, and resuming."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from common import variables
from common.data.special_ids import BOS, PAD
from common.errors import UserError
from common.metrics.kinds import load as load_predictions
from common.metrics.predictions import PREDICTIONS
from common.sharding import make_mesh
from common.track.tracker import read_metrics
from common.train.command import fit
from common.train.frozen import draw_on_mesh
from common.train.state import initial_params
from common.train.task import ModelState
from configs import masked
from reservoir import run
from reservoir.masking import mask
from reservoir.tasks.masked_lm import MaskedLm, lengths, vocabulary

pytestmark = pytest.mark.medium

TEXT = "the a cat dog bird sat ran flew on in under mat tree house and then slept ate"
WORDS = TEXT.split()


def write_text(directory: Path) -> None:
    generator = np.random.default_rng(0)
    for split, count in (("train", 120), ("valid", 11), ("test", 7)):
        lines = [" ".join(generator.choice(WORDS, generator.integers(3, 20))) for _ in range(count)]
        (directory / f"{split}.txt").write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("text")
    write_text(directory)
    return directory


def small(folder: Path, **fields: object) -> ConfigDict:
    config = masked.tiny(masked.roberta("ffn"))
    config.wandb.mode = "disabled"
    config.data.update({"source": f"files:{folder}", "documents": "line", "vocab_size": 60})
    config.data.update({"batch": 8, "cache_dir": f"{folder}/cache"})
    config.model.update({"width": 16, "hidden": 24, "heads": 2, "max_length": 16})
    config.optimizer.schedule, config.optimizer.warmup_steps = "constant", 0
    config.train.steps, config.train.log_steps = 12, 1
    config.eval.update({"steps": 6, "batch": 8})
    config.checkpoint.steps = 6
    config.update_from_flattened_dict(fields)
    return config


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"data": 1}, jax.devices()[:1])


@pytest.fixture(scope="module")
def task(folder, mesh) -> MaskedLm:
    return MaskedLm(small(folder), mesh)


@pytest.fixture(scope="module")
def values(task, mesh) -> ModelState:
    abstract_model = variables.abstract(task.build)
    frozen, _ = draw_on_mesh(abstract_model, 1, mesh)
    trainable = initial_params(task, abstract_model, 1, mesh)
    trainable["head/bias"] = jax.random.normal(jax.random.key(5), trainable["head/bias"].shape)
    return ModelState(abstract_model, trainable, frozen, mesh)


def test_evaluation_equals_a_row_by_row_implementation(task, values):
    """The reference computes one row at a time, with the logits of all its positions and a softmax in NumPy."""
    network = values.abstract_model.build(values.trainable, values.frozen)
    forward = jax.jit(lambda *inputs: network(*inputs))
    rows, everywhere = task.splits["valid"], jnp.arange(16)[None]
    loss = hits = count = 0.0
    for number in range(len(rows)):
        tokens = jnp.asarray(rows[np.array([number])])
        key = jax.random.fold_in(jax.random.key(0), number)
        asked = mask(tokens, key[None], task.tokenizer.size, 0.15)
        logits = np.asarray(forward(asked.inputs_BL, lengths(tokens), everywhere)[0], np.float64)
        for place, weight in zip(asked.places_BM[0], asked.weights_BM[0], strict=True):
            if weight:
                target = int(tokens[0, place])
                loss += math.log(np.exp(logits[place]).sum()) - logits[place, target]
                hits += logits[place].argmax() == target
                count += 1
    found = task.evaluate(values, "valid")
    assert count > 10
    assert found["loss"] == pytest.approx(loss / count, rel=1e-5)
    assert found["accuracy"] == pytest.approx(100 * hits / count)
    assert found["perplexity"] == pytest.approx(math.exp(loss / count), rel=1e-5)


def test_evaluation_masks_do_not_depend_on_batching(folder, mesh, task, values):
    expected = task.evaluate(values, "test")
    assert task.evaluate(values, "test") == expected
    other = MaskedLm(small(folder, **{"eval.batch": 3, "seed": 7}), mesh)
    assert other.evaluate(values, "test") == pytest.approx(expected, rel=1e-5)


def test_evaluation_limit_applies_to_validation_only(folder, mesh, task, values):
    few = MaskedLm(small(folder, **{"eval.sequences": 2}), mesh)
    assert few.evaluate(values, "valid")["loss"] != task.evaluate(values, "valid")["loss"]
    assert few.evaluate(values, "test") == pytest.approx(task.evaluate(values, "test"))


def epoch(task: MaskedLm, number: int) -> list[np.ndarray]:
    count = task.training_batches.batches_per_epoch
    return [task.training_batches[number * count + k]["tokens"] for k in range(count)]


def test_epoch_has_every_row_once_in_a_new_order(task):
    first, second = (np.concatenate(epoch(task, number)) for number in (0, 1))
    rows = task.splits["train"]
    expected = sorted(map(tuple, rows[np.arange(len(rows))].tolist()))
    for found in (first, second):
        assert sorted(tuple(row) for row in found.tolist() if row[0] == BOS) == expected
    assert (first != second).any()


def test_every_step_draws_new_masks(task):
    """As in the training loop, the key of step t is fold_in(key(seed), t)."""
    tokens = jnp.asarray(task.training_batches[0]["tokens"])
    seen = []

    class Spy:
        def __call__(self, inputs, lengths, places, key):
            seen.append(np.asarray(inputs))
            return jnp.zeros((*places.shape, vocabulary(task.tokenizer)))

    batch = {"tokens": tokens, "ids": jnp.arange(len(tokens))}
    for step in (3, 4, 3):
        key = jax.random.fold_in(jax.random.key(1), step)
        _, weight = task.loss(Spy(), batch, key)
        assert weight > 0
    assert (seen[0] == seen[2]).all() and (seen[0] != seen[1]).any()
    assert ((seen[0] == PAD) == (np.asarray(tokens) == PAD)).all()


def test_mask_id_is_the_last_of_the_vocabulary(task):
    assert vocabulary(task.tokenizer) == 60 == task.tokenizer.size + 1
    assert max(max(row) for row in task.tokenizer.encode(["<mask> [MASK] zebra"])) < 59


def test_vocabulary_sizes_in_messages_are_values_of_the_option(folder, mesh):
    for size in (8, 5000):
        told = rf"^--config.data.vocab_size={size} is too .* possible is \d+$"
        with pytest.raises(UserError, match=told) as caught:
            MaskedLm(small(folder, **{"data.vocab_size": size}), mesh)
        possible = int(str(caught.value).split()[-1])
        MaskedLm(small(folder, **{"data.vocab_size": possible}), mesh)


@pytest.mark.parametrize("length", [0, 7])
def test_shortest_rows_have_8_tokens(folder, length):
    with pytest.raises(UserError, match=f"model.max_length must be at least 8, got {length}$"):
        run.validate(small(folder, **{"model.max_length": length}))


def test_text_too_short_to_mask_raises_user_error(tmp_path, mesh):
    write_text(tmp_path)
    (tmp_path / "valid.txt").write_text("cat\n")
    with pytest.raises(UserError, match=r"needs at least \d+ tokens but has \d: use a longer"):
        MaskedLm(small(tmp_path), mesh)


@pytest.fixture(scope="module")
def trained(folder, mesh, tmp_path_factory) -> tuple[Path, dict]:
    workdir = tmp_path_factory.mktemp("runs") / "whole"
    return workdir, fit(small(folder), workdir, mesh)


def final_checksum(workdir: Path, step: int) -> int:
    meta = workdir / "checkpoints" / "latest" / str(step) / "meta" / "metadata"
    return json.loads(meta.read_text())["checksum"]


def losses(workdir: Path) -> list[float]:
    return [m["train/loss"] for m in read_metrics(workdir) if "train/loss" in m]


def test_training_lowers_the_perplexity(trained):
    _, summary = trained
    assert summary["objective"] == "perplexity"
    first, last = (summary["curve"]["points"][i]["value"] for i in (0, -1))
    assert last < first < 60
    assert set(summary["test"]) == {"perplexity", "loss", "accuracy"}


def test_predictions_keep_the_loss_of_every_test_row(trained, task):
    workdir, summary = trained
    kept = load_predictions(workdir / PREDICTIONS)
    assert kept.metrics() == pytest.approx(summary["test"], rel=1e-12)
    assert len(kept) == len(task.splits["test"]) and (kept.hits_E <= kept.weights_E).all()


def test_resume_is_bit_exact(trained, folder, mesh, tmp_path):
    """The run resumes in the middle of an epoch."""
    workdir = tmp_path / "run"
    fit(small(folder, **{"train.steps": 5}), workdir, mesh)
    fit(small(folder), workdir, mesh)
    assert losses(workdir) == losses(trained[0])
    assert final_checksum(workdir, 12) == final_checksum(trained[0], 12)


@pytest.mark.slow
def test_eight_devices_match_one_device(trained, folder, tmp_path):
    """The masks of a row do not depend on the device that holds the row."""
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    fit(small(folder), tmp_path / "eight", mesh)
    np.testing.assert_allclose(losses(tmp_path / "eight"), losses(trained[0]), rtol=1e-4)
