"""Training, evaluation and sampling end to end on the Python manual."""

import gzip
import json
import math
import re
import shutil
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from common import variables
from common.data.byte_text import load_bytes
from common.decode.generate import Generator
from common.decode.sample import Sampling
from common.errors import UserError
from common.metrics.kinds import load as load_predictions
from common.metrics.predictions import PREDICTIONS
from common.sharding import make_mesh
from common.tasks.language_modelling import WindowLosses, words
from common.train.command import fit
from common.train.state import initial_params
from common.train.task import ModelState
from configs import language
from gmlp_lm import load_run, run, sample
from gmlp_lm.train import print_summary
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
    return workdir, fit(small(), workdir, mesh)


def test_training_lowers_bits_per_byte(trained, capsys):
    workdir, summary = trained
    print_summary(summary, workdir)
    assert f"{summary['tokens_per_second']:,.0f} bytes/s" in capsys.readouterr().out
    first, last = (summary["curve"]["points"][i]["value"] for i in (0, -1))
    assert last < first < 8
    test = summary["test"]
    assert test["nats_per_byte"] == pytest.approx(test["bits_per_byte"] * math.log(2))


def test_finished_run_without_tokenizer_fields_is_reused(trained, mesh, tmp_path):
    """Configurations of older runs lack the fields of the tokenizer. Training such a run again reuses its summary.

    Training such a run with another tokenizer is an error.
    """
    workdir = tmp_path / "old"
    shutil.copytree(trained[0], workdir)
    saved = json.loads((workdir / "config.json").read_text())
    for field in ("tokenizer", "vocab_size", "cache_dir"):
        del saved["data"][field]
    (workdir / "config.json").write_text(json.dumps(saved))
    assert fit(small(), workdir, mesh)["test"] == trained[1]["test"]
    with pytest.raises(UserError, match=r"data\.tokenizer"):
        fit(small(**{"data.tokenizer": "sentencepiece"}), workdir, mesh)


def test_predictions_hold_the_loss_of_every_test_window(trained):
    workdir, summary = trained
    kept = load_predictions(workdir / PREDICTIONS)
    assert kept.metrics() == pytest.approx(summary["test"], rel=1e-12)
    stride = small().eval.stride
    assert set(kept.weights_E[:-1]) == {stride} and 0 < kept.weights_E[-1] <= stride


def reader(values: ModelState) -> Callable[[list[int]], np.ndarray]:
    """Returns a function from up to 24 bytes to the logits of the next byte. Padding after the bytes has no effect."""
    forward = jax.jit(lambda trainable, tokens: values.abstract_model.build(trainable, {})(tokens))

    def after(before: list[int]) -> np.ndarray:
        tokens = jnp.asarray([before + [0] * (24 - len(before))], jnp.int32)
        return np.asarray(forward(values.trainable, tokens)[0, len(before) - 1], np.float64)

    return after


def test_windowed_evaluation_equals_byte_by_byte_evaluation(mesh):
    """The reference scores one byte at a time, given the preceding bytes of the byte's window.

    Word perplexity comes from the same summed loss.
    """
    config = small("gpt")
    task = run.Task(config, mesh)
    task.splits["valid"] = task.splits["valid"][:60]
    abstract_model = variables.abstract(task.build)
    values = ModelState(abstract_model, initial_params(task, abstract_model, 1, mesh), {}, mesh)
    text, total, after = task.splits["valid"], 0.0, reader(values)
    for place in range(1, len(text)):
        window = (place - 1) // 12
        begin = max((window + 1) * 12 - 24, 0)
        logits = after(text[begin:place].tolist())
        total -= logits[text[place]] - np.log(np.exp(logits).sum())
    found = task.evaluate(values, "valid")
    assert found["nats_per_byte"] == pytest.approx(total / 59, rel=1e-5)
    assert found["perplexity_per_word"] == pytest.approx(
        math.exp(total / words(text.tobytes())), rel=1e-3
    )


def test_word_count_matches_wikitext():
    assert words(b" = Title = \n\n the cat <unk> . \n") == 3 + 4 + 3  # 3 line ends count as words


def write(
    trained, *prompts: bytes, length=20, sampling=None, seed=1, chunk=16, mesh=None
) -> list[bytes]:
    """Returns the generated bytes after each prompt, without the prompt."""
    loaded = load_run(trained[0], mesh=mesh)
    config, values = loaded.config, loaded.values
    sampling = sampling or Sampling(0.8, 40, 0.95)
    generator = Generator(values.abstract_model, mesh, config.model.length, sampling)
    chunks = generator(values, [list(prompt) for prompt in prompts], length, seed, chunk=chunk)
    return [np.concatenate(rows).astype(np.uint8).tobytes() for rows in zip(*chunks, strict=True)]


