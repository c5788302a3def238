"""The experiments in configs/ are documented, valid and equal to their golden files. Translation and masked language
models lower for eight devices.

After an intended change of a configuration: TRAINLESS_UPDATE_GOLDEN=1 python -m pytest tests/test_configs.py
"""

import ast
import importlib
import os
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from ml_collections import ConfigDict

from common import config as configuration
from common import sharding, variables
from common.errors import UserError
from common.train.state import Step
from configs import language
from explicit_opt import run as explicit
from gmlp_lm import run as gmlp
from perception import run as perception
from reservoir import finetuning
from reservoir import run as reservoir

ROOT = Path(__file__).parents[1]
GOLDEN = Path(__file__).parent / "golden"
UPDATE = "TRAINLESS_UPDATE_GOLDEN"
SIZES = ["", "tiny"]


def load(name: str, size: str = "") -> ConfigDict:
    """Returns the configuration of --config=configs/NAME.py[:SIZE]."""
    return configuration.load(f"{ROOT}/configs/{name}.py" + (f":{size}" if size else ""))


FILES = [path for path in (ROOT / "configs").glob("*.py") if "def get_config" in path.read_text()]
CONFIGS = {path.stem: load(path.stem) for path in sorted(FILES)}
EXPERIMENTS = list(CONFIGS)


def select(paper: str, *tasks: str) -> list[str]:
    """Returns the names of a paper's configurations for the given tasks, or for all tasks if `tasks` is empty."""
    chosen = {name: config for name, config in CONFIGS.items() if config.paper == paper}
    return [name for name, config in chosen.items() if not tasks or config.task in tasks]


TRANSLATION = select("reservoir", "translation")
RESERVOIR_LANGUAGE = select("reservoir", "masked_lm", "language_modelling")
FINETUNING = select("reservoir", "classification")
LANGUAGE = select("gmlp_lm")
EXPLICIT = select("explicit_opt")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", TRANSLATION)
def test_translation_configurations_are_valid(name, size):
    reservoir.validate(load(name, size))


@pytest.mark.parametrize("size", [*SIZES, "laptop"])
@pytest.mark.parametrize("name", RESERVOIR_LANGUAGE)
def test_reservoir_language_models_are_valid_in_every_size(name, size):
    reservoir.validate(load(name, size))


@pytest.mark.parametrize("size", [*SIZES, "laptop"])
@pytest.mark.parametrize("name", FINETUNING)
def test_fine_tuning_is_valid_in_every_size(name, size):
    config = load(name, size)
    config.pretrained = "runs/roberta_ffn_res"
    finetuning.validate(config)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", EXPLICIT)
def test_explicit_configurations_are_valid(name, size):
    explicit.validate(load(name, size))


@pytest.mark.parametrize(
    "size",
    [
        "",
        *language.RECIPES,
        "tiny",
        "code,tiny",
        "fixed,tiny",
        *(f"{r},laptop" for r in language.RECIPES),
    ],
)
@pytest.mark.parametrize("name", LANGUAGE)
def test_language_models_are_valid_in_every_recipe(name, size):
    gmlp.validate(load(name, size))


@pytest.mark.parametrize("recipe", ["", "fixed", "paper"])
@pytest.mark.parametrize("size", ["", "laptop", "tiny"])
def test_perception_is_valid_in_every_recipe_and_size(recipe, size):
    config = load("perception", ",".join(filter(None, (recipe, size))))
    config.dataset = "" if size == "tiny" else "sst2"
    perception.validate(config)
    assert config.freeze_head == (config.eval.select == "test") == (recipe == "paper")
    if size == "tiny":  # The size "tiny" trains on the Python manual, not on SST-2.
        config.dataset = "sst2"
        with pytest.raises(UserError, match="sst2 cannot be read from"):
            perception.validate(config)


def test_unknown_recipes_are_rejected():
    with pytest.raises(
        UserError, match=r"give a recipe .paper, code, fixed., a size .laptop, tiny., or both"
    ):
        load("enwik8_gmlp", "best")
    for words in ("best", "paper,fixed", "tiny,laptop"):
        with pytest.raises(
            UserError, match=r"give a recipe .fixed, paper., a size .laptop, tiny., or both"
        ):
            load("perception", words)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_docstring_has_command_target_hardware_and_data(name):
    text = ast.get_docstring(ast.parse((ROOT / "configs" / f"{name}.py").read_text()))
    program = f"{CONFIGS[name].paper}.{'finetune' if name in FINETUNING else 'train'}"
    assert re.search(rf"\n    python -m {program} --config=configs/{name}.py( .*)?\n", text)
    assert f"--config=configs/{name}.py:tiny" in text
    assert re.search(r"Reproduces: (Table \d|Figure \d|nothing in the paper)", text)
    assert "\nHardware: " in text
    assert "\nData: " in text


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_unknown_fields_cannot_be_set(name, size):
    config = load(name, size)
    for group in (config, *(value for value in config.values() if isinstance(value, ConfigDict))):
        with pytest.raises(AttributeError, match="config is locked"):
            group.unknown_field = 1


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_tiny_needs_no_data_and_keeps_the_model_kind(name):
    full, tiny = load(name), load(name, "tiny")
    assert tiny.data.source.startswith("embedded:")
    layers = ("layers",) if name in EXPLICIT else ()
    for field in ("reservoir", "aggregate", "kind", "tied", "positions", *layers):
        assert tiny.model.get(field) == full.model.get(field)


