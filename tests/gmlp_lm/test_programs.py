"""Training, evaluation and sampling end to end on the embedded text."""

import gzip
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from common import variables
from common.decode.generate import Generator
from common.decode.sample import Sampling
from common.errors import UserError
from common.metrics.predictions import PREDICTIONS
from common.metrics.predictions import load as load_predictions
from common.sharding import make_mesh
from common.tasks.language_modelling import LanguageModelling, WindowLosses, words
from common.train.state import initial_params
from common.train.task import ModelState
from configs import language
from gmlp_lm import run
from gmlp_lm.model import language_model
from tests.programs import call, finish, start


def small(kind: str = "gmlp_attn", **fields: object) -> ConfigDict:
    config = language.choose(kind, "wikitext2", "fixed,tiny")
    config.wandb.mode = "disabled"
    config.model.update({"width": 32, "hidden": 64, "length": 24, "dtype": "float32"})
    config.train.steps = 30
    config.data.batch = 8
    config.eval.update({"steps": 15, "stride": 12, "tokens": 1500})
    config.update_from_flattened_dict(fields)
    return config


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"data": 1}, jax.devices()[:1])


@pytest.fixture(scope="module")
def trained(tmp_path_factory, mesh) -> tuple[Path, dict]:
    workdir = tmp_path_factory.mktemp("runs") / "run"
    return workdir, run.fit(small(), workdir, mesh)


def test_training_lowers_bits_per_byte(trained):
    _, summary = trained
    first, last = (summary["curve"]["points"][i]["value"] for i in (0, -1))
    assert last < first < 8
    test = summary["test"]
    assert test["nats_per_byte"] == pytest.approx(test["bits_per_byte"] * math.log(2))


def test_predictions_hold_the_loss_of_every_test_window(trained):
    workdir, summary = trained
    kept = load_predictions(workdir / PREDICTIONS)
    assert kept.metrics() == pytest.approx(summary["test"], rel=1e-12)
    stride = small().eval.stride
    assert set(kept.weights_M[:-1]) == {stride} and 0 < kept.weights_M[-1] <= stride


def reader(values: ModelState) -> Callable[[list[int]], np.ndarray]:
    """Returns the logits of the next byte. Padding after it has no effect."""
    forward = jax.jit(lambda trainable, tokens: values.abstract_model.build(trainable, {})(tokens))

    def after(before: list[int]) -> np.ndarray:
        tokens = jnp.asarray([before + [0] * (24 - len(before))], jnp.int32)
        return np.asarray(forward(values.trainable, tokens)[0, len(before) - 1], np.float64)

    return after


def test_windowed_evaluation_equals_byte_by_byte_evaluation(mesh):
    """Scores every byte alone with its window's context; word perplexity follows from the same total."""
    config = small("gpt")
    task = LanguageModelling(config, language_model, mesh)
    task.splits["valid"] = task.splits["valid"][:60]
    abstract_model = variables.abstract(lambda: task.build(variables.ParamKeys(0)))
    values = ModelState(abstract_model, initial_params(task, abstract_model, 1, mesh), {}, mesh)
    text, total, after = task.splits["valid"], 0.0, reader(values)
    for place in range(1, len(text)):
        window = (place - 1) // 12
        begin = max((window + 1) * 12 - 24, 0)
        logits = after(text[begin:place].tolist())
        total -= logits[text[place]] - np.log(np.exp(logits).sum())
    found = task.evaluate(values, "valid")
    assert found["nats_per_byte"] == pytest.approx(total / 59, rel=1e-5)
    assert found["perplexity_per_word"] == pytest.approx(math.exp(total / words(text)), rel=1e-3)


def test_word_count_matches_wikitext():
    text = np.frombuffer(b" = Title = \n\n the cat <unk> . \n", np.uint8)
    assert words(text) == 3 + 4 + 3  # three line ends


def write(trained, prompt=b"The ", length=20, sampling=None, seed=1, chunk=16, mesh=None) -> bytes:
    config, values = run.load(trained[0], mesh)
    sampling = sampling or Sampling(0.8, 40, 0.95)
    writer = Generator(values.abstract_model, mesh, config.model.length, sampling)
    return b"".join(writer(values, prompt, length, seed, chunk=chunk))


def test_samples_depend_on_the_seed_not_on_the_chunk_size(trained, mesh):
    one = write(trained, mesh=mesh)
    assert len(one) == 20
    assert one == write(trained, chunk=7, mesh=mesh) == write(trained, chunk=1, mesh=mesh)
    assert one != write(trained, seed=2, mesh=mesh)


def test_temperature_0_is_greedy(trained, mesh):
    _, values = run.load(trained[0], mesh)
    text, after = list(b"The "), reader(values)
    for _ in range(20):
        text.append(int(np.argmax(after(text))))
    assert write(trained, sampling=Sampling(0.0), mesh=mesh) == bytes(text[4:])


@pytest.mark.parametrize(
    ("fault", "arguments"),
    [
        ("the prompt is empty", {"prompt": b""}),
        (
            "a prompt of 25 bytes and --length=20 need 45 positions; the model has 24",
            {"prompt": b"x" * 25},
        ),
        ("positions; the model has 24", {"length": 21}),
    ],
)
def test_invalid_sampling_options_are_rejected(trained, mesh, fault, arguments):
    with pytest.raises(UserError, match=fault):
        write(trained, mesh=mesh, **arguments)


