"""Times generation of byte language models against PyTorch: python -m benchmarks.gmlp

The models have width 512, hidden 2048, 4 layers and 768 positions, and generate 256 bytes of one text after prompts of
1 and of 512 bytes. The times include the prefill. Also compares the training steps of our three models with equal
parameter counts (`:fixed,laptop`). `benchmarks.step` compares training steps with PyTorch.
"""

import importlib.util
from collections.abc import Callable
from functools import partial

from common.runtime import program

COUNT = 256
STARTS = (1, 512)
KINDS = ("gmlp", "gmlp_attn", "gpt")
WRITERS = {"gmlp": "g-mlp-gpt", "gpt": "hugging face gpt-2"}

TARGETS = {"gpt": 1 / 3}  # upper bound of (our time) / (the peer's time)
BYTES_PER_SECOND = 1000  # lower bound of the speed of generation with the gMLP


def make_laptop_step(kind: str) -> Callable[[], float]:
    from benchmarks.ours import laptop_step

    return laptop_step(kind, "bfloat16")


def laptop_bytes(kind: str) -> int:
    """Returns the number of bytes in a batch of `make_laptop_step`."""
    from configs import language

    config = language.choose(kind, "enwik8", "fixed,laptop")
    return config.data.batch * config.model.length


def make_writer(side: str, name: str, start: int) -> Callable[[], object]:
    if side == "torch":
        from benchmarks.peers import load

        return load("language_torch").make_writer(name, start, COUNT)
    from benchmarks.ours import make_writer

    return make_writer(name, start, COUNT)


def main() -> None:
    from benchmarks.harness import compare, isolated, make_parser, ratio, report

    options = make_parser(__doc__, "gmlp", rounds=5, peers=True).parse_args()
    torch = not options.without_torch and importlib.util.find_spec("torch") is not None
    pairs, targets = [], {}

    def pair(case: str, baseline: str, most: float | None) -> None:
        pairs.append((case, baseline))
        if most:
            targets[f"{case} / {baseline}"] = most

    with isolated({f"laptop {kind}": partial(make_laptop_step, kind) for kind in KINDS}) as cases:
        timings = compare(cases, rounds=2 * options.rounds, warmup=2, settle=1)
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
    speed |= {f"laptop {k}": laptop_bytes(k) / timings[f"laptop {k}"].median for k in KINDS}
    title = "width 512, hidden 2048, 4 layers, 768 positions; 256 bytes written"
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
