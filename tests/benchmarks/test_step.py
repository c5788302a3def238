"""The table of `benchmarks.step`, the interval of a ratio, and steps and matrix products of `benchmarks.ours`."""

from collections import Counter

import numpy as np
import pytest

from benchmarks import ours, step
from benchmarks.harness import interval
from launch.products import Product


def row(**cells: str) -> dict[str, str]:
    ratios = ("ours / PyTorch", "ours / products", "products / PyTorch")
    empty = {f"{name}{end}": "0.5" for name in ratios for end in ("", " low", " high")}
    machine = {"cpu": "A", "amx": "no", "cores": "2", "jax": "1", "torch": "2", "commit": "c"}
    rest = {
        "date": "2026-01-01",
        "load": "0",
        "products_ms": "1",
        "ours_ms": "1",
        "PyTorch_ms": "1",
    }
    return {"recipe": "gpt", "dtype": "float32"} | machine | rest | empty | cells


@pytest.mark.parametrize(
    ("torch", "products", "rates", "expected"),
    [
        ("0.9", "1.3", "0.7", "met"),
        ("1.1", "1.3", "0.8", "missed"),
        ("0.9", "1.5", "0.6", "missed"),
        ("1.4", "1.3", "1.1", "products only: met"),
        ("1.8", "1.5", "1.2", "products only: missed"),
    ],
)
def test_verdict_ignores_pytorch_if_products_are_slower(torch, products, rates, expected):
    cells = {"ours / PyTorch": torch, "ours / products": products, "products / PyTorch": rates}
    assert step.verdict(row(**cells)) == expected


def test_rows_of_the_same_machine_recipe_dtype_and_commit_are_replaced():
    old = [row(), row(commit="d"), row(cpu="B")]
    new = [row(ours_ms="9"), row(recipe="gmlp")]
    merged = step.merge(old, new)
    assert [(x["recipe"], x["cpu"], x["commit"], x["ours_ms"]) for x in merged] == [
        ("gmlp", "A", "c", "1"),
        ("gpt", "A", "c", "9"),
        ("gpt", "A", "d", "1"),
        ("gpt", "B", "c", "1"),
    ]


def test_page_has_every_machine():
    page = step.markdown([row(), row(cpu="B"), row(cpu="B", amx="yes")])
    assert (
        "Machine 2: 2 cores of B without AMX" in page and "Machine 3: 2 cores of B with AMX" in page
    )
    assert page.count("| gpt: ") == 3


def test_interval_of_the_median():
    assert interval((3.0, 1.0, 2.0, 6.0, 5.0, 4.0)) == (1.0, 6.0)
    # The interval leaves out one of nine ratios at each end, so it misses the median with probability 2 * 10 / 512 =
    # 3.9 %. If the interval left out two ratios at each end, this probability would be 2 * 46 / 512 = 18 %.
    assert interval(tuple(map(float, range(9)))) == (1.0, 7.0)


def test_products_run_with_their_axes_and_dtypes():
    product = Product(
        ("bf16", (2, 3, 4)), ("bf16", (2, 5, 4)), ("f32", (2, 3, 5)), ((2,), (2,)), ((0,), (0,))
    )
    ours.run_products(Counter({product: 2}))()


@pytest.mark.medium
@pytest.mark.parametrize(
    ("family", "sizes"), [("bert", (1, 16, 32, 2, 50)), ("qwen2", (1, 16, 32, 2, 1, 50))]
)
def test_step_of_a_classifier_with_adapters_runs_and_lists_its_products(family, sizes):
    step = ours.classifier_step(family, sizes, "lora", "float32", batch=8, length=8, classes=3)
    assert np.isfinite(step()) and step.memory > 0
    assert sum(count * product.flops for product, count in step.products().items()) > 0
