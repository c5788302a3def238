"""Training steps of the translation model, in milliseconds: python -m benchmarks.training."""

import argparse

from benchmarks.harness import compare, ratio, report
from benchmarks.peers import load
from common.errors import run

VARIANTS = ("plain", "t_reservoir", "ffn_reservoir")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--out", default="results/benchmarks/training.json")
    args = parser.parse_args()
    peer = load("translation_torch")
    cases = {
        f"torch {variant}": peer.make_step(variant, args.dtype, args.dropout)
        for variant in VARIANTS
    }
    timings = compare(cases, rounds=args.rounds, warmup=2)
    ratios = [ratio(timings, f"torch {variant}", "torch plain") for variant in VARIANTS[1:]]
    title = f"training step, 64 x 32 tokens, {args.dtype}, dropout {args.dropout}"
    report(title, timings, ratios, {}, args.out)


if __name__ == "__main__":
    run(main)
