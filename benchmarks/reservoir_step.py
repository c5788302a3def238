"""A training step of the translator, plain and with reservoirs, beside PyTorch: python -m benchmarks.reservoir_step

IWSLT geometry: width 512, feed-forward 1024, 4 heads, 8 encoder layers of which 2 are reservoirs, 2 decoder layers,
vocabulary 10,000, 64 x 32 tokens. Cases of one type and dropout take turns, each in its own process.
"""

import argparse
import importlib.util
from collections.abc import Callable
from functools import partial

from common import program

VARIANTS = {"plain": "none", "T": "transformer", "FFN": "ffn"}
PEERS = {"plain": "plain", "T": "t_reservoir", "FFN": "ffn_reservoir"}

# The most that a time ratio may be: ours over PyTorch's per type, a reservoir over plain, dropout over none.
TARGETS = {"float32": 1 / 1.8, "bfloat16": 1 / 0.8, "T": 0.93, "FFN": 0.85, "dropout": 1.12}


def make(side: str, variant: str, dtype: str, rate: float) -> Callable[[], float]:
    """A call makes one whole training step and returns its loss."""
    if side == "torch":
        from benchmarks.peers import load

        return load("translation_torch").make_step(PEERS[variant], dtype, rate)
    from benchmarks.ours import iwslt, translation_step

    return translation_step(iwslt(VARIANTS[variant], dtype=dtype, dropout=rate))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--types", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--out", default="results/benchmarks/reservoir_step.json")
    parser.add_argument("--without_torch", action="store_true", help="our cases only")
    options = parser.parse_args()

    from benchmarks.harness import compare, isolated, ratio, report

    torch = not options.without_torch and importlib.util.find_spec("torch") is not None
    if not torch:
        print("only our own cases: pip install -r benchmarks/requirements.txt for PyTorch's")
    pairs: list[tuple[str, str]] = []
    targets: dict[str, float] = {}
    timings = {}

    def pair(case: str, baseline: str, target: str | None = None) -> None:
        pairs.append((case, baseline))
        if target:
            targets[f"{case} / {baseline}"] = TARGETS[target]

    # Two groups per type, as many processes as fit in a laptop's memory.
    for dtype in options.types:
        for rate in (0.0, 0.3):
            factories = {}
            for variant in VARIANTS:
                name = f"{variant} {dtype}" + (" dropout" if rate else "")
                factories[name] = partial(make, "ours", variant, dtype, rate)
                if variant != "plain":
                    pair(name, name.replace(variant, "plain"), None if rate else variant)
                if torch:
                    peer = f"torch {name}"
                    factories[peer] = partial(make, "torch", variant, dtype, rate)
                    pair(name, peer, None if rate or variant != "plain" else dtype)
                    if variant != "plain":
                        pair(peer, peer.replace(variant, "plain"))
            if rate:
                again = f"plain {dtype} beside dropout"
                factories[again] = partial(make, "ours", "plain", dtype, 0.0)
                pair(f"plain {dtype} dropout", again, "dropout")
            with isolated(factories) as cases:
                timings |= compare(cases, rounds=options.rounds, warmup=2, settle=1)
    title = "training step, 64 x 32 tokens, 8 encoder layers (2 reservoirs), 2 decoder layers"
    report(title, timings, [ratio(timings, *names) for names in pairs], targets, options.out)


if __name__ == "__main__":
    program.run(main)
