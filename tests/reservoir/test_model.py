"""Models with reservoirs: validation, parameter counts, initialization, FLOPs, and training."""

from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from common import freezing, variables
from common.errors import UserError
from common.model.block import Context
from common.model.loss import cross_entropy
from common.sharding import make_mesh, place, shardings
from common.train import flops, optimizer
from common.train.state import Step, TrainState
from common.variables import AbstractModel
from configs import translation
from reservoir.model import translator, validate
from tests.model import helpers

KINDS = ("none", "transformer", "ffn")
# Path of the reservoir in an encoder of 3 layers.
FROZEN_LAYER = "encoder/blocks/1/"
SOURCE = np.array([[3, 4, 5, 6, 7, 2], [8, 9, 2, 0, 0, 0]])
TARGET = np.array([[1, 3, 4, 5, 6], [1, 7, 8, 2, 0]])


def test_invalid_fields_are_rejected(make_config):
    validate(make_config("none", reservoirs=0).model)
    validate(make_config("ffn", reservoirs=2).model)
    for reservoir, reservoirs, message in (
        ("fnn", 1, "did you mean ffn"),
        ("ffn", 3, "need 5 layers, but the number of layers is 3; lower --config.model.reservoirs"),
        ("transformer", 0, "no layer is a reservoir: --config.model.reservoirs=0"),
    ):
        with pytest.raises(UserError, match=message):
            validate(make_config(reservoir, reservoirs=reservoirs).model)
    for fields, message in (
        ({"placement": "LRL R"}, "unknown placement 'LRL R'"),
        (
            {"placement": "LRLL"},
            "LRLL has the length 4, but the number of layers is 3 .*one letter",
        ),
        ({"placement": "LLL"}, "no layer is a reservoir: .*--config.model.placement=LLL"),
        ({"placement": "top", "reservoirs": 4}, "4 reservoirs need 4 layers, but the number of"),
        ({"decoder_reservoirs": 2}, "decoder_reservoirs=2: 2 alternating reservoirs need 3"),
        ({"decoder_placement": "LRL"}, "decoder_placement=LRL: the pattern LRL has the length 3"),
        ({"placement": "math:hypot"}, "placement=math:hypot: no signature .*written in Python"),
        (
            {"reservoir": "bigru", "decoder_reservoirs": 1},
            "the decoder cannot use it.*or set --config.model.decoder_reservoirs=0",
        ),
        (
            {"reservoir": "bigru", "decoder_placement": "LR"},
            "the decoder cannot use it.*or write no R in --config.model.decoder_placement",
        ),
        ({"reservoir": "bigru", "width": 15}, "the two directions"),
        (
            {"reservoir": "bigru", "reservoir_hidden": 15},
            "reservoir_hidden=15 must be even, because the two directions",
        ),
        ({"reservoir_hidden": -1}, "reservoir_hidden must be at least 0"),
        ({"kernel": 0}, "kernel must be a number of at least 1"),
        ({"layerdrop": 1.0}, "layerdrop"),
        ({"layerdrop": -0.1}, "layerdrop"),
    ):
        with pytest.raises(UserError, match=message):
            validate(make_config(**{"reservoir": "ffn", **fields}).model)


# Parameter counts of Tables 1, 2 and 5 by (task, decoder layers), kind of reservoir and encoder layers (`DEPTHS`).
# PRINTED_* has the paper's counts in millions, TRAINABLE and TOTAL have our counts, and `MISPRINTS` lists wrong printed
# counts. For 12 layers with reservoirs, Table 2 prints 72.4M trainable parameters. With FFN reservoirs, this is more
# than the printed total of 71.4M. In Table 1, the total with FFN reservoirs grows by 3.3M from 6 to 8 layers, although
# two more layers add 4.2M or 4.3M to all other totals of Table 1.

IWSLT, WMT, IWSLT_DEEP = ("iwslt", 2), ("wmt", 1), ("iwslt", 6)
DEPTHS = {IWSLT: (6, 8, 10, 12), WMT: (12, 16, 24, 32), IWSLT_DEEP: (6, 8, 10, 12)}
VOCABULARIES = {"iwslt": (8848, 6632), "wmt": (32768, 32768)}

