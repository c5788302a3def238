"""benchmarks.worth compares perception.worth with a script that uses transformers and peft."""

import ast
import json
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import harness, worth
from common.errors import UserError
from common.metrics.classes import Classes
from common.metrics.curve import Curve, Point
from common.metrics.predictions import PREDICTIONS
from common.report.runs import Run

OPTIONS = Namespace(
    data=Path("data/rotten_tomatoes"),
    pretrained=Path("MINILM"),
    ways=["lora", "head"],
    steps=600,
    batch=16,
    length=64,
    runs=Path("runs/x"),
)
LABELS_E = np.array([0, 1, 0, 1])


def test_lines_of_code_leave_out_blank_lines_comments_and_docstrings() -> None:
    script = '"""Two\nlines."""\n\nimport os  # counted\n\ndef f():\n    """One."""\n    # no\n'
    script += '    return """a\nb"""\n'
    assert worth.lines_of_code(script) == 4


def test_both_programs_get_the_same_settings() -> None:
    ours, peer = " ".join(worth.our_command(OPTIONS, 1)), worth.peer_command(OPTIONS, 1)
    for of_ours, of_peer in {
        "train.steps=600": "max_steps=600",
        "eval.steps=200": "eval_steps=200",
        "data.batch=16": "per_device_train_batch_size=16",
        "data.max_length=64": "length=64",
        "pretrained=MINILM": "model=MINILM",
    }.items():
        assert f"--config.{of_ours} " in ours and f"--{of_peer}" in peer
    (line,) = (x for x in worth.SCRIPT.read_text().splitlines() if x.startswith("RATES = "))
    assert ast.literal_eval(line.removeprefix("RATES = ")) == worth.RATES
    assert "--config.learning_rates.lora=0.001 " in ours


def test_later_rounds_only_train_another_seed() -> None:
    first, second = (worth.peer_command(OPTIONS, seed) for seed in (1, 2))
    assert first[2:6] == ["--ways", "lora", "head", "tf_idf"] and "--seed=1" in first
    assert second[2:5] == ["--ways", "lora", f"--data={OPTIONS.data}"] and "--seed=2" in second
    assert "--seeds=2" in worth.our_command(OPTIONS, 2)


def our_run(folder: Path, seed: int) -> Run:
    """Writes and returns a run whose classifier is wrong in the third of four test examples."""
    logs_EC = np.log(np.eye(2)[[0, 1, 1, 1]] * 0.8 + 0.1)
    folder.mkdir(parents=True)
    made = Classes.of_log_probabilities("test", LABELS_E, logs_EC, ("bad", "good"))
    made.save(folder / PREDICTIONS)
    curve = Curve("weighted_f1", "max", [Point(1, 1.0, 1.0, 50.0)])
    summary = {"config": {}, "test": made.metrics(), "params": {"trainable": 1, "total": 2}}
    summary |= {"seed": seed, "curve": curve.to_json()}
    (folder / "summary.json").write_text(json.dumps(summary))
    return Run(folder.name, summary, curve, folder)


def write_peer(folder: Path, seed: int) -> None:
    """Writes the result file of the transformers script, for a classifier that is right in all four examples."""
    logs = np.log(np.eye(2)[LABELS_E] * 0.8 + 0.1).tolist()
    (folder / f"lora_seed{seed}.json").write_text(json.dumps({"valid": 60.0, "logs": logs}))


def test_results_of_the_script_are_compared_on_the_same_test_examples(tmp_path) -> None:
    ours = [our_run(tmp_path / f"ours{seed}", seed) for seed in (1, 2, 3)]
    for seed in (1, 2, 3):
        write_peer(tmp_path, seed)
    found = worth.peer_runs(tmp_path, {"lora": ours})
    assert [run.seed for run in found["lora"]] == [1, 2, 3]
    compared = worth.verdicts({"lora": ours}, found)
    rows = worth.table_rows([20, 25], {"seconds": [[1.0, 4.0], [2.0, 2.0]]}, compared)
    assert rows[1] == ("words of the command", "20", "25", "", "", "")
    assert rows[2] == ("seconds", "1 4", "2 2", "x 0.50 x 2.00", "", "")
    # F1 of "bad": 2/3, of "good": 4/5.
    name, mine, theirs, difference, interval, _ = rows[3]
    assert (name, mine, theirs) == ("test weighted F1, lora", "73.3 ± 0.0", "100.0 ± 0.0")
    assert difference == "-26.7" and " to " in interval


def test_programs_run_in_turns_and_one_seed_is_undecided(tmp_path, monkeypatch) -> None:
    ran = []

    def fake(command: list[str], log: Path) -> float:
        ran.append(log.stem)
        seed = ran.count(log.stem)
        if log.stem == "ours":
            our_run(log.parent / f"ours/runs/lora_seed{seed}", seed)
        else:
            write_peer(log.parent / "peer", seed)
        return 2.0 if log.stem == "ours" else 4.0

    monkeypatch.setattr(worth, "cpu_seconds_of", fake)
    monkeypatch.setattr(harness, "find_spec", lambda name: name)
    out = tmp_path / "worth.json"
    arguments = ["--data=d", "--pretrained=p", "--ways=lora", "--rounds=2", f"--out={out}"]
    monkeypatch.setattr(sys, "argv", ["worth", *arguments, f"--runs={tmp_path / 'runs'}"])
    worth.main()
    assert ran == ["ours", "peer", "peer", "ours"]
    assert json.loads(out.read_text())["cpu_seconds"] == {"ours": [2.0, 2.0], "peer": [4.0, 4.0]}
    rows = [line.split(",") for line in out.with_suffix(".csv").read_text().splitlines()]
    assert ["CPU seconds of each round", "2 2", "4 4", "x 0.50 x 0.50", "", ""] in rows
    assert rows[-1][-1].startswith("undecided")
    with pytest.raises(UserError, match="exists: choose a new folder"):
        worth.main()


def test_failing_program_is_named_with_its_log(tmp_path) -> None:
    log = tmp_path / "peer.log"
    with pytest.raises(
        UserError, match=r"failed with exit code 3: see its error in .*peer\.log \(.* -c "
    ):
        worth.cpu_seconds_of([sys.executable, "-c", "print('why'); raise SystemExit(3)"], log)
    assert log.read_text() == "why\n"
    assert worth.cpu_seconds_of([sys.executable, "-c", "sum(range(10**6))"], log) > 0
