"""Reads parallel text from files, TFDS or a user's function."""

from pathlib import Path

from ml_collections import ConfigDict

from common.data.files import names_in, read_lines, source_folder
from common.errors import UserError, check
from common.storage.addresses import shown


def load(data: ConfigDict, split: str) -> tuple[list[str], list[str]]:
    """Returns (source sentences, target sentences) of a split. See `reservoir.parallel_text.load_parallel`."""
    kind, _, place = data.source.partition(":")
    name = data.splits.get(split, split)
    languages = (data.source_language, data.target_language)
    match kind:
        case "files":
            if split not in data.splits:
                return _load_files(place, name, languages, "--split")
            option = f"--config.data.splits.{split}"
            return _load_files(place, name, languages, option, data.splits.train)
        case "tfds":
            return _load_tfds(place, name, languages, data.tfds_dir)
        case "import":
            return _load_user(data.source, split)
        case _:
            raise UserError(
                f"--config.data.source={data.source} must be embedded:NAME, files:DIR, tfds:NAME or"
                " import:MODULE:FUNCTION"
            )


def _load_files(
    place: str, split: str, languages: tuple[str, str], option: str, unwanted: str = ""
) -> tuple[list[str], list[str]]:
    folder = source_folder(place)
    sides = zip(("source", "target"), languages, strict=True)
    return read_parallel(*(_find(folder, split, *side, option, unwanted) for side in sides))


def read_parallel(*paths: Path) -> tuple[list[str], list[str]]:
    """Reads a text file and the file with its translation, line by line. Unpacks .gz and .zip.

    Raises:
      UserError: a file is missing, damaged, empty or neither UTF-8 nor UTF-16, or the files have different numbers of
        lines.
    """
    source, target = (read_lines(path) for path in paths)
    shorter, longer = sorted((source, target), key=len)
    surplus = longer[len(shorter) :]
    remedy = "correct the files"
    if not "".join(surplus).strip():
        plural = "s" * (len(surplus) > 1)
        remedy = f"remove the {len(surplus)} blank line{plural} at the end of the longer file"
    check(
        not surplus,
        f"{shown(paths[0])} and {shown(paths[1])} must have the same number of lines, because each line is translated"
        f" by the line with the same number, got {len(source)} and {len(target)} lines: {remedy}",
    )
    return source, target


def _find(folder: Path, split: str, side: str, language: str, option: str, unwanted: str) -> Path:
    """Returns the file of a side ("source" or "target") of a split.

    Raises a UserError if the file is missing. The message lists the splits of the folder in `language`. Without such a
    split, it lists the files of the folder.

    Args:
      option: the option that selects the split, for the error message.
      unwanted: a split that the error message does not propose, such as the training split for validation; or "".
    """
    plain, zipped = (folder / f"{split}.{language}{ending}" for ending in ("", ".gz"))
    for path in (plain, zipped):
        if path.is_file():
            return path
    names = (path.name.removesuffix(".gz") for path in folder.iterdir() if path.is_file())
    splits = {n.removesuffix(f".{language}") for n in names if n.endswith(f".{language}")} - {
        unwanted
    }
    advice = (
        f"set {option} to one of its splits in {language!r}: {', '.join(sorted(splits))}; or add the missing file"
        if splits
        else f"no name of a file ends with .{language} or .{language}.gz; give another folder, or set"
        f" --config.data.{side}_language to the ending of a file, without the dot (files in the folder:"
        f" {names_in(folder)})"
    )
    raise UserError(
        f"--config.data.source=files:{shown(folder)} has no {plain.name} or {zipped.name}: {advice}"
    )


def _load_tfds(
    name: str, split: str, languages: tuple[str, str], directory: str
) -> tuple[list[str], list[str]]:
    from common.data.tfds import in_blocks, open_tfds

    _, examples = open_tfds(name, split, directory, "translate")
    sides: tuple[list[str], list[str]] = ([], [])
    for block in in_blocks(examples):
        for side, language in zip(sides, languages, strict=True):
            check(
                language in block[0],
                f"--config.data.source=tfds:{name} has {', '.join(block[0])}, but not {language!r}: set"
                " --config.data.source_language and --config.data.target_language to two of them",
            )
            side.extend(example[language].decode() for example in block)
    return sides


def _load_user(source: str, split: str) -> tuple[list[str], list[str]]:
    from common.data.user_source import user_examples

    pairs = user_examples(source, split, (tuple, list), "a pair of sentences")
    for number, pair in enumerate(pairs, start=1):
        check(
            [isinstance(side, str) for side in pair] == [True, True],
            f"--config.data.source={source}: example {number} of split {split!r} is {pair!r:.80} instead of a pair of"
            " sentences: correct this function",
        )
    sources, targets = map(list, zip(*pairs, strict=True))
    return sources, targets