PRINTED_TRAINABLE = {
    (IWSLT, "none"): (26.8, 31.1, 35.3, 39.5),
    (IWSLT, "transformer"): (22.6, 26.8, 31.1, 35.3),
    (IWSLT, "ffn"): (22.6, 26.8, 31.1, 35.3),
    (WMT, "none"): (75.6, 88.2, 113.4, 138.6),
    (WMT, "transformer"): (72.4, 75.6, 100.8, 126.0),
    (WMT, "ffn"): (72.4, 75.6, 100.8, 126.0),
    (IWSLT_DEEP, "none"): (39.5, 43.7, 47.9, 52.0),
    (IWSLT_DEEP, "transformer"): (35.3, 39.5, 43.7, 47.8),
    (IWSLT_DEEP, "ffn"): (35.3, 39.5, 43.7, 47.8),
}
PRINTED_TOTAL = {
    (IWSLT, "none"): (26.8, 31.1, 35.3, 39.5),
    (IWSLT, "transformer"): (26.8, 31.1, 35.3, 39.5),
    (IWSLT, "ffn"): (25.8, 29.1, 33.3, 37.5),
    (WMT, "none"): (75.6, 88.2, 113.4, 138.6),
    (WMT, "transformer"): (75.6, 88.2, 113.4, 138.6),
    (WMT, "ffn"): (71.4, 83.9, 109.2, 134.4),
    (IWSLT_DEEP, "none"): (39.5, 43.7, 47.9, 52.0),
    (IWSLT_DEEP, "transformer"): (39.5, 43.7, 47.9, 52.0),
    (IWSLT_DEEP, "ffn"): (37.4, 41.6, 45.8, 49.9),
}
TRAINABLE = {
    (IWSLT, "none"): (26_853_376, 31_058_944, 35_264_512, 39_470_080),
    (IWSLT, "transformer"): (22_647_808, 26_853_376, 31_058_944, 35_264_512),
    (IWSLT, "ffn"): (22_647_808, 26_853_376, 31_058_944, 35_264_512),
    (WMT, "none"): (75_589_120, 88_198_656, 113_417_728, 138_636_800),
    (WMT, "transformer"): (62_979_584, 75_589_120, 100_808_192, 126_027_264),
    (WMT, "ffn"): (62_979_584, 75_589_120, 100_808_192, 126_027_264),
    (IWSLT_DEEP, "none"): (39_471_104, 43_676_672, 47_882_240, 52_087_808),
    (IWSLT_DEEP, "transformer"): (35_265_536, 39_471_104, 43_676_672, 47_882_240),
    (IWSLT_DEEP, "ffn"): (35_265_536, 39_471_104, 43_676_672, 47_882_240),
}
TOTAL = {
    (IWSLT, "none"): (26_853_376, 31_058_944, 35_264_512, 39_470_080),
    (IWSLT, "transformer"): (26_853_376, 31_058_944, 35_264_512, 39_470_080),
    (IWSLT, "ffn"): (24_750_080, 28_955_648, 33_161_216, 37_366_784),
    (WMT, "none"): (75_589_120, 88_198_656, 113_417_728, 138_636_800),
    (WMT, "transformer"): (75_589_120, 88_198_656, 113_417_728, 138_636_800),
    (WMT, "ffn"): (71_382_528, 83_992_064, 109_211_136, 134_430_208),
    (IWSLT_DEEP, "none"): (39_471_104, 43_676_672, 47_882_240, 52_087_808),
    (IWSLT_DEEP, "transformer"): (39_471_104, 43_676_672, 47_882_240, 52_087_808),
    (IWSLT_DEEP, "ffn"): (37_367_808, 41_573_376, 45_778_944, 49_984_512),
}
MISPRINTS = {
    ("trainable", WMT, "transformer", 12),
    ("trainable", WMT, "ffn", 12),
    ("total", IWSLT, "ffn", 6),
}


def full_size(task: tuple[str, int], kind: str, layers: int) -> AbstractModel:
    name, decoder_layers = task
    model = getattr(translation, name)(kind).model
    model.encoder_layers, model.decoder_layers = layers, decoder_layers
    # All parameters get the same key, because only their number matters. nnx.Rngs would take most of the time.
    rngs = SimpleNamespace(params=lambda: jax.random.key(0))
    return variables.abstract(lambda _: translator(model, *VOCABULARIES[name], rngs=rngs))


