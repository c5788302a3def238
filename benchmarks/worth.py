"""Compares perception.worth with a script that uses transformers and peft: python -m benchmarks.worth

    python -m benchmarks.worth --data=data/rotten_tomatoes --pretrained=MINILM

Measures lines of code, words of the command, seconds and F1. Both programs train with the same methods on the same
splits, with the same numbers of steps, batch sizes, LoRA ranks, learning rates and seeds. Round n trains seed n. The
first round also trains the methods without a seed (the head, TF-IDF) and includes all compilation. In each round the
two programs run one after the other, in an order that changes from round to round. Reports wall-clock seconds, and CPU
seconds of all threads, which depend less on other programs.

`common.report` compares the test weighted F1. A verdict on a method with seeds needs at least three rounds. The main
differences between the programs are these. Our classifiers read the mean over tokens and the state of the last token;
the script's fine-tuned classifiers read BERT's pooler, and the script's head reads the mean. Only our head standardises
its features. Our TF-IDF features are hashed n-grams; the script has one feature for each n-gram of the training texts.
For the head and for TF-IDF, the two programs choose the inverse penalty from different candidates.
"""

import ast
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from common.arguments import int_arg
from common.errors import check
from common.runtime import program

WAYS = ("lora", "full_pretrained", "head")
SCRIPT = Path(__file__).parent / "peers/text_classifier.py"
RATES = {"lora": 1e-3, "full_pretrained": 1e-4}
"""{training method: learning rate}, as in SCRIPT. Methods that are not listed train only in the first round."""


