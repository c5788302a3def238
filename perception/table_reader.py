"""Reads a user's tables: CSV, TSV, JSON lines or Parquet, plain or .gz, one file or a directory, or Hugging Face data.

A damaged row is listed with its location, and reading continues. An error is raised if rows could be lost unnoticed:
wrong encoding, unclosed quote, truncated archive.
"""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from common.data.files import names_in
from common.data.record_files import NAMES, Parsed, Record, named_rows, parse_json_lines, read_names
from common.errors import UserError, check, missing_package, reason_of
from common.storage.addresses import shown
from common.storage.folders import open_path
from perception.datasets import SPLITS
from perception.table_files import (
    FORMATS,
    check_encoding,
    check_names,
    csv_rows,
    delimiter_of,
    format_of,
    open_parquet,
    text_of,
)

if TYPE_CHECKING:
    import datasets

WHOLE = "all"
"""Name of the single split of a source without splits."""

SPLIT = "split"
"""Name, in lower case, of a column that divides a table into splits."""


@dataclass
class Table:
    """Rows with named columns.

    Attributes:
      columns: names of the columns, in the order of the source.
      records: location and fields of each row.
      damaged: location and fault of each row that could not be read.
      names: column -> class names, for columns whose values are indices of class names. The key "" has the names from
        labels.json, which apply to any label column.
      delimited: whether the columns are named by the first line of a CSV or TSV file.
    """

    columns: list[str] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    names: dict[str, Sequence[str]] = field(default_factory=dict)
    delimited: bool = False

    def add(self, parsed: Iterable[Parsed]) -> None:
        """Adds rows, their columns, and the faults of damaged rows."""
        known = dict.fromkeys(self.columns)
        for place, found in parsed:
            if isinstance(found, str):
                self.damaged.append(f"{place}{found}")
            else:
                known |= dict.fromkeys(found)
                self.records.append((place, found))
        self.columns = list(known)


def read_tables(source: str, encoding: str = "", download: bool = False) -> dict[str, Table]:
    """Returns {split: table}. The splits are "train", and "valid" and "test" if the source has them.

    A source without splits gives {WHOLE: table}.

    Args:
      source: a file, a folder, or "hf:NAME[@REVISION]".
      encoding: encoding of text files; "" is UTF-8, or UTF-16 with a byte order mark.
      download: whether a Hugging Face data set may be downloaded.

    Raises:
      UserError: the source cannot be read completely or has no rows, the files of a folder do not form one table or
        complete splits, a Hugging Face data set has no split "train", `encoding` is unknown, or a package is missing.
        A damaged row among readable rows is no error (see `Table.damaged`).
    """
    check_encoding(encoding)
    if source.startswith("hf:"):
        found = _hugging_face(source.removeprefix("hf:"), download)
    else:
        found = _read_place(open_path(os.path.expanduser(source)), encoding)
    for split, table in found.items():
        of = "" if split == WHOLE else f" of the split {split}"
        check(
            bool(table.records or table.damaged),
            f"--data={source} has no row{of}: add rows with texts and labels",
        )
        check(
            bool(table.records),
            f"--data={source} has no row{of} that can be read ({''.join(table.damaged[:1])}): correct the file",
        )
    return found