@pytest.mark.parametrize(
    ("task", "kind"),
    [pytest.param(*x, marks=[] if x[0] == IWSLT else [pytest.mark.medium]) for x in TOTAL],
    ids=lambda v: "".join(map(str, v)),
)
def test_parameter_counts_of_the_papers_tables(task: tuple[str, int], kind: str):
    for row, layers in enumerate(DEPTHS[task]):
        counts = variables.count(full_size(task, kind, layers))
        assert counts["trainable"] == TRAINABLE[task, kind][row]
        assert counts["total"] == TOTAL[task, kind][row]
        assert counts["frozen"] == counts["total"] - counts["trainable"]
        for column, printed in (("trainable", PRINTED_TRAINABLE), ("total", PRINTED_TOTAL)):
            # The paper rounds some numbers and truncates others: allow one unit of the last digit.
            near = abs(round(counts[column] / 1e6, 1) - printed[task, kind][row]) < 0.11
            assert near == ((column, task, kind, layers) not in MISPRINTS), (column, layers)


def test_parameter_counts_of_each_layer():
    """A trained encoder layer of width d and hidden size f has 4 (d^2 + d) + 2 d f + f + d + 4 d parameters."""
    d, f = 512, 1024
    feed_forward, attention, norm = 2 * d * f + f + d, 4 * (d * d + d), 2 * d
    assert feed_forward + attention + 2 * norm == 2_102_784
    for kind, frozen in (
        ("transformer", feed_forward + attention + 2 * norm),
        ("ffn", feed_forward + norm),
    ):
        rows = dict(
            (group, (trainable, frozen))
            for group, trainable, frozen, _ in variables.count_by_group(full_size(IWSLT, kind, 12))
        )
        assert list(rows)[:3] == ["decoder/blocks/0", "decoder/blocks/1", "decoder/norm"]
        assert list(rows)[3:15] == [f"encoder/blocks/{i}" for i in range(12)]
        for layer in range(12):
            expected = (0, frozen) if layer in (4, 6) else (2_102_784, 0)
            assert rows[f"encoder/blocks/{layer}"] == expected
        assert rows["decoder/blocks/0"] == (feed_forward + 2 * attention + 3 * norm, 0)
        assert rows["source_embed"] == (8848 * d, 0)
        assert rows["target_embed"] == (6632 * d, 0)


# Layers.


@dataclass
class Run:
    """A small model with one kind of reservoir, and the loss, the gradients and the FLOPs of one step.

    Attributes:
      counted: FLOPs by `flops.count`.
      compiled: FLOPs by XLA's cost analysis.
    """

    model: ConfigDict
    abstract_model: AbstractModel
    trainable: dict
    frozen: dict
    loss: float
    gradients: dict
    counted: int
    compiled: float


