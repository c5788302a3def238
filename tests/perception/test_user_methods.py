"""Methods of fine-tuning from a module outside the project."""

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from common import variables
from common.config import override_all
from common.data.manual import python
from common.errors import UserError
from common.report.runs import load_local
from common.train.command import fit
from configs import perception as recipes
from perception import loading, run, ways
from perception.backbones import bert
from perception.finetuning import make_model, resolve
from perception.hugging_face import export, open_model
from perception.methods import METHODS
from perception.model import backbone
from perception.safetensor_files import TensorFiles
from perception.subword import build_subword
from tests.perception.helpers import SHAPE
from tests.programs import ROOT, call
from tests.user_parts import importable, python_of_readme

pytestmark = pytest.mark.medium

DEEP = replace(bert(2, 16, 24, 2), vocabulary=300, learned=64, longest=64)
USER = "my_package.ways:mine"

MODULE = """
import jax.numpy as jnp
from flax import nnx

from common.freezing import freeze, freeze_loaded, thaw
from common.variables import Frozen
from perception.methods import METHODS, Method, Option


def adds(variable, **fields):
    def change(config, model, shape, *, rngs):
        freeze_loaded(model.encoder)
        model.encoder.gate = variable

    return Method("adds", 1e-3, change, **fields)


class Head(nnx.Module):
    def __init__(self, head):
        self.inner = head

    def __call__(self, x_BM, dtype=None):
        return jnp.tanh(self.inner(x_BM, dtype))


def wraps_head(config, model, shape, *, rngs):
    freeze_loaded(model.encoder)
    model.head = Head(model.head)


def last_adapters(config, model, shape, *, rngs):
    freeze_loaded(model.encoder)
    METHODS["lora"].change(config, model, shape, rngs=rngs)


def freezes_head(config, model, shape, *, rngs):
    freeze_loaded(model)


def random(config, model, shape, *, rngs):
    freeze(model.encoder.stack)


def loaded(config, model, shape, *, rngs):
    freeze_loaded(model.encoder.stack)


def removes(config, model, shape, *, rngs):
    freeze_loaded(model.encoder)
    del model.encoder.stack.blocks[0]


def narrow(config, model, shape, *, rngs):
    freeze_loaded(model.encoder)
    model.head.kernel = nnx.Param(model.head.kernel[:, :2], axes=("embed", None))
    model.head.bias = nnx.Param(model.head.bias[:2], axes=(None,))


def returns_two(config, model, shape, *, rngs):
    original = type(model)
    model.__class__ = type("Twice", (original,), {"__call__": lambda *a: (original.__call__(*a),) * 2})


def beside(config, model, shape, *, rngs):
    METHODS["lora"].change(config, model, shape, rngs=rngs)
    thaw(model.encoder.embed)


def reads_gain(config, model, shape, *, rngs):
    model.gain = config.gain


def divides(config, model, shape, *, rngs):
    1 / 0


def no_argument(config, model, shape):
    pass


number = 3
wrapped = Method("x", 1e-3, wraps_head)
again = Method("x", 1e-3, last_adapters, adapters=True)
gate = adds(nnx.Param(jnp.ones(3), axes=(None,)))
no_axes = adds(nnx.Param(jnp.ones(3)))
no_value = adds(Frozen(jnp.ones(3), axes=(None,), draw=None))
all_frozen, missing, wrong_shape = (Method("x", 1e-3, f) for f in (freezes_head, removes, narrow))
no_array = Method("x", 1e-3, returns_two)
seeded, not_loaded = (Method("x", 1e-3, f, pretrained=False) for f in (random, loaded))
not_only_adapters = Method("x", 1e-3, beside, adapters=True)
not_pretrained = Method("x", 1e-3, last_adapters, adapters=True, pretrained=False)
undeclared, fails, lacks_rngs = (Method("x", 1e-3, f) for f in (reads_gain, divides, no_argument))
no_function = Method("x", 1e-3, "biases")
no_label = Method(None, 1e-3, divides)
no_rate = Method("x", 0.0, divides)
no_option = Method("x", 1e-3, divides, options={"gain": 2})
no_options = Method("x", 1e-3, divides, options=2)
bad_check = Method("x", 1e-3, divides, check=lambda config: config.gain > 0)
solved = Method("x", 1e-3, divides, solves_head=True)
"""


@pytest.fixture(scope="module")
def user_package(tmp_path_factory) -> Iterator[Path]:
    """Yields a folder with an importable package: the method of perception/PYTHON.md, and the methods in MODULE."""
    (method,) = (code for code in python_of_readme("perception") if "Method" in code)
    with importable(tmp_path_factory.mktemp("user"), ways=method, others=MODULE) as folder:
        yield folder


