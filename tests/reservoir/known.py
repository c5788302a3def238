"""An experiment suite with made-up results instead of trained runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ml_collections import ConfigDict

from common.config import to_json
from reservoir import finetuning, run
from reservoir.experiments import ExperimentSuite

NAMES = {"translation": "bleu", "masked_lm": "perplexity", "classification": "accuracy"}


@dataclass(frozen=True)
class Known(ExperimentSuite):
    """A suite with made-up runs. A translation run has its best BLEU, 30 + seed, at step 200.

    `_made` has the results of runs of other tasks.

    Attributes:
      asked: configurations of all requested runs.
      timing: value of `timing.kind` in the summaries.
    """

    asked: list[ConfigDict] = field(default_factory=list)
    timing: str = "turns"

    def train(self, asked: Mapping[str, ConfigDict]) -> dict[str, dict]:
        return {name: self._made(name, config) for name, config in asked.items()}

    def _made(self, run_name: str, config: ConfigDict) -> dict:
        classifies = config.task == "classification"
        (finetuning if classifies else run).validate(config)
        self.asked.append(config)
        lower = config.task not in ("translation", "classification")
        plain = "transformer_seed" in run_name if classifies else config.model.reservoir == "none"
        seconds = 50.0 if plain else 40.0
        best = (
            30.0 + config.seed + (20 if classifies else 0) + (5 if classifies and not plain else 0)
        )
        values = (200 - best, 100 - best, 101 - best) if lower else (best / 2, best, best - 1)
        name = NAMES.get(config.task, "bits_per_byte")
        points = [
            {"step": 100 * n, "seconds": n * seconds, "flops": 1e9 * n, "value": value}
            for n, value in enumerate(values, 1)
        ]
        curve = {"name": name, "mode": "min" if lower else "max", "points": points}
        return {
            "curve": curve,
            "config": to_json(config),
            "params": {"trainable": 2_000_000, "frozen": 500_000, "total": 2_500_000},
            "seed": config.seed,
            "test": {name: best},
            "timing": {"kind": self.timing, "sessions": [f"turns {config.seed}"]},
            **{"best_valid": min(values) if lower else best, "steps": 300, "flops": 3e9},
            "train_seconds": 3 * seconds,
            "epochs": 6.0,
            "seconds_to": {"95": 2 * seconds, "99": 2 * seconds, "100": 2 * seconds},
        }