def test_sample_program_writes_text(trained):
    program = ["gmlp_lm.sample", f"--workdir={trained[0]}"]
    output = call(*program, "--prompt=In ", "--length=16", "--temperature=0.5")
    assert output.startswith("In ") and len(output.encode()) >= 19
    # Invalid UTF-8 on an ASCII terminal.
    arguments = [sys.executable, "-m", *program, b"--prompt=\xff\xc3\xa9", "--length=4"]
    assert finish(start(arguments, PYTHONIOENCODING="ascii:strict")).startswith("??")
    for option, message in (
        ("--top_p=0", "error: --top_p must be above 0 and at most 1, got 0"),
        ("--temperature=-1", "error: --temperature must be at least 0, got -1"),
        ("--top_k=many", "error: --top_k must be a whole number of at least 0, got 'many'"),
        ("--length=0", "error: --length must be a whole number of at least 1, got '0'"),
        ("--prompt=", "error: the prompt is empty"),
        ("--seed=4294967296", "error: --seed must be below 4294967296, got 4294967296"),
    ):
        said = call(*program, "--length=8", option, code=2)
        assert said.startswith(message) and said.count("\n") == 1


def test_evaluate_program_scores_a_text_like_a_split(trained, mesh, tmp_path):
    """The test split as a plain and a packed file; stride 1 gives every byte the longest context."""
    workdir, summary = trained
    text = LanguageModelling(small(), language_model, mesh).splits["test"]
    (tmp_path / "text").write_bytes(text.tobytes())
    (tmp_path / "text.gz").write_bytes(gzip.compress(text.tobytes()))
    program = ["gmlp_lm.evaluate", f"--workdir={workdir}"]
    plain = call(*program, f"--text={tmp_path}/text")
    bits, count = summary["test"]["bits_per_byte"], len(text) - 1
    assert f"{bits:.4f} bits per byte of {count:,} bytes" in plain
    per_word = bits * count / words(text)
    assert f"{per_word:.4f} bits per word of {words(text):,} words" in plain
    assert "stride 12 in windows of 24: 13 to 24 bytes of context" in plain
    assert call(*program, f"--text={tmp_path}/text.gz") == plain.replace("text:", "text.gz:")


def test_smaller_stride_gives_every_byte_more_context(trained, mesh):
    """With stride 1 each byte is scored after the 24 bytes before it."""
    config, values = run.load(trained[0], mesh)
    generator = np.random.default_rng(0)  # random values: every byte of context has an effect
    noisy = {n: x + 0.2 * generator.normal(size=x.shape) for n, x in values.trainable.items()}
    values = replace(values, trainable=jax.tree.map(lambda x: x.astype(jnp.float32), noisy))
    text = np.frombuffer(b"The for statement is used to iterate over the elements.", np.uint8)
    after = reader(values)
    expected = 0.0
    for place in range(1, len(text)):
        logits = after(text[max(place - 24, 0) : place].tolist())
        expected -= logits[text[place]] - np.log(np.exp(logits).sum())
    found = WindowLosses(config, mesh)(values, text, 1)
    assert found.nats_M.sum() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (None, [], "cannot read "),
        (b"", [], " has 0 bytes; at least 2 are needed"),
        (b"a text", ["--stride=25"], "--stride=25 must be at most the run's window length, 24"),
        (b"a text", ["--stride=0"], "--stride must be a whole number of at least 1, got '0'"),
        (b"a text", ["--workdir=/nowhere"], "/nowhere"),
    ],
)
def test_invalid_texts_are_one_line_errors(trained, tmp_path, text, options, message):
    if text is not None:
        (tmp_path / "text.gz").write_bytes(gzip.compress(text))
    program = ["gmlp_lm.evaluate", f"--workdir={trained[0]}"]
    said = call(*program, f"--text={tmp_path}/text.gz", *options, code=2)
    assert said.startswith("error: ") and message in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("fault", "field", "value"),
    [
        ("leaves out bytes", "eval.stride", 25),
        ("model.length must be at least 1", "model.length", 0),
        ("eval.tokens must be at least 0", "eval.tokens", -1),
        ("eval.sample must be at least 0", "eval.sample", -1),
        ("are longer than --config.model.length=24", "eval.sample", 21),
        ("one of pre, post", "model.norm", "between"),
        ("shares must be three", "data.shares", (0.5, 0.5)),
        ("one of auto, float32, bfloat16", "model.dtype", "int8"),
        ("is not divisible by 2", "data.batch", 7),
    ],
)
def test_invalid_options_are_one_line_errors(tmp_path, fault, field, value):
    config = small()
    with config.ignore_type():
        config.update_from_flattened_dict({field: value})
    with pytest.raises(UserError, match=fault) as caught:
        run.fit(config, tmp_path / "run", make_mesh({"data": 2}, jax.devices()[:2]))
    assert "\n" not in str(caught.value)


def test_text_without_words_has_no_word_perplexity(tmp_path, mesh):
    for split, text in (("train", "a b " * 50), ("valid", " " * 99), ("test", "a b " * 9)):
        (tmp_path / f"{split}.txt").write_text(text)
    config = small(**{"data.source": f"files:{tmp_path}"})
    with pytest.raises(UserError, match="the valid text has no words"):
        run.fit(config, tmp_path / "run", mesh)


def test_resuming_with_other_evaluation_fields_is_rejected(trained, mesh):
    workdir, _ = trained
    with pytest.raises(UserError, match="stride"):
        run.fit(small(**{"eval.stride": 6, "train.steps": 40}), workdir, mesh)


@pytest.mark.slow
def test_eight_devices_match_one_device(tmp_path, mesh):
    quick = {"train.steps": 3, "eval.steps": 3, "eval.sample": 5}
    one = run.fit(small(**quick), tmp_path / "one", mesh)
    wide = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    eight = run.fit(small(**quick), tmp_path / "eight", wide)
    assert one["test"]["bits_per_byte"] == pytest.approx(eight["test"]["bits_per_byte"], rel=1e-4)
