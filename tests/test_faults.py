"""Invalid input: a program prints one error line, writes no files and damages no run."""

import gzip
import io
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.errors import UserError
from common.sharding import make_mesh
from common.train.workdir import lock_workdir
from reservoir import evaluate, train, translate
from reservoir.parallel_text import load_parallel
from tests.data.helpers import settings

ROOT = Path(__file__).parents[1]
TINY = f"--config={ROOT}/configs/wmt_ffn_res.py:tiny"
PAIRS = 60


def write_text(directory: Path) -> Path:
    """Writes train, valid and test splits of parallel text to `directory`; returns `directory`."""
    directory.mkdir()
    text = load_parallel(settings(), "test")
    for split, part in (("train", slice(PAIRS)), ("valid", slice(60, 64)), ("test", slice(64, 68))):
        for language, lines in (("de", text.source), ("en", text.target)):
            path = directory / f"{split}.{language}"
            path.write_text("".join(f"{line}\n" for line in lines[part]), encoding="utf-8")
    return directory


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Path:
    """Returns a folder with parallel text in text/.

    Programs that tokenize the text write caches to cache/. The fixture `trained` adds a run in run/.
    """
    folder = tmp_path_factory.mktemp("faults")
    write_text(folder / "text")
    return folder


@pytest.fixture
def smallest(shared) -> list[str]:
    """Returns the command-line arguments of a training run that takes seconds."""
    fields = {
        "data.source": f"files:{shared}/text",
        "data.cache_dir": f"{shared}/cache",
        "data.vocab_size": 150,
        "data.buckets": 64,
        "data.tokens_per_batch": 1024,
        "model.encoder_layers": 1,
        "model.width": 32,
        "model.hidden": 32,
        "model.heads": 2,
        # Step 1 uses the small learning rate warmup_init. The update of step 2 makes the loss of step 3 NaN.
        "optimizer.learning_rate": 1e30,
        "train.steps": 1,
        "eval.steps": 1,
        "eval.buckets": 64,
        "eval.tokens_per_batch": 512,
        "decode.beams": 2,
        "decode.ratio": 0.0,
        "checkpoint.steps": 1,
        "wandb.mode": "disabled",
    }
    return [TINY, *(f"--config.{key}={value}" for key, value in fields.items())]