@pytest.fixture(scope="module")
def deep(tmp_path_factory) -> Path:
    """Returns a directory in Hugging Face format: a tokenizer, and a model of two blocks with random weights."""
    folder = tmp_path_factory.mktemp("deep")
    trainable = variables.split(backbone(DEEP, rngs=nnx.Rngs(7))).trainable
    values = {name: 5 * value.get_value() for name, value in trainable.items()}
    lines = [text for (text,), _ in python("train")]
    tokenizer = build_subword(DEEP.vocabulary, lines, folder).to_json()
    export(folder / "model", DEEP, values, tokenizer)
    return folder / "model"


@pytest.fixture(scope="module")
def command(user_package, deep) -> list[str]:
    """Returns the words of the training command in perception/PYTHON.md, with further options.

    The options evaluate and save checkpoints every two steps, log every step, and disable wandb.
    """
    text = (ROOT / "perception/PYTHON.md").read_text()
    (found,) = re.findall(rf"    python -m (perception.train .*{USER}.*)\n", text)
    fields = {"eval.steps": 2, "checkpoint.steps": 2, "train.log_steps": 1}
    fields |= {"wandb.mode": "disabled", "data.cache_dir": user_package}
    given = [f"--config.{name}={value}" for name, value in fields.items()]
    return [*found.replace("DIR", str(deep)).split(), *given]


@pytest.fixture(scope="module")
def workdir(command, user_package) -> Path:
    """Returns the workdir of a run that was trained for two steps, and resumed for two more steps."""
    folder = user_package / "run"
    for steps in (2, 4):
        call(*command, f"--config.train.steps={steps}", f"--workdir={folder}")
    return folder


def test_command_of_the_page_trains_evaluates_and_resumes(workdir, deep, mesh):
    """The last block and the head are trained. The other parameters keep the pretrained values."""
    summary = json.loads((workdir / "summary.json").read_text())
    assert summary["steps"] == 4 and 0 <= summary["test"]["weighted_f1"] <= 100
    steps = [point["step"] for point in summary["curve"]["points"]]
    assert steps == [2, 4]
    assert summary["config"]["finetune"] == USER and summary["config"]["last_blocks"] == 1
    values = loading.load(workdir, mesh).values
    last = {name for name in values.trainable if name.startswith("encoder/stack/blocks/1/")}
    assert set(values.trainable) == last | {"head/kernel", "head/bias"}
    kept = {n.removeprefix("encoder/"): x for n, x in values.frozen.items()}
    assert len(kept) + len(last) == len(variables_of(DEEP))
    assert_stored(deep, kept)


def test_trained_parameters_start_at_the_pretrained_values(command, user_package, deep, mesh):
    """Without training steps, the last block keeps the pretrained values."""
    folder = user_package / "start"
    fields = "--config.train.steps=0", "--config.eval.start=true"
    call(*command, *fields, f"--workdir={folder}")
    values = loading.load(folder, mesh).values.trainable
    block = {n.removeprefix("encoder/"): x for n, x in values.items() if "/blocks/1/" in n}
    assert block
    assert_stored(deep, block)


def variables_of(shape) -> set[str]:
    return set(variables.abstract(lambda rngs: backbone(shape, rngs=rngs)).trainable)


def assert_stored(directory: Path, values: dict) -> None:
    """Checks that the weights in a Hugging Face directory equal `values`, {path of our parameter: array}."""
    wanted = {
        n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for n, x in values.items()
    }
    for name, value in open_model(directory).load(wanted).items():
        np.testing.assert_array_equal(value, values[name], err_msg=name)


def test_run_of_a_users_method_does_not_resume_with_other_options(command, workdir):
    more = "--config.train.steps=6", f"--workdir={workdir}"
    refused = call(*command, "--config.last_blocks=2", *more, code=2)
    assert "last_blocks (saved 1, now 2)" in refused
    assert "last_blocks must be a number of at least 1, got 0" in call(
        *command, "--config.last_blocks=0", *more, code=2
    )


def test_run_of_a_users_method_classifies(workdir, tmp_path):
    (tmp_path / "new.txt").write_text("The debugger steps.\nA string.\n")
    given = f"--input={tmp_path / 'new.txt'}", f"--output={tmp_path / 'out.txt'}", "--top=1"
    call("perception.classify", f"--run={workdir}", *given)
    lines = (tmp_path / "out.txt").read_text().splitlines()
    assert len(lines) == 2
    assert {line.split("\t")[0] for line in lines} <= set(loading.read_classes(workdir))


