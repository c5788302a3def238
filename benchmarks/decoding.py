"""Generating translations, in milliseconds: python -m benchmarks.decoding."""

import argparse

from benchmarks.harness import compare, ratio, report
from benchmarks.peers import load
from common.errors import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", default="results/benchmarks/decoding.json")
    args = parser.parse_args()
    peer = load("marian")
    cases = {
        "marian greedy": peer.make_generate(num_beams=1),
        "marian beam 5": peer.make_generate(num_beams=5),
    }
    timings = compare(cases, rounds=args.rounds, warmup=1)
    ratios = [ratio(timings, "marian beam 5", "marian greedy")]
    report("32 sentences x 32 new tokens, float32", timings, ratios, {}, args.out)


if __name__ == "__main__":
    run(main)
