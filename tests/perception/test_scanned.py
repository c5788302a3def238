"""Scanned layers of pretrained language models: kinds of layers, ways of fine-tuning, and whole runs."""

from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from common import variables
from common.model.layers import is_stacked, layers_of, scan_layers
from common.model.low_rank import Lora, adapt
from common.track.tracker import read_metrics
from common.train.command import fit
from configs import perception as recipes
from perception import adapter_commands
from perception.backbones import Backbone, Relative, Stretch, bert, openelm, phi
from perception.finetuning import make_model
from perception.model import block
from perception.quantized import quantize_frozen
from perception.safetensor_files import TensorFiles
from perception.task import TextClassification
from tests.model.test_stored import D, assert_no_recomputation
from tests.perception.conftest import TUNED
from tests.perception.helpers import SHAPE, texts, write_small_bert
from tests.train.test_layers import assert_trains_alike

OPTIONS = {"vocabulary": 50, "longest": 16, "dropout": (0.3, 0.0, 0.3), "scaled_init": True}
DEBERTA = replace(
    bert(2, D, 24, 2),
    **OPTIONS,
    learned=0,
    types=0,
    relative=Relative("disentangled", buckets=8, farthest=10),
)
MPNET = replace(DEBERTA, relative=Relative("bias", buckets=8, farthest=10))
OPENELM = replace(openelm(4, D, 4, groups=2, divisor=8), **OPTIONS)
LOCAL = replace(
    phi(4, D, 24, 2),
    **OPTIONS,
    kv_heads=(1,) * 4,
    rotated=4,
    window=3,
    local=(True, False) * 2,
    local_theta=100.0,
    stretch=Stretch(factor=4.0, low=1.0, high=4.0, trained=8),
    fused=True,
    head_norm=True,
    gated=True,
    targets=("qkv", "down"),
)
"""Parallel sublayers as in phi, with the options of other decoders.

As in ModernBERT, some layers (here every second) have a window and other rotary frequencies.
"""


def task(shape: Backbone, mesh: Mesh, finetune: str, **fields: object) -> TextClassification:
    config = recipes.get_config("tiny")
    config.update_from_flattened_dict(
        {"finetune": finetune, "lora.rank": 2, "lora.dropout": 0.3, "data.max_length": 12, **fields}
    )
    return TextClassification(config, None, partial(make_model, config, shape), mesh, classes=3)


def batch() -> dict[str, np.ndarray]:
    """Returns four texts of different lengths. The third row is padding of the batch."""
    tokens_BL, lengths_B = texts(50, (12, 5, 1, 8))
    ids_B, labels_B = np.int32([3, 1, -1, 7]), np.int32([0, 1, 2, 1])
    return {"tokens": tokens_BL, "lengths": lengths_B, "ids": ids_B, "labels": labels_B}


def stacks(task: TextClassification, least: int) -> list[list[int]]:
    """Returns the groups of layers that share stacked arrays in a training step."""
    model = scan_layers(variables.abstract(task.build), least)
    layers = {
        tuple(int(layer.split("/blocks/")[1].split("/")[0]) for layer in layers_of(name))
        for name in model.paths
        if is_stacked(name)
    }
    return sorted(map(list, layers))


@pytest.mark.parametrize(
    ("shape", "targets", "expected"),
    [
        pytest.param(LOCAL, "", [[0, 2], [1, 3]], id="local and global layers"),
        pytest.param(
            replace(
                LOCAL,
                first_norm=False,
                heads=(4,) * 5,
                kv_heads=(2,) * 5,
                hidden=(24,) * 5,
                local=(False, True) * 2 + (False,),
            ),
            "",
            [[0], [1, 3], [2, 4]],
            id="first layer without norm",
        ),
        pytest.param(DEBERTA, "", [[0, 1]], id="shared relative positions"),
        pytest.param(DEBERTA, "blocks/1/residuals/1/function/up", [], id="one adapter"),
        pytest.param(OPENELM, "", [], id="layers of different widths"),
        pytest.param(
            replace(OPENELM, heads=(4,) * 4, kv_heads=(2,) * 4, hidden=(8, 8, 16, 16)),
            "",
            [[0, 1], [2, 3]],
            id="two widths",
        ),
    ],
)
def test_layers_of_equal_structure_are_stacked(
    shape: Backbone, targets: str, expected: list[list[int]], mesh: Mesh
) -> None:
    lora = task(shape, mesh, "lora", **{"lora.targets": targets, "quantize": "4bit"})
    assert stacks(lora, 2) == expected


