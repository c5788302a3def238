"""Times translation against Hugging Face Marian of the same size: python -m benchmarks.decode

Both models translate 32 random sentences of 32 tokens into exactly 32 tokens each, greedily and with 5 beams, in
float32, with a KV cache.
"""

from common.runtime import program


def main() -> None:
    from benchmarks.harness import compare, make_parser, ratio, report

    options = make_parser(__doc__, "decode", rounds=9).parse_args()
    from benchmarks.ours import make_generate
    from benchmarks.peers import load

    peer = load("marian")
    cases = {}
    for name, beams in (("greedy", 1), ("beam 5", 5)):
        cases[f"ours {name}"] = make_generate(beams)
        cases[f"marian {name}"] = peer.make_generate(num_beams=beams)
    timings = compare(cases, rounds=options.rounds, warmup=1)
    pairs = [ratio(timings, f"ours {name}", f"marian {name}") for name in ("greedy", "beam 5")]
    targets = {pair.name: 0.5 for pair in pairs if "beam" in pair.name}
    report("32 sentences x 32 new tokens, float32", timings, pairs, targets, options.out)
    for name, timing in timings.items():
        print(f"{name}: {32 / timing.median:.1f} sentences/s")


if __name__ == "__main__":
    program.run(main)
