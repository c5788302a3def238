"""Kinds of reservoirs, placements and a corpus from modules outside the project."""

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict

from common import compare, experiments, freezing
from common.config import override_all
from common.errors import UserError
from common.model import transformer
from common.model.block import Stateless, Sublayer
from common.model.linear import Linear
from configs import translation
from reservoir.kinds import RESERVOIRS, Kind
from reservoir.layers import layers_of
from reservoir.model import reservoir_block, validate
from reservoir.options import add
from reservoir.parallel_text import load_parallel
from reservoir.user_kind import check_complete
from tests.model import helpers
from tests.programs import ROOT, call
from tests.user_parts import importable, python_of_readme

SOURCE = np.array([[3, 4, 5, 6, 7, 2], [8, 9, 2, 0, 0, 0]])
TARGET = np.array([[1, 3, 4, 5, 6], [1, 7, 8, 2, 0]])
USER = "my_package.kinds:my_kind"
SPREAD = "my_package.placements:spread"

MODULE = """
from common.model.block import Block
from configs import translation
from reservoir.kinds import Kind, Option
from tests.reservoir.test_user_kinds import (
    Forgetful,
    ForgetsPrompt,
    Later,
    NoCache,
    NoInitializer,
    kind_of,
)


def reads_gain(model, layer, causal, *, rngs):
    return NoCache(model.width * model.gain, rngs=rngs)


def lacks_width(model, layer, causal, *, rngs):
    return NoCache(rngs=rngs)


class NoArray(Block):
    def __call__(self, x_BLD, context, key=None):
        return "x"


class NoPair(Block):
    def step(self, x_B1D, cache, index, context):
        return x_B1D


def returns(make):
    return Kind(lambda model, layer, causal, *, rngs: make(), "returned")


no_initializer, no_cache, number = kind_of(NoInitializer), kind_of(NoCache), 3
later, forgetful, forgets_prompt = map(kind_of, (Later, Forgetful, ForgetsPrompt))
no_block, no_array, no_pair = map(returns, (list, lambda: NoArray([]), lambda: NoPair([])))
undeclared, no_argument = Kind(reads_gain, "undeclared"), Kind(lacks_width, "no argument")
no_option = Kind(reads_gain, "no option", options={"gain": 2})
no_build, no_label = Kind(None, "no build"), Kind(reads_gain, None)
listed = Kind(reads_gain, "listed", options=["gain"])
numbered = Kind(reads_gain, "numbered", options={2: Option(1.0)})
two_words = Kind(reads_gain, "two words", options={"my gain": Option(1.0)})
text_minimum = Kind(reads_gain, "text minimum", options={"gain": Option("one", minimum=0)})
minimum_text = Kind(reads_gain, "minimum text", options={"gain": Option(1.0, "the gain")})
declared = Kind(reads_gain, "declared", options={"gain": Option(1, minimum=0)})
bad_check = Kind(reads_gain, "bad check", check=lambda model: model.width + "4")
refuses = Kind(reads_gain, "refuses", check=lambda model: int("four"))
sets_text = Kind(reads_gain, "sets text", check=lambda model: setattr(model, "width", "4"))
"""

PLACEMENTS = """

def ends(layers, reservoirs):
    return 0, layers - 1


def twice(layers, reservoirs):
    return [0, 0]


def fractions(layers, reservoirs):
    return [float(index) for index in range(reservoirs)]


def no_default(layers, reservoirs, *, gap):
    return range(reservoirs)


def fails(layers, reservoirs):
    return [0][reservoirs]


def refuses(layers, reservoirs):
    raise ValueError


def no_reservoirs(layers):
    return [0]


number = 3
"""


class NoInitializer(Sublayer):
    """A layer with a parameter that has no initializer in `frozen_init()`."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.gate = nnx.Param(jnp.ones(width), axes=(None,))

    def __call__(self, x_BLD, context, key=None):
        return x_BLD * self.gate[...]


class NoCache(Sublayer):
    """A layer without the methods for decoding."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.out = Linear(width, width, (None, None), rngs=rngs)

    def __call__(self, x_BLD, context, key=None):
        return self.out(x_BLD)