def by_split_column(
    tables: Mapping[str, Table], taken: Collection[str]
) -> tuple[dict[str, Table], list[str]]:
    """Divides a source without splits by its column SPLIT, if this column has only names of splits, among them "train".

    Args:
      tables: tables of `read_tables`.
      taken: names of columns that hold texts or labels.

    Returns:
      ({split: table}, notes). If a value of the column is the name of a split, `Table.columns` lacks the column,
      and one note says whether the column divides the source. Otherwise the tables are unchanged, and there is no note.
    """
    table = tables.get(WHOLE, Table())
    named = (name for name in table.columns if name.strip().lower() == SPLIT and name not in taken)
    column = next(named, None)
    values = [str(fields.get(column)).strip().lower() for _, fields in table.records]
    split_of = {name: split for split, names in SPLITS.items() for name in names.split("|")}
    if column is None or not split_of.keys() & set(values):
        return dict(tables), []
    unknown = next((value for value in values if value not in split_of), None)
    columns = [name for name in table.columns if name != column]
    if unknown is not None or "train" not in values:
        why = (
            "no row has the value 'train'"
            if unknown is None
            else f"it has the value {unknown!r}, which is no split"
        )
        advice = (
            "put the rows of each split into train.csv, validation.csv and test.csv in a folder"
        )
        note = f"The column {column!r} is not used, because {why}: {advice}."
        return {**tables, WHOLE: replace(table, columns=columns)}, [note]
    found: dict[str, Table] = {}
    for value, record in zip(values, table.records, strict=True):
        split = split_of[value]
        if split not in found:
            found[split] = replace(table, columns=columns, records=[], damaged=[])
        found[split].records.append(record)
    found["train"].damaged.extend(table.damaged)
    return found, [
        f"Splits are read from the column {column!r}: remove or rename it to draw new splits."
    ]


def _read_place(place: Path, encoding: str) -> dict[str, Table]:
    if place.is_dir():
        return _read_folder(place, encoding)
    check(
        place.exists(),
        f"--data={shown(place)}: no such file or folder; give an existing file or folder, or hf:NAME",
    )
    check(
        bool(format_of(place)),
        f"--data={shown(place)} has a name that ends with none of {', '.join(FORMATS)} (each optionally followed by"
        " .gz): save the table in one of these formats",
    )
    return {WHOLE: _read_files([place], encoding)}


def _read_folder(folder: Path, encoding: str) -> dict[str, Table]:
    """Reads all tables of a directory, as one table if no file has the name of a split.

    If a file has the name of a split, all files must have such names, and one file must have the name "train". Hidden
    files, such as the ._NAME files of macOS, are not read.
    """
    files = sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and format_of(path) and not path.name.startswith(".")
    )
    check(
        bool(files),
        f"--data={shown(folder)}: no table ({', '.join(FORMATS)}) in this folder; its files: {names_in(folder)}; name"
        " another folder, or save a table in it",
    )
    formats = sorted({format_of(path) for path in files})
    check(
        len(formats) == 1,
        f"--data={shown(folder)} mixes {' and '.join(formats)} files: keep only the files of one format in the folder",
    )
    by_stem: dict[str, list[Path]] = {}
    for path in files:
        by_stem.setdefault(_stem(path), []).append(path)
    twice = [_names(paths) for paths in by_stem.values() if len(paths) > 1]
    check(
        not twice,
        f"--data={shown(folder)} has files whose names differ only in .gz or in case ({'; '.join(twice)}), so their"
        " rows would count twice: keep one of these files for each name",
    )
    splits = {}
    for split, names in SPLITS.items():
        stems = [name for name in names.split("|") if name in by_stem]
        check(
            len(stems) < 2,
            f"--data={shown(folder)} has several files for the split {split}:"
            f" {_names([by_stem[stem][0] for stem in stems])}; keep one",
        )
        if stems:
            splits[split] = by_stem.pop(stems[0])
    others = _names([path for paths in by_stem.values() for path in paths])
    if "train" not in splits:
        there = _names([path for paths in splits.values() for path in paths])
        advice = f"replace {others} by such a file" if others else "add such a file"
        check(
            not splits,
            f"--data={shown(folder)} has {there}, but no train{formats[0]} or train{formats[0]}.gz with the training"
            f" examples: {advice}",
        )
        return {WHOLE: _read_files(files, encoding)}
    check(
        not others,
        f"--data={shown(folder)} has {splits['train'][0].name}, so every table must have the name of a split (train,"
        f" validation or test): rename {others}, or move {others} to another folder",
    )
    return {split: _read_files(paths, encoding) for split, paths in splits.items()}


