"""Times training and generation of byte language models against PyTorch: python -m benchmarks.gmlp

The models have width 512, hidden 2048, 4 layers and 768 positions. Training: batches of 4. Generation: 256 bytes of one
text after prompts of 1 and of 512 bytes, including the prefill. Also compares the training steps of our three models
with equal parameter counts (`:fixed,laptop`).
"""

import importlib.util
from collections.abc import Callable
from functools import partial

from common.runtime import program

BATCH, COUNT = 4, 256
STARTS = (1, 512)
KINDS = {"gmlp": "g-mlp-gpt", "gmlp_attn": "g-mlp-gpt attention", "gpt": "gpt"}
WRITERS = {"gmlp": "g-mlp-gpt", "gpt": "hugging face gpt-2"}

# Upper bounds of (our time) / (the peer's time): of a training step, by dtype, and of generation with the GPT.
TARGETS = {"float32": 1 / 1.5, "bfloat16": 1 / 0.9, "gpt": 1 / 3}
BYTES_PER_SECOND = 1000  # lower bound of the speed of generation with the gMLP


def make_step(side: str, name: str, dtype: str) -> Callable[[], float]:
    if side == "torch":
        from benchmarks.peers import load

        return load("language_torch").make_step(name, dtype, BATCH)
    from benchmarks.ours import language_step

    return language_step(name, dtype, BATCH)


def make_laptop_step(kind: str) -> Callable[[], float]:
    from benchmarks.ours import laptop_step

    return laptop_step(kind, "bfloat16")


def make_writer(side: str, name: str, start: int) -> Callable[[], object]:
    if side == "torch":
        from benchmarks.peers import load

        return load("language_torch").make_writer(name, start, COUNT)
    from benchmarks.ours import make_writer

    return make_writer(name, start, COUNT)


def main() -> None:
    from benchmarks.harness import compare, isolated, make_parser, ratio, report

    options = make_parser(__doc__, "gmlp", rounds=5, types=True, peers=True).parse_args()
    torch = not options.without_torch and importlib.util.find_spec("torch") is not None
    timings, pairs, targets = {}, [], {}

    def pair(case: str, baseline: str, most: float | None) -> None:
        pairs.append((case, baseline))
        if most:
            targets[f"{case} / {baseline}"] = most

    for dtype in options.types:
        factories = {}
        for kind, peer in KINDS.items():
            case = f"{kind} {dtype}"
            factories[case] = partial(make_step, "ours", kind, dtype)
            peers = [peer, "g-mlp-pytorch"] if kind == "gmlp" else [peer]
            for name in peers if torch else []:
                factories[f"torch {name} {dtype}"] = partial(make_step, "torch", name, dtype)
                pair(case, f"torch {name} {dtype}", TARGETS[dtype])
        with isolated(factories) as cases:
            timings |= compare(cases, rounds=options.rounds, warmup=2, settle=1)
    with isolated({f"laptop {kind}": partial(make_laptop_step, kind) for kind in KINDS}) as cases:
        timings |= compare(cases, rounds=2 * options.rounds, warmup=2, settle=1)
    pairs += [("laptop gpt", "laptop gmlp"), ("laptop gmlp_attn", "laptop gmlp")]
    factories = {}
    for start in STARTS:
        for kind, peer in WRITERS.items():
            case = f"{kind} writes from {start}"
            factories[case] = partial(make_writer, "ours", kind, start)
            if torch:
                factories[f"torch {peer} from {start}"] = partial(make_writer, "torch", peer, start)
                pair(case, f"torch {peer} from {start}", TARGETS.get(kind))
    with isolated(factories) as cases:
        timings |= compare(cases, rounds=options.rounds, warmup=1, settle=1)
    speed = {name: COUNT / timings[name].median for name in factories}
    speed |= {
        name: (4096 if name.startswith("laptop") else BATCH * 768) / timing.median
        for name, timing in timings.items()
        if name not in speed
    }
    title = "width 512, hidden 2048, 4 layers, 768 positions; batches of 4; 256 bytes written"
    ratios = [ratio(timings, *names) for names in pairs]
    report(title, timings, ratios, targets, options.out, {"bytes_per_second": speed})
    for name, value in speed.items():
        met = ""
        if name.startswith("gmlp writes"):
            verdict = "yes" if value >= BYTES_PER_SECOND else "no"
            met = f"   target >= {BYTES_PER_SECOND:,}   met {verdict}"
        print(f"{name}: {value:,.0f} bytes/s{met}")


if __name__ == "__main__":
    program.run(main)