class Later(Stateless):
    """Every position reads the next position."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        pass

    def __call__(self, x_BLD, context, key=None):
        return jnp.roll(x_BLD, -1, axis=1)


class Forgetful(Later):
    """Sums all earlier positions, but decodes without them."""

    def __call__(self, x_BLD, context, key=None):
        return jnp.cumsum(x_BLD, axis=1)


class ForgetsPrompt(Forgetful):
    """Decodes with the sum of earlier positions, without the positions of the prompt."""

    def cache(self, batch, spec, context):
        return jnp.zeros((batch, 1, 16))

    def step(self, x_B1D, cache, index, context):
        return x_B1D + cache, x_B1D + cache


def kind_of(layer: type) -> Kind:
    def build(model, trained, causal, *, rngs):
        return transformer.make_block(model, [layer(model.width, rngs=rngs)], rngs=rngs)

    return Kind(build, layer.__name__)


@pytest.fixture
def user_package(tmp_path) -> Iterator[Path]:
    """Makes `my_package` importable: MODULE, PLACEMENTS, and the kind, placement and corpus of reservoir/PYTHON.md.

    Yields the folder that contains the package.
    """
    _, _, kind, placements, corpus, *_ = python_of_readme("reservoir")
    modules = {"kinds": kind, "texts": corpus, "incomplete": MODULE}
    with importable(tmp_path, **modules, placements=placements + PLACEMENTS) as folder:
        yield folder


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
@pytest.mark.medium
def test_user_kind_is_frozen_and_decodes(make_config, user_package, stack):
    fields = {"reservoirs": 1} if stack == "encoder" else {"reservoirs": 0, "decoder_reservoirs": 1}
    model = make_config(USER, **fields).model
    validate(model)
    assert model.feature_scale == 1.0  # validation adds the option of the kind, with its default
    abstract_model = helpers.structure_of(model)
    frozen = freezing.draw_frozen(abstract_model, 1)
    layer = {"encoder": "encoder/blocks/1/", "decoder": "decoder/blocks/0/"}[stack]
    assert frozen and all(name.startswith(layer) for name in frozen)
    made = abstract_model.build(helpers.random_values(abstract_model.trainable, 0), frozen)
    whole = made(SOURCE, TARGET)
    context = made.encode(jnp.asarray(SOURCE))
    cache = made.cache(len(TARGET), TARGET.shape[1], context)
    for index in range(TARGET.shape[1]):
        logits, cache = made.step(jnp.asarray(TARGET[:, index]), cache, jnp.int32(index), context)
        np.testing.assert_allclose(logits, whole[:, index], rtol=1e-4, atol=1e-4)


def test_reports_name_a_users_kind_without_importing_it(make_config, user_package):
    config = make_config(USER, reservoirs=1)
    assert (
        str(layers_of(config.to_dict())) == "my_kind, 1 of 3"
    )  # a report does not import the user's module
    validate(config.model)
    assert str(layers_of(config.to_dict())) == "random features, 1 of 3"
    config.model.reservoir = "elsewhere.kinds:unknown_here"
    assert str(layers_of(config.to_dict())) == "unknown_here, 1 of 3"


def test_options_of_a_users_kind(make_config, user_package):
    with pytest.raises(UserError, match="feature_scale must be a number of at least 0, got -1"):
        validate(make_config(USER, reservoirs=1, feature_scale=-1.0).model)
    with pytest.raises(UserError, match="gain must be a number of at least 0, got 'one'"):
        validate(make_config("my_package.incomplete:declared", reservoirs=1, gain="one").model)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        (
            "my_package.incomplete:no_initializer",
            {},
            r"function/gate cannot be initialised .* NoInit.*such as \('zeros',\)$",
        ),
        (
            "my_package.incomplete:no_cache",
            {"decoder_reservoirs": 1},
            "NotImplementedError in cache",
        ),
        (
            "my_package.incomplete:no_block",
            {},
            r"build must return a common.model.block.Block, got \[\]$",
        ),
        (
            "my_package.incomplete:no_array",
            {},
            r"__call__ must return .* in the encoder, got a str",
        ),
        (
            "my_package.incomplete:no_pair",
            {"decoder_reservoirs": 1},
            r"step must return the pair \(output, cache\), got an array of shape \(2, 1, 16\)",
        ),
        (
            "my_package.incomplete:later",
            {"decoder_reservoirs": 1},
            "__call__ reads later positions, which the decoder must not do",
        ),
        (
            "my_package.incomplete:forgetful",
            {"decoder_reservoirs": 1},
            "step gives other outputs than __call__ in the decoder",
        ),
        (
            "my_package.incomplete:forgets_prompt",
            {"decoder_reservoirs": 1},
            "step after prefill gives other outputs than __call__ in the decoder",
        ),
        ("my_package.incomplete:number", {}, "is of type int; it must be a reservoir.kinds.Kind"),
        ("my_package.incomplete:absent", {}, "has no attribute 'absent'"),
        (
            "my_package.incomplete:undeclared",
            {},
            "reads_gain .* reads model.gain, but the kind declares no option gain",
        ),
        (
            "my_package.incomplete:no_argument",
            {},
            r"TypeError in lacks_width .*incomplete.py, line \d+\): .* argument: 'width'",
        ),
        ("my_package.incomplete:no_option", {}, "option gain must be a .*Option, got 2"),
        ("my_package.incomplete:no_build", {}, "'build' of the Kind must be a function, got None"),
        (
            "my_package.incomplete:no_label",
            {},
            "'label' of the [A-Z][a-z]+ must be a string, got None",
        ),
        (
            "my_package.incomplete:listed",
            {},
            r"'options' of the [A-Z][a-z]+ must be a dictionary, got \['gain'\]",
        ),
        (
            "my_package.incomplete:numbered",
            {},
            "the name of an option must be an identifier .*, got 2",
        ),
        (
            "my_package.incomplete:two_words",
            {},
            "the name of an option must be an identifier .*, got 'my gain'",
        ),
        (
            "my_package.incomplete:text_minimum",
            {},
            "the option gain has a minimum, so .* must be numbers, got Option.default='one', minimum=0",
        ),
        (
            "my_package.incomplete:minimum_text",
            {},
            "gain has .* must be numbers, got .*minimum='the gain'",
        ),
        ("my_package.incomplete:bad_check", {}, "TypeError in <lambda> .*unsupported operand"),
        (
            "my_package.incomplete:refuses",
            {},
            r": invalid literal .*: 'four' \(raised in <lambda> \(\S*incomplete.py, line \d+\)\)$",
        ),
        (
            "my_package.incomplete:sets_text",
            {},
            "TypeError in <lambda> .*: Could not override field",
        ),
        (
            "my_package.broken:kind",
            {},
            r": ZeroDivisionError in \S*broken.py, line 1: division by zero",
        ),
        ("nowhere.kinds:kind", {}, "No module named 'nowhere'"),
    ],
)
def test_incomplete_user_kinds_are_rejected(make_config, user_package, name, fields, message):
    with pytest.raises(UserError, match=rf"--config.model.reservoir={name}.*{message}"):
        validate(make_config(name, **{"reservoirs": 1, **fields}).model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [name for name in RESERVOIRS if name != "bigru"])
def test_our_kinds_pass_the_checks_of_user_kinds(make_config, kind, dtype):
    """The BiGRU reads later positions and is not allowed in a decoder."""
    model = make_config(kind, reservoirs=0, decoder_reservoirs=1, dtype=dtype).model
    check_complete(partial(reservoir_block, model, "decoder"), model, "decoder")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ([f"model.reservoir={USER}"], {"feature_scale": 1.0}),
        (["model.feature_scale=2", f"model.reservoir={USER}"], {"feature_scale": 2.0}),
        ([f"model.placement={SPREAD}"], {"gap": 3}),
        (["model.gap=2", f"model.decoder_placement={SPREAD}"], {"gap": 2}),
        (["model.kernel=3", "model.reservoir=cnn"], {"kernel": 3}),
    ],
)
def test_options_are_fields_of_the_command_line(user_package, fields, expected):
    config = translation.tiny(translation.iwslt("ffn"))
    override_all(config, [f"--config.{field}" for field in fields])
    add(config.model)
    found = {name: config.model[name] for name in expected}
    assert found == expected
    assert list(map(type, found.values())) == list(map(type, expected.values()))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (["model.feature_scale=2"], "unknown option --config.model.feature_scale"),
        (
            ["model.feature_scal=2", f"model.reservoir={USER}"],
            "did you mean --config.model.feature_scale?",
        ),
        (
            ["model.feature_scale=x", f"model.reservoir={USER}"],
            "feature_scale must be a finite number",
        ),
        (["model.gap=1.5", f"model.placement={SPREAD}"], "gap must be a whole number"),
        (
            ["model.gap=1", "model.placement=my_package.placements:number"],
            "number is of type int, not a function",
        ),
        (["model.gap=1", "model.placement=my_package.placements:no_default"], "gap .* a default"),
    ],
)
def test_wrong_options_are_rejected(user_package, fields, message):
    config = translation.tiny(translation.iwslt("ffn"))
    with pytest.raises(UserError, match=message):
        override_all(config, [f"--config.{field}" for field in fields])


def test_suites_set_options_and_reuse_their_runs(user_package, monkeypatch):
    """A suite reuses a run although `prepare` adds options to the run's configuration."""
    cases = compare.parse_cases(
        [
            ["own", "model.feature_scale=2", f"model.reservoir={USER}"],
            ["b", f"model.reservoir={USER}"],
        ]
    )
    spec = "configs/iwslt_ffn_res.py:tiny"
    suite = compare.Cases("", 1, [], user_package / "out", None, spec=spec, overrides=cases)
    config = suite.configuration("own", 1)
    assert config.model.feature_scale == 2.0
    assert experiments.set_fields(config, {"model.feature_scale": "3"}).model.feature_scale == 3.0

    def fit(jobs, mesh, turns):
        (job,) = jobs
        (job.workdir / "checkpoints/best/1").mkdir(parents=True)
        (job.workdir / "summary.json").write_text('{"test": {"bleu": 1.0}}')
        return [{}]

    def prepare(self, config):
        add(config.model)
        return config, None

    monkeypatch.setattr(compare.Cases, "prepare", prepare)
    monkeypatch.setattr(experiments, "fit_in_turns", fit)
    suite.train({"run": suite.configuration("b", 1)})
    assert suite._kept("run", suite.configuration("b", 1))


