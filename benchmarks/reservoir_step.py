"""A training step of the translator, plain and with reservoirs, beside PyTorch: python -m benchmarks.reservoir_step

IWSLT geometry: width 512, feed-forward 1024, 4 heads, 8 encoder layers of which 2 are reservoirs, 2 decoder layers,
vocabulary 10,000, 64 x 32 tokens. Cases of one group take turns, each in its own process. Parts: "kinds" has every kind
of reservoir, LayerDrop and backskipping beside the plain model; "deep" has 24 encoder layers with 8 reservoirs; "peers"
is PyTorch, with and without dropout. With LayerDrop no step is like another: each leaves out other layers, two of eight
on average, so that its time says something over many rounds alone.
"""

import argparse
import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from common.runtime import program

PARTS = ("kinds", "deep", "peers")
VARIANTS = {"plain": "none", "T": "transformer", "FFN": "ffn"}
PEERS = {"plain": "plain", "T": "t_reservoir", "FFN": "ffn_reservoir"}

# The most that a time ratio may be: ours over PyTorch's per type, a reservoir over plain, dropout over none.
TARGETS = {"float32": 1 / 1.8, "bfloat16": 1 / 0.8, "dropout": 1.12}

SKIPPING = {"backskip": True}
# Two groups, as many processes as fit in a laptop's memory; each with the plain model.
KINDS = (
    {
        "T": ("transformer", {}, 0.93),
        "FFN": ("ffn", {}, 0.85),
        "T backskip": ("transformer", SKIPPING, 0.86),
        "FFN backskip": ("ffn", SKIPPING, 0.82),
    },
    {
        "BiGRU": ("bigru", {}, None),
        "CNN": ("cnn", {}, None),
        "gMLP": ("gmlp", {"max_length": 32}, None),
        "LayerDrop": ("none", {"layerdrop": 0.25}, None),
    },
)
"""Name -> (reservoir, further fields, the most of the plain model's time that it may take)."""

DEEP = {"encoder_layers": 24, "reservoirs": 8}
DEEP_TARGET = 0.75


def make(side: str, variant: str, dtype: str, rate: float) -> Callable[[], float]:
    """A call makes one whole training step and returns its loss."""
    if side == "torch":
        from benchmarks.peers import load

        return load("translation_torch").make_step(PEERS[variant], dtype, rate)
    from benchmarks.ours import iwslt, translation_step

    return translation_step(iwslt(VARIANTS[variant], dtype=dtype, dropout=rate))


def make_kind(reservoir: str, dtype: str, fields: dict) -> Callable[[], float]:
    """The same for our own kinds; the file `note` of the fields takes the bytes that its compiled step needs."""
    from benchmarks.ours import iwslt, translation_step

    fields = dict(fields)
    note = fields.pop("note")
    step = translation_step(iwslt(reservoir, dtype=dtype, **fields))
    Path(note).write_text(str(step.memory))
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
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

    memory: dict[str, int] = {}

    def ours(group: dict[str, tuple], dtype: str, common: dict, end: str) -> None:
        """Times a group of our own kinds beside the plain model; `end` tells its cases from those of other groups."""
        with TemporaryDirectory() as folder:
            factories = {}
            for name, (reservoir, fields, most) in {"plain": ("none", {}, None), **group}.items():
                case = name + end
                note = Path(folder) / name
                given = {**common, **fields, "note": str(note)}
                factories[case] = partial(make_kind, reservoir, dtype, given)
                if name != "plain":
                    pairs.append((case, f"plain{end}"))
                if most:
                    targets[f"{case} / plain{end}"] = most
            with isolated(factories) as cases:
                timings.update(compare(cases, rounds=options.rounds, warmup=2, settle=1))
            for case, name in zip(factories, ("plain", *group), strict=True):
                memory[case] = int((Path(folder) / name).read_text())

    for dtype in options.types:
        if "kinds" in options.parts:
            for number, group in enumerate(KINDS, 1):
                ours(group, dtype, {}, f" {dtype}, kinds {number}")
        if "deep" in options.parts:
            deep = {"FFN": ("ffn", {}, DEEP_TARGET), "T": ("transformer", {}, None)}
            ours(deep, dtype, DEEP, f" {dtype}, 24 layers")

    # Two groups per type, as many processes as fit in a laptop's memory.
    for dtype in options.types if "peers" in options.parts else ():
        for rate in (0.0, 0.3):
            factories = {}
            for variant in VARIANTS:
                name = f"{variant} {dtype}" + (" dropout" if rate else "")
                factories[name] = partial(make, "ours", variant, dtype, rate)
                if variant != "plain":
                    pair(name, name.replace(variant, "plain"))
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
    shares = {f"{a} / {b}": memory[a] / memory[b] for a, b in pairs if a in memory}
    report(
        title,
        timings,
        [ratio(timings, *names) for names in pairs],
        targets,
        options.out,
        {"memory of the compiled step (bytes)": memory, "memory ratios": shares},
    )
    for name, share in shares.items():
        print(f"memory of the compiled step, {name}: {share:.3f}")


if __name__ == "__main__":
    program.run(main)
