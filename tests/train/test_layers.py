"""Scanned layers: a step with stacked arrays trains like a step with an array for each layer."""

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict

from common import variables
from common.freezing import freeze
from common.model import transformer
from common.model.block import Context
from common.model.layers import (
    is_stacked,
    layers_of,
    scan_layers,
    stack_layers,
    unstack_layers,
)
from common.model.linear import Linear
from common.model.low_rank import Lora, adapt
from common.model.scan import interleaved, runs, stacked_name
from common.sharding import make_mesh, place, shardings
from common.track.tracker import read_metrics
from common.train.checkpoint import Checkpoints
from common.train.prefetch import put
from common.train.state import Step
from common.train.task import Task
from launch.collectives import read_collectives
from reservoir.attention_blocks import decoder_block, encoder_block
from tests.train import toy

MODEL = ConfigDict(
    {"width": 8, "hidden": 16, "heads": 2, "norm": "pre", "activation": "relu", "dropout": 0.3}
)
BATCH = {"x": np.random.default_rng(0).standard_normal((4, 3, 8)).astype(np.float32)}


class Deep(toy.Toy):
    """The toy task with a stack of encoder blocks.

    Args:
      layers: for each block, "L" for a trained block, or "R" for a frozen feed-forward block.
      remat, skip_rate: arguments of the stack.
      adapters: whether each block has LoRA adapters.
      cross: whether all blocks, including frozen blocks, are decoder blocks, which attend to a trained linear map of x.
      twice: whether the loss calls the stack twice.
    """

    def __init__(
        self,
        layers: str = "LLRLRL",
        remat: str = "none",
        skip_rate: float = 0.0,
        adapters: bool = False,
        cross: bool = False,
        twice: bool = False,
    ):
        super().__init__()
        self.layers, self.adapters, self.skip_rate, self.cross = layers, adapters, skip_rate, cross
        self.twice = twice
        self.model = ConfigDict({**MODEL, "remat": remat})

    def build(self, rngs):
        return Wrapped(self, rngs)

    def loss(self, model, batch, key):
        x_BLD = batch["x"] + jnp.zeros((len(batch["x"]), 3, 8))
        lengths_B = jnp.full(len(x_BLD), 2)
        context = Context(lengths_B=lengths_B)
        if self.cross:
            context = Context(encoded_BSD=model.encode(x_BLD), encoded_lengths_B=lengths_B)
        y_BLD = model.stack(x_BLD, context, key)
        if self.twice:
            y_BLD += model.stack(x_BLD + 1, context, key)
        return jnp.square(y_BLD - x_BLD[..., ::-1]).sum(), jnp.float32(x_BLD.size)

    def batches(self, start):
        for batch, state in super().batches(start):
            yield {"x": batch["x"][:, :1, None] * np.ones((8, 3, 8), np.float32)}, state

    def evaluate(self, values, split):
        model = values.abstract_model.build(values.trainable, values.frozen)
        return {"error": float(jax.jit(lambda: self.loss(model, BATCH, None)[0])())}


class Wrapped(nnx.Module):
    def __init__(self, task: Deep, rngs: nnx.Rngs):
        blocks = []
        for letter in task.layers:
            if task.cross:
                block = decoder_block(task.model, rngs=rngs)
                if letter == "R":
                    freeze(block)
            elif letter == "L":
                block = encoder_block(task.model, rngs=rngs)
            else:
                feed_forward = transformer.feed_forward(task.model, rngs=rngs)
                block = transformer.make_block(task.model, [feed_forward], rngs=rngs)
                freeze(block)
            blocks.append(block)
        self.stack = transformer.stack(task.model, blocks, rngs=rngs, skip_rate=task.skip_rate)
        if task.cross:
            self.encode = Linear(8, 8, ("embed", "mlp"), rngs=rngs)
        if task.adapters:
            adapt(self, ("query", "down"), Lora(rank=2, rate=0.3), rngs=rngs)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("LLLL", (((0, 1, 2, 3),),)),
        ("RLRLRL", (((0, 2, 4), (1, 3, 5)),)),
        ("LLLRLRLRLLL", (((0, 1, 2),), ((3, 5, 7), (4, 6, 8)), ((9, 10),))),
        ("ABC", (((0,),), ((1,),), ((2,),))),
    ],
)
def test_runs_find_repeating_blocks(kinds: str, expected: tuple) -> None:
    assert runs(kinds) == expected


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("LLLRLRL", ((0, 1, 2, 4, 6), (3, 5))),
        ("LLRRLL", ((0, 1, 4, 5), (2, 3))),
        ("RRLLLL", None),  # not needed: `runs` gives RR and LLLL, which are compiled once each
        ("RLRLRL", None),
        ("LLRLLR", None),  # the last block is frozen
        ("LLRLSL", None),  # two kinds of frozen blocks
        ("LLRLMM", None),  # two kinds of trained blocks
        ("LLLL", None),
    ],
)
def test_interleaved_finds_frozen_blocks_between_trained_blocks(
    kinds: str, expected: tuple | None
) -> None:
    assert interleaved(kinds, [kind in "RS" for kind in kinds]) == expected


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([2, 4, 6], "[2,4,6]"),
        ([5], "[5]"),
        ([0, 1, 12], "[0,1,12]"),
    ],
)
def test_names_of_stacked_layers(layers: list[int], expected: str) -> None:
    assert stacked_name(layers) == expected
    assert layers_of(f"blocks/{expected}/a") == [f"blocks/{layer}/a" for layer in layers]