@pytest.fixture
def call(monkeypatch, tmp_path) -> Callable[..., None]:
    """Returns a function (module of a program, *arguments, stdin=b"").

    The function runs the program in this process. The current folder is empty.
    """
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def run(program, *arguments: object, stdin: bytes = b"") -> None:
        monkeypatch.setattr(sys, "argv", ["program", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        program.main()

    return run


@pytest.fixture
def fault(call) -> Callable[..., str]:
    """Returns a function like `call` that expects a UserError and returns its message.

    The function also checks that the message is one line and that the current folder stays empty.
    """

    def run(program, *arguments: object, stdin: bytes = b"") -> str:
        with pytest.raises(UserError) as caught:
            call(program, *arguments, stdin=stdin)
        message = str(caught.value)
        assert message
        assert len(message.splitlines()) == 1
        assert not list(Path.cwd().iterdir())
        return message

    return run


@pytest.fixture
def trained(shared, smallest, call) -> Path:
    """Returns the directory of a finished run, which tests share. Tests that change a run use the fixture `copied`."""
    workdir = shared / "run"
    if not workdir.exists():
        call(train, *smallest, f"--workdir={workdir}")
    return workdir


@pytest.fixture
def copied(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "copy"))


def contents(folder: Path) -> dict[str, bytes]:
    """Returns {path: content} of all files except the lock, which has another word after each start."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


COMMAND_LINES = [
    ([TINY, "--config.train.stpes=5"], "unknown option --config.train.stpes; did you mean"),
    ([TINY, "--config.train=5"], "--config.train is a group; set one of its fields"),
    (
        [TINY, "--config.train.steps=many"],
        "--config.train.steps must be a whole number in digits, got 'many'",
    ),
    (
        [TINY, "--config.model.dropout=nan"],
        "--config.model.dropout must be a finite number, got 'nan'",
    ),
    ([TINY, "--config.eval.start=maybe"], "--config.eval.start must be true or false"),
    ([TINY, "--config.model.remat=some"], "--config.model.remat"),
    (
        [TINY, "--config.data.buckets=8;16"],
        "--config.data.buckets must be a list of whole numbers such as 32",
    ),
    ([TINY, "--config.train.steps"], "--config.train.steps needs a value"),
    ([TINY, "--config.train.steps", "5"], "--config.train.steps=VALUE"),
    ([TINY, "--steps=5"], "unrecognized arguments: --steps=5"),
    ([TINY, "--work=x"], "unrecognized arguments: --work=x"),
    ([TINY, "stray"], "unrecognized arguments: stray"),
    ([TINY, "--workdir"], "--workdir: expected one argument"),
    ([], "the following arguments are required: --config"),
    (["--config=none.py"], "no configuration file none.py"),
    (["--config="], "--config is empty: give a value"),
    ([TINY, "--workdir="], "--workdir is empty: give a value, or leave out the option"),
    ([TINY, "--workdir", ""], "--workdir is empty: give a value, or leave out the option"),
    ([f"--config={ROOT}/configs"], f"no configuration file {ROOT}/configs"),
    ([f"--config={ROOT}/LICENSE"], "LICENSE is not a Python file"),
    ([f"{TINY[:-5]}:tinny"], "unknown argument 'tinny'; choose laptop or tiny"),
    (
        [f"--config={ROOT}/configs/mnist_explicit.py:tiny"],
        "is a configuration for explicit_opt, not for",
    ),
    (
        [f"--config={ROOT}/configs/babylm_cat.py", "--config.paper=reservoir"],
        "of this program: the field",
    ),
]


@pytest.mark.parametrize(("arguments", "told"), COMMAND_LINES)
def test_invalid_command_line_raises_user_error(fault, arguments, told):
    assert told in fault(train, *arguments)


def test_similar_config_file_is_suggested(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["program", "--config=configs/wmt_fnn_res.py"])
    with pytest.raises(UserError, match=r"did you mean configs/wmt_ffn_res\.py\?$"):
        train.main()


CONFIG_FILES = [
    ("def get_config(:\n    pass\n", "mine.py, line 1: "),
    ("x = 1\n", "mine.py has no function get_config"),
    ("import nothing_of_this_name\n", "mine.py, line 1: ModuleNotFoundError: No module named"),
    ("def get_config():\n    return 1 / 0\n", "mine.py, line 2): ZeroDivisionError: division"),
    ("def get_config():\n    raise ValueError('no: is\\nbad')\n", "mine.py: no: is bad"),
    ("def get_config():\n    return {'seed': 1}\n", "mine.py must return a ConfigDict, got dict"),
    ("def get_config():\n    return None\n", "mine.py must return a ConfigDict, got NoneType"),
    ("x = '\0'\n", "mine.py"),
]


@pytest.mark.parametrize(("code", "told"), CONFIG_FILES)
def test_invalid_config_file_raises_user_error(fault, tmp_path, code, told):
    path = tmp_path / "mine.py"
    path.write_text(code)
    assert told in fault(train, f"--config={path}")


def test_config_file_that_takes_no_argument_raises_user_error(fault, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def get_config():\n    return None\n")
    assert "takes 0 positional arguments" in fault(train, f"--config={path}:tiny")


ASCENDING = "must be one or more lengths above 0 in strictly ascending order"
FINITE = "must be a finite number"

FIELDS = [
    (
        "model.reservoirs=9",
        "9 alternating reservoirs need 17 layers, but the number of layers is 1",
    ),
    ("model.reservoirs=0", "but no layer is a reservoir: --config.model.reservoirs=0"),
    ("model.reservoirs=-2", "--config.model.reservoirs must be at least 0, got -2"),
    (
        "model.reservoir=fnn",
        "choose one of none, transformer, ffn, bigru, cnn, gmlp; did you mean ffn?",
    ),
    ("model.heads=3", "--config.model.width=32 must be a multiple of --config.model.heads=3"),
    ("model.heads=0", "--config.model.heads must be a whole number of at least 1, got 0"),
    ("model.width=0", "--config.model.width must be a whole number of at least 1, got 0"),
    ("model.decoder_layers=0", "model.decoder_layers must be a whole number of at least 1, got 0"),
    ("model.dtype=float16", "--config.model.dtype='float16': choose one of auto, float32"),
    ("model.norm=pree", "--config.model.norm='pree': choose one of pre, post; did you mean pre?"),
    ("model.positions=sinus", "--config.model.positions='sinus': choose one of"),
    ("model.activation=rellu", "--config.model.activation='rellu'"),
    ("model.dropout=1.0", "--config.model.dropout must be a number from 0 to 0.99, got 1.0"),
    ("model.dropout=-0.1", "--config.model.dropout must be a number from 0 to 0.99, got -0.1"),
    (
        "train.label_smoothing=1",
        "--config.train.label_smoothing must be at least 0 and below 1, got 1.0",
    ),
    ("train.steps=-5", "--config.train.steps must be at least 0, got -5"),
    ("train.accumulate=0", "--config.train.accumulate must be at least 1, got 0"),
    ("train.reduce_dtype=float16", "--config.train.reduce_dtype='float16': choose one of float32"),
    ("train.max_seconds=-1", "--config.train.max_seconds must be at least 0, got -1.0"),
    ("optimizer.name=adamm", "--config.optimizer.name='adamm': choose one of adam, adamw"),
    ("optimizer.schedule=cos", "choose one of inverse_sqrt, cosine, linear, constant"),
    ("optimizer.learning_rate=0", f"--config.optimizer.learning_rate {FINITE} above 0, got 0.0"),
    ("optimizer.beta2=1", "--config.optimizer.beta2 must be at least 0 and below 1, got 1.0"),
    ("optimizer.epsilon=-1", f"--config.optimizer.epsilon {FINITE} above 0, got -1.0"),
    ("optimizer.clip=-1", f"--config.optimizer.clip {FINITE} of at least 0, got -1.0"),
    ("data.buckets=32,16", f"--config.data.buckets {ASCENDING}, got 32,16"),
    ("data.buckets=", f"--config.data.buckets {ASCENDING}, got none"),
    (
        "data.buckets=2",
        "all training examples are longer than 2 tokens, the longest of --config.data.buckets",
    ),
    ("eval.buckets=0,16", f"--config.eval.buckets {ASCENDING}, got 0,16"),
    ("data.tokens_per_batch=0", "--config.data.tokens_per_batch must be at least 1, got 0"),
    ("data.dictionaries=common", "choose one of shared, separate"),
    ("data.vocab_size=4", "--config.data.vocab_size must be at least 8, got 4"),
    ("data.vocab_size=20", "data.vocab_size=20 is too small for the training text; the smallest"),
    ("data.vocab_size=9000", "data.vocab_size=9000 is too large for the training text; the larg"),
    (
        "data.source=",
        "data.source= must be embedded:NAME, files:DIR, tfds:NAME or import:MODULE:FUNCTION",
    ),
    ("data.source=hub:x", "data.source=hub:x must be embedded:NAME"),
    (
        "data.source=embedded:x",
        "data.source=embedded:x is unknown: use embedded:numbers_de_en",
    ),
    ("data.source=files:~nobody_of_this_name", "no directory ~nobody_of_this_name"),
    ("data.source=files:none", "--config.data.source=files:none: there is no directory none"),
    (
        "data.source_language=fr",
        "no train.fr or train.fr.gz: no name of a file ends with .fr or .fr.gz; give another folder, or set"
        " --config.data.source_language to the ending of a file, without the dot (files in the folder: test.de,"
        " test.en",
    ),
    (
        "data.splits.valid=dev",
        "no dev.de or dev.de.gz: set --config.data.splits.valid to one of its splits in 'de': test, valid;",
    ),
    (
        "data.cache_dir=/dev/null/cache",
        "cannot write to --config.data.cache_dir=/dev/null/cache (tokenizer-",
    ),
    ("mesh.data=3", "the mesh data=3 x fsdp=1 x tensor=1 needs 3 devices, but there are 8"),
    (
        "mesh.fsdp=-1",
        "must be at least 1, except that one of them may be -1 (all remaining devices)",
    ),
    (
        "mesh.tensor=0",
        "must be at least 1, except that one of them may be -1 (all remaining devices)",
    ),
    ("eval.steps=0", "--config.eval.steps and --config.eval.seconds are both 0: set one"),
    ("eval.sentences=-1", "--config.eval.sentences must be at least 0 (0: all sentences), got -1"),
    ("eval.tokenize=flores", "--config.eval.tokenize='flores': choose one of 13a, intl"),
    ("decode.beams=0", "--config.decode.beams must be at least 1, got 0"),
    ("decode.length_penalty=-1", "--config.decode.length_penalty must be at least 0, got -1.0"),
    ("decode.extra=0", "--config.decode.extra must be at least 1, got 0"),
    ("checkpoint.keep=0", "--config.checkpoint.keep must be at least 1, got 0"),
    ("wandb.mode=off", "--config.wandb.mode='off': choose one of offline, online, disabled"),
    ("seed=-1", "--config.seed must be a whole number of at least 0, got -1"),
]


@pytest.mark.parametrize(("field", "told"), FIELDS)
def test_invalid_field_raises_user_error(fault, smallest, tmp_path, field, told):
    """The program raises the error before it creates the workdir, so before any training."""
    workdir = tmp_path / "run"
    assert told in fault(train, *smallest, f"--config.{field}", f"--workdir={workdir}")
    assert not workdir.exists()


PAIRS_OF_FIELDS = [
    (
        ("model.width=33", "model.heads=3"),
        "--config.model.width=33 must be even for --config.model.positions=sinusoidal",
    ),
    (
        ("model.positions=learned", "model.max_length=32"),
        "--config.model.max_length=32 positions, too few for --config.data.buckets up to 64 tokens",
    ),
    (
        ("model.positions=learned", "model.max_length=32", "decode.ratio=2"),
        "set --config.model.max_length=138, which is also enough for the translations of sentences of up to 64 tokens",
    ),
    (
        ("model.positions=learned", "model.max_length=64", "decode.extra=100"),
        "the translation of the longest source sentence needs up to 100 positions, but the model has"
        " --config.model.max_length=64; shorten the text, or train with --config.model.max_length=100 or a smaller"
        " --config.decode.ratio or --config.decode.extra",
    ),
    (
        ("data.source=embedded:numbers_de_en", "data.target_language=fr"),
        "embedded:numbers_de_en translates de-en, not de-fr",
    ),
]


@pytest.mark.parametrize(("fields", "told"), PAIRS_OF_FIELDS)
def test_contradictory_fields_raise_user_error(fault, smallest, tmp_path, fields, told):
    options = [f"--config.{field}" for field in fields]
    assert told in fault(train, *smallest, *options, f"--workdir={tmp_path / 'run'}")
    assert not (tmp_path / "run").exists()


def test_unprepared_tfds_data_set_raises_user_error(fault, smallest, tmp_path):
    options = ["--config.data.source=tfds:wmt16_translate/de-en"]
    options.append(f"--config.data.tfds_dir={tmp_path}")
    message = fault(train, *smallest, *options)
    assert "the TFDS data set wmt16_translate/de-en is not prepared" in message
    assert "download_and_prepare" in message


def test_tensor_axis_over_several_processes_raises_user_error():
    devices = [SimpleNamespace(platform="cpu", process_index=number // 2) for number in range(8)]
    with pytest.raises(UserError, match=r"mesh\.tensor=4 spans several processes"):
        make_mesh({"data": -1, "tensor": 4}, devices)


def _spoil_gzip(folder: Path) -> None:
    path = folder / "train.de"
    zipped = gzip.compress(path.read_bytes())
    path.unlink()
    (folder / "train.de.gz").write_bytes(zipped[: len(zipped) // 2])


TEXTS = [
    (
        lambda folder: (folder / "valid.en").unlink(),
        "valid.en.gz: set --config.data.splits.valid to one of its splits in 'en': test;",
    ),
    (lambda folder: (folder / "test.de").write_text(""), "test.de is empty"),
    (lambda folder: (folder / "train.en").write_text("one\n"), f"got {PAIRS} and 1"),
    (lambda folder: (folder / "valid.de").write_bytes(b"a\nb\nM\xfcll\n"), "valid.de line 3 is"),
    (_spoil_gzip, "train.de.gz is damaged or truncated"),
    (
        lambda folder: (folder / "train.de").write_text("\n" * PAIRS),
        "has no de-en sentence pair with text on both sides in",
    ),
]


@pytest.mark.parametrize(("spoil", "told"), TEXTS)
def test_missing_or_damaged_training_text_raises_user_error(fault, smallest, tmp_path, spoil, told):
    folder = write_text(tmp_path / "text")
    spoil(folder)
    source = f"--config.data.source=files:{folder}"
    assert told in fault(train, *smallest, source, f"--workdir={tmp_path / 'run'}")
    assert not (tmp_path / "run").exists()


@pytest.mark.medium
def test_damaged_token_cache_raises_user_error(fault, smallest, tmp_path, shared, trained):
    cache = Path(shutil.copytree(shared / "cache", tmp_path / "cache"))
    for path in cache.glob("tokens-*"):
        path.write_bytes(path.read_bytes()[:50])
    assert "is damaged: remove the file" in fault(
        train, *smallest, f"--config.data.cache_dir={cache}"
    )


def test_file_as_workdir_is_refused(fault, smallest, tmp_path):
    path = tmp_path / "file"
    path.write_text("mine")
    assert f"--workdir={path} is a file" in fault(train, *smallest, f"--workdir={path}")
    assert path.read_text() == "mine"
    message = fault(train, *smallest, f"--workdir={path}/below")
    assert f"cannot write to --workdir={path}/below: Not a directory" in message


def test_workdir_of_another_configuration_is_refused(fault, smallest, trained):
    before = contents(trained)
    options = ["--config.model.hidden=64", "--config.seed=2", "--config.train.steps=2"]
    message = fault(train, *smallest, *options, f"--workdir={trained}")
    assert "belongs to a run with another configuration" in message
    assert "configuration: model.hidden (saved 32, " in message
    assert "seed (saved 1, now 2); to resume the run, set the fields to the saved values" in message
    assert "train.steps" not in message
    assert contents(trained) == before


def test_workdir_with_other_files_is_refused(fault, smallest, tmp_path):
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "lock").write_text("a file that happens to have this name")
    (folder / "chapter").write_text("1")
    before = contents(folder)
    message = fault(train, *smallest, f"--workdir={folder}")
    assert f"--workdir={folder} is not empty and holds no run" in message
    assert contents(folder) == before


@pytest.mark.parametrize("text", ['{"model_type": "bert"}', "[1,2]", "x", ""])
def test_workdir_with_a_foreign_config_json_is_refused(fault, smallest, tmp_path, text):
    """Such as the folder of a Hugging Face model. A run's config.json is written atomically, so it is never cut."""
    folder = tmp_path / "bert"
    folder.mkdir()
    for name in ("model.safetensors", "summary.json", "metrics.jsonl"):
        (folder / name).write_text("mine")
    (folder / "config.json").write_text(text)
    before = contents(folder)
    assert f"{folder}/config.json is damaged" in fault(train, *smallest, f"--workdir={folder}")
    assert contents(folder) == before and not (folder / "lock").exists()


@pytest.mark.medium
def test_run_that_was_killed_at_its_start_starts_again(call, smallest, tmp_path):
    """The first process was killed while it wrote config.json, the second process before its first checkpoint."""
    folder = tmp_path / "run"
    folder.mkdir()
    for file in ("config.json.partial", "metrics.jsonl"):
        (folder / "lock").touch()
        (folder / file).write_text("{")
        call(train, *smallest, f"--workdir={folder}")
        assert (folder / "summary.json").exists()
        shutil.rmtree(folder / "checkpoints")
        (folder / "summary.json").unlink()


@pytest.mark.medium
def test_finished_run_without_checkpoints_is_refused(call, fault, smallest, copied):
    shutil.rmtree(copied / "checkpoints")
    before = contents(copied)
    for options in ([], ["--config.seed=2"]):
        assert fault(train, *smallest, *options, f"--workdir={copied}") == (
            f"--workdir={copied} is a finished run whose checkpoints are gone: delete its summary.json to train"
            " the run again, or choose another --workdir"
        )
    assert contents(copied) == before
    (copied / "summary.json").unlink()
    call(train, *smallest, f"--workdir={copied}")
    assert (copied / "summary.json").exists()


def test_workdir_in_use_is_refused(fault, smallest, copied):
    before = contents(copied)
    with lock_workdir(copied):
        assert fault(train, *smallest, f"--workdir={copied}") == (
            f"another process is training in {copied} (process {os.getpid()} on {socket.gethostname()}): wait until it"
            " ends, or choose another --workdir"
        )
    assert contents(copied) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_unwritable_workdir_is_refused(fault, smallest, tmp_path):
    folder = tmp_path / "sealed"
    folder.mkdir(mode=0o500)
    for workdir in (folder, folder / "run"):
        assert "cannot write to --workdir=" in fault(train, *smallest, f"--workdir={workdir}")


def test_resume_with_a_damaged_configuration_is_refused(fault, smallest, copied):
    (copied / "config.json").write_text('{"seed": ')
    before = contents(copied)
    assert "config.json is damaged" in fault(train, *smallest, f"--workdir={copied}")
    assert contents(copied) == before


def test_resume_with_changed_training_text_is_refused(fault, smallest, shared, copied, tmp_path):
    text = write_text(tmp_path / "text")
    path = text / "train.en"
    path.write_text(path.read_text().upper())
    config = copied / "config.json"
    config.write_text(config.read_text().replace(f"{shared}/text", str(text)))
    before = contents(copied)
    source = f"--config.data.source=files:{text}"
    message = fault(train, *smallest, source, f"--workdir={copied}")
    assert "the target tokenizer changed since the run" in message
    assert contents(copied) == before


@pytest.mark.medium
def test_nan_loss_stops_training_and_keeps_the_checkpoint(call, fault, smallest, copied, capsys):
    before = contents(copied / "checkpoints")
    more = ["--config.train.steps=9", "--config.eval.steps=100", f"--workdir={copied}"]
    message = fault(train, *smallest, *more)
    assert "the loss is nan" in message
    assert f"at step 3 of {copied}: training stopped; start again with a lower" in message
    assert message.rstrip().endswith("--config.optimizer.learning_rate and another --workdir")
    # The checkpoint that the run resumed from is still on disk and can be loaded.
    assert "resuming from step 1 of" in capsys.readouterr().out
    assert before.items() <= contents(copied / "checkpoints").items()
    call(translate, f"--workdir={copied}")


# Programs that read a finished run.

NO_RUN = [translate, evaluate]


@pytest.mark.parametrize("program", NO_RUN)
def test_workdir_without_a_run_is_refused(fault, tmp_path, program):
    for workdir in (tmp_path, tmp_path / "none"):
        message = fault(program, f"--workdir={workdir}")
        assert f"--workdir={workdir} holds no run (config.json is missing)" in message
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("program", NO_RUN)
def test_run_without_a_checkpoint_is_refused(fault, copied, program):
    shutil.rmtree(copied / "checkpoints")
    assert "no best checkpoint in" in fault(program, f"--workdir={copied}")


@pytest.mark.parametrize("program", NO_RUN)
def test_missing_workdir_option_raises_user_error(fault, program):
    assert "arguments are required: --workdir" in fault(program)


OPTIONS = [
    (translate, "--beams=0", "--beams must be a whole number of at least 1, got '0'"),
    (translate, "--beams=two", "--beams must be a whole number of at least 1, got 'two'"),
    (
        translate,
        "--length_penalty=-1",
        "--length_penalty must be a finite number of at least 0, got -1.0",
    ),
    (translate, "--length_penalty=nan", "--length_penalty must be a finite number, got 'nan'"),
    (translate, "--batch_tokens=0", "--batch_tokens must be a whole number of at least 1"),
    (translate, "--input=none.txt", "--input=none.txt is not a file"),
    (translate, "--input=/dev/null", "/dev/null is empty"),
    (translate, "--input=", "--input is empty: give a value, or leave out the option"),
    (translate, "--output=", "--output is empty: give a value, or leave out the option"),
    (translate, "--output=/dev/null/out.txt", "/dev/null is not a folder; choose another folder"),
    (translate, "--beam=3", "unrecognized arguments: --beam=3"),
    (evaluate, "--split=dev", "its splits in 'de': test, train, valid"),
    (evaluate, "--beams=-1", "--beams must be a whole number of at least 1, got '-1'"),
]


@pytest.mark.parametrize(("program", "option", "told"), OPTIONS)
def test_invalid_option_raises_user_error(fault, trained, program, option, told):
    before = contents(trained)
    assert told in fault(program, f"--workdir={trained}", option)
    assert contents(trained) == before


def test_unwritable_output_fails_before_translation(fault, trained, monkeypatch):
    monkeypatch.setattr("reservoir.loading.load", lambda options: pytest.fail("loaded"))
    told = fault(translate, f"--workdir={trained}", "--output=/dev")
    assert told == "--output=/dev is a folder: name a file"


def test_failed_translation_keeps_the_output_file(fault, trained, tmp_path):
    path = tmp_path / "out"
    path.write_text("yesterday's")
    options = [f"--workdir={trained}", f"--output={path}", "--input=none"]
    assert "--input=none is not a file" in fault(translate, *options)
    assert path.read_text() == "yesterday's"


def test_line_that_is_not_utf8_raises_user_error(fault, trained, tmp_path):
    lines, path = b"eins\nM\xfcll\n", tmp_path / "text"
    path.write_bytes(lines)
    told = "line 2 is not UTF-8; convert the text to UTF-8"
    assert fault(translate, f"--workdir={trained}", stdin=lines) == f"standard input {told}"
    assert fault(translate, f"--workdir={trained}", f"--input={path}") == f"{path} {told}"


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"seed": 1, "model": {}}', "\xff"])
def test_damaged_configuration_of_a_run_raises_user_error(fault, copied, text):
    (copied / "config.json").write_bytes(text.encode("latin-1"))
    assert "config.json is damaged" in fault(translate, f"--workdir={copied}")