@pytest.mark.medium
def test_samples_depend_on_the_seed_not_on_the_chunk_size(trained, mesh):
    """The text of 40 bytes is longer than the window of 24 bytes."""
    one = write(trained, b"The ", length=40, mesh=mesh)
    assert len(one[0]) == 40
    assert one == write(trained, b"The ", length=40, chunk=7, mesh=mesh)
    assert one == write(trained, b"The ", length=40, chunk=1, mesh=mesh)
    assert one != write(trained, b"The ", length=40, seed=2, mesh=mesh)


def greedy(values: ModelState, prompt: bytes, count: int) -> bytes:
    """Returns the greedy continuation. A window of 24 bytes begins with the last 12 bytes of the previous window."""
    after = reader(values)
    context, text = list(prompt), b""
    for _ in range(count):
        if len(context) >= 24:
            context = context[-12:]
        best = int(np.argmax(after(context)))
        context.append(best)
        text += bytes([best])
    return text


@pytest.mark.medium
def test_temperature_0_is_greedy_in_every_window(trained, mesh):
    """The text needs several windows. Prompts are shorter than a window, as long as a window, and longer."""
    values = load_run(trained[0], mesh=mesh).values
    for prompt in (b"The ", b"In the following lines:", b"a" * 24, b"the value of " * 3):
        [text] = write(trained, prompt, length=45, sampling=Sampling(0.0), mesh=mesh)
        assert text == greedy(values, prompt, 45)


@pytest.mark.medium
def test_texts_do_not_depend_on_the_other_prompts(trained, mesh):
    """The prompts of the batch have different lengths."""
    values = load_run(trained[0], mesh=mesh).values
    prompts = (b"T", b"The value of the ", b"an expression that is lo")
    texts = write(trained, *prompts, length=30, sampling=Sampling(0.0), mesh=mesh)
    assert texts == [greedy(values, prompt, 30) for prompt in prompts]
    [alone] = write(trained, prompts[0], length=30, mesh=mesh)
    assert write(trained, *prompts, length=30, mesh=mesh)[0] == alone


@pytest.mark.parametrize(("fault", "prompts"), [("prompt 1 is empty", [b""]), ("no prompts", [])])
def test_generator_rejects_missing_prompts(trained, mesh, fault, prompts):
    with pytest.raises(UserError, match=fault):
        write(trained, *prompts, mesh=mesh)


@pytest.mark.medium
def test_sample_program_writes_text(trained, tmp_path):
    program = ["gmlp_lm.sample", f"--workdir={trained[0]}"]
    output = call(*program, "--prompt=In ", "--length=16", "--temperature=0.5")
    assert output.startswith("In ") and len(output.encode()) >= 19
    # The prompt is invalid UTF-8, and the terminal is ASCII.
    arguments = [sys.executable, "-m", *program, b"--prompt=\xff\xc3\xa9", "--length=4"]
    assert finish(start(arguments, PYTHONIOENCODING="ascii:strict")).startswith("??")
    # Several prompts in a JSON lines file.
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"The\\nvalue"\n{"prompt": "In ", "id": 7}\n')
    lines = call(*program, f"--prompts={prompts}", "--samples=2", "--length=30").splitlines()
    texts = [json.loads(line) for line in lines]
    assert [text["prompt"] for text in texts] == ["The\nvalue", "The\nvalue", "In ", "In "]
    assert texts[0] != texts[1] and all(len(text["text"]) >= 8 for text in texts)
    (tmp_path / "empty.txt").write_text("The\n\nA\n")
    # The pieces of a streamed text add up to the text without --stream.
    streamed = call(*program, f"--prompts={prompts}", "--samples=2", "--length=30", "--stream")
    pieces = [json.loads(line) for line in streamed.splitlines()]
    assert [piece.get("prompt") for piece in pieces[:4]] == [text["prompt"] for text in texts]
    assert len(pieces) > 8
    for number, text in enumerate(texts):
        own = [piece.get("text", "") for piece in pieces if piece["number"] == number]
        assert "".join(own) == text["text"]
    (tmp_path / "other.jsonl").write_text('{"text": "The"}\n')
    (tmp_path / "none.txt").write_text("")
    (tmp_path / "half.jsonl").write_text('{"prompt": "\\ud800"}\n')
    for option, message in (
        (f"--prompts={tmp_path}/empty.txt", f"error: {tmp_path}/empty.txt, line 2 is an empty"),
        (f"--prompts={tmp_path}/other.jsonl", f"error: {tmp_path}/other.jsonl, line 1 must be a"),
        (
            f"--prompts={tmp_path}/half.jsonl",
            f"error: {tmp_path}/half.jsonl, line 1 is not Unicode",
        ),
        (f"--prompts={tmp_path}/none.txt", f"error: {tmp_path}/none.txt has no prompts"),
        (f"--prompts={tmp_path}/absent", f"error: --prompts={tmp_path}/absent is not a file"),
        ("--samples=0", "error: --samples must be a whole number of at least 1, got '0'"),
        ("--top_p=0", "error: --top_p must be above 0 and at most 1, got 0"),
        ("--temperature=-1", "error: --temperature must be a finite number of at least 0"),
        ("--top_k=many", "error: --top_k must be a whole number of at least 0, got 'many'"),
        ("--length=0", "error: --length must be a whole number of at least 1, got '0'"),
        ("--prompt=", "error: --prompt is empty"),
        ("--seed=4294967296", "error: --seed must be below 4294967296, got 4294967296"),
    ):
        said = call(*program, "--length=8", option, code=2)
        assert said.startswith(message) and said.count("\n") == 1


