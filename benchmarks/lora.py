"""Times training steps of text classifiers, full and LoRA, against transformers and peft: python -m benchmarks.lora

The models are a BERT of arctic-embed-xs's size (6 layers of width 384) and a small Qwen2 (4 layers of width 256). A
batch has 8 texts of 128 tokens. Training uses Adafactor with gradient clipping, adapters of rank 32, and dropout: 0.1
in BERT, 0.05 in the adapters. Each case runs in its own process, whose peak memory is recorded.
"""

import importlib.util
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from common.runtime import program

BATCH, LENGTH, CLASSES = 8, 128, 2
SIZES = {"bert": (6, 384, 1536, 12, 30_522), "qwen2": (4, 256, 1024, 4, 2, 32_000)}
"""{family: (layers, width, hidden, heads, key-value heads for qwen2 only, vocabulary)}."""

# Upper bounds of time ratios. Keys that are dtypes: our step / the peer's step. Keys that are families: our LoRA step /
# our full step.
TARGETS = {"float32": 1 / 1.5, "bfloat16": 1 / 0.9, "bert": 0.80, "qwen2": 0.66}


def make(side: str, family: str, finetune: str, dtype: str, note: str) -> Callable[[], float]:
    """Returns a function that runs a training step of a text classifier and returns the loss.

    The function also writes the peak memory of its process, in bytes, to the file `note`.
    """
    from benchmarks.harness import peak_bytes

    arguments = (family, SIZES[family], finetune, dtype, BATCH, LENGTH, CLASSES)
    if side == "torch":
        from benchmarks.peers import load

        step = load("lora_torch").make_step(*arguments)
    else:
        from benchmarks.ours import classifier_step

        step = classifier_step(*arguments)

    def noted() -> float:
        loss = step()
        Path(note).write_text(str(peak_bytes(resource.getrusage(resource.RUSAGE_SELF))))
        return loss

    return noted


def main() -> None:
    from benchmarks.harness import compare, isolated, make_parser, ratio, report

    options = make_parser(__doc__, "lora", rounds=9, types=True, peers=True).parse_args()

    installed = importlib.util.find_spec("peft") is not None
    torch = installed and not options.without_torch
    if not installed and not options.without_torch:
        print(
            "transformers and peft are not timed, because peft is not installed: pip install -r"
            " benchmarks/requirements.txt"
        )
    timings, memory, pairs, targets = {}, {}, [], {}

    def pair(case: str, baseline: str, most: float) -> None:
        pairs.append((case, baseline))
        targets[f"{case} / {baseline}"] = most

    for dtype in options.types:
        for family in ("bert", "qwen2"):
            with TemporaryDirectory() as folder:
                factories, notes = {}, {}
                for finetune in ("full", "lora"):
                    for side in ("ours", "torch") if torch else ("ours",):
                        name = f"{side} {family} {finetune} {dtype}"
                        notes[name] = Path(folder) / name
                        factories[name] = partial(
                            make, side, family, finetune, dtype, str(notes[name])
                        )
                    if torch:
                        case = f"{family} {finetune} {dtype}"
                        pair(f"ours {case}", f"torch {case}", TARGETS[dtype])
                pair(f"ours {family} lora {dtype}", f"ours {family} full {dtype}", TARGETS[family])
                with isolated(factories) as cases:
                    timings |= compare(cases, rounds=options.rounds, warmup=2, settle=1)
                memory |= {name: int(note.read_text()) for name, note in notes.items()}
    shares = {f"{a} / {b}": memory[a] / memory[b] for a, b in pairs if b.startswith("torch")}
    report(
        "training step of a classifier, 8 x 128 tokens, Adafactor, rank 32",
        timings,
        [ratio(timings, *names) for names in pairs],
        targets,
        options.out,
        {"greatest memory of the process (bytes)": memory, "memory ratios": shares},
    )
    for name, share in shares.items():
        print(f"peak memory, {name}: {share:.3f}")


if __name__ == "__main__":
    program.run(main)
