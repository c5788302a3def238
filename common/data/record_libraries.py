"""Reads examples with named fields from TFDS and Hugging Face; see `common.data.records.open_records`."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from common.data.record import Record, Records
from common.data.tfds import in_blocks, open_tfds
from common.errors import UserError, check, missing_package, reason_of


def open_tfds_records(
    name: str, splits: Mapping[str, str], label: str, directory: str, optional: Container[str]
) -> Records:
    builder, _ = open_tfds(name, "all", directory, "text")
    chosen = _choose(splits, builder.info.splits, optional)

    def examples(split: str) -> Iterator[dict[str, Any]]:
        _, data = open_tfds(name, split, directory, "text")
        for block in in_blocks(data):
            for example in block:
                yield {k: v.decode() if isinstance(v, bytes) else v for k, v in example.items()}

    records = {split: _located(f"tfds:{name}", x, examples(x)) for split, x in chosen.items()}
    return records, _class_names(builder.info.features, label)


def open_hugging_face(
    name: str, splits: Mapping[str, str], label: str, optional: Container[str]
) -> Records:
    try:
        import datasets
    except ImportError as error:
        otherwise = "save the examples as files and use --config.data.source=files:DIR"
        option = f"--config.data.source=hf:{name}"
        raise missing_package(option, "datasets", error, otherwise) from error
    try:
        data = datasets.load_dataset(name)
    except Exception as error:  # Downloads and data set scripts may raise any type of exception.
        raise UserError(
            f"cannot read --config.data.source=hf:{name}: {reason_of(error)}; correct the name, or check the network"
        ) from error
    chosen = _choose(splits, data, optional)
    for split, wanted in chosen.items():
        check(
            wanted in data,
            f"--config.data.splits.{split}={splits[split]} is not a split of hf:{name}: choose one of"
            f" {', '.join(data)}",
        )
    records = {split: _located(f"hf:{name}", x, data[x]) for split, x in chosen.items()}
    return records, _class_names(data[chosen["train"]].features, label)


def _located(source: str, split: str, examples: Iterable[Mapping[str, Any]]) -> Iterator[Record]:
    for number, example in enumerate(examples, start=1):
        yield f"{source}, split {split}, example {number}", dict(example)


def _choose(
    splits: Mapping[str, str], available: Container[str], optional: Container[str]
) -> dict[str, str]:
    """Resolves names "a|b" to the first available name. Returns {split: name}.

    Omits an optional split if none of its names is available. A required split then gets the last name of "a|b", so
    that reading fails with an error message.
    """
    chosen = {}
    for split, names in splits.items():
        candidates = names.split("|")
        name = next((name for name in candidates if name.partition("[")[0] in available), None)
        if name or split not in optional:
            chosen[split] = name or candidates[-1]
    return chosen


def _class_names(features: Mapping[str, Any], label: str) -> Sequence[str] | None:
    """Returns the class names of the feature `label`, or None. For "a|b", takes the first feature that exists."""
    named = dict(features)
    return next((getattr(named[n], "names", None) for n in label.split("|") if n in named), None)