def test_run_of_a_users_method_is_exported(workdir, deep, tmp_path, mesh):
    """The exported encoder has the trained block and the pretrained values of the other parameters."""
    call("perception.adapters", "export", f"--run={workdir}", f"--out={tmp_path / 'out'}")
    values = loading.load(workdir, mesh).values
    both = values.frozen | values.trainable
    own = {n.removeprefix("encoder/"): x for n, x in both.items() if n.startswith("encoder/")}
    assert_stored(tmp_path / "out", own)
    before, after = TensorFiles(deep), TensorFiles(tmp_path / "out")
    assert set(before.names) == set(after.names)
    told = call("perception.adapters", "peft", f"--run={workdir}", f"--out={tmp_path}/x", code=2)
    assert f"has no adapter: the run used --config.finetune={USER}" in told


def test_learning_rate_and_label_of_a_users_method(user_package):
    config = recipes.get_config()
    config.finetune = USER
    assert resolve(config).optimizer.learning_rate == 1e-3
    config.optimizer.learning_rate = 2e-3
    assert resolve(config).optimizer.learning_rate == 2e-3
    way = ways.find(USER)
    assert (way.name, way.pretrained, way.random) == ("the last blocks", True, True)


def test_options_are_fields_of_the_command_line(user_package):
    config = recipes.get_config()
    override_all(config, ["--config.last_blocks=3", f"--config.finetune={USER}"])
    assert config.last_blocks == 3
    with pytest.raises(
        UserError, match=r"unknown option --config.last_block; did you mean --config.last_b"
    ):
        override_all(config, ["--config.last_block=3"])
    with pytest.raises(UserError, match=r"unknown option --config.last_blocks"):
        override_all(recipes.get_config(), ["--config.last_blocks=3"])


def test_a_users_method_may_start_from_random_weights(make, user_package, mesh, tmp_path):
    """The blocks get random values from the seed and stay frozen. Embeddings and head are trained."""
    fields = {"backbone": "tiny_bert", "pretrained": "", "finetune": "my_package.others:seeded"}
    fit(make(**fields), tmp_path / "run", mesh)
    values = loading.load(tmp_path / "run", mesh).values
    assert set(values.frozen) == {n for n in values.frozen if n.startswith("encoder/stack/")}
    assert "encoder/embed/table" in values.trainable
    out = tmp_path / "out"
    call("perception.adapters", "export", f"--run={tmp_path / 'run'}", f"--out={out}")
    stack = {n.removeprefix("encoder/"): x for n, x in values.frozen.items()}
    assert_stored(out, stack)


def test_a_users_method_may_add_parameters(make, user_package, mesh, tmp_path):
    """A run trains and stores added parameters. Its export fails, because the format of BERT lacks these parameters."""
    for name, names in (
        ("gate", {"encoder/gate", "head/kernel", "head/bias"}),
        ("wrapped", {"head/inner/kernel", "head/inner/bias"}),
    ):
        workdir = tmp_path / name
        fit(make(finetune=f"my_package.others:{name}"), workdir, mesh)
        assert set(loading.load(workdir, mesh).values.trainable) == names
        given = f"--run={workdir}", f"--out={tmp_path / 'out'}"
        (line,) = call("perception.adapters", "export", *given, code=2).splitlines()
        added = min(names - {"head/kernel", "head/bias"}).removeprefix("encoder/")
        lacks = f"adds parameters that models in Hugging Face format lack, such as {added}; use perception.classify"
        assert f"my_package.others:{name} {lacks}" in line