@pytest.mark.medium
def test_texts_in_python_equal_the_output_of_the_program(trained, mesh):
    """The folder is a str. Another seed gives other texts, without another compilation."""
    options = {"samples": 2, "length": 30, "temperature": 0.7, "top_k": 50, "top_p": 0.9, "seed": 3}
    given = [f"--{name}={value}" for name, value in options.items()]
    said = call("gmlp_lm.sample", f"--workdir={trained[0]}", "--prompt=The é ", *given)
    loaded = load_run(str(trained[0]), mesh=mesh)
    texts = loaded.sample("The é ", **options)
    assert texts == [json.loads(line)["text"] for line in said.splitlines()]
    (generator,) = loaded._generators.values()
    assert loaded.sample("The é ", **options | {"seed": 4}) != texts
    assert [*loaded._generators.values()] == [generator]
    assert load_run(trained[0]).mesh.size == 8
    for arguments, message in (
        ({"prompt": ""}, "^prompt must be a text, got ''"),
        ({"prompt": ["The "]}, r"^prompt must be a text, got \['The '\]"),
        ({"samples": 0}, "^samples must be a whole number of at least 1, got 0"),
        ({"length": 1.5}, "^length must be a whole number of at least 1, got 1.5"),
        ({"temperature": -1.0}, "^temperature must be a finite number of at least 0"),
        ({"top_p": "x"}, "^top_p must be a finite number of at least 0, got 'x'"),
        ({"seed": 2**32}, "^seed must be below 4294967296"),
    ):
        with pytest.raises(UserError, match=message):
            loaded.sample(**arguments)