@pytest.mark.medium
@pytest.mark.parametrize(
    ("shape", "finetune", "fields", "sizes"),
    [
        pytest.param(DEBERTA, "full", {}, {"fsdp": 2}, id="deberta"),
        pytest.param(LOCAL, "lora", {"quantize": "4bit", "lora.targets": "qkv"}, {}, id="local"),
        pytest.param(MPNET, "head", {"quantize": "int8"}, {}, id="mpnet"),
    ],
)
def test_scanned_step_equals_the_unrolled_step(
    shape: Backbone, finetune: str, fields: dict, sizes: dict, mesh: Mesh
) -> None:
    """The cases have relative and rotary positions and windows, and train all weights, adapters or the head alone."""
    made = task(shape, mesh, finetune, **fields)
    assert stacks(made, 2)
    assert_trains_alike(made, 2, sizes=sizes, optimizer="adafactor", batch=batch())


@pytest.mark.parametrize(
    ("shape", "targets", "kind"),
    [
        pytest.param(DEBERTA, (), "", id="deberta"),
        pytest.param(DEBERTA, ("query", "down"), "int8", id="deberta, int8"),
        pytest.param(LOCAL, ("qkv", "down"), "4bit", id="local"),
    ],
)
def test_backward_pass_recomputes_no_products_or_random_bits(
    shape: Backbone, targets: tuple[str, ...], kind: str
) -> None:
    layer = block(shape, 0, rngs=nnx.Rngs(0))
    if targets:
        adapt(layer, targets, Lora(rank=2, rate=0.3), rngs=nnx.Rngs(1))
        quantize_frozen(layer, kind)
    assert_no_recomputation(layer)


@pytest.mark.medium
def test_scanned_run_resumes_an_unrolled_run(make, mesh: Mesh, tmp_path: Path) -> None:
    """Scanned and unrolled layers share pretrained weights, checkpoints of Adafactor, evaluation and export."""
    deep = replace(SHAPE, heads=(2, 2), kv_heads=(2, 2), hidden=(24, 24))
    fields = {**TUNED, "pretrained": str(write_small_bert(tmp_path / "deep", shape=deep))}
    # A smaller epsilon would amplify rounding errors of gradients that are 0.
    fields |= {"optimizer.epsilon": 1e-6, "model.dropout": 0.0}

    def trained(name: str, *sessions: tuple[int, int]) -> tuple[list[float], TensorFiles]:
        """Returns the losses of all training steps and of the test, and the exported weights."""
        for steps, least in sessions:
            config = make(**fields, **{"train.steps": steps, "train.scan_layers": least})
            summary = fit(config, tmp_path / name, mesh)
        rows, out = read_metrics(tmp_path / name), tmp_path / f"{name}_exported"
        given = {"run": tmp_path / name, "pretrained": None, "out": out, "mesh": mesh}
        adapter_commands.export(Namespace(**given))
        losses = [row["train/loss"] for row in rows if "train/loss" in row]
        return [*losses, summary["test"]["loss"]], TensorFiles(out)

    (losses, files), (mixed_losses, mixed_files) = (
        trained("whole", (4, 2)),
        trained("mixed", (2, 0), (4, 2)),
    )
    assert mixed_losses == pytest.approx(losses, rel=1e-4)
    for name in files.names:
        np.testing.assert_allclose(mixed_files.read(name, ()), files.read(name, ()), atol=1e-4)