def loss_of(model, batch: dict, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    logits = model(batch["source"], batch["target"][:, :-1], key)
    outputs = batch["target"][:, 1:]
    weights = (outputs != 0).astype(jnp.float32)
    return jnp.sum(cross_entropy(logits, outputs, 0.1) * weights), jnp.sum(weights)


@pytest.fixture(scope="module")
def runs(make_config) -> dict[str, Run]:
    """Returns {kind of reservoir: run}. Parameters with the same path in two models have equal values.

    An exception is the FFN reservoir: it has the initial values of seed 1.
    """
    made = {}
    plain = helpers.random_values(helpers.structure_of(make_config("none").model).trainable, 0)
    for kind in KINDS:
        model = make_config(kind, encoder_layers=3, decoder_layers=1).model
        abstract_model = helpers.structure_of(model)
        trainable = {name: jnp.asarray(plain[name]) for name in abstract_model.trainable}
        frozen = freezing.draw_frozen(abstract_model, 1)
        if kind == "transformer":
            frozen = {name: plain[name] for name in abstract_model.frozen}

        def loss(trainable, frozen, abstract_model=abstract_model):
            batch = {"source": SOURCE, "target": TARGET}
            return loss_of(abstract_model.build(trainable, frozen), batch, None)[0]

        function = jax.value_and_grad(loss)
        program = jax.jit(function).lower(trainable, frozen).compile()
        made[kind] = Run(
            model,
            abstract_model,
            trainable,
            frozen,
            *program(trainable, frozen),
            flops.count(jax.make_jaxpr(function)(trainable, frozen)),
            program.cost_analysis()["flops"],
        )
    return made


def test_only_the_reservoir_is_frozen(runs):
    assert not runs["none"].frozen
    for kind, size in (("transformer", 16), ("ffn", 6)):
        abstract_model = runs[kind].abstract_model
        layer = {n for n in abstract_model.paths if n.startswith(FROZEN_LAYER)}
        assert layer == set(abstract_model.frozen) == set(abstract_model.seed_initialised)
        assert len(layer) == size
    assert set(runs["transformer"].abstract_model.paths) == set(runs["none"].abstract_model.paths)


def test_gmlp_reservoir_mixes_positions_and_ignores_padding(make_config):
    config = make_config("gmlp", max_length=6).model
    validate(config)
    abstract_model = helpers.structure_of(config)
    assert {n for n in abstract_model.paths if n.startswith(FROZEN_LAYER)} == set(
        abstract_model.frozen
    )
    frozen = freezing.draw_frozen(abstract_model, 1)
    weight = frozen[FROZEN_LAYER + "residuals/0/function/spatial/weight"]
    assert weight.shape == (1, 6, 6) and 0.5 < np.linalg.norm(weight) / 6**0.5 < 1.5
    block = abstract_model.build(
        helpers.random_values(abstract_model.trainable, 0), frozen
    ).encoder.blocks[1]
    x = np.random.default_rng(0).standard_normal((1, 6, 16)).astype(np.float32)
    lengths = np.array([4])
    call = jax.jit(lambda x: block(x, Context(lengths_B=lengths)))
    found = call(x)[0, :4]
    for position, seen in ((3, True), (5, False)):
        changed = x.copy()
        changed[0, position, 0] += 1
        other = call(changed)[0, 0]
        assert np.allclose(other, found[0]) == (not seen)


def test_ffn_reservoir_is_a_residual_feed_forward_without_attention(runs):
    run = runs["ffn"]
    assert set(run.frozen) == {
        FROZEN_LAYER + "residuals/0/" + name
        for name in (
            "norm/scale",
            "norm/bias",
            "function/up/kernel",
            "function/up/bias",
            "function/down/kernel",
            "function/down/bias",
        )
    }
    block = run.abstract_model.build(run.trainable, run.frozen).encoder.blocks[1]
    x = np.random.default_rng(0).standard_normal((5, 16)).astype(np.float32)
    weights = helpers.below(run.frozen, FROZEN_LAYER + "residuals/0")
    norm, function = (helpers.below(weights, name) for name in ("norm", "function"))
    expected = helpers.feed_forward(function, helpers.layer_norm(norm, x)) + x
    np.testing.assert_allclose(block(x[None], Context())[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["transformer", "ffn"])
def test_reservoirs_are_orthogonal_with_pytorch_biases(runs, kind: str):
    run = runs[kind]
    for name, value in freezing.draw_frozen(run.abstract_model, 3).items():
        if name.endswith("kernel"):
            tall = value if value.shape[0] >= value.shape[1] else value.T
            np.testing.assert_allclose(tall.T @ tall, np.eye(tall.shape[1]), atol=1e-6)
        elif "norm" in name:
            np.testing.assert_array_equal(value, float(name.endswith("scale")))
        else:
            bound = (24 if "down" in name else 16) ** -0.5
            assert 0.5 * bound < np.abs(value).max() <= bound


def test_reservoir_dropout(make_config):
    for on, expected in ((True, [0.2, 0.2, 0.2]), (False, [0.2, 0.0, 0.2])):
        abstract_model = helpers.structure_of(
            make_config("ffn", dropout=0.2, reservoir_dropout=on).model
        )
        model = abstract_model.build(dict(abstract_model.trainable), dict(abstract_model.frozen))
        assert [block.residuals[0].dropout_rate for block in model.encoder.blocks] == expected


def test_attention_dropout(make_config):
    """Dropout applies to all attention in training. `reservoir_dropout` turns dropout in reservoirs on or off."""
    for on, quiet in ((True, 0.1), (False, 0.0)):
        fields = {"dropout": 0.0, "attention_dropout": 0.1, "reservoir_dropout": on}
        abstract_model = helpers.structure_of(make_config("transformer", **fields).model)
        values = helpers.random_values(abstract_model.trainable, 0)
        model = abstract_model.build(values, freezing.draw_frozen(abstract_model, 1))
        rates = [
            [r.function.dropout_rate for r in block.residuals[:-1]]
            for block in (*model.encoder.blocks, *model.decoder.blocks)
        ]
        assert rates == [[0.1], [quiet], [0.1], [0.1, 0.1], [0.1, 0.1]]
    block, cross = model.encoder.blocks[0], model.decoder.blocks[0].residuals[1].function
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 6, 16)), jnp.float32)
    context = Context(encoded_BSD=x, encoded_lengths_B=jnp.array([6]))
    for call in (block, cross):
        still, *drawn = (
            call(x, context, key) for key in (None, *jax.random.split(jax.random.key(0)))
        )
        assert not np.allclose(still, drawn[0]) and not np.allclose(*drawn)
    plain = helpers.structure_of(make_config("transformer", attention_dropout=0.0).model)
    assert plain.paths.keys() == abstract_model.paths.keys()