def _names(paths: Iterable[Path]) -> str:
    return " and ".join(path.name for path in paths)


def _stem(path: Path) -> str:
    name = path.name.lower().removesuffix(".gz")
    return name.removesuffix(format_of(path))


def _read_files(paths: Sequence[Path], encoding: str) -> Table:
    """Reads files into one table. The locations of rows, which the report shows, name the files without a folder."""
    names = read_names(paths[0].parent / NAMES)
    table = Table(names={"": names} if names else {})
    for path in paths:
        match format_of(path):
            case ".parquet":
                table.add(_parse_parquet(path))
            case ".jsonl":
                table.add(parse_json_lines(path.name, text_of(path, encoding)))
            case _:
                delimiter = delimiter_of(path, encoding)
                table.add(named_rows(csv_rows(path, delimiter, encoding, path.name)))
                table.delimited = True
    return table


def _parse_parquet(path: Path) -> Iterator[Parsed]:
    with open_parquet(path) as file:
        names, rows = file.schema_arrow.names, file.read().to_pylist()
    check_names(shown(path), names)
    for number, row in enumerate(rows, start=1):
        yield f"{path.name} row {number}", row


def _hugging_face(name: str, download: bool) -> dict[str, Table]:
    """Reads a Hugging Face data set from the local cache or, with `download`, from the hub."""
    option = f"--data=hf:{name}"
    name, _, revision = name.partition("@")
    if not download:
        # huggingface_hub and datasets read HF_HUB_OFFLINE when they are imported.
        os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        from datasets import load_dataset
    except ImportError as error:
        otherwise = "save the examples as a CSV file and give it by --data=FILE"
        raise missing_package(option, "datasets", error, otherwise) from error
    try:
        there = load_dataset(name, revision=revision or None)
    except Exception as error:  # Downloads and data set scripts raise any exception type.
        hint = "check the name, the network and the free disk space"
        if download and os.environ.get("HF_HUB_OFFLINE") == "1":
            hint = "HF_HUB_OFFLINE=1 forbids downloads in this process; unset it and start Python again"
        elif not download:
            hint = "if the data set is not in the local cache, add --download to fetch it"
        raise UserError(
            f"cannot read {option}: {reason_of(error)}; {hint}; or save the examples as a CSV file and give it by"
            " --data=FILE"
        ) from error
    splits = {}
    for split, names in SPLITS.items():
        found = next((one for one in names.split("|") if one in there), None)
        if found:
            splits[split] = _of_examples(f"hf:{name}, split {found}", there[found])
    check(
        "train" in splits,
        f"{option} has no split train (its splits: {', '.join(there)}): choose another data set, or save the"
        " examples as a CSV file and give it by --data=FILE",
    )
    if revision and not download:
        _check_revision(name, revision, there["train"])
    return splits


def _check_revision(name: str, revision: str, examples: "datasets.Dataset") -> None:
    """Raises a UserError unless the examples belong to the revision.

    Without network access, the package datasets reads the newest version in its cache, whatever the revision. The
    folder of a version is named after its commit.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    reference = Path(HF_HUB_CACHE, f"datasets--{name.replace('/', '--')}", "refs", revision)
    commit = reference.read_text().strip() if reference.is_file() else revision
    versions = {Path(file["filename"]).parent.name for file in examples.cache_files}
    check(
        all(version.startswith(commit) for version in versions),
        f"cannot read --data=hf:{name}@{revision}: the newest version in the local cache is"
        f" {' and '.join(sorted(versions))}; add --download to fetch {revision}",
    )


def _of_examples(place: str, examples: "datasets.Dataset") -> Table:
    features = {name: getattr(f, "names", None) for name, f in examples.features.items()}
    table = Table(names={name: names for name, names in features.items() if names})
    # Counts from 0, unlike other locations: data folders of existing runs store these locations and must not change.
    table.add((f"{place}, example {i}", dict(one)) for i, one in enumerate(examples))
    return table