def lines_of_code(script: str) -> int:
    """Returns the number of lines of a Python script that are not blank, comments or docstrings."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(script)):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in docstrings
        for number, line in enumerate(script.splitlines(), 1)
    )


def our_command(options, seeds: int) -> list[str]:
    """Returns the command of perception.worth for the seeds 1 to `seeds`. perception.worth skips finished runs."""
    fields = {
        "data.source": f"files:{options.data}",
        "data.cache_dir": options.runs / "cache",
        "pretrained": options.pretrained,
        "data.batch": options.batch,
        "data.max_length": options.length,
        # Many buckets, because SCRIPT groups texts by length and pads a batch only to its longest text.
        "data.buckets": ",".join(str(options.length * n // 8) for n in (2, 3, 4, 6, 8)),
        "model.dtype": "float32",
        "train.steps": options.steps,
        "eval.steps": options.steps // 3,
        "checkpoint.steps": options.steps // 3,
        "optimizer.name": "adamw",
        "optimizer.beta2": 0.999,
        "optimizer.epsilon": 1e-8,
        "optimizer.weight_decay": 0.0,
        **{f"learning_rates.{way}": RATES[way] for way in options.ways if way in RATES},
    }
    command = [sys.executable, "-m", "perception.worth", "--config=configs/perception.py:laptop"]
    command += [f"--config.{name}={value}" for name, value in fields.items()]
    return [
        *command,
        f"--ways={','.join(options.ways)}",
        f"--seeds={seeds}",
        f"--out={options.runs / 'ours'}",
    ]


def peer_command(options, seed: int) -> list[str]:
    ways = [way for way in (*options.ways, "tf_idf") if way in RATES or seed == 1]
    fields = {
        "data": options.data,
        "model": options.pretrained,
        "length": options.length,
        "output_dir": options.runs / "peer",
        "seed": seed,
        "max_steps": options.steps,
        "per_device_train_batch_size": options.batch,
        "per_device_eval_batch_size": 128,
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.05,
        "max_grad_norm": 1.0,
        "group_by_length": True,
        "eval_strategy": "steps",
        "eval_steps": options.steps // 3,
        "save_steps": options.steps // 3,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "weighted_f1",
        "disable_tqdm": True,
        "report_to": "none",
    }
    command = [sys.executable, str(SCRIPT), "--ways", *ways]
    return command + [f"--{name}={value}" for name, value in fields.items()]


def cpu_seconds_of(command: Sequence[str], log: Path) -> float:
    """Runs a program and returns the CPU seconds of its threads and ended children. Appends its output to `log`.

    Raises a UserError if the program fails.
    """
    # Use a new folder for compiled programs, so that the first round always compiles.
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(log.absolute().parent / "cache")}
    before = os.times()
    with log.open("a") as file:
        done = subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
    after = os.times()
    check(
        done.returncode == 0,
        f"a command failed with exit code {done.returncode}: see its error in {log} ({shlex.join(command)})",
    )
    user = after.children_user - before.children_user
    return user + after.children_system - before.children_system


def peer_runs(folder: Path, ours: Mapping[str, Sequence]) -> dict[str, list]:
    """Returns {training method: runs of the script}, one run per seed.

    Writes the predictions of each run to a folder beside the run's JSON file. Reads the test examples, labels and class
    names from `ours`, {training method: our runs}, because the script uses the same test examples in the same order.
    """
    from common.metrics.classes import Classes
    from common.metrics.curve import Curve, Point
    from common.metrics.predictions import PREDICTIONS
    from common.report.runs import Run

    found: dict[str, list] = {way: [] for way in ours}
    for way, runs in ours.items():
        true = runs[0].predictions
        for path in sorted(folder.glob(f"{way}_seed*.json")):
            result = json.loads(path.read_text())
            logs_EC = np.array(result["logs"])
            run = folder / path.stem
            run.mkdir(exist_ok=True)
            made = Classes.of_log_probabilities(true.examples, true.labels_E, logs_EC, true.names)
            made.save(run / PREDICTIONS)
            seed = int(path.stem.rpartition("seed")[2]) if way in RATES else None
            curve = Curve("weighted_f1", "max", [Point(0, 0.0, 0.0, result["valid"])])
            found[way].append(Run(path.stem, {"seed": seed}, curve, run))
    return found


def verdicts(ours: Mapping[str, Sequence], peers: Mapping[str, Sequence]) -> dict:
    """Returns {training method: comparison of test weighted F1, ours minus SCRIPT's}, corrected by Holm's method."""
    from common.report.significance import compare, correct

    found = [compare(ours[way], peers[way]) for way in ours]
    on_test = [next(c for c in every if c.metric == "weighted_f1") for every in found]
    return dict(zip(ours, correct(on_test), strict=True))


def table_rows(
    words: Sequence[int],
    seconds: Mapping[str, Sequence[Sequence[float]]],
    compared: Mapping,
) -> list[tuple[str, ...]]:
    """Returns the rows of the table: lines, words, seconds, and F1 with verdicts.

    Args:
      words: numbers of words of our command and of the script's command.
      seconds: {name: (seconds of our program, seconds of the script)}, each with one value per round.
      compared: see `verdicts`.
    """
    from common.report.table import mean_std

    lines = lines_of_code(SCRIPT.read_text())
    rows = [("lines of code", "0", str(lines), "", "", "")]
    rows.append(("words of the command", *map(str, words), "", "", ""))
    for name, (ours, peer) in seconds.items():
        cells = [" ".join(f"{value:.0f}" for value in values) for values in (ours, peer)]
        ratios = " ".join(f"x {a / b:.2f}" for a, b in zip(ours, peer, strict=True))
        rows.append((name, *cells, ratios, "", ""))
    for way, one in compared.items():
        interval = "" if np.isnan(one.low) else f"{one.low:+.1f} to {one.high:+.1f}"
        scores = [mean_std(sample.values) for sample in (one.a, one.b)]
        difference = f"{one.difference:+.1f}"
        rows.append((f"test weighted F1, {way}", *scores, difference, interval, str(one)))
    return rows


def main() -> None:
    from benchmarks.harness import check_installed, compare, make_parser, report
    from common.report.runs import load_local
    from common.report.table import publish
    from common.train.conditions import Conditions

    parser = make_parser(__doc__, "worth", rounds=3)
    parser.add_argument("--data", required=True, type=Path, help="folder with *.jsonl.gz")
    parser.add_argument("--pretrained", required=True, type=Path, help="folder of BERT's weights")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument(
        "--steps", type=int_arg("--steps", 3), default=600, help="training steps of each run"
    )
    parser.add_argument(
        "--batch", type=int_arg("--batch"), default=16, help="texts of a training batch"
    )
    parser.add_argument(
        "--length", type=int_arg("--length"), default=64, help="maximum tokens of a text"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/benchmark_worth"))
    options = parser.parse_args()
    check_installed("torch", "transformers", "peft")
    check(not options.runs.exists(), f"--runs={options.runs} already exists: choose a new folder")
    (options.runs / "peer").mkdir(parents=True)

    cpu: dict[str, list[float]] = {"ours": [], "peer": []}
    commands = {"ours": our_command, "peer": peer_command}

    def run_next_seed(case: str) -> None:
        command = commands[case](options, len(cpu[case]) + 1)
        cpu[case].append(cpu_seconds_of(command, options.runs / f"{case}.log"))

    conditions = Conditions(["alone"])
    cases = {case: partial(run_next_seed, case) for case in cpu}
    timings = compare(cases, rounds=options.rounds, warmup=0)
    used = conditions.describe()

    ours: dict[str, list] = {}
    for run in load_local(options.runs / "ours" / "runs"):
        ours.setdefault(run.name.partition("_seed")[0], []).append(run)
    compared = verdicts(ours, peer_runs(options.runs / "peer", ours))
    report(
        f"{options.steps} steps of {options.batch} texts of at most {options.length} tokens,"
        f" {', '.join(options.ways)}; a seed in each round",
        timings,
        {("ours", "peer"): None},
        options.out,
        {
            "cpu_seconds": cpu,
            "conditions": used,
            "learning_rates": RATES,
            "weighted_f1": {
                way: {"ours": one.a.values, "peer": one.b.values} for way, one in compared.items()
            },
        },
    )
    marked = "seconds of each round" + " (shared machine)" * (used["kind"] == "shared")
    seconds = {
        marked: [timings[case] for case in cases],
        "CPU seconds of each round": [cpu[case] for case in cases],
    }
    words = [len(make(options, 1)) for make in commands.values()]
    columns = ("", "perception.worth", "transformers + peft", "ours against theirs", "95% interval")
    rows = table_rows(words, seconds, compared)
    publish(options.out.with_suffix(""), (*columns, "verdict"), rows)


if __name__ == "__main__":
    program.run(main)
