"""The summary that `reservoir.train` prints, and the names that reports give to the layers of fine-tuning runs."""

from pathlib import Path

import pytest

from reservoir.layers import layers_of
from reservoir.report import print_summary


@pytest.mark.parametrize(
    ("source", "config"),
    [("embedded:python", "configs/sst2.py:tiny"), ("files:data/books", "configs/sst2.py")],
)
def test_printed_fine_tuning_command_needs_no_more_data_than_the_run(source, config, capsys):
    summary = {
        "objective": "perplexity",
        "config": {"task": "masked_lm", "data": {"source": source}},
        "params": {"total": 12, "frozen": 2},
        "aucc": {"seconds": 1.0, "hours": 0.1},
        "seconds_to": dict.fromkeys(("95", "99", "100"), 1.0),
        "test": {"perplexity": 9.0},
        "best_valid": 9.0,
        "best_step": 1,
        "steps": 1,
        "train_seconds": 1.0,
        "tokens_per_second": 1.0,
        "unit": "masked tokens",
        "device": "1 x cpu",
    }
    print_summary(summary, Path("runs/mlm"))
    output = capsys.readouterr().out
    assert f"--config={config} --config.pretrained=runs/mlm\n" in output
    assert "1 masked tokens/s" in output
    # A user's task may have the same objective, but its models cannot be fine-tuned.
    summary["config"]["task"] = "my_package.tasks:Mine"
    print_summary(summary, Path("runs/mlm"))
    assert "fine-tune" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "tuning", "expected"),
    [
        ({"reservoir": "none"}, {"lora": {"rank": 8}}, "transformer, LoRA, 12 of 12"),
        ({"reservoir": "ffn", "reservoirs": 4}, {"lora": {"rank": 8}}, "FFN, LoRA, 12 of 12"),
        ({"reservoir": "ffn", "reservoirs": 4}, {"lora": {"rank": 0}}, "FFN, 4 of 12"),
        ({"reservoir": "ffn", "reservoirs": 4}, {"reservoirs": "tune"}, "FFN, tuned, 12 layers"),
        (
            {"reservoir": "ffn", "reservoir_trained": True},
            {"reservoirs": "freeze_now", "freeze_now": 3},
            "FFN, trained, frozen in fine-tuning, 3 of 12",
        ),
        (
            {"reservoir": "none"},
            {"reservoirs": "keep", "lora": {"rank": 0}},
            "transformer, 12 layers",
        ),
    ],
)
def test_layers_of_fine_tuning_runs(model, tuning, expected):
    """With LoRA, all layers count as frozen, because only adapters and the head are trained."""
    assert str(layers_of({"model": {"encoder_layers": 12, **model}, **tuning})) == expected