def test_missing_or_damaged_tokenizer_raises_user_error(fault, copied):
    path = copied / "target_tokenizer.npz"
    path.write_bytes(path.read_bytes()[:100])
    assert f"cannot read a tokenizer from {path}" in fault(translate, f"--workdir={copied}")
    path.unlink()
    assert f"cannot read a tokenizer from {path}" in fault(translate, f"--workdir={copied}")


def test_damaged_checkpoint_raises_user_error(fault, copied):
    for path in (copied / "checkpoints" / "best").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:10])
    assert "the best checkpoint, " in fault(translate, f"--workdir={copied}")


def test_missing_text_of_a_run_raises_user_error(fault, copied):
    config = json.loads((copied / "config.json").read_text())
    config["data"]["source"] = "files:gone"
    (copied / "config.json").write_text(json.dumps(config))
    assert "no directory gone" in fault(evaluate, f"--workdir={copied}")


def test_empty_input_gives_empty_output(call, trained, capsys, tmp_path):
    call(translate, f"--workdir={trained}", f"--output={tmp_path / 'out'}")
    assert (tmp_path / "out").read_text() == ""
    call(translate, f"--workdir={trained}")
    assert capsys.readouterr().out == ""


def test_empty_lines_stay_empty(call, trained, capsys):
    call(translate, f"--workdir={trained}", stdin=b"\nam Montag\n \t\n\r\nzwei")
    lines = capsys.readouterr().out.split("\n")
    assert len(lines) == 6
    assert [lines[i] for i in (0, 2, 3, 5)] == [""] * 4


# Programs as subprocesses: exit code and output.


PROCESSES = [
    ("train", [TINY, "--config.train.stpes=5"], "unknown option --config.train.stpes"),
    ("train", [f"{TINY}x"], "unknown argument 'tinyx'; choose laptop or tiny"),
    ("translate", ["--workdir=none"], "--workdir=none holds no run"),
    *(
        pytest.param(*case, marks=pytest.mark.medium)
        for case in (
            (
                "train",
                [TINY, "--config.model.heads=3"],
                "must be a multiple of --config.model.heads=3",
            ),
            (
                "evaluate",
                ["--workdir=none", "--source=a"],
                "--source and --reference must be given together",
            ),
        )
    ),
]


@pytest.mark.parametrize(("program", "arguments", "told"), PROCESSES)
def test_exit_code_and_one_line_on_stderr(tmp_path, program, arguments, told):
    result = subprocess.run(
        [sys.executable, "-m", f"reservoir.{program}", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert told in result.stderr
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