def lines(name: str, size: str) -> list[str]:
    fields = configuration.flatten(load(name, size))
    return [f"{key} = {value!r}\n" for key, value in sorted(fields.items())]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_fields_match_the_golden_files(name):
    """A golden file has all fields at full size, and the fields whose values differ in the size "tiny"."""
    full, tiny = lines(name, ""), lines(name, "tiny")
    assert [line.split()[0] for line in tiny] == [line.split()[0] for line in full]
    text = "".join([*full, "\ntiny:\n", *(line for line in tiny if line not in full)])
    path = GOLDEN / f"{name}.txt"
    if os.environ.get(UPDATE):
        path.write_text(text)
    golden = path.read_text() if path.exists() else ""
    changes = sorted(set(text.splitlines()) ^ set(golden.splitlines()))
    assert text == golden, (
        f"configs/{name}.py differs from {path.relative_to(ROOT)}: {'; '.join(changes)}. "
        f"To accept the change: {UPDATE}=1 python -m pytest tests/test_configs.py"
    )


def test_golden_files_have_a_configuration():
    assert {path.stem for path in GOLDEN.iterdir()} == set(EXPERIMENTS)


SKETCHED = (
    "iwslt_ffn_res",
    "enwik8_t_res",
    "enwik8_gmlp",
    "babylm_cat",
    "mnist_explicit",
    "perception",
)


def shapes(batch: Mapping[str, Any]) -> dict[str, tuple]:
    return {name: (x.shape, x.dtype) for name, x in batch.items()}


@pytest.mark.parametrize("name", SKETCHED)
def test_batch_spec_has_the_arrays_of_a_training_batch(name):
    """`batch_spec` without data has the names and dtypes of a training batch.

    The shapes are equal if the training batch is from the longest bucket. Batches of other buckets are not larger.
    """
    config = load(name, "tiny")
    run = importlib.import_module(f"{config.paper}.run")
    mesh = sharding.make_mesh({"data": -1})
    _, task = run.prepare(config, mesh)
    first, _ = next(iter(task.batches(None)))
    _, without = run.prepare(config, mesh, read_data=False)
    spec = without.batch_spec(8).arrays
    assert {n: (x.dtype, x.ndim) for n, x in first.items()} == {
        n: (x.dtype, x.ndim) for n, x in spec.items()
    }
    for key, x in first.items():
        longest = spec[key].shape
        same_bucket = x.shape[1:] == longest[1:]
        assert (x.shape == longest) if same_bucket else (x.size <= longest[0] * longest[1]), key
    samples = list(task.batch_samples())
    assert not samples or shapes(first) in [shapes(sample) for sample in samples]
    drawn_sizes, sizes = (variables.count(variables.abstract(one.build)) for one in (without, task))
    assert drawn_sizes["frozen"] == sizes["frozen"]
    # Without data, the counts may differ: the vocabulary of the data may be smaller than the configured vocabulary, and
    # the number of classes is a guess.
    assert drawn_sizes["trainable"] >= 0.99 * sizes["trainable"]


LOWERED = {
    "wmt_ffn_res": (),
    "iwslt_transformer": pytest.mark.medium,
    "roberta_t_res": pytest.mark.medium,
}
"""Experiment -> pytest mark: a translator with reservoirs, a translator without, and a masked language model.

The empty tuple is no mark. All other experiments get the mark "slow", because each takes a minute.
"""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=LOWERED.get(name, pytest.mark.slow))
        for name in (*TRANSLATION, *select("reservoir", "masked_lm"))
    ],
)
def test_full_size_step_lowers_for_eight_devices(name):
    """Lowering neither allocates nor compiles, but checks that shapes, shardings and dtypes fit."""
    config = load(name)
    axes = (AxisType.Auto,) * len(sharding.MESH_AXES)
    mesh = AbstractMesh((2, 2, 2), sharding.MESH_AXES, axis_types=axes)
    whole, rows = sharding.replicated(mesh), sharding.batch_sharding(mesh)
    run = importlib.import_module(f"{config.paper}.run")
    one = sharding.make_mesh({"data": 1}, jax.devices()[:1])
    _, task = run.prepare(config, one, read_data=False)
    step = Step.of(config, task, mesh)
    trainable, opt_state, frozen = step.arguments()
    for name, x in (trainable | frozen).items():
        assert len(x.sharding.spec) == len(x.shape), name
    assert {"fsdp", "tensor"} <= {axis for x in trainable.values() for axis in x.sharding.spec}
    assert bool(frozen) == (config.model.reservoir != "none")
    batch = {
        key: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows)
        for key, x in task.batch_spec(4).arrays.items()
    }
    number = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
    where, opt_where = jax.tree.map(lambda x: x.sharding, (trainable, opt_state))
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(
            partial(step._step, task.loss), out_shardings=(where, opt_where, whole)
        ).trace(trainable, opt_state, frozen, batch, number, number)
        traced.lower(lowering_platforms=("cpu",))
    new, _, metrics = traced.out_info
    assert {k: (v.shape, v.dtype) for k, v in new.items()} == {
        k: (v.shape, v.dtype) for k, v in trainable.items()
    }
    assert metrics["loss"].shape == ()