def test_names_of_stacked_arrays() -> None:
    names = ["encoder/blocks/2/a/0", "encoder/blocks/4/a/0", "encoder/blocks/6/a/0"]
    assert layers_of("encoder/blocks/[2,4,6]/a/0") == names
    assert layers_of("encoder/norm/scale") == ["encoder/norm/scale"]


def test_shallow_and_irregular_stacks_are_not_scanned() -> None:
    def scanned(layers: str, least: int) -> bool:
        model = variables.abstract(Deep(layers).build)
        return any(map(is_stacked, scan_layers(model, least).paths))

    assert scanned("LLLL", 4) and not scanned("LLLL", 5) and not scanned("LLLL", 0)
    assert scanned("RLRL", 4) and not scanned("RL", 2)


def test_residuals_of_frozen_blocks_have_a_slot_for_each_frozen_block() -> None:
    """The step stores residuals of the 2 frozen blocks in arrays of length 2.

    Automatic differentiation of the scan over 7 trained blocks would store arrays of length 7, with unused slots.
    """
    config = toy.config(train__scan_layers=4)
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    with jax.set_mesh(mesh):
        step = Step.of(config, Deep("LLLLLRLRL"), mesh)
        text = step.lower(step.task.loss, put(BATCH, mesh))[0].as_text()
    # Residuals of the activation function: the shape (4, 3, 16) of a hidden layer, for 7 trained and 2 frozen blocks.
    assert "tensor<7x4x3x16x" in text and "tensor<2x4x3x16x" in text


def train(
    task: Task,
    least: int,
    sizes: dict[str, int] | None = None,
    optimizer: str = "adamw",
    accumulate: int = 1,
    batch: Mapping[str, np.ndarray] = BATCH,
) -> tuple:
    """Trains three steps, and asserts that the final values have the shardings of an unrolled step.

    Args:
      least: the configuration's `train.scan_layers`.
      sizes: sizes of mesh axes.
      optimizer, accumulate: the configuration's `optimizer.name` and `train.accumulate`.

    Returns:
      Losses and gradient norms, FLOPs of a step, names of the step's parameters, and (parameters, optimizer state,
      frozen values) with an array for each layer.
    """
    options = {"optimizer__name": optimizer, "train__accumulate": accumulate}
    config = toy.config(train__scan_layers=least, optimizer__clip=0.5, **options)
    # Biases of keys have gradients that are 0 up to rounding, which Adam with a small epsilon would amplify.
    config.optimizer.epsilon, config.optimizer.weight_decay = 1e-2, 0.1
    sizes = {"data": 1, **(sizes or {})}
    mesh = make_mesh(sizes, jax.devices()[: int(np.prod([*sizes.values()]))])
    with jax.set_mesh(mesh):
        step = Step.of(config, task, mesh)
        state, model = step.start(), step.abstract_model
        generator = np.random.default_rng(0)
        frozen = {
            name: generator.integers(np.iinfo(v.dtype).max, size=v.shape, dtype=v.dtype)
            if np.issubdtype(v.dtype, np.integer)  # codes of a quantized kernel
            else generator.normal(0, 0.3, v.shape).astype(np.float32)
            for name, v in model.frozen.items()
        }
        frozen = place(frozen, shardings(model.frozen, mesh))
        frozen = stack_layers(frozen, step.scanned.frozen)
        batch, numbers = put(batch, mesh), []
        step.compile(batch)
        for _ in range(3):
            metrics = step(state, frozen, batch)
            numbers += [float(metrics["loss"]), float(metrics["gradient_norm"])]
        values = unstack_layers((state.params, state.opt_state, frozen))
        expected = jax.tree.map(lambda x: x.sharding, step.arguments(model))
        assert jax.tree.all(
            jax.tree.map(lambda x, to: x.sharding.is_equivalent_to(to, x.ndim), values, expected)
        )
    return numbers, step.compiled[step.cache_key(batch, 0)].flops, list(state.params), values


def assert_trains_alike(task: Task, least: int, **options: Any) -> tuple[float, float, list[str]]:
    """Compares three steps with `train.scan_layers=least` with three unrolled steps. `train` documents the options.

    Returns FLOPs of an unrolled and of a scanned step, and names of the parameters of the scanned step.
    """
    (numbers, flops, _, values), (scanned_numbers, scanned_flops, names, scanned_values) = (
        train(task, least, **options) for least in (0, least)
    )
    assert scanned_numbers == pytest.approx(numbers, rel=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5), scanned_values, values)
    return flops, scanned_flops, names