def test_adapters_of_a_users_method_are_merged(make, user_package, mesh, tmp_path):
    """A user's method may use the adapters of this project. Exports of its run equal the exports of a run with LoRA."""
    for name in ("lora", "my_package.others:again"):
        workdir = tmp_path / name
        fit(make(finetune=name), workdir, mesh)
        call("perception.adapters", "export", f"--run={workdir}", f"--out={workdir}_whole")
        call("perception.adapters", "peft", f"--run={workdir}", f"--out={workdir}_peft")
    for file in ("whole/model.safetensors", "peft/adapter_model.safetensors"):
        wanted, found = (
            load_file(tmp_path / f"{name}_{file}") for name in ("lora", "my_package.others:again")
        )
        assert wanted.keys() == found.keys()
        for name, value in wanted.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("others:no_axes", r"parameter encoder/gate has 1 dimension and the axes None: name one"),
        ("others:no_value", r"parameter encoder/gate has no value, because the backbone lacks it"),
        ("others:not_loaded", r"encoder/stack/blocks/0/\S+ has no value, because pretrained is F"),
        ("others:missing", r"removes the parameter encoder/stack/blocks/\S+: keep this parameter"),
        (
            "others:not_only_adapters",
            r"has adapters=True, but trains the parameter encoder/embed/\S+, which is no adapter: freeze it, or set",
        ),
        ("others:not_pretrained", "has adapters=True, but pretrained=False: set pretrained=True"),
        ("others:all_frozen", "freezes all parameters: train at least one"),
        (
            "others:wrong_shape",
            r"returned an array of shape \(2, 2\) instead of logits, an array of shape \(2, 6\)",
        ),
        (
            "others:no_array",
            r"the model returned a tuple instead of logits, an array of shape \(2, 6\)",
        ),
        ("others:undeclared", "reads_gain .* reads config.gain, but the method declares no option"),
        ("others:fails", r"ZeroDivisionError in divides .*others.py, line \d+\): division by zero"),
        ("others:lacks_rngs", r"TypeError in make_model .* unexpected keyword argument 'rngs'"),
        ("others:no_function", "change must be a function or None, got 'biases'"),
        ("others:no_label", "'label' of the [A-Z][a-z]+ must be a string, got None"),
        ("others:no_rate", "learning_rate must be a finite number above 0, got 0.0"),
        ("others:no_option", "the option gain must be a perception.methods.Option, got 2"),
        ("others:no_options", "'options' of the [A-Z][a-z]+ must be a dictionary, got 2"),
        ("others:bad_check", "<lambda> .* reads config.gain, but the method declares no option"),
        ("others:solved", "only the method head can have solves_head=True"),
        ("others:number", "is of type int; it must be a perception.methods.Method"),
        ("others:absent", "has no attribute 'absent'"),
        ("broken:way", r": ZeroDivisionError in \S*broken.py, line 1: division by zero"),
    ],
)
def test_incomplete_user_methods_are_rejected(make, user_package, mesh, tmp_path, name, message):
    config = make(finetune=f"my_package.{name}")
    if name == "others:not_loaded":
        config.update({"backbone": "tiny_bert", "pretrained": ""})
    with pytest.raises(UserError, match=f"^--config.finetune=my_package.{name}.*{message}") as told:
        fit(config, tmp_path / "run", mesh)
    assert "\n" not in str(told.value) and not (tmp_path / "run").exists()


def test_incomplete_user_method_fails_at_start_of_the_program(command, user_package):
    """The program exits with code 2 and one line that names the parameter, and writes no folder."""
    given = [text for text in command if USER not in text and "last_blocks" not in text]
    method = "--config.finetune=my_package.others:no_axes"
    (line,) = call(*given, method, f"--workdir={user_package}/bad", code=2).splitlines()
    assert "encoder/gate" in line and not (user_package / "bad").exists()


def test_run_with_quantized_kernels_may_add_parameters(make, user_package, mesh):
    """A run with quantized kernels may add parameters.

    The check of added parameters builds a model without quantization, whose kernels have other names and shapes.
    """
    config = make(finetune="my_package.others:gate", quantize="int8")
    config, task = run.prepare(config, mesh)
    found = variables.abstract(task.build)
    assert any(name.endswith("/kernel/codes") for name in found.frozen)
    assert "encoder/gate" in found.trainable


def test_worth_compares_a_users_method(command, user_package, deep):
    out = user_package / "worth"
    given = [f for f in command if f.startswith("--config.") and "finetune" not in f]
    given = [f for f in given if "last_blocks" not in f and "wandb" not in f]
    more = f"--ways=head,{USER}", "--config.train.steps=2", f"--out={out}"
    call("perception.worth", "--config=configs/perception.py:tiny", *given, *more)
    with (out / "worth.csv").open() as file:
        labels = [row[0] for row in csv.reader(file)][1:]
    own = "the last blocks"
    assert labels == [ways.find("head").name, own, ways.find("tf_idf").name]
    assert {run.name for run in load_local(out / "runs")} == {"head", "tf_idf", f"{USER}_seed1"}
    assert own in (out / "answer.txt").read_text()


def test_attributes_of_the_projects_methods_match_their_models(make):
    """`trains_all` and `adapters` agree with the parameters of the model.

    With the recipe "fixed", no method freezes values that are drawn from a seed.
    """
    for name, method in METHODS.items():
        config = make(finetune=name)
        found = variables.abstract(
            lambda rngs, config=config: make_model(config, SHAPE, 6, rngs=rngs)
        )
        assert bool(found.frozen) != method.trains_all
        assert method.adapters == any("lora_" in n for n in found.trainable)
        assert not found.seed_initialised
