"""A training step of the translator, plain and with reservoirs, beside PyTorch: python -m benchmarks.reservoir_step

IWSLT geometry: width 512, feed-forward 1024, 4 heads, 8 encoder layers of which 2 are reservoirs, 2 decoder layers,
vocabulary 10,000, 64 x 32 tokens. All cases take turns in one process.
"""

import argparse

from common import program

VARIANTS = {"plain": "none", "T": "transformer", "FFN": "ffn"}
PEERS = {"plain": "plain", "T": "t_reservoir", "FFN": "ffn_reservoir"}

# The most that a time ratio may be: ours over PyTorch's per type, a reservoir over plain, dropout over none.
TARGETS = {"float32": 1 / 1.8, "bfloat16": 1 / 0.8, "T": 0.93, "FFN": 0.85, "dropout": 1.12}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--types", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--out", default="results/benchmarks/reservoir_step.json")
    parser.add_argument("--without_torch", action="store_true", help="our cases only")
    options = parser.parse_args()

    from benchmarks.harness import compare, ratio, report
    from benchmarks.ours import iwslt, make_step
    from benchmarks.peers import load
    from common.errors import UserError

    peer = None
    if not options.without_torch:
        try:
            peer = load("translation_torch")
        except UserError as error:
            print(f"{error}; only our own cases run")
    cases, pairs, targets, flops = {}, [], {}, {}

    def pair(case: str, baseline: str, target: str | None) -> None:
        pairs.append((case, baseline))
        if target:
            targets[f"{case} / {baseline}"] = TARGETS[target]

    for dtype in options.types:
        for rate in (0.0, 0.3):
            for variant, reservoir in VARIANTS.items():
                name = f"{variant} {dtype}" + (" dropout" if rate else "")
                cases[name], step = make_step(iwslt(reservoir, dtype=dtype, dropout=rate))
                flops[name] = next(iter(step.compiled.values()))[1]
                if variant != "plain":
                    pair(name, name.replace(variant, "plain"), None if rate else variant)
                if rate:
                    pair(
                        name,
                        name.removesuffix(" dropout"),
                        "dropout" if variant == "plain" else None,
                    )
                if peer:
                    torch = f"torch {name}"
                    cases[torch] = peer.make_step(PEERS[variant], dtype, rate)
                    pair(name, torch, None if rate or variant != "plain" else dtype)
                    if variant != "plain":
                        pair(torch, torch.replace(variant, "plain"), None)
    timings = compare(cases, rounds=options.rounds, warmup=2)
    title = "training step, 64 x 32 tokens, 8 encoder layers (2 reservoirs), 2 decoder layers"
    report(title, timings, [ratio(timings, *names) for names in pairs], targets, options.out)
    plain = flops[f"plain {options.types[0]}"]
    for variant in ("T", "FFN"):
        saved = flops[f"{variant} {options.types[0]}"] / plain
        print(f"counted operations of {variant} over plain: {saved:.3f}")


if __name__ == "__main__":
    program.run(main)
