"""benchmarks.accelerator: FLOPs of a step, the written page, and cases that fail."""

import os
import re
import sys
from functools import partial

import jax
import pytest

from benchmarks import accelerator, ours
from benchmarks.accelerator import Case, markdown, measure


def make(end: str = "") -> Case:
    """Returns a case that works or, for end="exit", a case whose first timed call ends the process.

    For end="raise", raises a ValueError instead of returning a case.
    """
    if end == "raise":
        raise ValueError("first line\nsecond line")
    calls = []

    def run() -> None:
        calls.append(1)
        if end == "exit" and len(calls) > accelerator.WARMUP:
            os._exit(1)

    return run, lambda: {"flops": 7}


@pytest.mark.medium
def test_failing_case_does_not_stop_the_other_cases(capsys):
    rows = {
        "a": {"a, ours": make, "a, PyTorch": partial(make, "raise")},
        "b": {"b, ours": make, "b, PyTorch": partial(make, "exit")},
        "c": {"c, ours": make},
    }
    timings, notes = measure(rows, rounds=2)
    assert timings.keys() == {"a, ours", "c, ours"} and len(timings["c, ours"]) == 2
    assert notes["a, ours"] == notes["c, ours"] == {"flops": 7}
    lines = capsys.readouterr().err.splitlines()
    assert "a, PyTorch: ValueError: first line" in lines
    assert "b, ours: a process of b ended" in lines


def record(**cases: float) -> dict:
    """Returns made-up measurements of one row of the table, "gpt".

    `cases` maps the name of a case to the seconds of a call of 10 steps.
    """
    row = {"batch": 64, "length": 768, "steps": 10, "flops": 2e12, "product": 1e13}
    return {
        "title": "10 training steps in a call",
        "machine": {"cores": 16, "commit": "c", "versions": {"jax": "1", "torch": "2"}},
        "device": "GPU",
        "cases": {f"gpt, {case}": {"seconds": [x, x, x]} for case, x in cases.items()},
        "rows": {"gpt": row | {"peak_bytes": [2**30, None, None]}},
    }


def page_of(**cases: float) -> str:
    """Returns the Markdown page of the measurements `record(**cases)`, without the spaces that align the table."""
    return re.sub(" +", " ", markdown(record(**cases)))


def test_page_has_ratios_and_mfu_of_the_best_case():
    page = page_of(ours=0.4, PyTorch=1.0, **{"torch.compile": 0.8})
    assert page.splitlines()[-1].endswith(
        "| 64 x 768 = 49,152 | 40.0 | 100.0 | 80.0 | 0.40 (0.40 to 0.40) | 0.50 (0.50 to 0.50) | 50% | 25% "
        "| 1.0, -, - |"
    )
    assert "10 to 10 TFLOP/s" in page


@pytest.mark.parametrize(
    ("cases", "cells"),
    [
        ({"ours": 0.4}, "| 40.0 | - | - | - | - | 50% | - |"),
        ({"PyTorch": 0.8}, "| - | 80.0 | - | - | - | - | 25% |"),
        ({}, "| - | - | - | - | - | - | - |"),
    ],
)
def test_page_shows_dashes_for_cases_that_failed(cases, cells):
    assert cells in page_of(**cases)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("family", "sizes"), [("bert", (2, 64, 128, 4, 50)), ("qwen2", (2, 64, 128, 4, 2, 50))]
)
@pytest.mark.parametrize("finetune", ["full", "lora"])
def test_counted_flops_equal_the_compiled_products(family, sizes, finetune):
    step = ours.classifier_step(family, sizes, finetune, "float32", 8, 16, 3, "adamw")
    products = sum(count * product.flops for product, count in step.products().items())
    # `products` has the matrix products of one device, `flops` the FLOPs of all devices.
    assert step.flops == pytest.approx(products * jax.device_count(), rel=0.02)


@pytest.mark.slow
def test_program_times_our_steps_without_torch(tmp_path, monkeypatch):
    out = tmp_path / "accelerator.json"
    small = ["--rows", "gpt", "--batch_factor=0.01", "--product=64", "--steps=2", "--rounds=1"]
    monkeypatch.setattr(sys, "argv", ["accelerator", *small, "--without_torch", f"--out={out}"])
    accelerator.main()
    (row,) = (line for line in out.with_suffix(".md").read_text().splitlines() if "gpt:" in line)
    assert "1 x 768 = 768" in row and "%" in row
