"""Makes summaries and runs with made-up results, without training or files."""

from collections.abc import Sequence
from typing import Any

from common.report.runs import Run, run_of


def summary(
    values: Sequence[float],
    *,
    seed: int = 1,
    reservoir: str = "none",
    layers: int = 6,
    seconds: float = 1.0,
    metric: str = "bleu",
    mode: str = "max",
    test: float = 30.0,
    timing: dict | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """Returns the summary of a run with a validation for each of `values`.

    The validations are 10 steps, `seconds` seconds and 1e12 FLOPs apart. `fields` become the group `train` of the
    configuration.
    """
    points = [
        {"step": 10 * i, "seconds": seconds * i, "flops": 1e12 * i, "value": value}
        for i, value in enumerate(values, start=1)
    ]
    model = {"encoder_layers": layers, "reservoir": reservoir, "reservoirs": 2}
    config = {"seed": seed, "model": model, "data": {"cache_dir": f"cache{seed}"}, "train": fields}
    return {
        "test": {metric: test},
        "params": {"trainable": 10, "frozen": 2, "total": 12},
        "seed": seed,
        "commit": "0123456789",
        "device": "1 x cpu",
        "config": config,
        **({"timing": timing} if timing else {}),
        "curve": {"name": metric, "mode": mode, "points": points},
    }


def made(values: Sequence[float], name: str = "", **options: Any) -> Run:
    """Returns a run in memory with a made-up `summary`."""
    return run_of(summary(values, **options), name or f"run{options.get('seed', 1)}")