@pytest.mark.medium
@pytest.mark.parametrize("option", ["feature_scale=2.0", "gap=2"])
def test_commands_of_the_page_train_with_options(user_package, option):
    """The run records the option, resumes, and translates. Another value of the option is refused."""
    text = (ROOT / "reservoir/PYTHON.md").read_text()
    (command,) = re.findall(rf"    python -m (reservoir.train .*--config.model.{option})\n", text)
    sizes = ("width=16", "hidden=24", "heads=2", "decoder_layers=1")
    program, *arguments = [*command.split(), *(f"--config.model.{size}" for size in sizes)]
    arguments += [
        "--config.eval.steps=1",
        "--config.checkpoint.steps=1",
        "--config.wandb.mode=disabled",
    ]
    run = f"--workdir={user_package / 'run'}"
    for steps in (1, 2):
        call(program, *arguments, f"--config.train.steps={steps}", run)
    name, _, value = option.partition("=")
    saved = json.loads((user_package / "run" / "config.json").read_text())
    assert saved["model"][name] == float(value)
    (user_package / "text").write_text("Mein Haus.\n")
    output = user_package / "translation"
    call("reservoir.translate", run, f"--input={user_package / 'text'}", f"--output={output}")
    assert len(output.read_text().splitlines()) == 1
    refused = call(program, *arguments, f"--config.model.{name}=1", run, code=2)
    assert f"model.{name} (saved" in refused


