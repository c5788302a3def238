"""Methods of fine-tuning: `METHODS`, and methods from a module outside the project."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from common import variables
from common.config import override_all
from common.errors import UserError
from common.freezing import draw_frozen
from common.sharding import make_mesh
from common.train.command import fit
from configs import finetuning as recipes
from reservoir import encoder, finetuning
from reservoir.layers import layers_of
from reservoir.methods import METHODS
from reservoir.pretrained import open_run
from tests.programs import ROOT, call
from tests.reservoir.test_finetuning import arrays, classifying, pretrain, pretrained_values
from tests.user_parts import importable, python_of_readme

pytestmark = pytest.mark.medium

USER = "my_package.ways:mine"

MODULE = """
import jax.numpy as jnp
import numpy as np
from flax import nnx

from common.errors import check
from common.freezing import freeze, freeze_loaded
from common.variables import Frozen
from reservoir.methods import Method, Option


def none(config, layers):
    return 0


def reads_gain(config, model, *, rngs):
    model.gain = config.gain


def fails(config, model, *, rngs):
    1 / 0


def no_keys(config, model):
    pass


def freezes_head(config, model, *, rngs):
    freeze_loaded(model)


def removes(config, model, *, rngs):
    del model.encoder.stack.blocks[0]


def random(config, model, *, rngs):
    freeze(model.encoder.stack.blocks[0])


def adds(variable):
    def change(config, model, *, rngs):
        model.encoder.gate = variable

    return Method("x", none, change)


def deep(config, pretrained):
    check(pretrained.config.model.encoder_layers > 3, f"{pretrained.workdir} has too few layers")


