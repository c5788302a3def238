"""Times generation of byte language models against PyTorch: python -m benchmarks.gmlp

The models have width 512, hidden 2048, 4 layers and 768 positions (GPT-2: 769), and generate 256 bytes of one text
after prompts of 1 and of 512 bytes. The times include the prefill. Also compares the training steps of our three models
of the recipe `:fixed,laptop` with each other, in twice as many rounds. `benchmarks.step` compares training steps with
PyTorch.
"""

from collections.abc import Callable
from functools import partial
from statistics import median

from ml_collections import ConfigDict

from common.runtime import program
from configs import language

COUNT = 256
STARTS = (1, 512)
KINDS = ("gmlp", "gmlp_attn", "gpt")
WRITERS = {"gmlp": "g-mlp-gpt", "gpt": "hugging face gpt-2"}  # {our model: model of the peer}

TARGETS = {"gpt": 1 / 3}  # {our model: upper bound of (our time) / (the peer's time)}
BYTES_PER_SECOND = 1000  # target: the gMLP generates at least this fast


def laptop_config(kind: str) -> ConfigDict:
    """Returns the configuration of a model in the recipe "fixed" at the size "laptop", in bfloat16."""
    config = language.choose(kind, "enwik8", "fixed,laptop")
    config.model.dtype = "bfloat16"
    return config


def make_laptop_step(kind: str) -> Callable[[], float]:
    from benchmarks.ours import bytes_step

    config = laptop_config(kind)
    return bytes_step(config, config.data.batch)


def laptop_bytes(kind: str) -> int:
    config = laptop_config(kind)
    return config.data.batch * config.model.length


def make_writer(side: str, name: str, start: int) -> Callable[[], object]:
    if side == "torch":
        from benchmarks.peers import language_torch as models
    else:
        from benchmarks import ours as models

    return models.make_writer(name, start, COUNT)


def main() -> None:
    from benchmarks.harness import check_installed, compare_isolated, make_parser, report

    options = make_parser(__doc__, "gmlp", rounds=5, peers=True).parse_args()
    if not options.without_torch:
        check_installed("torch", "transformers", "g_mlp_gpt")
    steps = {f"laptop {kind}": partial(make_laptop_step, kind) for kind in KINDS}
    timings, _ = compare_isolated(steps, rounds=2 * options.rounds, warmup=2)
    targets = {("laptop gpt", "laptop gmlp"): None, ("laptop gmlp_attn", "laptop gmlp"): None}
    factories = {}
    for start in STARTS:
        for kind, peer in WRITERS.items():
            case, baseline = f"{kind} writes from {start}", f"torch {peer} from {start}"
            factories[case] = partial(make_writer, "ours", kind, start)
            if not options.without_torch:
                factories[baseline] = partial(make_writer, "torch", peer, start)
                targets[case, baseline] = TARGETS.get(kind)
    timings |= compare_isolated(factories, rounds=options.rounds, warmup=1)[0]
    speed = {name: COUNT / median(timings[name]) for name in factories}
    speed |= {f"laptop {k}": laptop_bytes(k) / median(timings[f"laptop {k}"]) for k in KINDS}
    title = "width 512, hidden 2048, 4 layers, 768 positions; 256 bytes written"
    report(title, timings, targets, options.out, {"bytes_per_second": speed})
    for name, value in speed.items():
        met = ""
        if name.startswith("gmlp writes"):
            verdict = "yes" if value >= BYTES_PER_SECOND else "no"
            met = f"   target >= {BYTES_PER_SECOND:,}   met {verdict}"
        print(f"{name}: {value:,.0f} bytes/s{met}")


if __name__ == "__main__":
    program.run(main)