def test_loading_a_folder_without_a_run_raises_an_error(tmp_path):
    with pytest.raises(UserError, match=f"^folder={tmp_path} holds no run"):
        load_run(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'"a"\n"caf\xe9"\n', "line 2 is not UTF-8 .*: convert the file to UTF-8"),
        (b"[" * 100_000, "line 1 is not JSON"),
        (b'{"text": "a"}', "line 1 must be .*, got {'text': 'a'}"),
    ],
)
def test_invalid_prompts_raise_errors_with_the_line(tmp_path, content, message):
    (tmp_path / "prompts.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=message):
        sample.read(tmp_path / "prompts.jsonl")


def test_compressed_prompts_are_read(tmp_path):
    path = tmp_path / "prompts.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "In "}\n'))
    assert sample.read(path) == [b"In "]
    path = tmp_path / "prompts.jsonl.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("prompts.jsonl", '{"prompt": "In "}\n')
    assert sample.read(path) == [b"In "]


@pytest.mark.medium
def test_evaluate_program_scores_a_text_like_a_split(trained, mesh, tmp_path):
    """The test split gets the same scores from a plain file, from a gzip file and in training."""
    workdir, summary = trained
    text = run.Task(small(), mesh).splits["test"].tobytes()
    (tmp_path / "text").write_bytes(text)
    (tmp_path / "text.gz").write_bytes(gzip.compress(text))
    program = ["gmlp_lm.evaluate", f"--workdir={workdir}"]
    plain = call(*program, f"--text={tmp_path}/text")
    bits, count = summary["test"]["bits_per_byte"], len(text) - 1
    assert f"{bits:.4f} bits per byte of {count:,} bytes" in plain
    per_word = bits * count / words(text)
    assert f"{per_word:.4f} bits per word of {words(text):,} words" in plain
    assert "stride 12 in windows of 24 bytes: 13 to 24 bytes of context" in plain
    assert call(*program, f"--text={tmp_path}/text.gz") == plain.replace("text:", "text.gz:")


@pytest.mark.medium
def test_a_run_of_subwords_reports_bits_per_byte_and_writes_text(mesh, tmp_path, capsys):
    """The summed loss is divided by the scored bytes for bits per byte, and by all words for word perplexity."""
    fields = {"data.tokenizer": "sentencepiece", "data.vocab_size": 500, "train.steps": 10}
    config = small(**fields, **{"data.cache_dir": f"{tmp_path}/cache", "eval.sample": 8})
    workdir = tmp_path / "run"
    summary = fit(config, workdir, mesh)
    print_summary(summary, workdir)
    assert f"{summary['tokens_per_second']:,.0f} tokens/s" in capsys.readouterr().out
    assert (workdir / "tokenizer.model").is_file()
    kept, test = load_predictions(workdir / PREDICTIONS), summary["test"]
    text = load_bytes(config.data)["test"].tobytes()
    first = len(text) - int(kept.weights_E.sum(dtype=np.float64))
    assert 1 <= first <= 20  # the bytes of the first subword are not scored
    bits = kept.nats_E.sum() / math.log(2)
    assert test["bits_per_byte"] == pytest.approx(bits / (len(text) - first), rel=1e-6)
    per_word = math.exp(kept.nats_E.sum() / words(text))
    assert test["perplexity_per_word"] == pytest.approx(per_word, rel=1e-3)
    assert kept.words_E.sum() == words(text)
    (tmp_path / "text").write_bytes(text)
    said = call("gmlp_lm.evaluate", f"--workdir={workdir}", f"--text={tmp_path}/text")
    assert f"{test['bits_per_byte']:.4f} bits per byte of {len(text) - first:,} bytes" in said
    assert "windows of 24 subwords" in said
    written = call("gmlp_lm.sample", f"--workdir={workdir}", "--prompt=The value", "--length=30")
    assert written.startswith("The value") and len(written) > 30
    config.data.vocab_size, config.train.steps = 400, 20
    with pytest.raises(UserError, match="vocab_size"):
        fit(config, workdir, mesh)


def wrong_head(features_ED, labels_E, outputs):
    return np.zeros((3, outputs)), np.zeros(outputs)


def head_without_outputs(features_ED, labels_E):
    raise AssertionError


def failing_head(features_ED, labels_E, outputs):
    raise RuntimeError("singular")


def head_without_bias(features_ED, labels_E, outputs):
    return np.zeros((features_ED.shape[1], outputs))


@pytest.mark.medium
def test_head_start_fills_the_output_layer_before_training(mesh, tmp_path):
    """Before training, the closed-form output layer has a lower loss than the random output layer."""
    fields = {"model.tied": False, "eval.start": True, "train.steps": 1, "eval.steps": 1}
    starts = {}
    for name in ("", "explicit_opt:head_start", "explicit_opt.heads:zero_head"):
        config = small("gmlp", head_start=name, **fields)
        summary = fit(config, tmp_path / f"run{len(starts)}", mesh)
        starts[name] = summary["curve"]["points"][0]
    assert all(point["step"] == 0 for point in starts.values())
    assert starts["explicit_opt:head_start"]["value"] < starts[""]["value"] - 2
    assert starts["explicit_opt.heads:zero_head"]["value"] == pytest.approx(8)
    for name, tied, fault in (
        ("explicit_opt:head_start", True, "needs an untied output layer: set --config.model.tied"),
        ("explicit_opt:absent", False, "has no attribute"),
        (
            "tests.gmlp_lm.test_programs:head_without_bias",
            False,
            r"a tuple of two .*, got an array of",
        ),
        ("tests.gmlp_lm.test_programs:head_without_outputs", False, "unexpected .* 'outputs'"),
        (
            "tests.gmlp_lm.test_programs:failing_head",
            False,
            "head_start=.*: RuntimeError in failing_head .*: singular; correct this code",
        ),
        ("tests.gmlp_lm.test_programs:wrong_head", False, r"got \(\(3, 256\)"),
    ):
        config = small("gmlp", head_start=name, **(fields | {"model.tied": tied}))
        with pytest.raises(UserError, match=fault):
            fit(config, tmp_path / "wrong", mesh)


def test_smaller_stride_gives_every_byte_more_context(trained, mesh):
    """With stride 1, each byte is scored with the 24 bytes before it, or with all earlier bytes if there are fewer."""
    loaded = load_run(trained[0], mesh=mesh)
    config, tokenizer, values = loaded.config, loaded.tokenizer, loaded.values
    # With random values, every byte of the context affects the logits.
    generator = np.random.default_rng(0)
    noisy = {n: x + 0.2 * generator.normal(size=x.shape) for n, x in values.trainable.items()}
    values = replace(values, trainable=jax.tree.map(lambda x: x.astype(jnp.float32), noisy))
    text = np.frombuffer(b"The for statement is used to iterate over the elements.", np.uint8)
    after = reader(values)
    expected = 0.0
    for place in range(1, len(text)):
        logits = after(text[max(place - 24, 0) : place].tolist())
        expected -= logits[text[place]] - np.log(np.exp(logits).sum())
    found = WindowLosses(config, tokenizer)(values, text, 1)
    assert found.nats_E.sum() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"  \t", None),
        (b"\n\n", r"\d\.\d{4} bits per word of 2 words, .* \(perplexity [\d,.]+\)"),
        (b"ab", r"of 1 byte\n\d\.\d{4} bits per word of 1 word, .* \(perplexity [\d,.]+\)"),
        (b"ab" * 1000, r"[\d.]+ bits per word of 1 word, .* \(perplexity above 1e300\)"),
    ],
)
def test_short_texts_and_long_words_are_scored(trained, tmp_path, text, words):
    """A text of spaces has no words, so the program prints no bits per word."""
    (tmp_path / "text").write_bytes(text)
    said = call("gmlp_lm.evaluate", f"--workdir={trained[0]}", f"--text={tmp_path}/text")
    assert re.search(rf"text: \d\.\d{{4}} bits per byte of {len(text) - 1:,} byte", said)
    assert re.search(words, said) if words else "per word" not in said


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (None, [], "text.gz is not a file"),
        (b"", [], " must have at least 2 bytes, because the first is not scored, got 0"),
        (b"a", [], " must have at least 2 bytes, because the first is not scored, got 1"),
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
        ("would skip tokens", "eval.stride", 25),
        ("model.length must be at least 1", "model.length", 0),
        ("eval.tokens must be at least 0", "eval.tokens", -1),
        ("data.limit must be at least 0", "data.limit", -1),
        ("eval.sample must be at least 0", "eval.sample", -1),
        ("one of pre, post", "model.norm", "between"),
        ("shares must be three", "data.shares", (0.5, 0.5)),
        ("one of auto, float32, bfloat16", "model.dtype", "int8"),
        ("must be a positive multiple of 2", "data.batch", 7),
    ],
)
def test_invalid_options_are_one_line_errors(tmp_path, fault, field, value):
    config = small()
    with config.ignore_type():
        config.update_from_flattened_dict({field: value})
    with pytest.raises(UserError, match=fault) as caught:
        fit(config, tmp_path / "run", make_mesh({"data": 2}, jax.devices()[:2]))
    assert "\n" not in str(caught.value)


def test_text_without_words_has_no_word_perplexity(tmp_path, mesh):
    for split, text in (("train", "a b " * 50), ("valid", " " * 99), ("test", "a b " * 9)):
        (tmp_path / f"{split}.txt").write_text(text)
    config = small(**{"data.source": f"files:{tmp_path}"})
    with pytest.raises(UserError, match=r"the valid split of .* has no words"):
        fit(config, tmp_path / "run", mesh)


def test_resuming_with_other_evaluation_fields_is_rejected(trained, mesh):
    workdir, _ = trained
    with pytest.raises(UserError, match="stride"):
        fit(small(**{"eval.stride": 6, "train.steps": 40}), workdir, mesh)


@pytest.mark.slow
def test_eight_devices_match_one_device(tmp_path, mesh):
    quick = {"train.steps": 3, "eval.steps": 3, "eval.sample": 5}
    one = fit(small(**quick), tmp_path / "one", mesh)
    wide = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    eight = fit(small(**quick), tmp_path / "eight", wide)
    assert one["test"]["bits_per_byte"] == pytest.approx(eight["test"]["bits_per_byte"], rel=1e-4)