number = 3
drawn = Method("x", lambda config, layers: 2, random)
gate = adds(nnx.Param(jnp.ones(3), axes=(None,)))
no_axes = adds(nnx.Param(jnp.ones(3)))
no_value = adds(Frozen(jnp.ones(3), axes=(None,), draw=None))
undeclared, divides, lacks_rngs = (Method("x", none, f) for f in (reads_gain, fails, no_keys))
all_frozen, missing = (Method("x", none, f) for f in (freezes_head, removes))
no_function, no_frozen = Method("x", none, "tune"), Method("x", None)
no_number, too_many, no_field = (
    Method("x", f)
    for f in (lambda c, s: "2", lambda c, s: s.total + 1, lambda c, s: c["gain"])
)
fraction, several = (Method("x", lambda c, s, n=n: n) for n in (2.0, np.array([1, 2])))
no_label, no_option = Method(None, none), Method("x", none, options={"gain": 2})
bad_check, too_shallow = Method("x", none, check=fails), Method("x", none, check=deep)
low = Method("x", none, options={"gain": Option(0, minimum=1)})
"""


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"data": 1}, jax.devices()[:1])


@pytest.fixture(scope="module")
def user_package(tmp_path_factory) -> Iterator[Path]:
    """Makes `my_package` importable: the method of reservoir/PYTHON.md, and the methods in MODULE.

    Yields the folder that contains the package.
    """
    (method,) = (code for code in python_of_readme("reservoir") if "Method" in code)
    with importable(tmp_path_factory.mktemp("user"), ways=method, others=MODULE) as folder:
        yield folder


@pytest.fixture(scope="module")
def reservoirs(tmp_path_factory, mesh) -> Path:
    """Returns the workdir of a pretraining run of three layers, of which the middle layer is a reservoir."""
    return pretrain(tmp_path_factory.mktemp("pretraining"), mesh, "ffn")


@pytest.fixture(scope="module")
def command(reservoirs) -> list[str]:
    """Returns the fine-tuning command in reservoir/PYTHON.md for the run `reservoirs`, split into words.

    The command evaluates and saves a checkpoint after every step.
    """
    text = (ROOT / "reservoir/PYTHON.md").read_text()
    (found,) = re.findall(rf"    python -m (reservoir.finetune .*{USER}.*)\n", text)
    fields = {"eval.steps": 1, "checkpoint.steps": 1, "wandb.mode": "disabled"}
    given = [f"--config.{name}={value}" for name, value in fields.items()]
    return [*found.replace("runs/mlm", str(reservoirs)).split(), *given]


def test_command_of_the_page_trains_the_last_layer_and_resumes(
    command, user_package, reservoirs, mesh
):
    """The last layer and the head are trained. The other parameters keep the pretrained values."""
    workdir = user_package / "run"
    for steps in (1, 2):
        call(*command, f"--config.train.steps={steps}", f"--workdir={workdir}")
    config = json.loads((workdir / "summary.json").read_text())["config"]
    assert (config["reservoirs"], config["last_layers"]) == (USER, 1)
    trainable, frozen = arrays(workdir)
    before = {n: x for n, x in pretrained_values(reservoirs, mesh).items() if "encoder/" in n}
    last = {n for n in before if n.startswith("encoder/stack/blocks/2/")}
    assert last and {n for n in trainable if not n.startswith("head/")} == last
    assert all((np.asarray(trainable[name]) != before[name]).any() for name in last)
    assert frozen.keys() == before.keys() - last
    for name, value in frozen.items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)
    refused = call(
        *command, "--config.last_layers=2", "--config.train.steps=3", f"--workdir={workdir}", code=2
    )
    assert "last_layers (saved 1, now 2)" in refused


def test_options_are_fields_of_the_command_line(user_package):
    config = recipes.tiny(recipes.sst2())
    override_all(config, ["--config.last_layers=3", f"--config.reservoirs={USER}"])
    assert config.last_layers == 3
    with pytest.raises(UserError, match=r"unknown option --config.last_layers"):
        override_all(recipes.sst2(), ["--config.last_layers=3"])


def test_options_that_a_configuration_lacks_get_their_defaults(user_package):
    config = classifying("runs/mlm", reservoirs=USER)
    with config.unlocked():
        del config.lora
    finetuning.validate(config)
    assert (config.last_layers, config.lora.rank, config.lora.alpha) == (2, 0, 0.0)


def test_reports_do_not_import_a_users_method(user_package, monkeypatch):
    monkeypatch.delitem(sys.modules, "my_package.ways", raising=False)
    model = {"encoder_layers": 12, "reservoir": "ffn", "reservoirs": 4}
    config = {"model": model, "reservoirs": USER, "last_layers": 3}
    assert layers_of(config) is None  # the number of frozen layers is unknown
    finetuning.validate(classifying("runs/mlm", reservoirs=USER))
    assert str(layers_of(config)) == "FFN, last layers, 9 of 12"


def test_frozen_layers_with_an_initializer_keep_their_drawn_values(user_package, reservoirs, mesh):
    """Frozen layers with an initializer do not get the pretrained values. All other encoder parameters do."""
    config = classifying(reservoirs, reservoirs="my_package.others:drawn")
    _, task = finetuning.prepare(config, mesh)
    model = variables.abstract(task.build)
    drawn = draw_frozen(model, 1)
    assert drawn and all(name.startswith("encoder/stack/blocks/0/") for name in drawn)
    known = {n for n in pretrained_values(reservoirs, mesh) if n.startswith("encoder/")}
    assert task.start({}, drawn).keys() == known - drawn.keys()


def test_a_users_method_may_add_parameters(user_package, reservoirs, mesh):
    config = classifying(reservoirs, reservoirs="my_package.others:gate")
    _, task = finetuning.prepare(config, mesh)
    model = variables.abstract(task.build)
    assert "encoder/gate" in model.trainable


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("others:no_axes", "parameter encoder/gate has 1 dimension and the axes None: name one"),
        ("others:no_value", "encoder/gate has no value, because the pretraining run lacks it"),
        ("others:missing", r"removes the parameter encoder/stack/blocks/\S+: keep this parameter"),
        ("others:all_frozen", "freezes all parameters: train at least one"),
        ("others:undeclared", "reads_gain .* reads config.gain, but the method declares no option"),
        ("others:divides", r"ZeroDivisionError in fails .*others.py, line \d+\): division by zero"),
        ("others:lacks_rngs", "TypeError in classifier .* unexpected keyword argument 'rngs'"),
        ("others:no_function", "'change' of the Method must be a function or None, got 'tune'"),
        ("others:no_frozen", "'frozen' of the Method must be a function, got None"),
        ("others:no_number", "frozen must return a number of layers, an int from 0 to 3, got '2'"),
        ("others:too_many", "frozen must return a number of layers, an int from 0 to 3, got 4"),
        ("others:fraction", "an int from 0 to 3, got 2.0"),
        ("others:several", r"an int from 0 to 3, got array\(\[1, 2\]\)"),
        ("others:no_field", "KeyError in <lambda> .*'gain'"),
        ("others:no_label", "'label' of the [A-Z][a-z]+ must be a string, got None"),
        ("others:no_option", "the option gain must be a reservoir.methods.Option, got 2"),
        ("others:bad_check", "TypeError in check_complete .* missing 1 required keyword"),
        ("others:too_shallow", "/ffn has too few layers"),
        ("others:number", "is of type int; it must be a reservoir.methods.Method"),
        ("others:absent", "has no attribute 'absent'"),
        ("broken:way", r": ZeroDivisionError in \S*broken.py, line 1: division by zero"),
    ],
)
def test_incomplete_user_methods_are_rejected(
    user_package, reservoirs, mesh, tmp_path, name, message
):
    config = classifying(reservoirs, reservoirs=f"my_package.{name}")
    told = f"^--config.reservoirs=my_package.{name}.*{message}"
    with pytest.raises(UserError, match=told) as caught:
        fit(config, tmp_path / "run", mesh)
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


def test_invalid_fields_of_user_methods_are_rejected(user_package):
    for fields, message in (
        (
            {"reservoirs": "my_package.others:low"},
            "--config.gain must be a number of at least 1, got 0",
        ),
        ({"reservoirs": USER, "lora.rank": 2}, "so --config.reservoirs must be keep"),
    ):
        with pytest.raises(UserError, match=message):
            finetuning.validate(classifying("runs/mlm", **fields))


def test_incomplete_user_method_fails_at_start_of_the_program(command, user_package):
    """The program exits with code 2 and one line that names the parameter, and writes no folder."""
    given = [text for text in command if USER not in text and "last_layers" not in text]
    method = "--config.reservoirs=my_package.others:no_axes"
    (line,) = call(*given, method, f"--workdir={user_package}/bad", code=2).splitlines()
    assert "encoder/gate" in line and not (user_package / "bad").exists()


def test_methods_freeze_the_number_of_layers_that_reports_name(user_package, reservoirs):
    """Reports count a layer as frozen if fine-tuning trains none of its pretrained parameters."""
    cases = (
        ("ffn", {"reservoirs": "keep"}),
        ("none", {"reservoirs": "keep"}),
        ("ffn", {"reservoirs": "tune"}),
        ("none", {"reservoirs": "freeze_now", "freeze_now": 2}),
        ("ffn", {"lora.rank": 2}),
        ("ffn", {"reservoirs": USER}),
    )
    assert METHODS.keys() <= {fields.get("reservoirs") for _, fields in cases}
    pretrained = open_run(reservoirs)
    for reservoir, fields in cases:
        pretrained.config.model.reservoir = reservoir
        config = classifying(reservoirs, **fields)
        finetuning.validate(config)
        config = finetuning.complete_model(config, pretrained)
        model = variables.abstract(
            lambda rngs, config=config: encoder.classifier(config, 300, 2, rngs=rngs)
        )
        layer = re.compile(r"encoder/stack/blocks/(\d+)/")
        trained = {
            layer.match(name)[1]
            for name in model.trainable
            if layer.match(name) and "lora_" not in name
        }
        layers = layers_of(config.to_dict())
        assert (layers.total, layers.frozen) == (3, 3 - len(trained)), fields
