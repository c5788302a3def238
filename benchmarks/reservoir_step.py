"""Times training steps of translation models with and without reservoirs: python -m benchmarks.reservoir_step

The option --parts selects comparisons. "kinds" compares each kind of reservoir, LayerDrop and backskipping with the
plain model. "deep" has 24 encoder layers with 8 reservoirs. Sizes are IWSLT's: width 512, feed-forward 1024, 4 heads, 8
encoder layers of which 2 are reservoirs, 2 decoder layers, vocabulary 10,000, batches of 64 x 32 tokens. Each case has
its own process, and the cases of a group take turns. LayerDrop drops random layers in each step (two of eight on
average), so its mean time needs many rounds. `benchmarks.step` compares with PyTorch.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from common.runtime import program

PARTS = ("kinds", "deep")

SKIPPING = {"backskip": True}
# Two groups of cases, because a laptop's RAM limits the number of processes. Each group also times the plain model.
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
"""Groups of cases. Each group is {case: (kind of reservoir, model fields to override, target)}.

The target is an upper bound of (time of the case) / (time of the plain model); None if the case has no target.
"""

DEEP = {"encoder_layers": 24, "reservoirs": 8}
DEEP_TARGET = 0.75


def make_kind(reservoir: str, dtype: str, fields: dict) -> Callable[[], float]:
    """Returns a function that runs a training step of one of our models.

    Also writes the temporary memory of the compiled step, in bytes, to the file `fields["note"]`.
    """
    from benchmarks.ours import iwslt, translation_step

    fields = dict(fields)
    note = fields.pop("note")
    step = translation_step(iwslt(reservoir, dtype=dtype, **fields))
    Path(note).write_text(str(step.memory))
    return step


def main() -> None:
    from benchmarks.harness import compare, isolated, make_parser, ratio, report

    parser = make_parser(__doc__, "reservoir_step", rounds=9, types=True)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    options = parser.parse_args()
    pairs: list[tuple[str, str]] = []
    targets: dict[str, float] = {}
    timings = {}
    memory: dict[str, int] = {}

    def ours(group: dict[str, tuple], dtype: str, common: dict, end: str) -> None:
        """Times a group of our models and the plain model. `end` is the suffix of the group's case names."""
        with TemporaryDirectory() as folder:
            factories = {}
            for name, (reservoir, fields, most) in {"plain": ("none", {}, None), **group}.items():
                case = name + end
                note = Path(folder) / name
                overrides = {**common, **fields, "note": str(note)}
                factories[case] = partial(make_kind, reservoir, dtype, overrides)
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