def test_user_kind_without_an_initializer_fails_at_start(user_package):
    """The program exits with code 2 and one line that names the parameter, and writes no folder."""
    config = "--config=configs/iwslt_ffn_res.py:tiny"
    kind = "--config.model.reservoir=my_package.incomplete:no_initializer"
    workdir = f"--workdir={user_package}/run"
    (line,) = call("reservoir.train", config, kind, workdir, code=2).splitlines()
    assert "residuals/0/function/gate" in line
    assert not (user_package / "run").exists()


def test_user_placement(make_config, user_package):
    own = "my_package.placements:ends"
    model = make_config("ffn", placement=own, reservoirs=2).model
    validate(model)
    frozen = helpers.structure_of(model).frozen
    assert {name.split("/")[2] for name in frozen} == {"0", "2"}
    for fields, message in (
        (
            {"placement": own, "reservoirs": 1},
            r"returned \(0, 2\); it must return 1 different indices from 0 to 2, one for each reservoir",
        ),
        (
            {"placement": "my_package.placements:twice", "reservoirs": 1},
            r"returned \(0, 0\); it must return 1 different indices from 0 to 2, one for each reservoir",
        ),
        (
            {"placement": "my_package.placements:fractions"},
            r"TypeError: 'float' .* an integer",
        ),
        (
            {"placement": "my_package.placements:fails"},
            r":fails\(layers, reservoirs\) gives no indices: IndexError in fails .*placements.py, line \d+\): list .*;",
        ),
        (
            {"placement": "my_package.placements:refuses"},
            r":refuses\(layers, reservoirs\) gives no indices: ValueError in .*line \d+\); correct",
        ),
        (
            {"placement": "my_package.placements:no_reservoirs"},
            r"\(layers, reservoirs\) gives no indices: .* argument but 2 were given; correct this function$",
        ),
        (
            {"decoder_placement": "nowhere:f"},
            "decoder_placement=nowhere:f cannot be imported: .*No module named 'nowhere'",
        ),
    ):
        with pytest.raises(UserError, match=message):
            validate(make_config("ffn", **fields).model)


def test_user_corpus_of_the_readme_is_read(user_package):
    languages = {"source_language": "en", "target_language": "de", "splits": {}}
    source = {"source": "import:my_package.texts:pairs"}
    text = load_parallel(ConfigDict(source | languages), "valid")
    assert (text.source[7], text.target[7]) == ("the river is 7", "das river ist 7")
