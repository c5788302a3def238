"""Times training steps of text classifiers, full and LoRA, against transformers and peft: python -m benchmarks.lora

The models are a BERT of arctic-embed-xs's size (6 layers of width 384) and a small Qwen2 (4 layers of width 256). A
batch has 8 texts of 128 tokens. Training uses Adafactor with gradient clipping, adapters of rank 32, and dropout: 0.1
in BERT, 0.05 in the adapters. Each case runs in its own process, whose peak memory is recorded.
"""

from collections.abc import Callable
from functools import partial

from common.runtime import program

BATCH, LENGTH, CLASSES = 8, 128, 2
SIZES = {"bert": (6, 384, 1536, 12, 30_522), "qwen2": (4, 256, 1024, 4, 2, 32_000)}
"""{family: (layers, width, hidden, heads, key-value heads for qwen2 only, vocabulary)}."""

TARGETS = {"float32": 1 / 1.5, "bfloat16": 1 / 0.9}
"""{dtype: upper bound of (time of our step) / (time of the peer's step)}."""

LORA_TARGETS = {"bert": 0.80, "qwen2": 0.66}
"""{family: upper bound of (time of our LoRA step) / (time of our full step)}."""


def make(side: str, family: str, finetune: str, dtype: str) -> Callable[[], float]:
    """Returns a function that runs a training step and returns the loss.

    `side` is "ours" or "torch", `family` a key of SIZES, and `finetune` "full" or "lora".
    """
    arguments = (family, SIZES[family], finetune, dtype, BATCH, LENGTH, CLASSES)
    if side == "torch":
        from benchmarks.peers import lora_torch

        return lora_torch.make_step(*arguments)
    from benchmarks.ours import classifier_step

    return classifier_step(*arguments)


def main() -> None:
    from benchmarks.harness import check_installed, compare_isolated, make_parser, report

    options = make_parser(__doc__, "lora", rounds=9, types=True, peers=True).parse_args()
    sides = ["ours"]
    if not options.without_torch:
        check_installed("torch", "transformers", "peft")
        sides.append("torch")
    timings, memory, targets = {}, {}, {}
    for dtype in options.types:
        for family in SIZES:
            factories = {}
            for finetune in ("full", "lora"):
                model = f"{family} {finetune} {dtype}"
                for side in sides:
                    factories[f"{side} {model}"] = partial(make, side, family, finetune, dtype)
                if not options.without_torch:
                    targets[f"ours {model}", f"torch {model}"] = TARGETS[dtype]
            targets[f"ours {family} lora {dtype}", f"ours {family} full {dtype}"] = LORA_TARGETS[
                family
            ]
            times, sizes = compare_isolated(factories, rounds=options.rounds, warmup=2)
            timings |= times
            memory |= sizes
    shares = {f"{a} / {b}": memory[a] / memory[b] for a, b in targets if b.startswith("torch")}
    report(
        "training step of a classifier, 8 x 128 tokens, Adafactor, rank 32",
        timings,
        targets,
        options.out,
        {"greatest memory of the process (bytes)": memory, "memory ratios": shares},
    )
    for name, share in shares.items():
        print(f"peak memory, {name}: {share:.3f}")


if __name__ == "__main__":
    program.run(main)