@pytest.mark.parametrize(
    ("task", "options"),
    [
        pytest.param(
            Deep(remat="full", skip_rate=0.5), {"optimizer": "adam"}, marks=pytest.mark.medium
        ),
        pytest.param(
            Deep(remat="dots", adapters=True), {"optimizer": "adagrad"}, marks=pytest.mark.medium
        ),
        pytest.param(
            Deep("LLLLRL"),
            {"optimizer": "adafactor", "sizes": {"fsdp": 2}},
            marks=pytest.mark.medium,
        ),
        pytest.param(Deep("LLRRLRL", cross=True), {}, marks=pytest.mark.medium),
        pytest.param(Deep(), {"sizes": {"data": 2, "tensor": 2}}, marks=pytest.mark.medium),
        pytest.param(Deep("LLRRLRL"), {"sizes": {"fsdp": 2}}, marks=pytest.mark.medium),
        pytest.param(
            Deep("LLLLRL", twice=True),
            {"sizes": {"data": 2, "fsdp": 2}},
            marks=pytest.mark.medium,
        ),
        pytest.param(Deep(), {"sizes": {"fsdp": 2}, "accumulate": 2}, marks=pytest.mark.medium),
        pytest.param(
            Deep(remat="full", skip_rate=0.5),
            {"sizes": {"fsdp": 2, "tensor": 2}},
            marks=pytest.mark.medium,
        ),
    ],
)
def test_scanned_step_equals_the_unrolled_step(task: Deep, options: dict) -> None:
    """With dropout, losses, gradient norms, parameters, moments, shardings and (without adapters) FLOPs are equal."""
    flops, scanned_flops, names = assert_trains_alike(task, 4, **options)
    assert any(map(is_stacked, names))
    # With adapters, the unrolled step needs no gradient at the input of the first block.
    assert flops == scanned_flops or task.adapters


@pytest.mark.filterwarnings("error:Variable hooks")
@pytest.mark.medium
@pytest.mark.parametrize("accumulate", [1, 2])
def test_scans_gather_one_layer_at_a_time(accumulate: int) -> None:
    """With fsdp, a scanned step gathers the same arrays as an unrolled step, and never an array with all layers."""
    mesh = make_mesh({"data": 1, "fsdp": 2}, jax.devices()[:2])

    def of(least: int) -> tuple[dict[str, int], set[str]]:
        """Returns {kind of collective: bytes received by each device}, and the shapes of gathered arrays."""
        config = toy.config(train__scan_layers=least, train__accumulate=accumulate)
        with jax.set_mesh(mesh):
            step = Step.of(config, Deep("LLLRLLRL"), mesh)
            text = step.lower(step.task.loss, put(BATCH, mesh))[0].compile().as_text()
        found = read_collectives(text, mesh.size)
        assert not found.unknown_loops
        shapes = set(re.findall(r"= \w+\[([\d,]+)\]\S* all-gather", text))
        return {row.kind: row.received for row in found.rows}, shapes

    (received, shapes), (scanned, scanned_shapes) = of(0), of(4)
    assert scanned.keys() == received.keys() == {"all-gather", "reduce-scatter", "all-reduce"}
    assert scanned_shapes == shapes
    assert scanned["reduce-scatter"] == received["reduce-scatter"]
    assert scanned["all-reduce"] <= received["all-reduce"]
    # Without scans, the compiler gathers each parameter before the loop over microbatches.
    assert scanned["all-gather"] == accumulate * received["all-gather"]


@pytest.mark.medium
def test_scanned_and_unrolled_runs_resume_each_other(tmp_path: Path) -> None:
    """A resumed scanned run is bit-exact. The layout of checkpoints does not depend on `train.scan_layers`."""

    def fit(name: str, *sessions: tuple[int, int]) -> list[float]:
        for steps, least in sessions:
            toy.run(tmp_path / name, Deep(), train__steps=steps, train__scan_layers=least)
        rows = read_metrics(tmp_path / name)
        return [row["train/loss"] for row in rows if "train/loss" in row]

    expected = fit("whole", (6, 4))
    assert fit("resumed", (3, 4), (6, 4)) == expected
    assert fit("mixed", (2, 4), (4, 0), (6, 4)) == pytest.approx(expected, rel=1e-4)


def test_best_checkpoint_has_the_only_copy_of_stacked_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory has one copy of stacked values while the best checkpoint is saved.

    Evaluation and checkpoint each copy the stacked arrays into one array for each layer. The copy of the evaluation is
    freed before the copy of the checkpoint is made.
    """
    copied: dict[str, int] = {}

    def live() -> int:
        return sum(x.nbytes for x in jax.live_arrays())

    class Measured(Deep):
        def evaluate(self, values, split):
            copied.setdefault("evaluation", live())
            copied.setdefault("parameters", sum(x.nbytes for x in values.trainable.values()))
            return {"error": 0.0}

    save_as = Checkpoints.save_as

    def measured(self, kind, *arguments):
        if kind == "best":
            copied.setdefault("checkpoint", live())
        else:
            save_as(self, kind, *arguments)

    monkeypatch.setattr(Checkpoints, "save_as", measured)
    toy.run(tmp_path, Measured(), train__steps=5, train__scan_layers=4, eval__test=False)
    assert copied["checkpoint"] < copied["evaluation"] + copied["parameters"] / 2