# Training.


def test_gradients_pass_through_a_reservoir_and_stop_at_its_weights(runs):
    """Freezing a layer changes neither the loss nor the gradients of other layers."""
    plain, frozen = runs["none"], runs["transformer"]
    assert set(frozen.gradients) == set(frozen.trainable)
    assert not set(frozen.gradients) & set(frozen.frozen)
    np.testing.assert_allclose(frozen.loss, plain.loss, rtol=1e-6)
    for name, gradient in frozen.gradients.items():
        np.testing.assert_allclose(gradient, plain.gradients[name], rtol=1e-4, atol=1e-5)
    for run in (frozen, runs["ffn"]):
        below = [n for n in run.gradients if n.startswith("encoder/blocks/0/") and "kernel" in n]
        assert len(below) == 6
        assert all(np.abs(run.gradients[name]).max() > 1e-4 for name in below)


def saving(kind: str) -> int:
    """Returns by how many FLOPs a training step is cheaper if layer 1 is a reservoir instead of a trained layer."""
    (batch, length), d, f, heads = SOURCE.shape, 16, 24, 2
    tokens = batch * length
    weight_gradients = 2 * tokens * (4 * d * d + 2 * d * f)
    if kind == "transformer":
        return weight_gradients
    # An FFN reservoir also has no attention. Each of the four projections counts twice: the forward pass and the input
    # gradient. Scores and weighted sum count three times: once forward and twice backward.
    projections = 2 * 2 * tokens * 4 * d * d
    scores = 3 * 2 * 2 * batch * heads * length * length * (d // heads)
    return weight_gradients + projections + scores


@pytest.mark.parametrize("kind", ["transformer", "ffn"])
def test_reservoir_saves_exactly_its_weight_gradient_flops(runs, kind: str):
    assert runs["none"].counted - runs[kind].counted == saving(kind)
    # XLA also counts elementwise operations, so its difference is not exactly equal.
    assert runs["none"].compiled - runs[kind].compiled >= 0.95 * saving(kind)


def test_optimizer_leaves_reservoirs_unchanged(runs, make_config):
    """Reservoirs are unchanged to the bit, in spite of weight decay and dropout, and have no optimizer moments."""
    run = runs["ffn"]
    config = make_config("ffn")
    config.optimizer.weight_decay = 0.1
    config.optimizer.schedule = "constant"
    config.optimizer.warmup_steps = 0
    update, schedule = optimizer.make(config.optimizer, 3)
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    step = Step(
        SimpleNamespace(loss_at=lambda number: loss_of),
        run.abstract_model,
        update,
        schedule,
        mesh,
        seed=0,
    )
    frozen = place(run.frozen, shardings(run.abstract_model.frozen, mesh))
    trainable = place(
        {name: np.asarray(value) for name, value in run.trainable.items()},
        shardings(run.abstract_model.trainable, mesh),
    )
    state = TrainState(0, trainable, jax.jit(update.init)(trainable))
    batch = {"source": jnp.asarray(SOURCE), "target": jnp.asarray(TARGET)}
    step.compile(batch)
    losses = []
    for _ in range(3):
        metrics = step(state, frozen, batch)
        losses.append(float(metrics["loss"]))

    trainable = state.params
    assert losses[-1] < losses[0]
    assert set(trainable) == set(run.trainable)
    assert all(np.any(value != run.trainable[name]) for name, value in trainable.items())
    for name, value in frozen.items():
        np.testing.assert_array_equal(value, run.frozen[name])
    leaves, _ = jax.tree.flatten_with_path(state.opt_state)
    moments = [
        entry.key
        for path, _ in leaves
        for entry in path
        if isinstance(entry, jax.tree_util.DictKey)
    ]
    assert sorted(moments) == sorted(2 * list(run.trainable))
