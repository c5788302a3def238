"""Reads examples with named fields from any source: files, TFDS, Hugging Face, Python's manual, or a function."""

from collections.abc import Container, Iterable, Iterator, Mapping

from common.data.record import Record, Records
from common.errors import UserError, check


def open_records(
    source: str,
    splits: Mapping[str, str],
    fields: str,
    label: str,
    *,
    tfds_dir: str = "",
    optional: Container[str] = (),
) -> Records:
    """Opens a source of examples. Returns {split: examples}, and the class names (None if the source has none).

    Args:
      source: "files:DIR", "tfds:NAME", "hf:NAME", "embedded:NAME" or "import:MODULE:FUNCTION". FUNCTION(split)
        returns a dictionary {field: value} for each example. "files:FILE" is a file of training examples. It has no
        other split, so all splits except "train" must be optional.
      splits: split -> its name in the source. "a|b" is the first of the names a and b that exists. Embedded sources
        and FUNCTION use the split, not this name.
      fields: names of the text fields, separated by spaces.
      label: name of the label field.
      tfds_dir: data directory of TFDS. "" means TFDS's default.
      optional: splits that may be missing.

    Raises:
      UserError: the source is unknown, missing or damaged, `fields` has the wrong number of names for an embedded
        source, or the user's function fails. Damaged examples may raise an error only when they are read.
    """
    kind, _, place = source.partition(":")
    match kind:
        case "embedded":
            return _embedded(place, splits, fields, label)
        case "files":
            from common.data import record_files

            return record_files.open_files(place, splits, optional)
        case "hf":
            from common.data import record_libraries

            return record_libraries.open_hugging_face(place, splits, label, optional)
        case "tfds":
            from common.data import record_libraries

            return record_libraries.open_tfds_records(place, splits, label, tfds_dir, optional)
        case "import":
            return _user_records(source, splits, optional)
    raise UserError(
        f"--config.data.source={source} must be files:DIR, files:FILE, tfds:NAME, hf:NAME, embedded:NAME or"
        " import:MODULE:FUNCTION"
    )


def _user_records(source: str, splits: Iterable[str], optional: Container[str]) -> Records:
    from common.data.user_source import user_examples

    records, form = {}, "a dictionary of fields"
    for split in splits:
        examples = user_examples(source, split, dict, form, optional=split in optional)
        if examples:
            records[split] = [
                (f"{source} example {n} of {split}", fields)
                for n, fields in enumerate(examples, start=1)
            ]
    return records, None


def _embedded(name: str, splits: Mapping[str, str], fields: str, label: str) -> Records:
    from common.data.manual import MANUAL

    check(
        name in MANUAL,
        f"--config.data.source=embedded:{name} does not exist; choose one of"
        f" {', '.join(f'embedded:{known}' for known in sorted(MANUAL))}",
    )
    make, parts, classes = MANUAL[name]
    names = [field.split("|")[0] for field in fields.split()]
    form = "one name" if parts == 1 else "two names, separated by a space"
    check(
        len(names) == parts,
        f"embedded:{name} has {parts} text field{'s' * (parts > 1)}, but --config.data.fields={fields!r} has"
        f" {len(names)} (alternative names, such as a|b, are one field): set --config.data.fields to {form}",
    )

    def records(split: str) -> Iterator[Record]:
        for number, (texts, topic) in enumerate(make(split), start=1):
            named = dict(zip(names, texts, strict=True)) | {label.split("|")[0]: topic}
            yield f"embedded:{name} example {number}", named

    return {split: records(split) for split in splits}, classes
