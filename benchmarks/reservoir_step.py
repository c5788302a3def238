"""Times training steps of translation models with and without reservoirs: python -m benchmarks.reservoir_step

The option --parts selects comparisons. "kinds" compares 2 reservoirs of each kind, backskipping and LayerDrop with a
plain model of 8 encoder layers. "deep" compares 8 FFN or T reservoirs with a plain model of 24 encoder layers. All
models have width 512, feed-forward 1024, 4 heads, 2 decoder layers and vocabulary 10,000. Batches have 64 x 32 tokens.
Each case has its own process, and the cases of a group (KINDS, DEEP) take turns. Also compares the temporary memory of
the steps. LayerDrop drops random encoder layers in each step (two of eight on average), so its times differ from round
to round. `benchmarks.step` compares with PyTorch.
"""

from collections.abc import Callable
from functools import partial

from common.runtime import program

PARTS = ("kinds", "deep")

SKIPPING = {"backskip": True}
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
"""Two groups of cases, {case: (kind of reservoir, model fields to override, target)}.

The groups run one after the other, to save RAM. Each group also times the plain model. A target is an upper bound of
(time of the case) / (time of the plain model).
"""

DEEP_FIELDS = {"encoder_layers": 24, "reservoirs": 8}
DEEP = {"FFN": ("ffn", DEEP_FIELDS, 0.75), "T": ("transformer", DEEP_FIELDS, None)}


def make_step(reservoir: str, dtype: str, fields: dict) -> tuple[Callable, Callable[[], int]]:
    """Returns a function that runs a training step, and one that returns the temporary memory of the step in bytes."""
    from benchmarks.ours import iwslt, translation_step

    step = translation_step(iwslt(reservoir, dtype=dtype, **fields))
    return step, lambda: step.memory


def main() -> None:
    from benchmarks.harness import compare, isolated, make_parser, report

    parser = make_parser(__doc__, "reservoir_step", rounds=9, types=True)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    options = parser.parse_args()
    groups = []
    for dtype in options.types:
        if "kinds" in options.parts:
            groups += [(dtype, f"kinds {n}", cases, {}) for n, cases in enumerate(KINDS, 1)]
        if "deep" in options.parts:
            groups.append((dtype, "24 layers", DEEP, DEEP_FIELDS))
    timings, memory, targets = {}, {}, {}
    for dtype, part, group, plain_fields in groups:
        plain = f"plain {dtype}, {part}"
        factories = {(plain, f"memory of {plain}"): partial(make_step, "none", dtype, plain_fields)}
        for name, (reservoir, fields, most) in group.items():
            case = f"{name} {dtype}, {part}"
            factories[case, f"memory of {case}"] = partial(make_step, reservoir, dtype, fields)
            targets[case, plain] = most
        with isolated(factories) as calls:
            cases = {case: calls[case] for case, _ in factories}
            timings |= compare(cases, rounds=options.rounds, warmup=2, settle=1)
            memory |= {case: calls[name]() for case, name in factories}
    shares = {f"{a} / {b}": memory[a] / memory[b] for a, b in targets}
    report(
        "training step, 64 x 32 tokens, 8 encoder layers (2 reservoirs) or 24 (8 reservoirs), 2 decoder layers",
        timings,
        targets,
        options.out,
        {"memory of the compiled step (bytes)": memory, "memory ratios": shares},
    )
    for name, share in shares.items():
        print(f"memory of the compiled step, {name}: {share:.3f}")


if __name__ == "__main__":
    program.run(main)
